"""The walk through draft trees (see ``engine/verify.py``), one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _walk(
    sampled, starts, draft_ids, parents, lens,
    tokens, accepted, nodes,
    k, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK)
    real = draft < tl.load(lens + row)
    ids = tl.load(draft_ids + row * k + draft, real, 0)
    parent = tl.load(parents + row * k + draft, real, -2)  # nobody's child
    own = sampled + tl.load(starts + row)
    to = row * (k + 1)
    node = tl.load(lens + row) * 0  # the root
    count = node + 1
    alive = count > 0
    for step in range(k + 1):
        token = tl.load(own + node)
        tl.store(tokens + to + step, token)
        tl.store(nodes + to + step, node)
        child = tl.min(tl.where((parent + 1 == node) & (ids == token) & alive, draft, BLOCK), 0)
        alive = child < BLOCK
        node = tl.where(alive, child + 1, node)
        count += tl.where(alive, 1, 0)
    tl.store(accepted + row, count)


def walk(
    sampled: torch.Tensor, starts: torch.Tensor, draft_ids: torch.Tensor, parents: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``engine.verify.accept``: tokens ``[rows, k + 1]``, how many are new ``[rows]``, their nodes ``[rows, k + 1]``."""
    rows, k = draft_ids.shape
    tokens, nodes = sampled.new_empty(2, rows, k + 1).unbind(0)
    accepted = torch.empty_like(lens)
    _walk[(rows,)](
        sampled, starts, draft_ids, parents, lens, tokens, accepted, nodes,
        k, BLOCK=triton.next_power_of_2(max(k, 2)), num_warps=1,
    )  # fmt: skip
    return tokens, accepted, nodes
