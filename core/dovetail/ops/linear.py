"""Matrix products of the layers.

On the CPU, ``x @ weight.T`` is fastest with a weight that oneDNN has stored in the order its kernels read. One row is
bound by reading the weight, and a compiled kernel that reads it as it is comes closest to the memory's speed.
``benchmarks/forward_cpu.py --ops`` measures these ways on a machine and holds the numbers of one.
"""

from __future__ import annotations

import torch
from torch.nn import functional


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
