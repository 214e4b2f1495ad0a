"""Convert weights that are stored as integers of 4 or 8 bits, with a scale for each group of columns of a row.

Dovetail holds integers of 8 bits as int8, and those of 4 bits as uint8 with two numbers in a byte. If the number of columns is a
multiple of ``PLANES``, that many columns are 32 words of 16 bits, little endian: word j has column j in its lowest bits, then columns 32 + j,
64 + j and 96 + j. Kernels take the same bits of all words with few instructions, and each such plane is 32 columns. Otherwise,
of 32 columns, the low bits of 16 bytes are the first 16 columns and the high bits the others, as in ``ops.mxfp4``. A number of
4 bits stands for its value minus 8. Scales are ``[groups, out]``, so that those of many rows are contiguous. Zero points are uint8 numbers
in the same order; the number in the middle, 8 or 128, stands for 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 32
"""Groups of columns of 4 bits are multiples of this number."""
PLANES = 128
"""The number of columns of 4 bits in one block of words, in rows of a multiple of it."""
_ROWS = 4096
"""The number of rows that are held in float32 at a time."""


class Integers(NamedTuple):
    """Hold a weight: ``codes [..., out, in]`` (int8) or ``[..., out, in / 2]`` (uint8, 4 bits), ``scales [..., groups, out]`` in a
    floating-point dtype, and ``zeros`` (uint8) of that shape, or None if every zero point is the middle."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        """Return the number of bits of a number."""
        return 8 if self.codes.dtype is torch.int8 else 4

    @property
    def columns(self) -> int:
        """Return the number of columns of the weight."""
        return self.codes.shape[-1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Return the number of columns that have one scale."""
        return self.columns // self.scales.shape[-2]


def held(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned numbers (uint8 ``[..., in]``) as codes. For 4 bits the columns are a multiple of ``BLOCK``."""
    if bits == 8:
        return (numbers ^ 128).view(torch.int8)
    if numbers.shape[-1] % PLANES:
        halves = numbers.unflatten(-1, (-1, 2, BLOCK // 2))
        return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
    bytes_of = numbers.unflatten(-1, (-1, 4, PLANES // 4))
    low, high = bytes_of[..., 0, :] | bytes_of[..., 1, :] << 4, bytes_of[..., 2, :] | bytes_of[..., 3, :] << 4
    return torch.stack((low, high), -1).flatten(-3)


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the unsigned numbers (uint8 ``[..., in]``) of codes."""
    if codes.dtype is torch.int8:
        return codes.view(torch.uint8) ^ 128
    if codes.shape[-1] * 2 % PLANES:
        halves = codes.unflatten(-1, (-1, BLOCK // 2))
        return torch.stack((halves & 15, halves >> 4), -2).flatten(-3)
    low, high = codes.unflatten(-1, (-1, PLANES // 4, 2)).unbind(-1)
    return torch.stack((low & 15, low >> 4, high & 15, high >> 4), -2).flatten(-3)


def dequantize(weight: Integers, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight ``[out, in]``, computed in float32 and rounded to ``dtype``."""
    codes, scales, zeros = weight
    result = torch.empty(codes.shape[0], weight.columns, dtype=dtype, device=codes.device)
    middle = 1 << weight.bits - 1
    for start in range(0, len(codes), _ROWS):
        rows = slice(start, start + _ROWS)
        numbers = numbers_of(codes[rows]).float().unflatten(1, (-1, weight.group))
        zero = middle if zeros is None else zeros[:, rows].T.float()[:, :, None]
        result[rows] = ((numbers - zero) * scales[:, rows].T.float()[:, :, None]).flatten(1)
    return result


def quantize(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool = True, dtype: torch.dtype = torch.float32
) -> Integers:
    """Round a weight ``[out, in]`` to the nearest integers. A scale is the range of a group divided by ``2 ** bits - 1``, rounded
    to ``dtype``; ``symmetric`` ranges reach as far below zero as above it. Scales of groups with numbers that are infinite or NaN are NaN."""
    most, middle = (1 << bits) - 1, 1 << bits - 1
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = torch.maximum(-low, high) * 2 / most if symmetric else (high - low) / most
    scales = scales.to(dtype).float()
    scales = torch.where(scales == 0, 1.0, scales)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    zeros = torch.full_like(scales, middle) if symmetric else (-low / scales).round().clamp(0, most)
    numbers = ((groups / scales[:, :, None]).round() + zeros[:, :, None]).clamp(0, most).nan_to_num(middle)
    own = None if symmetric else zeros.nan_to_num(middle).to(torch.uint8).mT.contiguous()
    return Integers(held(numbers.to(torch.uint8).flatten(1), bits), scales.mT.contiguous(), own)
