"""Dequantize tensors of GGUF files, on any device.

The functions follow the definition of the types in ggml (ggml-quants.c), in float32 and in the same order of operations.
Each maps blocks, uint8 ``[n, bytes of a block]``, to their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from dovetail.gguf.block_types import TYPES, BlockType

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the 16 codes of IQ4_NL and IQ4_XS."""
FP4_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the 16 codes of MXFP4 (E2M1)."""


class BlockNumbers(NamedTuple):
    """Hold the elements of blocks as integers: element = scale * multiplier * (code - zero) - offset * offset_multiplier.

    ``codes`` are uint8 ``[n, elements]``. ``scale`` and ``offset`` are floating-point numbers ``[n, 1]`` of 16 bits, multipliers
    int8 ``[n, groups]`` for groups of consecutive elements. What is None does not occur in the formula.
    """

    codes: torch.Tensor
    zero: int
    scale: torch.Tensor
    multiplier: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    offset_multiplier: torch.Tensor | None = None


def dequantize(data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return the elements of rows of blocks of type ``kind``, uint8 ``[..., bytes of a row]``, as a new float32 tensor
    ``[..., columns]``."""
    *rows, width = data.shape
    blocks = data.reshape(-1, kind.nbytes)
    made = _PLAIN[kind.name](blocks) if kind.name in _PLAIN else _elements(block_numbers(blocks, kind))
    return made.reshape(*rows, width // kind.nbytes * kind.elements)


def block_numbers(blocks: torch.Tensor, kind: BlockType) -> BlockNumbers:
    """Return the integers and scales of ``blocks``, uint8 ``[n, bytes of a block]``. Types of plain numbers have none."""
    return _NUMBERS[kind.name](blocks)


def _elements(numbers: BlockNumbers) -> torch.Tensor:
    codes, zero, scale, multiplier, offset, offset_multiplier = numbers
    values = codes.float() - zero if zero else codes.float()
    factor = scale.float() if multiplier is None else scale.float() * multiplier.float()
    values = values.view(len(codes), factor.shape[1], -1).mul_(factor[:, :, None])
    if offset is not None:
        less = offset.float() if offset_multiplier is None else offset.float() * offset_multiplier.float()
        values -= less[:, :, None]
    return values.flatten(1)


def as_torch(data: np.ndarray) -> torch.Tensor:
    """Return the bytes of a tensor of a file as a new torch tensor."""
    return torch.from_numpy(np.array(data))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at byte ``at`` of each block, ``[n, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes, then the high halves: ``[n, k, b]`` becomes ``[n, k, 2 * b]``."""
    return torch.cat((codes & 15, codes >> 4), -1)


def _bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the bits of the four bytes at ``at``, lowest first, ``[n, 32]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return ((blocks[:, at : at + 4, None] >> shifts) & 1).flatten(1)


def _shifted(codes: torch.Tensor, *shifts: int) -> torch.Tensor:
    """Return ``codes [n, b]`` shifted right by each of ``shifts``, ``[n, shifts, b]``."""
    return codes[:, None] >> torch.tensor(shifts, dtype=torch.uint8, device=codes.device)[:, None]


def _f32(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float32).clone()


def _f16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.float16).float()


def _bf16(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: torch.Tensor) -> BlockNumbers:
    return BlockNumbers(_nibbles(blocks[:, 2:]), 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> BlockNumbers:
    return BlockNumbers(_nibbles(blocks[:, 4:]), 0, _half(blocks, 0), offset=-_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> BlockNumbers:
    return BlockNumbers(_nibbles(blocks[:, 6:]) | (_bits(blocks, 2) << 4), 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> BlockNumbers:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks, 4) << 4)
    return BlockNumbers(codes, 0, _half(blocks, 0), offset=-_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> BlockNumbers:
    return BlockNumbers(blocks[:, 2:] ^ 128, 128, _half(blocks, 0))


def _two_bits(codes: torch.Tensor) -> torch.Tensor:
    """Return the pairs of bits of 64 bytes ``[n, 64]`` in the order of Q2_K and Q3_K, ``[n, 256]``."""
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=codes.device)[:, None]
    return ((codes.reshape(-1, 2, 1, 32) >> shifts) & 3).flatten(1)


def _signed(numbers: torch.Tensor, zero: int = 0) -> torch.Tensor:
    """Return ``numbers`` (uint8) less ``zero`` as int8."""
    return (numbers - zero).view(torch.int8)  # wraps around


def _q2_k(blocks: torch.Tensor) -> BlockNumbers:
    scales = blocks[:, :16]
    return BlockNumbers(
        _two_bits(blocks[:, 16:80]), 0, _half(blocks, 80), _signed(scales & 15), _half(blocks, 82), _signed(scales >> 4)
    )


def _q3_k(blocks: torch.Tensor) -> BlockNumbers:
    high, packed = blocks[:, :32], blocks[:, 96:108]
    codes = _two_bits(blocks[:, 32:96]) | ((_shifted(high, *range(8)) & 1) << 2).flatten(1)
    top = (_shifted(packed[:, 8:], 0, 2, 4, 6) & 3).flatten(1) << 4
    return BlockNumbers(codes, 4, _half(blocks, 108), _signed(_nibbles(packed[:, :8]) | top, 32))


def scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and the eight minima of 6 bits, uint8 ``[n, 8]``, of the 12 bytes ``[n, 12]`` in blocks of Q4_K
    and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales, minima


def _scaled(blocks: torch.Tensor, codes: torch.Tensor) -> BlockNumbers:
    """Return the numbers of Q4_K and Q5_K, whose blocks begin alike, of their codes ``[n, 256]``."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    return BlockNumbers(codes, 0, _half(blocks, 0), _signed(scales), _half(blocks, 2), _signed(minima))


def _q4_k(blocks: torch.Tensor) -> BlockNumbers:
    return _scaled(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1))


def _q5_k(blocks: torch.Tensor) -> BlockNumbers:
    top = (_shifted(blocks[:, 16:48], *range(8)) & 1) << 4
    return _scaled(blocks, (_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | top).flatten(1))


def _q6_k(blocks: torch.Tensor) -> BlockNumbers:
    low = blocks[:, :128].reshape(-1, 2, 64)
    low = torch.cat((low & 15, low >> 4), -1)  # [n, 2, 128]
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 2, 128)
    return BlockNumbers((low | (high << 4)).flatten(1), 32, _half(blocks, 208), _signed(blocks[:, 192:208]))


