"""Help to divide rows of blocks of GGUF, and to fill them for measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import BlockType
from dovetail.interfaces.model import TensorShare

_SCALES: Mapping[str, tuple[float, tuple[int, ...]]] = {
    "Q4_0": (8, (0,)),
    "Q4_1": (15, (0, 2)),
    "Q5_0": (16, (0,)),
    "Q5_1": (31, (0, 2)),
    "Q8_0": (128, (0,)),
    "Q2_K": (15 * 3, (80, 82)),
    "Q3_K": (32 * 4, (108,)),
    "Q4_K": (63 * 15, (0, 2)),
    "Q5_K": (63 * 31, (0, 2)),
    "Q6_K": (128 * 32, (208,)),
    "IQ4_NL": (127, (0,)),
    "IQ4_XS": (32 * 127, (0,)),
}
"""For each type the largest weight of a block whose scale is 1, and the bytes at which it has float16 numbers: the scale, and an
offset in some types."""


def fill_random(blocks: torch.Tensor, kind: BlockType, limit: float, generator: torch.Generator) -> None:
    """Fill ``blocks`` (uint8 ``[n, bytes of a block]``) with random codes and with scales so that no weight exceeds ``limit``."""
    blocks.random_(0, 256, generator=generator)
    if kind.name == "MXFP4":
        blocks[:, 0] = 128 + math.floor(math.log2(limit / 12))
        return
    most, places = _SCALES[kind.name]
    scale = torch.tensor([limit / most], dtype=torch.float16)
    if scale.item() * most > limit:
        scale = (scale.view(torch.int16) - 1).view(torch.float16)
    for number, at in zip((scale, torch.zeros_like(scale)), places, strict=False):
        blocks[:, at : at + 2] = number.view(torch.uint8).to(blocks.device)


def check_columns(name: str, columns: int, kind: BlockType) -> None:
    """Raise ``ConfigError`` if rows of ``columns`` columns of module ``name`` cut a block."""
    if columns % kind.elements:
        raise ConfigError(
            f"{name} has type {kind.name}, whose blocks have {kind.elements} columns, and {columns} columns are not a multiple of them "
            "on this rank; set parallel.tp to a smaller number, or quantization: none"
        )


def in_bytes(share: TensorShare, kind: BlockType) -> TensorShare:
    """Return a share of columns as a share of the bytes of rows."""
    return TensorShare(1, kind.row_bytes(share.start), kind.row_bytes(share.size), kind.row_bytes(share.whole))
