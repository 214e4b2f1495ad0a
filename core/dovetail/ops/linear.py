"""Matrix products of the layers."""

from __future__ import annotations

import torch
from torch.nn import functional

MIN_PANEL_ELEMENTS = 16384
"""A panel below this size costs more to hand to a thread than to multiply."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [tokens, in] @ weight [out, in].T + bias [out]`` -> ``[tokens, out]``."""
    return functional.linear(x, weight, bias)


def row_panels(weight: torch.Tensor, threads: int) -> torch.Tensor | None:
    """A view of ``weight [out, in]`` as ``[panels, in, out / panels]``, one panel a thread; None where one panel is best.

    For ``panel_linear``. The view shares the weight's memory.
    """
    rows, width = weight.shape
    limit = min(threads, rows * width // MIN_PANEL_ELEMENTS)
    panels = next((n for n in range(limit, 1, -1) if rows % n == 0), 1)
    return weight.view(panels, rows // panels, width).transpose(1, 2) if panels > 1 else None


def panel_linear(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear`` for one token, ``x [1, in]``, on the CPU: the panels are multiplied by one thread each.

    A product with one row is bound by reading the weight, and BLAS reads it with a single thread.
    """
    n, width, rows = panels.shape
    spread = x.expand(n, 1, width)
    if bias is None:
        return torch.bmm(spread, panels).view(1, n * rows)
    return torch.baddbmm(bias.view(n, 1, rows), spread, panels).view(1, n * rows)
