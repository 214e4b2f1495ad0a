"""Make random blocks of GGUF."""

import torch

from dovetail.gguf.block_types import TYPES

_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""Where blocks have float16 numbers."""


def random_blocks(name: str, rows: int, columns: int, scale: float = 0.01) -> torch.Tensor:
    """Return ``rows`` rows of blocks, uint8 ``[rows, bytes]``, with all codes and with scales that are about ``scale``."""
    kind = TYPES[name]
    blocks = torch.randint(0, 256, (rows * columns // kind.elements, kind.nbytes), dtype=torch.uint8)
    for at in _HALVES[name]:
        blocks[:, at : at + 2] = (torch.randn(len(blocks), 1) * scale).half().view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(118, 126, (len(blocks),))
    return blocks.view(rows, -1)
