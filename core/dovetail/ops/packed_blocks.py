"""Pack the blocks of GGUF into rows that kernels on CUDA read well.

Blocks of 144 or 210 bytes, with 6-bit scales spread over several bytes, are read badly by a kernel. A packed row has what its
blocks have, exactly, in sections one after another: first all codes, of 4 or 8 bits, then all scales, and so on
(``dovetail.gguf.blocks.BlockNumbers`` has the formula). Sections begin at multiples of 16 bytes, rows at multiples of 64.

Codes are in 32-bit words, and words in units of ``PackedType.step`` words. Word j of a unit has the columns j, j + step,
j + 2 * step and so on of the unit's columns, the first in its lowest bits: a kernel that takes the same bits of all words gets
``step`` consecutive columns of each unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dovetail.gguf.block_types import TYPES, BlockType
from dovetail.gguf.blocks import block_numbers

_ROW, _SECTION = 64, 16
"""Rows and sections begin at multiples of these bytes."""
_CHUNK = 4 << 20
"""The number of elements that are packed at a time."""


@dataclass(frozen=True, slots=True)
class PackedType:
    """Describe how rows of a type are packed. ``bits`` are those of a code, and ``zero`` is subtracted from it. ``whole`` columns have one scale, and one offset if there are offsets; with ``group``, that many columns have a
    multiplier of each."""

    name: str
    bits: int
    zero: int
    whole: int
    group: int | None = None
    offset: bool = False
    scale: torch.dtype = torch.float16

    @property
    def each(self) -> int:
        """Return the number of codes in a word."""
        return 32 // self.bits

    @property
    def step(self) -> int:
        """Return the number of words of a unit. All columns of a unit have the same scale and multiplier."""
        return 2 if self.bits == 4 and self.group == 16 else 4

    @property
    def unit(self) -> int:
        """Return the number of columns of a unit."""
        return self.step * self.each

    def sections(self, columns: int) -> dict[str, tuple[int, int, torch.dtype]]:
        """Return where the sections of a row of ``columns`` columns begin, their bytes and what they contain."""
        scales = (columns // self.whole * self.scale.itemsize, self.scale)
        wanted = {"codes": (columns * self.bits // 8, torch.int32), "scale": scales}
        if self.offset:
            wanted["offset"] = scales
        if self.group is not None:
            wanted["multiplier"] = (columns // self.group, torch.int8)
            if self.offset:
                wanted["offset_multiplier"] = wanted["multiplier"]
        found, end = {}, 0
        for name, (size, dtype) in wanted.items():
            found[name] = (end, size, dtype)
            end += -(-size // _SECTION) * _SECTION
        return found

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row."""
        start, size, _ = list(self.sections(columns).values())[-1]
        return -(-(start + size) // _ROW) * _ROW


PACKED: Mapping[str, PackedType] = MappingProxyType({one.name: one for one in (
    PackedType("Q4_0", 4, 8, 32),
    PackedType("Q4_1", 4, 0, 32, offset=True),
    PackedType("Q5_0", 8, 16, 32),
    PackedType("Q5_1", 8, 0, 32, offset=True),
    PackedType("Q8_0", 8, 128, 32),
    PackedType("Q2_K", 4, 0, 256, 16, offset=True),
    PackedType("Q3_K", 4, 4, 256, 16),
    PackedType("Q4_K", 4, 0, 256, 32, offset=True),
    PackedType("Q5_K", 8, 0, 256, 32, offset=True),
    PackedType("Q6_K", 8, 32, 256, 16),
    PackedType("IQ4_NL", 8, 128, 32),
    PackedType("IQ4_XS", 8, 128, 256, 32),
    PackedType("MXFP4", 8, 128, 32, scale=torch.bfloat16),
)})  # fmt: skip
"""How each type is packed. Codes of 5 and 6 bits take 8, and so do those of types that choose from a table of 16 numbers."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Hold packed rows of one type, uint8 ``[out, bytes]``, for a weight with ``columns`` columns."""

    rows: torch.Tensor
    packing: PackedType
    columns: int

    def section(self, name: str) -> torch.Tensor | None:
        """Return a view of a section of all rows, ``[out, numbers]``, or None if there is none."""
        found = self.packing.sections(self.columns).get(name)
        return None if found is None else self.rows[:, found[0] : found[0] + found[1]].view(found[2])

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight ``[out, columns]``, computed in float32 and rounded to ``dtype``."""
        out = torch.empty(len(self.rows), self.columns, dtype=dtype, device=self.rows.device)
        step = max(1, _CHUNK // self.columns)
        for rows, part in zip(self.rows.split(step), out.split(step), strict=True):
            part.copy_(_elements(PackedWeight(rows, self.packing, self.columns)))
        return out


def pack(blocks: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return rows of blocks, uint8 ``[out, bytes]``, as packed rows, uint8 ``[out, bytes of a packed row]``."""
    packing, columns = PACKED[kind.name], blocks.shape[1] // kind.nbytes * kind.elements
    rows = torch.zeros(len(blocks), packing.row_bytes(columns), dtype=torch.uint8, device=blocks.device)
    step = max(1, _CHUNK // columns)
    for some, place in zip(blocks.split(step), rows.split(step), strict=True):
        numbers = block_numbers(some.reshape(-1, kind.nbytes), kind)
        parts = numbers._asdict() | {"codes": _words(numbers.codes, packing)}
        for name, (start, size, _) in packing.sections(columns).items():
            place[:, start : start + size] = parts[name].contiguous().view(torch.uint8).view(len(some), -1)
    return rows


def row_bytes(kind: BlockType, columns: int) -> int:
    """Return the bytes of a packed row of a type."""
    return PACKED[kind.name].row_bytes(columns)


def _words(codes: torch.Tensor, packing: PackedType) -> torch.Tensor:
    """Return codes (uint8 ``[n, elements]``) in words, as bytes."""
    units = codes.reshape(-1, packing.each, packing.step).mT  # [n, words, codes of a word]
    if packing.bits == 8:
        return units.contiguous()
    return units[..., 0::2] | units[..., 1::2] << 4


def _codes(words: torch.Tensor, packing: PackedType) -> torch.Tensor:
    """Return the codes ``[out, columns]`` of words ``[out, words]``, as float32."""
    taken = words.contiguous().view(torch.uint8)
    if packing.bits == 4:
        taken = torch.stack((taken & 15, taken >> 4), -1)
    return taken.reshape(len(words), -1, packing.step, packing.each).mT.reshape(len(words), -1).float()


def _elements(weight: PackedWeight) -> torch.Tensor:
    """Return the elements of a few rows in float32."""
    packing, n = weight.packing, len(weight.rows)
    words = weight.section("codes")
    assert words is not None

    def factor(name: str) -> torch.Tensor | None:
        scale, times = weight.section(name), weight.section("multiplier" if name == "scale" else "offset_multiplier")
        if scale is None or times is None:
            return None if scale is None else scale.float()
        return (scale.float()[:, :, None] * times.float().view(n, scale.shape[1], -1)).flatten(1)

    scale, offset = factor("scale"), factor("offset")
    assert scale is not None
    numbers = _codes(words, packing) - packing.zero
    values = numbers.view(n, scale.shape[1], -1) * scale[:, :, None]
    return (values if offset is None else values - offset[:, :, None]).flatten(1)


assert PACKED.keys() == {name for name in TYPES if name not in ("F32", "F16", "BF16")}
