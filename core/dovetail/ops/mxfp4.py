"""Convert MXFP4 weights (OCP Microscaling Formats 1.0): E2M1 codes of 4 bits with one E8M0 scale, a power of two, for each block
of 32 columns.

Published checkpoints store the columns of a row in order, two in a byte, of which the low bits are the first. Dovetail holds
the codes of a block in 16 bytes of which the low bits are the first 16 columns and the high bits the others, so that the
columns of ``x`` that are multiplied with either are contiguous; and scales ``[in / 32, out]``, so that those of many rows are
contiguous.
"""

from __future__ import annotations

import functools

import torch

BLOCK = 32
"""The number of columns that have one scale."""
BIAS = 127
"""The scale of code s is 2 ** (s - BIAS)."""
NAN_SCALE = 255
"""The code of a scale that stands for no number."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes 0 to 7. Codes 8 to 15 are the same numbers with a minus."""
_EMAX = 2
"""The exponent of the largest number, 6."""
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The numbers between those of ``VALUES``."""


def halved(codes: torch.Tensor) -> torch.Tensor:
    """Return the codes of a checkpoint, uint8 ``[..., in / 2]``, as Dovetail holds them."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2, BLOCK // 4)  # both halves of each block
    first, second = pairs[..., 0, :], pairs[..., 1, :]
    low = torch.stack((first & 15, first >> 4), -1).flatten(-2)
    high = torch.stack((second << 4, second & 240), -1).flatten(-2)
    return (low | high).flatten(-2)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights ``[..., out, in]`` of codes ``[..., out, in / 2]`` and scales ``[..., in / 32, out]``. Exact, as far as
    ``dtype`` has the numbers."""
    pairs = (
        _pairs(dtype).to(codes.device).index_select(0, codes.reshape(-1).int())
    )  # of each byte the low and the high number
    values = pairs.view(dtype).view(*codes.shape[:-1], -1, BLOCK // 2, 2)
    factors = powers(scale, dtype).mT[..., None, None]
    return (values * factors).transpose(-1, -2).reshape(*codes.shape[:-1], -1)


def powers(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the powers of two that scales stand for; nan for ``NAN_SCALE``."""
    found = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - BIAS)
    return found.masked_fill_(scale == NAN_SCALE, float("nan")).to(dtype)


@functools.cache
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """Return the two numbers of each byte as one integer."""
    byte = torch.arange(256)
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=dtype)
    whole = {2: torch.int32, 4: torch.int64, 8: torch.complex128}[dtype.itemsize]
    return torch.stack((values[byte % 16], values[byte // 16]), 1).view(whole).view(-1)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[..., out, in / 2]`` and scales ``[..., in / 32, out]`` of a weight ``[..., out, in]``, by the rule of the
    specification: the scale is the largest power of two that is at most the largest magnitude, divided by 4; numbers are rounded to
    the nearest one, and to 6 at most. A block with a number that is infinite or NaN has ``NAN_SCALE``."""
    blocks = weight.float().contiguous().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    _, exponent = torch.frexp(largest)
    scale = (exponent - 1 - _EMAX + BIAS).clamp_(0, 254).masked_fill_(~largest.isfinite(), NAN_SCALE)
    # the sum of two powers may not be one: -BIAS is subnormal
    scaled = torch.ldexp(blocks, (BIAS - scale).unsqueeze(-1))
    magnitude = scaled.abs()
    middles = torch.tensor(_MIDDLES, device=weight.device)
    code = torch.bucketize(magnitude, middles)
    # a number in the middle goes to the even code
    code += (code % 2 == 1) & (magnitude == middles[code.clamp(max=len(_MIDDLES) - 1)])
    code += 8 * scaled.signbit()
    halves = code.to(torch.uint8).unflatten(-1, (2, -1))
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2), scale.to(torch.uint8).mT.contiguous()
