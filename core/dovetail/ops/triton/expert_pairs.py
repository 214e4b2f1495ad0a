"""Provide what the kernels of layers of experts share: the pairs of a block, and the activation of experts."""

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
def scaled_and_biased(
    gate, up, factors, bias, expert, pair, column, present, inside, size, SCALED: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Return gate and up ``[pairs, columns]`` of an expert times ``factors``, which scale inputs, and with ``bias``."""
    if SCALED:
        factor = tl.load(factors + pair, present, 0.0)[:, None]
        gate, up = gate * factor, up * factor
    if BIAS:
        own = bias + expert * 2 * size + column
        gate += tl.load(own, inside, 0.0).to(tl.float32)[None, :]
        up += tl.load(own + size, inside, 0.0).to(tl.float32)[None, :]
    return gate, up
