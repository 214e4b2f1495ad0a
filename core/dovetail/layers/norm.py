"""Compute RMSNorm of hidden states, with the residual added first, and of the heads of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dovetail.interfaces.model import WeightTarget, WeightTransform
from dovetail.interfaces.quantization import ActivationQuantizer
from dovetail.layers.base import Layer, parameter
from dovetail.layers.transforms import AddOne, Chain
from dovetail.ops import norm as ops
from dovetail.ops.parts import Addend, Parts, RankAddend, Summed


def norm_weight(size: int, *, plus_one: bool = False) -> nn.Parameter:
    """Return the weight of a norm, in float32 with ``plus_one`` (see ``RMSNorm``)."""
    if not plus_one:
        return parameter(size)
    return nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)


class RMSNorm(Layer):
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension. With ``plus_one``, a checkpoint contains
    the weight minus one (Gemma): the parameter is float32, because in fewer bits the sum would lose those of the small
    number, and ``targets`` add the one."""

    def __init__(self, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = norm_weight(size, plus_one=plus_one)
        self.plus_one = plus_one
        self.eps = eps
        self._operands: tuple[torch.Tensor, float]
        self._rms_norm: Callable[..., Any]
        self._add_rms_norm: Callable[..., Any]
        self._add_parts_rms_norm: Callable[..., Any]
        self._after_ranks: Callable[[torch.Tensor], Any] | None

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        self._operands = (self.weight, self.eps)
        self._rms_norm, self._add_rms_norm = ops.rms_norm, ops.add_rms_norm
        self._add_parts_rms_norm, self._after_ranks = ops.add_parts_rms_norm, None
        super().prepare()

    def quantize_with(self, quantizer: ActivationQuantizer) -> None:
        """Return ``QuantizedActivations`` in place of norms of more rows than ``quantizer.few_rows``, until the layer is
        prepared again."""

        def add_parts(x: Parts, *operands: Any) -> Any:
            return quantizer.add_parts_rms_norm(x.addends, *operands)

        few = quantizer.few_rows
        self._rms_norm = _by_rows(few, ops.rms_norm, quantizer.rms_norm)
        self._add_rms_norm = _by_rows(few, ops.add_rms_norm, quantizer.add_rms_norm)
        self._add_parts_rms_norm = _by_rows(few, ops.add_parts_rms_norm, add_parts)
        self._after_ranks = _by_rows(few, lambda normed: normed, quantizer.quantize)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [tokens, size]`` to the same shape. Mutates nothing."""
        if not self.prepared:
            self.prepare()
        return self._rms_norm(x, *self._operands)

    def add_forward(self, x: Addend, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(norm(x + residual), x + residual)``, after adding up ``x`` if it is ``Parts`` or a ``RankAddend``. The
        total of ``Summed`` is the sum. Overwrites ``x`` with the sum if it is a tensor. If ``residual`` is None, ``x`` must be a tensor;
        then the result is ``(norm(x), x)`` and nothing is mutated."""
        if residual is None:
            assert isinstance(x, torch.Tensor)
            return self.forward(x), x
        if not self.prepared:
            self.prepare()
        if not isinstance(x, torch.Tensor):
            return self._add_parts(x, residual)
        return self._add_rms_norm(x, residual, *self._operands), x

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the target of the weight. Its name in the checkpoint begins with ``checkpoint_prefix``, the parameter of
        the model with ``parameter_prefix``."""
        transform = AddOne() if self.plus_one else None
        yield f"{checkpoint_prefix}.weight", WeightTarget(f"{parameter_prefix}.weight", transform=transform)

    def _add_parts(self, x: Parts | RankAddend | Summed, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(x, Summed):
            return self._rms_norm(x.total, *self._operands), x.total
        if isinstance(x, Parts):
            return self._add_parts_rms_norm(x, residual, *self._operands)
        normed, total = x.tp.all_reduce_norm(x.x, residual, *self._operands)
        return normed if self._after_ranks is None else self._after_ranks(normed), total


def _by_rows(few_rows: int, few: Callable[..., Any], many: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``few`` if its first argument has up to ``few_rows`` rows, and ``many`` otherwise."""

    def chosen(x: torch.Tensor | Parts, *operands: Any) -> Any:
        rows = x.addends.shape[1] if isinstance(x, Parts) else x.shape[0]
        return (few if rows <= few_rows else many)(x, *operands)

    return chosen


class HeadNorm(Layer):
    """Compute RMSNorm over each head of queries and keys, which are side by side in one tensor (Qwen3). For
    ``plus_one`` see ``RMSNorm``."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.q_weight = norm_weight(head_dim, plus_one=plus_one)
        self.k_weight = norm_weight(head_dim, plus_one=plus_one)
        self.plus_one = plus_one
        self._heads = (num_heads, num_kv_heads)
        self.eps = eps
        self._weight: torch.Tensor
        self._operands: tuple[torch.Tensor, torch.Tensor, float]

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        num_heads, num_kv_heads = self._heads
        self._weight = torch.cat((self.q_weight.expand(num_heads, -1), self.k_weight.expand(num_kv_heads, -1)))
        self._operands = (self.q_weight, self.k_weight, self.eps)
        super().prepare()

    def targets(
        self, checkpoint_prefix: str, parameter_prefix: str, order: WeightTransform | None = None
    ) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the targets of the weights, such as ``{checkpoint_prefix}.q_norm.weight``. ``parameter_prefix`` is the
        name of this layer in the model. For ``order`` see ``AttentionShape``."""
        transforms = tuple(each for each in (order, AddOne() if self.plus_one else None) if each is not None)
        transform = Chain(transforms) if len(transforms) > 1 else transforms[0] if transforms else None
        for part in ("q", "k"):
            target = WeightTarget(f"{parameter_prefix}.{part}_weight", transform=transform)
            yield f"{checkpoint_prefix}.{part}_norm.weight", target

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return the weights of queries and of keys, ``[head_dim]`` each, and epsilon, for kernels that include the
        norm."""
        if not self.prepared:
            self.prepare()
        return self._operands

    def forward(self, qk: torch.Tensor) -> torch.Tensor:
        """Map ``qk [tokens, num_heads + num_kv_heads, head_dim]``, queries first, to the same shape. Mutates
        nothing."""
        if not self.prepared:
            self.prepare()
        return ops.rms_norm(qk, self._weight, self.eps)
