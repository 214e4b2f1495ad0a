"""Describe how kernels read the keys and values of a pool: where a head of a token begins, and how many elements are
read at once.

Values may have another size than keys, and may be a view of their first elements: multi-head latent attention
(DeepSeek-V2, arXiv 2405.04434) keeps one head of 512 latent elements, which are also the values, and 64 more elements
that are rotated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.ops.triton.launch import prefetch
from dovetail.ops.triton.sizes import next_power_of_2

WHOLE = 256
"""Limit the elements of a key that is read in one part. Longer keys are read in two parts, because one part would have
to be as long as the next power of two."""


@triton.jit
def prefetch_rows(
    kv, page, token, head,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Prefetch the cache lines of the first DIM elements of keys or values of ``token``, which is in ``page``. These
    need not be written yet."""
    line: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = BLOCK // line if line < BLOCK else 1
    place = page.to(tl.int64) * PAGE + token % PAGE
    at = tl.minimum(tl.arange(0, lines) * line, DIM - 1)
    prefetch(kv + ((place * KV_HEADS + head) * HEAD)[:, None] + at[None, :])


def layout(keys: torch.Tensor, values: torch.Tensor) -> dict[str, int | bool]:
    """Return the constants of kernels that read ``keys`` and ``values [pages, page_size, kv_heads, d]``. The elements
    of a head must be contiguous, heads must follow each other within a token, tokens within a page, and pages within
    the pool.

    - PAGE, KV_HEADS
    - K_HEAD and V_HEAD: elements from one head to the next; the first head of the next token follows the last one
    - KEY_DIM and VALUE_DIM elements are read in blocks of BLOCK_K and BLOCK_V; if a key has REST more elements, they
      are read in a block of BLOCK_REST
    - SAME: the first part of a key is also the value, and is read once
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
        and value_dim == first == next_power_of_2(first)
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
    """Return the elements of the two parts of a key. The second part may have none."""
    power = 1 << (dim.bit_length() - 1)
    return (dim, 0) if dim <= WHOLE or dim == power else (power, dim - power)


def block(dim: int) -> int:
    """Return the number of elements that are read at once for ``dim``: at least the number that tensor cores
    multiply."""
    return max(16, next_power_of_2(dim))
