"""Hold weights whose codes of 4 bits stand for numbers of a table, times a scale for each block of columns (NF4 and FP4 of bitsandbytes).

The codes of a row are in words of 32 bits, little endian, and ``PLANES`` columns in 16 of them. Of these columns, word j has the codes of columns
2 j and 2 j + 1 in its lowest bits, then those of columns 32 + 2 j and 33 + 2 j, and so on: each plane is 32 columns. Rows end with a
whole block of planes, whose codes are 0 where there is no column. Scales are ``[blocks, out]``, so that those of many rows are adjacent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.ops.integers import PLANES

_ROWS = 4096
"""The number of rows that are dequantized at a time."""


class TableWeight(NamedTuple):
    """Hold a weight ``[out, columns]``: ``codes`` (uint8 ``[out, bytes]``), ``scales`` (float32 ``[blocks, out]``, 0 where there is no
    column), each of ``block`` columns, and the ``table``, called ``kind``."""

    codes: torch.Tensor
    scales: torch.Tensor
    table: tuple[float, ...]
    columns: int
    block: int
    kind: str

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, computed in float32 and rounded to ``dtype``."""
        out = torch.empty(len(self.codes), self.columns, dtype=dtype, device=self.codes.device)
        table = self.scales.new_tensor(self.table)
        parts = self.codes.split(_ROWS), self.scales.split(_ROWS, 1), out.split(_ROWS)
        for codes, scales, part in zip(*parts, strict=True):
            numbers = table[codes_of(codes, self.columns).int()].unflatten(1, (-1, self.block))
            part.copy_((numbers * scales[: numbers.shape[1]].T[:, :, None]).flatten(1))
        return out


def code_bytes(columns: int) -> int:
    """Return the bytes of the codes of a row."""
    return -(-columns // PLANES) * PLANES // 2


def padded_scales(scales: torch.Tensor, block: int) -> torch.Tensor:
    """Return scales ``[out, blocks]`` in the order of ``TableWeight``."""
    more = -(-code_bytes(scales.shape[1] * block) * 2 // block) - scales.shape[1]
    return torch.nn.functional.pad(scales.T.float(), (0, 0, 0, more)).contiguous()


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return codes (uint8 ``[out, columns]``) in words, as bytes."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % PLANES))
    pairs = padded.unflatten(1, (-1, 4, PLANES // 8, 2))  # [out, blocks, planes, words, 2]
    return (pairs[..., 0] | pairs[..., 1] << 4).mT.flatten(1).contiguous()


def codes_of(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the codes (uint8 ``[out, columns]``) of ``packed_codes``."""
    planes = packed.unflatten(1, (-1, PLANES // 8, 4)).mT
    return torch.stack((planes & 15, planes >> 4), -1).flatten(1)[:, :columns]
