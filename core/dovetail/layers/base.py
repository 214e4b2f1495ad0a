"""The base of the layers that keep something derived from their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn


class Layer(nn.Module):
    """A module whose forward pass uses operands derived from its parameters: views, folded scales.

    ``prepare`` derives them, at the latest in the first forward pass. Whoever writes new values into parameters calls
    ``prepare_layers`` afterwards. Layers call each other's ``forward`` directly: at batch 1 on a CPU the bookkeeping of
    ``nn.Module.__call__`` costs as much as a small kernel.
    """

    prepared = False

    def prepare(self) -> None:
        """Derive the operands. Called again after every change of a parameter."""
        self.prepared = True

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.prepared = False
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # found at once, without nn.Module.__getattr__


@torch.no_grad()
def prepare_layers(model: nn.Module) -> None:
    """Call ``prepare`` of every layer of ``model``."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.prepare()


def parameter(*shape: int) -> nn.Parameter:
    """A parameter of torch's default dtype and device that holds anything until weights are loaded."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
