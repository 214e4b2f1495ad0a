"""Choose how the products of experts in FP8 are divided into tiles: as in ``expert_tiles``. None of these tiles was
measured: numbers of rows are those that were best for bfloat16, with about as many bytes of weights in flight.
``benchmarks/experts_gpu.py --format fp8_blocks --tune`` measures them.

Tensor cores multiply at least 64 rows of a weight at once with FP8. Smaller tiles are converted to float16 in registers,
which is exact, and take more instructions: they are for one token, which has few tiles.
"""

from __future__ import annotations

from dovetail.ops.triton.expert_tiles import ExpertTile, ExpertTiles, fitting_power

_BY_ROWS = {
    1: ExpertTiles(16, ExpertTile(32, 128, 4, 5), ExpertTile(32, 128, 4, 5)),
    16: ExpertTiles(16, ExpertTile(64, 128, 4, 5), ExpertTile(128, 128, 8, 5)),
    64: ExpertTiles(64, ExpertTile(128, 128, 8, 4), ExpertTile(128, 128, 4, 4)),
    128: ExpertTiles(128, ExpertTile(128, 128, 8, 4), ExpertTile(128, 128, 8, 4)),
}


def tiles_of(
    tokens: int, experts: int, top_k: int, hidden: int, size: int, share: float, group: int, by_block: bool
) -> ExpertTiles:
    """Return the tiles for weights in FP8, whose ``block_k`` is ``group``, the number of columns that share a scale. With
    scales ``by_block``, sums of a group are kept beside the totals of gate and up, for which blocks of more than 64 pairs
    have not enough registers."""
    rows = tokens * top_k * share / experts
    block_m = 16 if tokens <= 16 or rows <= 8 else 64 if rows <= 128 or by_block else 128
    tiles = _BY_ROWS[1 if tokens == 1 else block_m]
    gate_up, down = tiles.gate_up._replace(block_k=group), tiles.down._replace(block_k=group)
    # with as many columns as a group, the kernel of gate and up quantizes its results
    gate_up_n = min(group, 128) if block_m > 16 else min(gate_up.block_n, fitting_power(size))
    return ExpertTiles(
        block_m, gate_up._replace(block_n=gate_up_n), down._replace(block_n=min(down.block_n, fitting_power(hidden)))
    )
