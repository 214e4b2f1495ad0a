"""Implement Muon: momentum whose matrix updates are made orthogonal by a Newton-Schulz iteration (Jordan et al., 2024).

The update has the scale of AdamW's (Liu et al., 2025, "Muon is scalable for LLM training"), so one learning rate
serves both optimizers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Return the nearest semi-orthogonal matrices of a stack [N, rows, columns], approximately; in bf16 on a GPU."""
    x = update.bfloat16() if update.is_cuda else update
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon:
    """Update matrices with Muon; matrices of the same shape are updated together."""

    def __init__(self, matrices: Iterable[Tensor], momentum: float = 0.95, decay: float = 0.1) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        self.groups = list(shapes.values())
        self.buffers = [torch.zeros_like(torch.stack(group)) for group in self.groups]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix in place with the learning rate `rate`, then drop the gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grads = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonal(grads.lerp(buffer, self.momentum))
            scale = 0.2 * max(update.shape[-2:]) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate * scale)
            for matrix in group:
                matrix.grad = None
