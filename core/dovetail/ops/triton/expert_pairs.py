"""Provide what the kernels of layers of experts share: the pairs of a block, the activation of experts, and what is done with the
product of pairs before it is written."""

from __future__ import annotations

import triton
import triton.language as tl

NARROW = tl.constexpr(32)
"""Blocks of up to this number of rows are the right operand of a product, and the weight is the left one: tensor cores
multiply at least 64 rows at once."""


@triton.jit
def activate(gate, up, alpha, limit, offset, LIMITED: tl.constexpr):
    """Return the activation of experts with a gate, see ``SwiGLU`` in ``interfaces.expert_shapes``."""
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(alpha * gate) * (up + offset)


@triton.jit
def square_of_positive(x):
    """Return the activation of experts without a gate, ``relu(x) ** 2``."""
    x = tl.maximum(x, 0.0)
    return x * x


@triton.jit
def pairs_of_block(order, blocks, block, BLOCK_M: tl.constexpr):
    """Return the expert of a block, and of each of its pairs the place in the order by expert, the index, and whether it
    exists. See ``routing.sort_by_expert``."""
    expert = tl.load(blocks + block * 3).to(tl.int64)
    row = tl.load(blocks + block * 3 + 1) + tl.arange(0, BLOCK_M)
    present = row < tl.load(blocks + block * 3 + 2)
    return expert, row, tl.load(order + row, present, 0), present


@triton.jit
def rows_of_tile(tile, width, columns: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return of each of the BLOCK_N rows of a tile the column of the output, whether it exists, and the row of the weight of an expert,
    which exists always. With a gate, a tile has ``columns`` rows of gate, then those of up of the same columns of the output."""
    local = tl.arange(0, BLOCK_N)
    column = tile * columns + local % columns
    return column, column < width, tl.minimum(column, width - 1) + local // columns * width


@triton.jit
def with_added(gate, up, added, row, column, present, inside, size):
    """Return gate and up ``[pairs, columns]`` plus what adapters add to them, which ``added [pairs, 2 * size]`` has in the order by
    expert."""
    own, real = added + row.to(tl.int64)[:, None] * (2 * size) + column[None, :], present[:, None] & inside[None, :]
    gate += tl.load(own, real, 0.0).to(tl.float32)
    up += tl.load(own + size, real, 0.0).to(tl.float32)
    return gate, up


@triton.jit
def scaled_and_biased(
    gate, up, factors, bias, expert, pair, column, present, inside, size, SCALED: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Return gate and up ``[pairs, columns]`` of an expert times ``factors``, which scale inputs, and with ``bias``."""
    if SCALED:
        factor = tl.load(factors + pair, present, 0.0)[:, None]
        gate, up = gate * factor, up * factor
    if BIAS:
        own = bias + expert * (2 * size) + column
        gate += tl.load(own, inside, 0.0).to(tl.float32)[None, :]
        up += tl.load(own + size, inside, 0.0).to(tl.float32)[None, :]
    return gate, up


@triton.jit
def store_gated(
    out, total, added, bias, expert, factors, row, present, pair, tile, size, alpha, limit, offset,
    ADDED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, LIMITED: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the activation of ``total [2 * COLUMNS, pairs]``, whose rows are COLUMNS of gate, then as many of up. With ADDED, see ``with_added``."""
    gate, up = tl.split(tl.permute(tl.reshape(total, [2, COLUMNS, BLOCK_M]), (2, 1, 0)))
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    if ADDED:
        gate, up = with_added(gate, up, added, row, column, present, inside, size)
    gate, up = scaled_and_biased(gate, up, factors, bias, expert, pair, column, present, inside, size, SCALED, BIAS)
    result = activate(gate, up, alpha, limit, offset, LIMITED).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], result, present[:, None] & inside[None, :])


@triton.jit
def store_down(
    out, total, bias, expert, factors, present, pair, column, inside, tokens, hidden,
    TOP_K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Write the products of pairs of an expert with ``down``, ``total [pairs, columns]``, with ``bias``, and times ``factors`` unless
    these scale inputs. Rows of ``out`` are those of pairs, or if IN_PARTS of ``[TOP_K, tokens]``."""
    if BIAS:
        total += tl.load(bias + expert * hidden + column, inside, 0.0).to(tl.float32)[None, :]
    if not SCALED:
        total *= tl.load(factors + pair, present, 0.0)[:, None]
    place = (pair % TOP_K).to(tl.int64) * tokens + pair // TOP_K if IN_PARTS else pair.to(tl.int64)
    result = total.to(out.dtype.element_ty)
    tl.store(out + place[:, None] * hidden + column[None, :], result, present[:, None] & inside[None, :])
