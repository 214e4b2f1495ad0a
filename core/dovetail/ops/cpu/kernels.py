"""Call the compiled kernels with tensors. The tensors of a call are all float32 or all bfloat16, on the CPU.

The last dimension of every tensor is contiguous, and so are outputs. Nothing is recorded for autograd.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dovetail.ops.cpu.library import library

if TYPE_CHECKING:
    import numpy as np

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "rms_norm": (_P, _P, _P, _P, _I, _I, _I, _I, _F),
    "rms_norm_wide": (_P, _P, _P, _P, _I, _I, _I, _I, _F),
    "rotary": (_P, _P, _P, _P, _I, _I, _I, _I, _I),
    "silu_mul": (_P, _P, _I, _I),
    "gelu_tanh_mul": (_P, _P, _I, _I),
    "product": (_P, _P, _P, _P, _I, _I, _I),
    "mxfp4_product": (_P, _P, _P, _P, _P, _I, _I, _I),
    "mxfp4_weight": (_P, _P, _P, _I, _I),
    "store": (_P, _P, _P, _P, _P, _I, _I, _I, _I),
    "attend": (_P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _I, _I, _I, _F, _F),
}
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class PagedKV(NamedTuple):
    """Hold a layer's keys and values ``[pages, page_size, kv_heads, head_dim]``, contiguous, and the page table of a
    batch's rows, int32 ``[rows, pages]``, whose rows may be strided."""

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor


