"""Rotate the queries of latent attention, and store what its pool keeps of a token (MLA; arXiv 2405.04434)."""

from __future__ import annotations

import functools
from types import ModuleType

import torch


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import latent

    return latent


def rotate_and_store_latents(
    q: torch.Tensor,
    out: torch.Tensor,
    latents: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    table: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    out_loc: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    interleaved: bool,
) -> None:
    """Do all operations between the projections and the absorption of queries in one kernel. CUDA only.

    Rotates ``q [tokens, heads, rope]``, the rotated elements of queries, into ``out``, of the same shape; ``out`` may be
    ``q``, unless the elements are interleaved. Normalises the first ``rank`` numbers of ``latents [tokens, rank + rope]``
    (``norm``: weight and epsilon), rotates the others, and writes both to locations ``out_loc`` (int64 ``[tokens]``) of
    contiguous ``keys [..., 1, rank + rope]``, converted to their dtype as by ``ops.kv_dtypes.narrowed``. With
    ``scales`` (bfloat16, one for each location, contiguous), they are divided by the computed scale of the whole latent, which
    is written there (see ``ops.kv_scales``). With
    ``interleaved``, elements 2i and 2i + 1 of the input are a pair; in the results, pairs are always i and i + rope / 2.
    All inputs may be views with any strides except in the last dimension. ``table`` is the result of
    ``layers.rotary.rotary_table``; ``positions`` is int64 ``[tokens]``.
    """
    _triton().rotate_and_store_latents(
        q, out, latents, norm, table, positions, keys, out_loc, scales=scales, interleaved=interleaved
    )
