"""Multiply with weights in the block formats of GGUF on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.interfaces.quantization import LinearProduct
from dovetail.ops.activation import GATES, Activation
from dovetail.ops.block_products import BlockMatrix, BlockWeight
from dovetail.ops.cpu.blocks import FORMATS, BlockKernels, TileKind, block_kernels

_TILES = {TileKind.AMX: "AMX", TileKind.AVX512: "AVX-512"}


class BlockProduct(LinearProduct):
    """Multiply from the blocks, see ``BlockMatrix``."""

    def __init__(self, weights: Sequence[BlockWeight], kernels: BlockKernels) -> None:
        self._kinds, self._tiles = kinds_of(weights), kernels.tile_kind
        self._matrix = BlockMatrix(weights, kernels)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See ``LinearProduct``."""
        return self._matrix.multiply(x, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation) -> torch.Tensor:
        """See ``LinearProduct``."""
        return GATES[activation](self._matrix.multiply(x, bias))

    @property
    def describe(self) -> str:
        """See ``LinearProduct``."""
        more = f"in bfloat16 ({_TILES[self._tiles]})" if self._tiles else "by dequantized parts"
        return f"{self._kinds} in blocks, by integers up to {self._matrix.most_rows} rows, {more} above"


def can_multiply(weights: Sequence[BlockWeight], dtype: torch.dtype) -> BlockKernels | None:
    """Return the kernels that multiply with ``weights`` from their blocks, or None if there are none."""
    cpu = all(weight.blocks.device.type == "cpu" for weight in weights)
    known = all(weight.kind.name in FORMATS for weight in weights)
    return block_kernels(dtype) if cpu and known else None


def kinds_of(weights: Sequence[BlockWeight]) -> str:
    """Return the names of the types of ``weights`` for people."""
    return ", ".join(dict.fromkeys(weight.kind.name for weight in weights))