def _chosen(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    """Return ``values`` of ``codes`` plus 128, uint8."""
    table = torch.tensor([value + 128 for value in values], dtype=torch.uint8, device=codes.device)
    return table[codes.long()]


def _iq4_nl(blocks: torch.Tensor) -> BlockNumbers:
    return BlockNumbers(_chosen(NONLINEAR, _nibbles(blocks[:, 2:])), 128, _half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> BlockNumbers:
    low = _shifted(blocks[:, 4:8], 0, 4).transpose(1, 2).flatten(1) & 15
    high = _shifted(blocks[:, 2:4], 0, 2, 4, 6).transpose(1, 2).flatten(1) & 3
    codes = _chosen(NONLINEAR, _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1))
    return BlockNumbers(codes, 128, _half(blocks, 0), _signed(low | (high << 4), 32))


def _mxfp4(blocks: torch.Tensor) -> BlockNumbers:
    exponent = blocks[:, :1].to(torch.int32)
    half = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(
        torch.float32
    )  # 2^(e - 128), also in bfloat16
    return BlockNumbers(_chosen(FP4_TWICE, _nibbles(blocks[:, 1:])), 128, half.to(torch.bfloat16))


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"F32": _f32, "F16": _f16, "BF16": _bf16}
_NUMBERS: dict[str, Callable[[torch.Tensor], BlockNumbers]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
assert {**_PLAIN, **_NUMBERS}.keys() == TYPES.keys()
