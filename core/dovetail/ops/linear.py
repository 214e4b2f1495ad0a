"""Matrix products of the layers.

On the CPU in float32, torch computes ``x @ weight.T`` with MKL, whose speed depends on which side is the tall one and on
the number of rows; ``benchmarks/forward_cpu.py --ops`` measures the ways below on a machine and holds the numbers of one.
"""

from __future__ import annotations

import torch
from torch.nn import functional

MIN_PANEL_ELEMENTS = 65536
"""A panel below this size costs more to hand to a thread than to multiply."""
MAX_COLUMN_ROWS = 128
"""Above this many rows, what follows a product loses more with columns than the product gains."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [tokens, in] @ weight [out, in].T + bias [out]`` -> ``[tokens, out]``."""
    return functional.linear(x, weight, bias)


def row_panels(weight: torch.Tensor, threads: int) -> torch.Tensor | None:
    """A view of ``weight [out, in]`` as ``[panels, out / panels, in]``, one panel a thread; None where one panel is best.

    For ``panel_linear``. The view shares the weight's memory.
    """
    rows, width = weight.shape
    limit = min(threads, rows * width // MIN_PANEL_ELEMENTS)
    panels = next((n for n in range(limit, 1, -1) if rows % n == 0), 1)
    return weight.view(panels, rows // panels, width) if panels > 1 else None


def panel_linear(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear`` for one token, ``x [1, in]``, on the CPU: the panels are multiplied by one thread each.

    A product with one row is bound by reading the weight, and BLAS reads it with a single thread. The weight comes
    first because MKL's kernel for that order reads memory twice as fast as its kernel for the other.
    """
    n, rows, width = panels.shape
    out = torch.bmm(panels, x.t().expand(n, width, 1)).view(1, n * rows)
    return out if bias is None else out.add_(bias)


def columns_pay(rows: int) -> bool:
    """True if ``column_linear`` is the faster way for this many rows: MKL handles columns in blocks of 16, and has
    no good kernel for what is left over when it is most of a block."""
    return rows % 16 <= 8 and rows <= MAX_COLUMN_ROWS


def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear`` for few tokens on the CPU, as ``weight @ x.T``: the result ``[tokens, out]`` is stored by columns.

    Elementwise operations and reductions keep that layout, and the next product takes it as it is.
    """
    columns = x.contiguous().t() if x.shape[0] < 16 else x.t()
    if bias is None:
        return torch.mm(weight, columns).t()
    return torch.addmm(bias[:, None], weight, columns).t()
