"""Compare dense models with transformers. Test files of families share this module."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from dovetail.interfaces.model import ModelInfo
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail.testing.model import ModelSuite, Reference

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}

TWO_LAYERS = {key: value for key, value in SMALL.items() if key not in ("head_dim", "rms_norm_eps")} | {
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings for families that have other keys than Llama."""


def describe(name: str, config: Mapping[str, Any]) -> ModelInfo:
    """Return the description of a checkpoint by the model component ``name``."""
    component = installed().get(ComponentKind.MODEL, name)
    assert component.spec.describe is not None
    return load_attribute(component.spec.describe, component.label)(dict(config))


def rope(kind: str, theta: float = 10000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


@torch.no_grad()
def random_parameters(model: torch.nn.Module) -> None:
    """Change parameters that do not matter as they come: norms and biases are all 1 and 0, embeddings small."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        elif any(table in name for table in ("embed", "wte", "wpe")):
            parameter.mul_(3)


@functools.lru_cache(8)
def transformers_model(directory: Path, written: int) -> torch.nn.Module:
    """Return the model of transformers for a checkpoint. Tests of one class share it, as they share the checkpoint, which
    was ``written`` at this time."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()


class HuggingFaceSuite(ModelSuite):
    """Take checkpoints and logits from transformers."""

    model_type: str
    small: ClassVar[Mapping[str, Any]] = SMALL
    """Settings of every config that does not have others."""

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        built = transformers.AutoConfig.for_model(self.model_type, **{**self.small, **config})
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
        random_parameters(model)
        model.save_pretrained(directory)

    def reference(self, directory: Path) -> Reference | None:
        model = transformers_model(directory, (directory / "config.json").stat().st_mtime_ns)

        @torch.no_grad()
        def logits(tokens: Any) -> torch.Tensor:
            return model(torch.tensor([tokens])).logits[0]

        return logits


def check_watched_layers(suite: HuggingFaceSuite, directory: Path) -> None:
    """Check that drafters get the residual streams of transformers: what enters each of two layers, and what the final
    norm returns. Uses the suite's first config."""
    suite.write_checkpoint(next(iter(suite.configs.values())), directory)
    tokens = [5, 9, 2, 44, 3]
    model = suite.load(directory)
    hidden = suite.rows(model, [5]).enter_watching(tokens, (0, 1, 2))[1]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden, torch.stack([state[0] for state in states]), rtol=1e-4, atol=1e-4)
