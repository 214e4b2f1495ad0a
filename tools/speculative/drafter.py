"""Define what all drafters share: the interface to the trainer, the loss, and writing a checkpoint."""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from tools.speculative.llama import Llama
from tools.speculative.texts import Sample, View
from torch import Tensor, nn


class Drafter(nn.Module):
    """Define a drafter for training. The target is passed to every call, so that its parameters are not the drafter's."""

    name: ClassVar[str]
    """Name of its folder."""
    drafts: ClassVar[int]
    """Number of tokens that it proposes at once."""

    @abstractmethod
    def loss(self, target: Llama, sample: Sample) -> Tensor:
        """Return the loss of a sample, a scalar."""

    @abstractmethod
    def draft(self, target: Llama, view: View, anchors: Tensor) -> Tensor:
        """Return the drafts after each of ``anchors [B, A]``, computed only from the text up to the anchor: ``[B, A,
        drafts]``."""

    @abstractmethod
    def config(self, target: Llama) -> dict[str, Any]:
        """Return the content of config.json; empty if the drafter has no config file."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their published names."""
        return dict(self.state_dict())

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what ``tensors`` returns."""
        self.load_state_dict(tensors)

    def save(self, folder: Path, target: Llama) -> None:
        """Write model.safetensors in bfloat16, and config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        stored = {name: _stored(tensor) for name, tensor in self.tensors().items()}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        config = self.config(target)
        if config:
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read what ``save`` has written."""
        device = next(self.parameters()).device
        self.restore({name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()})


def _stored(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def distil(logits: Tensor, goal: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of the cross-entropy against the distribution of the target's logits ``goal`` and the
    cross-entropy against its likeliest token. Both are ``[..., vocabulary]``, weighted by ``weights [...]``."""
    said = logits.float().log_softmax(dim=-1)
    soft = -(goal.float().softmax(dim=-1) * said).sum(dim=-1)
    hard = -said.gather(-1, goal.argmax(dim=-1, keepdim=True))[..., 0]
    return ((soft + hard) * weights).sum() / (2 * weights.sum()).clamp(min=1e-6)


def at_anchors(values: Tensor, anchors: Tensor) -> Tensor:
    """Return ``values [B, L, D]`` at ``anchors [B, A]``: ``[B, A, D]``."""
    return torch.take_along_dim(values, anchors[..., None], dim=1)
