"""Dequantize the weights of experts: for the CPU, whose kernels multiply plain weights, and as the reference of kernels
that multiply with codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.gguf.block_types import TYPES
from dovetail.ops import block_products, integers, mxfp4
from dovetail.ops.block_products import BlockWeight
from dovetail.ops.packed_blocks import PACKED, PackedWeight

if TYPE_CHECKING:
    from dovetail.interfaces.expert_shapes import ExpertBlocks, ExpertFormat, ExpertWeights


def dequantized(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """Return ``weights`` in the format ``plain``, in ``dtype``. Plain weights are returned as they are."""
    if weights.format == "plain":
        return weights
    if weights.blocks is not None:
        return _of_blocks(weights, weights.blocks, dtype)
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    one = _DEQUANTIZE[weights.format]
    pairs = (
        (weights.gate_up, weights.gate_up_scale, weights.gate_up_zero),
        (weights.down, weights.down_scale, weights.down_zero),
    )
    gate_up, down = (_by_expert(one, codes, scale, zero, weights.block, dtype) for codes, scale, zero in pairs)
    return replace(
        weights, gate_up=gate_up, down=down, gate_up_scale=None, down_scale=None, gate_up_zero=None, down_zero=None,
        format="plain",
    )  # fmt: skip


def _of_blocks(weights: ExpertWeights, blocks: ExpertBlocks, dtype: torch.dtype) -> ExpertWeights:
    """Dequantize rows of blocks of GGUF, which may be packed."""
    (count, hidden, _), rows = weights.down.shape, weights.gate_up.shape[1]
    found = []
    for stored, kind, columns in ((weights.gate_up, blocks.gate_up, hidden), (weights.down, blocks.down, rows // 2)):
        flat = stored.flatten(0, 1)
        whole = (
            PackedWeight(flat, PACKED[kind], columns).dequantized(dtype)
            if blocks.packed
            else block_products.dequantized([BlockWeight(flat, TYPES[kind])], dtype)
        )
        found.append(whole.view(count, -1, columns))
    return replace(weights, gate_up=found[0], down=found[1], format="plain", blocks=None)


Dequantize = Callable[[torch.Tensor, torch.Tensor, tuple[int, int], torch.Tensor | None], torch.Tensor]
"""A function that returns the float32 weight ``[out, in]`` of the codes, scales and zero points of one expert."""


def _by_expert(
    one: Dequantize,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Dequantize the experts one by one, so that only one of them is held in float32."""
    first = one(codes[0], scale[0], block, None if zero is None else zero[0])
    result = torch.empty(len(codes), *first.shape, dtype=dtype, device=codes.device)
    result[0] = first
    for expert in range(1, len(codes)):
        result[expert] = one(codes[expert], scale[expert], block, None if zero is None else zero[expert])
    return result


def fp8_weight(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Return the float32 weight ``[out, in]`` of FP8 codes and scales: one for each row, or for each ``block``."""
    if block is None:
        return codes.float() * scale[:, None]
    (out, columns), (of_rows, of_columns) = codes.shape, block
    return codes.float() * scale.repeat_interleave(of_rows, 0)[:out].repeat_interleave(of_columns, 1)[:, :columns]


def _integers(
    codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], zero: torch.Tensor | None
) -> torch.Tensor:
    return integers.dequantize(integers.Integers(codes, scale, zero), torch.float32)


_DEQUANTIZE: dict[ExpertFormat, Dequantize] = {
    "fp8_rows": lambda codes, scale, block, zero: fp8_weight(codes, scale, None),
    "fp8_blocks": lambda codes, scale, block, zero: fp8_weight(codes, scale, block),
    "mxfp4": lambda codes, scale, block, zero: mxfp4.dequantize(codes, scale, torch.float32),
    "int4": _integers,
    "int8": _integers,
}
