"""Compare models with experts with transformers. Test files of families share this module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers

from dovetail.testing.model import ModelSuite, Reference
from hf_suite import transformers_model

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def randomise(model: torch.nn.Module) -> None:
    """Change weights that are all equal as they come, and those of routers."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:  # norms and biases are all 1 and 0 as they come
                tensor.add_(torch.randn_like(tensor) * 0.3)
            elif "embed" in name:
                tensor.mul_(3)
            elif name.endswith(("gate.weight", "router.weight")):
                tensor.copy_(torch.randn_like(tensor) * 0.5)
        for name, tensor in model.named_buffers():
            if "correction" in name:
                tensor.copy_(torch.randn_like(tensor) * 0.2)


class MoeSuite(ModelSuite):
    """Take checkpoints and logits from transformers. Routers get weights that spread the scores, so that rounding does
    not decide between experts."""

    model_type: str
    bfloat16_tolerance = 0.4
    small: ClassVar[Mapping[str, Any]] = SMALL
    """Settings of every config that does not have others."""

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        built = transformers.AutoConfig.for_model(self.model_type, **self.small | dict(config))
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
        randomise(model)
        model.save_pretrained(directory)

    def reference(self, directory: Path) -> Reference | None:
        model = transformers_model(directory, (directory / "config.json").stat().st_mtime_ns)

        @torch.no_grad()
        def logits(tokens: Any) -> torch.Tensor:
            return model(torch.tensor([tokens])).logits[0]

        return logits
