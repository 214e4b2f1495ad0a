"""Compute decoder layers of one token with fewer kernels: norms in the products that read them, and the sums with the
residual stream in the products before them."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch

from dovetail.layers.attention import SelfAttention
from dovetail.layers.experts import Experts
from dovetail.layers.linear import ColumnLinear, DenseProduct, Linear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.ops.parts import Summed

if TYPE_CHECKING:
    from torch import nn

    from dovetail.layers.rotary import Rotation
    from dovetail.ops.experts import GroupedProduct
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch


@functools.cache
def _kernels() -> ModuleType:
    from dovetail.ops.triton import one_row

    return one_row


class OneRow:
    """Compute a decoder layer of these parts, which ``one_row`` has found to fit, for one token."""

    def __init__(self, attn_norm: RMSNorm, attn: SelfAttention, mlp_norm: RMSNorm, mlp: GatedMLP | Experts) -> None:
        self._attn_norm, self._attn, self._mlp_norm, self._mlp = attn_norm, attn, mlp_norm, mlp

    def takes(self, x: Addend, residual: torch.Tensor | None) -> bool:
        """Return whether ``forward`` computes the layer for what the layer before it adds to ``residual``."""
        if isinstance(x, Summed):
            return x.total.shape[0] == 1
        return residual is None and isinstance(x, torch.Tensor) and x.shape[0] == 1

    def forward(self, stream: torch.Tensor, rotation: Rotation, batch: Batch) -> torch.Tensor:
        """Return the residual stream ``[1, hidden_size]`` after the layer, from the one before it. Writes K and V of the token
        to the pool."""
        kernels, attn, mlp = _kernels(), self._attn, self._mlp
        projected = kernels.normed_product(stream, _weight(self._attn_norm), attn.qkv.weight)
        attended = attn.attend_projected(projected, rotation, batch)
        stream = kernels.added_product(attended, attn.out.weight, stream)
        norm = _weight(self._mlp_norm)
        if isinstance(mlp, Experts):
            product = cast("GroupedProduct", mlp.product)  # ``one_row`` has checked the class
            normed, logits = kernels.normed_logits(stream, norm, mlp.router.gate.weight)
            return product.added(normed, mlp.router.choose(logits), stream)
        inner = kernels.normed_product(stream, norm, mlp.gate_up.weight, mlp.gate_up.activation)
        return kernels.added_product(inner, mlp.down.weight, stream)


def _weight(norm: RMSNorm) -> tuple[torch.Tensor, float]:
    return norm.weight, norm.eps


def one_row(attn_norm: nn.Module, attn: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> OneRow | None:
    """Return what computes a layer of these prepared parts for one token, or None if a part is not of the kind, or of the
    size, for which there are kernels. Only parts of exactly these classes are: a subclass may compute something else."""
    if type(attn_norm) is not RMSNorm or type(mlp_norm) is not RMSNorm or type(attn) is not SelfAttention:
        return None
    sized = attn_norm.weight.is_cuda and attn_norm.weight.numel() in _kernels().NORMED and not attn.divides_rows
    if not sized or not (_plain(attn.qkv) and _plain(attn.out)):
        return None
    if type(mlp) is GatedMLP:
        return OneRow(attn_norm, attn, mlp_norm, mlp) if _plain(mlp.gate_up) and _plain(mlp.down) else None
    if type(mlp) is Experts:
        return OneRow(attn_norm, attn, mlp_norm, mlp) if _one_rank(mlp) else None
    return None


def _plain(layer: Linear) -> bool:
    """Return whether a layer multiplies with a weight of 16 bits, for one row by a kernel of ``ops.triton``, and adds nothing."""
    if type(layer) not in (Linear, ColumnLinear) or layer.bias is not None or layer.in_features % 1024:
        return False
    return isinstance(layer.product, DenseProduct) and layer.product.fast_row


def _one_rank(mlp: Experts) -> bool:
    """Return whether one rank computes the experts, and nothing is added to them."""
    from dovetail.ops.experts import GroupedProduct

    product, rule = mlp.product, mlp.shape.routing
    if mlp.shared is not None or mlp.mesh.tp.size > 1 or not _plain(mlp.router.gate):
        return False
    return type(product) is GroupedProduct and product.adds_one_token(rule.top_k)