class Kernels:
    """Call the kernels of one dtype."""

    def __init__(self, handle: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.dtype = dtype
        (
            self._rms_norm,
            self._rms_norm_wide,
            self._rotary,
            self._silu_mul,
            self._gelu_tanh_mul,
            self._product,
            self._mxfp4_product,
            self._mxfp4_weight,
            self._store,
            self._attend,
        ) = (_function(handle, name, _DTYPES[dtype]) for name in _SIGNATURES)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute ``ops.norm.rms_norm`` of ``x [tokens, size]``, or of each head of ``x [tokens, heads, size]``, whose
        heads are contiguous. With ``residual [tokens, size]``, first add it to ``x`` in place. ``weight`` may also be
        float32."""
        call = self._rms_norm
        if weight.dtype is not self.dtype:
            assert weight.dtype is torch.float32
            call = self._rms_norm_wide
        assert weight.shape == x.shape[1:]
        assert weight.is_contiguous()
        heads, size = (1, x.shape[1]) if x.ndim == 2 else (x.shape[1], x.shape[2])
        assert x.stride(-1) == 1
        assert x.stride(-2) == size or x.ndim == 2
        assert residual is None or (residual.shape == x.shape and residual.is_contiguous())
        out = torch.empty(x.shape, dtype=self.dtype)
        added = None if residual is None else residual.data_ptr()
        rows = x.shape[0] * heads
        call(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), rows, heads, x.stride(0), size, eps)
        return out

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Compute ``ops.rotary.apply_rotary`` of ``x [tokens, heads, d]``, with ``cos, sin [tokens, 1, d]`` of equal
        strides."""
        assert cos.dtype is sin.dtype is self.dtype
        tokens, heads, size = x.shape
        assert x.stride(1) == size or heads == 1  # the stride of one head is never used
        out = torch.empty(x.shape, dtype=self.dtype)
        angles = cos.data_ptr(), sin.data_ptr()
        self._rotary(x.data_ptr(), *angles, out.data_ptr(), tokens, heads, x.stride(0), size, cos.stride(0))
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute ``ops.activation.silu_mul`` of contiguous ``gate_up [tokens, 2 * n]``."""
        assert gate_up.is_contiguous()
        tokens, width = gate_up.shape
        out = torch.empty(tokens, width // 2, dtype=self.dtype)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), tokens, width // 2)
        return out

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute ``ops.activation.gelu_tanh_mul`` of contiguous ``gate_up [tokens, 2 * n]``."""
        assert gate_up.is_contiguous()
        tokens, width = gate_up.shape
        out = torch.empty(tokens, width // 2, dtype=self.dtype)
        self._gelu_tanh_mul(gate_up.data_ptr(), out.data_ptr(), tokens, width // 2)
        return out

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``ops.linear.linear`` of few rows ``x [m, in]``. The result of a row does not depend on m. All
        tensors are contiguous. ``ops.linear.compiled_rows`` returns the m up to which this is the fastest product."""
        assert weight.dtype is self.dtype
        assert x.is_contiguous()
        assert weight.is_contiguous()
        rows, width = weight.shape
        assert x.shape[1] == width
        out = torch.empty(x.shape[0], rows, dtype=self.dtype)
        added = None if bias is None else bias.data_ptr()
        self._product(weight.data_ptr(), x.data_ptr(), added, out.data_ptr(), x.shape[0], rows, width)
        return out

    def mxfp4_product(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the product of few rows ``x [m, in]`` and a weight of codes ``[out, in / 2]`` and scales
        ``[in / 32, out]`` (``ops.mxfp4``), whose scales are no NaN. The result of a row does not depend on m. All tensors
        are contiguous."""
        rows, width = _check_mxfp4(codes, scale)
        assert x.dtype is self.dtype
        assert x.is_contiguous()
        assert x.shape[1] == width
        out = torch.empty(x.shape[0], rows, dtype=self.dtype)
        added = None if bias is None else bias.data_ptr()
        sizes = x.shape[0], rows, width
        self._mxfp4_product(codes.data_ptr(), scale.data_ptr(), x.data_ptr(), added, out.data_ptr(), *sizes)
        return out

    def mxfp4_weight(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return the weight ``[out, in]`` of codes and scales (see ``mxfp4_product``)."""
        rows, width = _check_mxfp4(codes, scale)
        out = torch.empty(rows, width, dtype=self.dtype)
        self._mxfp4_weight(codes.data_ptr(), scale.data_ptr(), out.data_ptr(), rows, width)
        return out

    def store(
        self, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_loc: torch.Tensor
    ) -> None:
        """Write ``k, v [tokens, kv_heads, d]`` to locations ``out_loc`` (int64 ``[tokens]``) of contiguous ``keys,
        values [locations, kv_heads, d]``."""
        assert v.dtype is keys.dtype is self.dtype
        tokens, heads, size = k.shape
        assert k.stride(1) == v.stride(1) == size
        assert keys.is_contiguous()
        assert values.is_contiguous()
        self._store(
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out_loc.data_ptr(),
            tokens,
            k.stride(0),
            v.stride(0),
            heads * size,
        )

    def attend(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        spans: np.ndarray[Any, np.dtype[np.int64]],
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Compute causal attention of the queries of ``spans`` over keys and values in the pool, without gathering
        them. Writes the rows of ``out`` that belong to these queries.

        ``q [tokens, heads, d]`` is contiguous except in the token dimension; ``out`` has its shape and is contiguous. A
        span is (row of the page table, index of its first query in ``q``, number of queries, position of the first
        query in its row): contiguous int64 ``[spans, 4]``. Query i of a span sees the first ``position + i + 1`` keys
        of its row, or the last ``window`` of them. ``sinks`` is float32 ``[heads]``.
        """
        assert q.dtype is kv.keys.dtype is self.dtype
        _, page_size, kv_heads, size = kv.keys.shape
        assert q.stride(1) == size
        assert kv.keys.is_contiguous()
        assert kv.values.is_contiguous()
        assert kv.page_table.dtype is torch.int32
        assert out.is_contiguous()
        self._attend(
            q.data_ptr(),
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            kv.page_table.data_ptr(),
            spans.ctypes.data,
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            len(spans),
            q.stride(0),
            kv.page_table.stride(0),
            page_size,
            q.shape[1],
            kv_heads,
            size,
            window or 0,
            scale,
            soft_cap or 0.0,
        )


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for ``dtype``, or None for other dtypes and if the library cannot be built (``library().text``
    gives the reason)."""
    handle = library().handle if dtype in _DTYPES else None
    return None if handle is None else Kernels(handle, dtype)


def _check_mxfp4(codes: torch.Tensor, scale: torch.Tensor) -> tuple[int, int]:
    """Return the rows and columns of the weight."""
    rows, width = codes.shape[0], 2 * codes.shape[1]
    assert codes.dtype is scale.dtype is torch.uint8
    assert codes.is_contiguous()
    assert scale.is_contiguous()
    assert scale.shape == (width // 32, rows)
    return rows, width


def _function(handle: ctypes.CDLL, name: str, dtype: str) -> Callable[..., None]:
    function = handle[f"{name}_{dtype}"]
    function.argtypes, function.restype = _SIGNATURES[name], None
    return function
