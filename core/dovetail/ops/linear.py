"""Matrix products of the layers.

On the CPU, ``x @ weight.T`` is fastest with a weight that oneDNN has stored in the order its kernels read. One row is
bound by reading the weight, and a compiled kernel that reads it as it is comes closest to the memory's speed. On CUDA the
same is true of up to 128 rows: ``few_rows`` gives kernels for the shapes and numbers of rows where they were measured to win.
``benchmarks/forward_cpu.py --ops`` measures these ways on a machine and holds the numbers of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from dovetail.ops.triton import tuning

if TYPE_CHECKING:
    from dovetail.ops.triton.matmul import FewRows


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


def few_rows(weight: torch.Tensor) -> FewRows | None:
    """The products ``(x, bias)`` of ``weight [out, in]`` with up to ``tuning.MAX_ROWS`` rows on CUDA; None where there is
    nothing better than ``linear``. It keeps no copy of the weight."""
    if not weight.is_cuda:
        return None
    from dovetail.ops.triton import matmul

    return matmul.FewRows(weight) if matmul.supported(weight) else None


def describe(weight: torch.Tensor) -> str:
    """What computes the products with ``weight``, for people: by number of rows where that depends on it."""
    if not weight.is_cuda:
        return "oneDNN, packed" if packed(weight[:1]) is not None else "torch"
    from dovetail.ops.triton import matmul

    return tuning.describe(*weight.shape) if matmul.supported(weight) else "torch"
