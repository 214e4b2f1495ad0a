"""Multiply on the CPU with weights in the block formats of GGUF, by the compiled kernels of ``ops.cpu.blocks``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from dovetail.gguf.block_types import BlockType
from dovetail.gguf.blocks import dequantize
from dovetail.ops.cpu.blocks import BlockKernels, BlockRows, TileKind

_MOST_ROWS = {torch.bfloat16: 24, torch.float32: 64}
"""The numbers of rows up to which products of integers are faster than dequantizing the weight."""
_MOST_ROWS_BEFORE_TILES = {TileKind.AMX: 4, TileKind.AVX512: 7}
"""The numbers of rows up to which they are faster than products of tiles."""
_CHUNK = 512
"""The number of rows of a weight that are dequantized at a time."""


class BlockWeight(NamedTuple):
    """Hold the weight of one module: rows of blocks, uint8 ``[out, bytes]``, and their type."""

    blocks: torch.Tensor
    kind: BlockType

    @property
    def columns(self) -> int:
        """Return the number of columns of the weight that the blocks stand for."""
        return self.blocks.shape[1] // self.kind.nbytes * self.kind.elements


def dequantized(weights: Sequence[BlockWeight], dtype: torch.dtype) -> torch.Tensor:
    """Return the weight ``[out, in]`` of several modules, one after another, in ``dtype``."""
    rows = sum(len(weight.blocks) for weight in weights)
    out = torch.empty(rows, weights[0].columns, dtype=dtype, device=weights[0].blocks.device)
    for weight, part in zip(weights, out.split([len(weight.blocks) for weight in weights]), strict=True):
        for blocks, chunk in zip(weight.blocks.split(_CHUNK), part.split(_CHUNK), strict=True):
            chunk.copy_(dequantize(blocks, weight.kind))
    return out


class BlockMatrix:
    """Multiply with the weights of several modules, one after another, from the blocks: up to ``most_rows`` rows with inputs
    that are quantized to 8 bits, by sums of integers; more rows with tiles in bfloat16 where the processor multiplies them, otherwise
    with a part of the weight after another in the dtype of activations."""

    def __init__(self, weights: Sequence[BlockWeight], kernels: BlockKernels) -> None:
        self._weights, self._kernels = tuple(weights), kernels
        self._rows = BlockRows([(weight.blocks, weight.kind.name) for weight in weights], weights[0].columns)
        self.most_rows = _MOST_ROWS_BEFORE_TILES.get(kernels.tile_kind, _MOST_ROWS[kernels.dtype])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Map contiguous ``x [rows, in]`` to ``[rows, out]``, with ``bias [out]`` added."""
        if x.shape[0] <= self.most_rows:
            return self._kernels.product(x, self._rows, bias)
        if self._kernels.tile_kind:
            return self._kernels.tiles(x, self._rows, bias)
        out = torch.empty(x.shape[0], self._rows.rows, dtype=x.dtype)
        start = 0
        for weight in self._weights:
            stop = start + len(weight.blocks)
            self._many_rows(x, weight, None if bias is None else bias[start:stop], out[:, start:stop])
            start = stop
        return out

    def _many_rows(self, x: torch.Tensor, weight: BlockWeight, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        memory = torch.empty(min(_CHUNK, len(weight.blocks)), weight.columns, dtype=x.dtype)
        for start in range(0, len(weight.blocks), _CHUNK):
            blocks = weight.blocks[start : start + _CHUNK]
            stop = start + len(blocks)
            part = memory[: len(blocks)]
            self._kernels.weight(blocks, weight.kind.name, part)
            out[:, start:stop] = functional.linear(x, part, None if bias is None else bias[start:stop])
