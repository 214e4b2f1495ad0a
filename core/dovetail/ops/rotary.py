"""Rotate queries and keys by their positions (Su et al. 2021, arXiv 2104.09864), in the halves layout."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from dovetail.interfaces.store import KVScales
from dovetail.ops.cpu.kernels import kernels


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import rotary

    return rotary


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [tokens, heads, d]``, where element i pairs with i + d / 2. Return a new tensor.

    ``x`` is contiguous except in the token dimension. ``cos`` and ``sin`` (``[tokens, 1, d]``) belong to the tokens'
    positions. The two halves of ``sin`` have opposite signs: ``[-s, s]``. ``cos`` and ``sin`` have equal strides.
    """
    compiled = kernels(x.dtype) if x.device.type == "cpu" else None
    if compiled is not None:
        return compiled.rotary(x, cos, sin)
    return torch.roll(x, x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)


def rotate_and_store(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_loc: torch.Tensor,
) -> torch.Tensor:
    """Do all operations between the projection and attention in one kernel. CUDA only.

    Normalises the heads of queries and keys (``norm``: weights ``[d]`` of queries and of keys, and epsilon; None for no
    norm), rotates them, and writes keys and values to locations ``out_loc`` (int64 ``[tokens]``) of contiguous ``keys,
    values [..., kv_heads, d]``, converted to their dtype as by ``ops.kv_dtypes.narrowed``. ``qkv [tokens, heads + 2 *
    kv_heads, d]`` is contiguous except in the token dimension; ``table`` is the result of
    ``layers.rotary.rotary_table``, float32 ``[context, 2, d]``; ``positions`` is int64 ``[tokens]``. Returns the
    queries ``[tokens, heads, d]``, a new tensor. All arithmetic is float32, rounded once.
    """
    return _triton().rotate_and_store(qkv, heads, kv_heads, table, positions, norm, keys, values, out_loc)


def rotate_and_store_scaled(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KVScales,
    out_loc: torch.Tensor,
) -> torch.Tensor:
    """Do the same as ``rotate_and_store``, and store keys and values with scales, as ``ops.kv_scales`` does: divided by
    ``scales`` that are expanded from one number for each head, or with computed ones, which are written to ``scales``. CUDA
    only."""
    return _triton().rotate_and_store_scaled(
        qkv, heads, kv_heads, table, positions, norm, keys, values, scales, out_loc
    )
