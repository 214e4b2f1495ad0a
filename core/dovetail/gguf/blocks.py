"""Dequantize tensors of GGUF files, on any device.

The functions follow the definition of the types in ggml (ggml-quants.c), in float32 and in the same order of operations.
Each maps blocks, uint8 ``[n, bytes of a block]``, to float32 ``[n, elements of a block]``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dovetail.gguf.block_types import TYPES, BlockType

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the 16 codes of IQ4_NL and IQ4_XS."""
FP4_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of the 16 codes of MXFP4 (E2M1)."""


def dequantize(data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return the elements of rows of blocks of type ``kind``, uint8 ``[..., bytes of a row]``, as a new float32 tensor
    ``[..., columns]``."""
    *rows, width = data.shape
    made = _FUNCTIONS[kind.name](data.reshape(-1, kind.nbytes))
    return made.reshape(*rows, width // kind.nbytes * kind.elements)


def as_torch(data: np.ndarray) -> torch.Tensor:
    """Return the bytes of a tensor of a file as a new torch tensor."""
    return torch.from_numpy(np.array(data))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 number at byte ``at`` of each block, ``[n, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


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


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | (_bits(blocks, 2) << 4)
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    codes = _nibbles(blocks[:, 8:]) | (_bits(blocks, 4) << 4)
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes = blocks[:, :16, None], blocks[:, 16:80].reshape(-1, 2, 1, 32)
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)[:, None]
    values = ((codes >> shifts) & 3).reshape(-1, 16, 16).float()
    scale = _half(blocks, 80)[:, None] * (scales & 15).float()
    return (scale * values - _half(blocks, 82)[:, None] * (scales >> 4).float()).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    high, codes, packed = blocks[:, :32], blocks[:, 32:96].reshape(-1, 2, 1, 32), blocks[:, 96:108]
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)[:, None]
    values = ((codes >> shifts) & 3).reshape(-1, 8, 32).float() - 4 * (1 - (_shifted(high, *range(8)) & 1).float())
    top = (_shifted(packed[:, 8:], 0, 2, 4, 6) & 3).flatten(1) << 4
    scales = (_nibbles(packed[:, :8]) | top).float() - 32
    scale = _half(blocks, 108) * scales
    return (scale[:, :, None] * values.reshape(-1, 16, 16)).flatten(1)


def scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and the eight minima of 6 bits, uint8 ``[n, 8]``, of the 12 bytes ``[n, 12]`` in blocks of Q4_K
    and Q5_K."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales, minima


def _scaled(blocks: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the elements of Q4_K and Q5_K, whose blocks begin alike, of their codes ``[n, 8, 32]``."""
    scales, minima = scales_and_minima(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()
    return (scale[:, :, None] * values.float() - minimum[:, :, None]).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    top = (_shifted(blocks[:, 16:48], *range(8)) & 1) << 4
    return _scaled(blocks, _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | top)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = blocks[:, :128].reshape(-1, 2, 64)
    low = torch.cat((low & 15, low >> 4), -1)  # [n, 2, 128]
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8, device=blocks.device)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).reshape(-1, 2, 128)
    values = (low | (high << 4)).float() - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scale[:, :, None] * values.reshape(-1, 16, 16)).flatten(1)


def _chosen(values: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.long()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _chosen(NONLINEAR, _nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    low = _shifted(blocks[:, 4:8], 0, 4).transpose(1, 2).flatten(1) & 15
    high = _shifted(blocks[:, 2:4], 0, 2, 4, 6).transpose(1, 2).flatten(1) & 3
    scale = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return (scale[:, :, None] * _chosen(NONLINEAR, _nibbles(blocks[:, 8:].reshape(-1, 8, 16)))).flatten(1)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    exponent = blocks[:, :1].to(torch.int32)
    half = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), (exponent - 1) << 23).view(
        torch.float32
    )  # 2^(e - 128)
    return half * _chosen(FP4_TWICE, _nibbles(blocks[:, 1:]))


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
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
assert _FUNCTIONS.keys() == TYPES.keys()
