"""Store the weights of a checkpoint in FP8, for tests."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
PROJECTION = re.compile(r".*(_proj|_proj_with_mqa|experts\.\d+\.w\d)\.weight")
"""Match the names of the weights that are quantized in published checkpoints."""
Tensors = dict[str, torch.Tensor]


class Stored(NamedTuple):
    """Hold codes ``[..., out, in]``, their scales by row ``[..., out, 1]`` or by block, and the weight that they stand for."""

    codes: torch.Tensor
    scale: torch.Tensor
    exact: torch.Tensor


def quantized(weight: torch.Tensor, block: tuple[int, int]) -> Stored:
    """Quantize blocks of ``block`` rows and columns. The last blocks of a matrix may be smaller."""
    rows, columns = weight.shape[-2:]
    weight = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = weight.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    scale = blocks.abs().amax((-3, -1), keepdim=True) / 448
    codes = (blocks / scale).to(FP8)
    exact = (codes.float() * scale).flatten(-4, -3).flatten(-2)[..., :rows, :columns]
    return Stored(codes.flatten(-4, -3).flatten(-2)[..., :rows, :columns], scale[..., 0, :, 0], exact)


def by_block(tensors: Tensors, size: int) -> tuple[Tensors, Tensors]:
    """Return the tensors of a checkpoint in FP8 by blocks of ``size``, and those that they stand for."""
    stored, exact = Tensors(), Tensors()
    for name, tensor in tensors.items():
        stored[name] = exact[name] = tensor
        if PROJECTION.fullmatch(name) and "eh_proj" not in name:
            made = quantized(tensor, (size, size))
            stored[name], stored[f"{name}_scale_inv"], exact[name] = (part.contiguous() for part in made)
    return stored, exact
