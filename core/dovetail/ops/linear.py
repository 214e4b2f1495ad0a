"""Matrix products of the layers.

On the CPU, ``x @ weight.T`` is fastest with a weight that oneDNN has stored in the order its kernels read; only one row
in float32 is faster with the weight as it is. ``benchmarks/forward_cpu.py --ops`` measures these ways on a machine and
holds the numbers of one.
"""

from __future__ import annotations

import torch
from torch.nn import functional

MIN_PANEL_ELEMENTS = 65536
"""A panel below this size costs more to hand to a thread than to multiply."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [tokens, in] @ weight [out, in].T + bias [out]`` -> ``[tokens, out]``."""
    return functional.linear(x, weight, bias)


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of ``weight [out, in]`` in oneDNN's own order, for ``packed_linear`` and nothing else.

    None where there is none to be had: on other devices, for dtypes other than float32 and (where the processor
    computes with it) bfloat16, and in builds of torch without oneDNN.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or weight.numel() == 0:
        return None
    known = weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous()) if known else None


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear`` with a ``packed`` weight."""
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def row_panels(weight: torch.Tensor, threads: int) -> torch.Tensor | None:
    """A view of ``weight [out, in]`` as ``[panels, out / panels, in]``, one panel a thread; None where one panel is best.

    For ``panel_linear``. The view shares the weight's memory.
    """
    rows, width = weight.shape
    limit = min(threads, rows * width // MIN_PANEL_ELEMENTS)
    panels = next((n for n in range(limit, 1, -1) if rows % n == 0), 1)
    return weight.view(panels, rows // panels, width) if panels > 1 else None


def panel_linear(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear`` for one token, ``x [1, in]``, in float32 on the CPU: the panels are multiplied by one thread each.

    A product with one row is bound by reading the weight, and BLAS reads it with a single thread. The weight comes
    first because MKL's kernel for that order reads memory twice as fast as its kernel for the other.
    """
    n, rows, width = panels.shape
    out = torch.bmm(panels, x.t().expand(n, width, 1)).view(1, n * rows)
    return out if bias is None else out.add_(bias)
