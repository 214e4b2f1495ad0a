"""Compare dense models with transformers. Test files of families share this module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

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


def rope(kind: str, theta: float = 10000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


@torch.no_grad()
def random_parameters(model: torch.nn.Module) -> None:
    """Change parameters that do not matter as they come: norms and biases are all 1 and 0, embeddings small."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        elif "embed" in name:
            parameter.mul_(3)


class HuggingFaceSuite(ModelSuite):
    """Take checkpoints and logits from transformers."""

    model_type: str

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        built = transformers.AutoConfig.for_model(self.model_type, **SMALL | dict(config))
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
        random_parameters(model)
        model.save_pretrained(directory)

    def reference(self, directory: Path) -> Reference | None:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()

        @torch.no_grad()
        def logits(tokens: Any) -> torch.Tensor:
            return model(torch.tensor([tokens])).logits[0]

        return logits
