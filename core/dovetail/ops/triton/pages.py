"""How kernels read the keys and values of a pool: where a head of a place begins, and how many elements are read at once.

Values may be of another size than keys, and be a view of their first elements: multi-head latent attention (DeepSeek-V2,
arXiv 2405.04434) keeps one head of 512 latent elements, which are the values too, and 64 more that are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.ops.triton.launch import prefetch

WHOLE = 256
"""Longer keys are read in two parts, where one part would have to be as long as the next power of two."""


@triton.jit
def prefetch_rows(
    kv, page, token, head,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Ask for the lines of the first DIM elements of keys or values of ``token``, which lie in ``page``: they need not be written yet."""
    line: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = BLOCK // line if line < BLOCK else 1
    place = page.to(tl.int64) * PAGE + token % PAGE
    at = tl.minimum(tl.arange(0, lines) * line, DIM - 1)
    prefetch(kv + ((place * KV_HEADS + head) * HEAD)[:, None] + at[None, :])


def layout(keys: torch.Tensor, values: torch.Tensor) -> dict[str, int | bool]:
    """Constants of kernels that read ``keys`` and ``values [pages, page_size, kv_heads, d]``, whose elements are contiguous
    and whose pages are places, and places heads, that follow each other:

    - PAGE, KV_HEADS; K_HEAD and V_HEAD: elements from a head to the next, the first head of the next place after the last
    - KEY_DIM and VALUE_DIM elements are read in blocks of BLOCK_K and BLOCK_V, and where a key has REST more, in BLOCK_REST
    - SAME: the first part of a key is the value, and is read once
    """
    page_size, kv_heads, key_dim = keys.shape[1:]
    value_dim = values.shape[3]
    first, rest = parts(key_dim)
    for x in (keys, values):
        assert x.stride(3) == 1
        assert kv_heads == 1 or x.stride(1) == kv_heads * x.stride(2)
        assert x.stride(0) == page_size * x.stride(1)
    same = (
        values.data_ptr() == keys.data_ptr()
        and values.stride() == keys.stride()
        and value_dim == first == triton.next_power_of_2(first)
    )
    return {
        "PAGE": page_size,
        "KV_HEADS": kv_heads,
        "KEY_DIM": first,
        "BLOCK_K": block(first),
        "REST": rest,
        "BLOCK_REST": block(rest),
        "VALUE_DIM": value_dim,
        "BLOCK_V": block(value_dim),
        "K_HEAD": keys.stride(1) // kv_heads,
        "V_HEAD": values.stride(1) // kv_heads,
        "SAME": same,
    }


def parts(dim: int) -> tuple[int, int]:
    """The elements of the two parts of a key; the second may have none."""
    power = 1 << (dim.bit_length() - 1)
    return (dim, 0) if dim <= WHOLE or dim == power else (power, dim - power)


def block(dim: int) -> int:
    """The elements that are read at once for ``dim``: at least as many as tensor cores multiply."""
    return max(16, triton.next_power_of_2(dim))
