"""Compute the matrix products of the layers.

On the CPU, ``x @ weight.T`` is fastest with a weight that oneDNN has stored in the order its kernels read. A product of
few rows is limited by the time to read the weight and by the overhead of a call. A compiled kernel that reads the
weight in its original order has less of both; ``compiled_rows`` returns the number of rows up to which it is used. On
CUDA the same holds for up to 128 rows: ``few_rows`` returns kernels for the shapes and numbers of rows at which they
were measured to be faster. ``benchmarks/forward_cpu.py --ops`` measures these alternatives on a machine and contains
the numbers of one machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from dovetail.errors import ConfigError
from dovetail.ops.cpu.kernels import kernels
from dovetail.ops.triton import tuning

if TYPE_CHECKING:
    from dovetail.ops.triton.invariant import InvariantRows
    from dovetail.ops.triton.matmul import FewRows


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x [tokens, in] @ weight [out, in].T + bias [out]``, ``[tokens, out]``."""
    return functional.linear(x, weight, bias)


def packed(weight: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of ``weight [out, in]`` in oneDNN's own order, which only ``packed_linear`` can use.

    Return None if oneDNN has no such copy: on other devices, for dtypes other than float32 and (where the processor
    computes with it) bfloat16, and in builds of torch without oneDNN.
    """
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or weight.numel() == 0:
        return None
    known = weight.dtype is torch.float32 or (
        weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous()) if known else None


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``linear`` with a ``packed`` weight. oneDNN gets ``ladder(tokens)`` rows; those after the rows of ``x``
    are zeros."""
    rows = x.shape[0]
    missing = ladder(rows) - rows
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    result = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result[:rows] if missing else result


_STEPS = 8
_EXACT_ROWS = 2 * _STEPS


def ladder(rows: int) -> int:
    """Return the number of rows, at least ``rows``, for which oneDNN has code: ``rows`` itself up to 16, then eight
    sizes from each power of two to the next.

    For each shape of weight and each number of rows oneDNN writes machine code, which takes up to a millisecond and
    half a MiB. oneDNN, and torch above it, each keep the last 1,024 such products; the ones they evict leave holes in
    the heap. The steps of a loaded server have any number of rows. Without a ladder the server's memory grew for
    minutes, by half a GiB and then by fragments. With a ladder there are 57 sizes between 16 rows and 2,304, and all of
    them stay in the caches. The zeros cost up to an eighth of a product, a few percent on average; code for a new size
    costs from a fifth of a product to several times as much.
    """
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length() - 1) // _STEPS
    return -(-rows // step) * step


_COMPILED = {torch.float32: (4, 6 << 20), torch.bfloat16: (1, 3 << 19)}
"""Map a dtype to the rows that the compiled kernel always takes, and to the largest product (rows * in * out) for which
it takes more rows. Within these limits it was measured to be up to twice as fast as oneDNN on small weights, and at
worst an eighth slower on large ones. For bfloat16, oneDNN uses instructions whose order of summation the kernel cannot
reproduce.
"""
_MOST_COMPILED = 16


def compiled_rows(weight: torch.Tensor) -> int:
    """Return the number of rows up to which ``Kernels.product`` should multiply with ``weight [out, in]``; 0 if it
    never should."""
    if weight.device.type != "cpu" or kernels(weight.dtype) is None:
        return 0
    always, work = _COMPILED[weight.dtype]
    return max(always, min(_MOST_COMPILED, work // max(1, weight.numel())))


def few_rows(weight: torch.Tensor) -> FewRows | None:
    """Return the CUDA products ``(x, bias)`` of ``weight [out, in]`` with up to ``most_rows`` rows, or None if nothing
    is faster than ``linear``. They keep no copy of the weight."""
    if not weight.is_cuda:
        return None
    from dovetail.ops.triton import matmul

    return matmul.FewRows(weight) if matmul.supported(weight) else None


def invariant_rows(weight: torch.Tensor) -> InvariantRows:
    """Return products like those of ``few_rows`` for any number of rows. The bits of each row do not depend on the
    other rows. Raises ``ConfigError`` if there are none for ``weight``."""
    if weight.is_cuda:
        from dovetail.ops.triton import invariant

        if invariant.supported(weight):
            return invariant.InvariantRows(weight)
    raise ConfigError(
        f"batch_invariant is true, and a layer has a weight {list(weight.shape)} of {weight.dtype} on {weight.device}; "
        "allowed: bfloat16 or float16, a multiple of 16 inputs, CUDA of compute capability 9.0. "
        "Set batch_invariant: false"
    )


def wide_product(weight: torch.Tensor) -> bool:
    """Return whether ``linear_float32`` multiplies with ``weight`` as it is: on CUDA, with 16 bits."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CUDA")
    return weight.is_cuda and weight.element_size() == 2 and has_kernel


def linear_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``linear`` of 16-bit numbers, and a float32 ``bias``, in float32. Their products are exact in float32, so
    that this is the same as a product of ``x`` and ``weight`` in float32, but for the order of the sum."""
    out = torch.mm(x, weight.T, out_dtype=torch.float32)
    return out if bias is None else out.add_(bias)


def describe(weight: torch.Tensor, *, batch_invariant: bool = False) -> str:
    """Return a text for people that names what computes the products with ``weight``, by number of rows if it depends
    on them."""
    if batch_invariant:
        return "triton, the same for any number of rows"
    if not weight.is_cuda:
        rows, others = compiled_rows(weight), "oneDNN, packed" if packed(weight[:1]) is not None else "torch"
        return f"compiled up to {rows} rows, then {others}" if rows else others
    from dovetail.ops.triton import matmul

    return tuning.describe(*weight.shape) if matmul.supported(weight) else "torch"
