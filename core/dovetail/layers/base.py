"""Define the base class of layers that derive operands from their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import nn


class Layer(nn.Module):
    """Derive operands (views, folded scales) from the parameters once, and use them in every forward pass.

    ``prepare`` derives them, at the latest in the first forward pass. Code that writes new values into parameters must
    call ``prepare_layers`` afterwards. Layers call each other's ``forward`` directly: at batch 1 on a CPU the overhead
    of ``nn.Module.__call__`` is as large as a small kernel.
    """

    prepared = False

    def prepare(self) -> None:
        """Derive the operands. Called again after every change of a parameter."""
        self.prepared = True

    def connect(self) -> None:
        """Let the parts of this layer compute what the next part reads, in the form that it reads. Called by
        ``prepare_layers`` after every layer is prepared; without it, the results are the same."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.prepared = False
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            self.__dict__[name] = value  # makes lookups bypass nn.Module.__getattr__, which is slow


@torch.no_grad()
def prepare_layers(model: nn.Module) -> None:
    """Call ``prepare`` of every layer of ``model``, and then ``connect``."""
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    for layer in layers:
        layer.prepare()
    for layer in layers:
        layer.connect()


_deferred: ContextVar[bool] = ContextVar("deferred weights", default=False)


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Let the weights of the linear layers that are made within the block have no memory, because what stores them is
    known only when the model is complete. ``Linear.allocate`` then allocates it."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def deferrable_parameter(*shape: int) -> nn.Parameter:
    """Return ``parameter(*shape)``, or, under ``deferred_weights``, one without memory."""
    if not _deferred.get():
        return parameter(*shape)
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def parameter(*shape: int) -> nn.Parameter:
    """Return a parameter of torch's default dtype and device. It is not initialised; the weight loader fills it."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
