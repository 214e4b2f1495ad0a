"""Walk through draft trees (see ``engine/verify.py``), with one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.ops.triton.sizes import next_power_of_2

LEAST_BLOCK = 32
"""The least number of drafts that a program walks through at a time: one for each lane of its warp. Steps with fewer
drafts then share a kernel; a step that is launched kernel by kernel has the columns that its drafts need."""


@triton.jit(
    do_not_specialize=["stride", "k"],
    do_not_specialize_on_alignment=["indptr", "draft_ids", "parents", "slots"],
)
def _walk(
    sampled, indptr, draft_ids, parents, stride, out, on_host, slots, last_token,
    k, TREE: tl.constexpr, ON_HOST: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(indptr + row).to(tl.int64), tl.load(indptr + row + 1).to(tl.int64)
    live = end > start  # a padding row may have no token
    draft = tl.arange(0, BLOCK)
    real = draft < end - start - 1
    ids = tl.load(draft_ids + row * stride + draft, real, 0).to(tl.int64)
    to = row * (2 * k + 3)
    if TREE:
        parent = tl.load(parents + row * stride + draft, real, 0).to(tl.int64)
        node = start * 0  # the root
        token = tl.load(sampled + start, live, 0)
        count = node + tl.where(live, 1, 0)
        alive = live
        for step in range(k + 1):
            token = tl.load(sampled + start + node, live, 0)
            tl.store(out + to + step, token)
            tl.store(out + to + k + 1 + step, node)
            if ON_HOST:
                tl.store(on_host + to + step, token)
                tl.store(on_host + to + k + 1 + step, node)
            child = tl.min(tl.where(real & (parent + 1 == node) & (ids == token) & alive, draft, BLOCK), 0)
            alive = child < BLOCK
            node = tl.where(alive, child.to(tl.int64) + 1, node)
            count += tl.where(alive, 1, 0)
    else:
        right = real & (ids == tl.load(sampled + start + draft, real, 0))
        taken = tl.min(tl.where(right, BLOCK, draft), 0).to(tl.int64)  # number of drafts before the first wrong one
        step = tl.arange(0, STEPS)
        nodes = tl.minimum(step, taken)
        inside = step <= k
        tokens = tl.load(sampled + start + nodes, step < tl.where(live, k + 1, 0), 0)
        token = tl.sum(tl.where(step == taken, tokens, 0), 0)
        count = tl.where(live, taken + 1, 0)
        tl.store(out + to + step, tokens, inside)
        tl.store(out + to + k + 1 + step, nodes, inside)
        if ON_HOST:
            tl.store(on_host + to + step, tokens, inside)
            tl.store(on_host + to + k + 1 + step, nodes, inside)
    tl.store(out + to + 2 * k + 2, count)
    if ON_HOST:
        tl.store(on_host + to + 2 * k + 2, count)
    if KEEP:
        tl.store(last_token + tl.load(slots + row), token, live)


def walk(
    sampled: torch.Tensor,
    indptr: torch.Tensor,
    draft_ids: torch.Tensor,
    parents: torch.Tensor | None,
    out: torch.Tensor,
    *,
    on_host: torch.Tensor | None = None,
    keep: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Compute ``engine.verify.accept`` into ``out``, int64 ``[rows, 2k + 3]``: for each row its k + 1 tokens, their
    nodes, and the number of new tokens. If ``parents`` is None, the drafts are chains. ``on_host``, in pinned memory,
    gets the same. With ``keep`` = (slots ``[rows]``, last_token), the last token of each row is written to
    ``last_token`` at its slot.
    """
    rows, k = draft_ids.shape
    slots, last_token = (draft_ids, out) if keep is None else keep
    assert parents is None or parents.stride(0) == draft_ids.stride(0)
    _walk[(rows,)](
        sampled, indptr, draft_ids, draft_ids if parents is None else parents, draft_ids.stride(0),
        out, out if on_host is None else on_host, slots, last_token,
        k, TREE=parents is not None, ON_HOST=on_host is not None, KEEP=keep is not None,
        BLOCK=max(LEAST_BLOCK, next_power_of_2(k)), STEPS=max(LEAST_BLOCK, next_power_of_2(k + 1)),
        num_warps=1,
    )  # fmt: skip
