"""Check what models promise by their features: the hidden states that they keep, and products that do not mix rows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.engine.build import as_module
from dovetail.interfaces.attention import AttentionBackend, AttentionLayer
from dovetail.interfaces.model import ModelArchitecture
from dovetail.interfaces.quantization import LinearInput, LinearProduct
from dovetail.layers.experts import Experts
from dovetail.layers.linear import Linear
from dovetail.ops.activation import Activation
from dovetail.types import Batch

_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "convolution", "_grouped_mm"}
)
_LAYER = re.compile(r"\.(\d+)\.")


def tensors_of_layer(tensors: Mapping[str, torch.Tensor], index: int) -> list[str]:
    """Return the names of a checkpoint's tensors that belong to layer ``index``: the first number in a name is that of its
    layer."""
    found = {name: _LAYER.search(name) for name in tensors}
    return [name for name, match in found.items() if match is not None and int(match[1]) == index]


def changed(tensors: Mapping[str, torch.Tensor], names: list[str], factor: float = 0.0) -> dict[str, torch.Tensor]:
    """Return ``tensors`` with those of ``names`` multiplied by ``factor``, or, if it is 0, with random numbers added."""
    torch.manual_seed(1)
    new = {
        name: tensors[name] * factor if factor else tensors[name] + torch.randn_like(tensors[name]) for name in names
    }
    return {**tensors, **new}


class ForeignProducts(TorchDispatchMode):
    """Note the products of a model that neither a ``Linear``, ``Experts`` nor the attention backend computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._allowed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        name = func.overloadpacket.__name__
        if name in _PRODUCTS and not self._allowed:
            self.names.add(name)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Note no products in a block."""
        self._allowed += 1
        try:
            yield
        finally:
            self._allowed -= 1

    def watch(self, model: ModelArchitecture) -> None:
        """Allow the products of the linear layers and of the experts of ``model``. Mutates them."""
        for module in as_module(model).modules():
            if isinstance(module, Linear):
                module.prepare()
                module._product = _AllowedProduct(module._product, self)
            if isinstance(module, Experts):
                for name in ("forward", "parts_forward"):
                    setattr(module, name, self._allowing(getattr(module, name)))

    def _allowing(self, compute: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def allowed(x: torch.Tensor) -> Any:
            with self.allowed():
                return compute(x)

        return allowed


class _AllowedProduct(LinearProduct):
    def __init__(self, product: LinearProduct, mode: ForeignProducts) -> None:
        self._product, self._mode = product, mode
        self.in_parts, self.quantizer = product.in_parts, product.quantizer

    def forward(self, x: LinearInput, bias: torch.Tensor | None) -> torch.Tensor:
        with self._mode.allowed():
            return self._product.forward(x, bias)

    def gated(self, x: LinearInput, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        with self._mode.allowed():
            return self._product.gated(x, bias, activation)

    def parts(self, x: LinearInput) -> torch.Tensor | None:
        with self._mode.allowed():
            return self._product.parts(x)

    @property
    def describe(self) -> str:
        return self._product.describe


class AllowedAttention(AttentionBackend):
    """Attend with ``backend``, whose products are allowed."""

    def __init__(self, backend: AttentionBackend, mode: ForeignProducts) -> None:
        self._backend, self._mode = backend, mode

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend``."""
        self._backend.plan(batch)

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend``."""
        with self._mode.allowed():
            return self._backend.forward(q, layer, batch)
