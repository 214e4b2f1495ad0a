"""Choose the experts of each token, and sort the pairs of a token and an expert by expert.

The host does not see what was chosen: grids have as many programs as any choice can need, and the programs that have
nothing to do end at once. One kernel sorts up to ``ONE_KERNEL`` pairs: each of its programs compares some of the pairs with
all of them. Three kernels sort more pairs, which they divide into chunks. Pairs of one expert stay in the order of their
tokens, and no kernel here uses atomic operations, so that results are the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.interfaces.expert_shapes import Routing, RoutingRule
from dovetail.ops.triton.launch import launch
from dovetail.ops.triton.sizes import cdiv, next_power_of_2

ONE_KERNEL = 4096
"""The largest number of pairs that one kernel sorts."""
_SORTED = (64, 256, 1024, 2048, ONE_KERNEL)
"""The numbers of pairs for which this kernel is compiled."""
OWN = 8
"""The number of pairs that a program of this kernel places: the fastest of 8, 16 and 32 on an H200."""
CHUNK = 256
"""The number of pairs in a chunk, if there are more than ``ONE_KERNEL``."""
_STEP = tl.constexpr(32)

_SCORINGS = {"softmax": 0, "sigmoid": 1, "sparsemixer": 2}
_SOFTMAX, _SIGMOID, _SPARSEMIXER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _first(values, allowed, at, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Return the lowest index in ``at`` of the largest of the ``values`` that are ``allowed``, along the last dimension
    AXIS, and SIZE if none is allowed."""
    best = tl.max(tl.where(allowed, values, float("-inf")), AXIS, keep_dims=True)
    return tl.min(tl.where(allowed & (values >= best), at, SIZE), AXIS)


@triton.jit
def _in_kept_groups(
    choice, at, experts,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_TOP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Return which experts are in one of the ``KEPT`` best groups."""
    group = tl.arange(0, BLOCK_G)
    width = experts // GROUPS
    member = (at[None, :] // width == group[:, None]) & (at < experts)[None, :]
    left, values = member, tl.broadcast_to(choice[None, :], [BLOCK_G, BLOCK_E])
    indices = tl.broadcast_to(at[None, :], [BLOCK_G, BLOCK_E])
    total = tl.zeros([BLOCK_G], tl.float32)
    for _ in tl.static_range(GROUP_TOP):
        index = _first(values, left, indices, 1, BLOCK_E)
        total += tl.sum(tl.where(indices == index[:, None], values, 0.0), 1)
        left = left & (indices != index[:, None])
    open_groups = group < GROUPS
    kept = group < 0
    for _ in tl.static_range(KEPT):
        index = _first(total, open_groups, group, 0, BLOCK_G)
        kept = kept | (group == index)
        open_groups = open_groups & (group != index)
    return tl.sum((member & kept[:, None]).to(tl.int32), 0) > 0


@triton.jit
def _ordered(values):
    """Return the bits of float32 ``values`` as integers of the same order."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # 0 for both zeros
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(ordered):
    """Return the number that ``_ordered`` has mapped to ``ordered``."""
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _route(
    logits, correction, ids, weights, experts, scale, jitter,
    TOP_K: tl.constexpr, SCORING: tl.constexpr, AFTER: tl.constexpr, RENORMALIZE: tl.constexpr, CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_TOP: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = at < experts
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logit = tl.load(logits + token * experts + at, inside, float("-inf")).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("-inf"))  # NaN is chosen last, so that indices stay valid
    scores = logit
    if not AFTER:
        if SCORING == _SOFTMAX:
            powers = tl.where(inside, tl.exp(logit - tl.max(logit, 0)), 0.0)
            scores = powers / tl.sum(powers, 0)
        elif SCORING == _SIGMOID:
            scores = tl.sigmoid(logit)
    choice = scores
    if CORRECTED:
        choice += tl.load(correction + at, inside, 0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))
    if GROUPS > 1:
        kept = _in_kept_groups(choice, at, experts, GROUPS, KEPT, GROUP_TOP, BLOCK_E, BLOCK_G)
        choice = tl.where(kept, choice, float("-inf"))
    left = inside
    chosen_ids = tl.zeros([BLOCK_K], tl.int32)
    chosen = tl.full([BLOCK_K], float("-inf"), tl.float32)
    # one reduction finds the largest value and the lowest index of it
    words = (_ordered(choice).to(tl.int64) << 32) | (BLOCK_E - 1 - at).to(tl.int64)
    for turn in tl.static_range(TOP_K):
        best = tl.max(tl.where(left, words, -0x8000000000000000), 0)
        index = BLOCK_E - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        if CORRECTED or GROUPS > 1:
            score = tl.sum(tl.where(at == index, scores, 0.0), 0)
        else:
            score = _value((best >> 32).to(tl.int32))
        if SCORING == _SPARSEMIXER:
            far = (score - logit) / tl.maximum(tl.abs(logit), score) > 2 * jitter
            score = 1.0 / tl.sum(tl.where(left & (far == 0), tl.exp(logit - score), 0.0), 0)
        chosen_ids = tl.where(place == turn, index, chosen_ids)
        chosen = tl.where(place == turn, score, chosen)
        left = left & (at != index)
    if AFTER:
        if SCORING == _SOFTMAX:
            powers = tl.exp(chosen - tl.max(chosen, 0))
            chosen = powers / tl.sum(powers, 0)
        elif SCORING == _SIGMOID:
            chosen = tl.sigmoid(chosen)
    chosen = tl.where(place < TOP_K, chosen, 0.0)
    if RENORMALIZE:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    tl.store(ids + token * TOP_K + place, chosen_ids, place < TOP_K)
    tl.store(weights + token * TOP_K + place, chosen * scale, place < TOP_K)


def route(logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None = None) -> Routing:
    """Compute ``ops.routing.route``."""
    assert logits.is_contiguous()
    tokens, experts = logits.shape
    ids = torch.empty(tokens, rule.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        block = next_power_of_2(experts)
        launch(
            _route, (tokens,),
            logits, correction, ids, weights, experts, rule.scale, rule.jitter,
            TOP_K=rule.top_k, SCORING=_SCORINGS[rule.scoring], AFTER=rule.after_choice, RENORMALIZE=rule.renormalize,
            CORRECTED=correction is not None, GROUPS=rule.groups, KEPT=rule.groups_kept, GROUP_TOP=rule.group_top,
            BLOCK_E=block, BLOCK_G=next_power_of_2(rule.groups), BLOCK_K=next_power_of_2(rule.top_k),
            num_warps=1 if block <= 512 else 4,
        )  # fmt: skip
    return Routing(ids, weights)


class ExpertOrder(NamedTuple):
    """Hold the pairs of a token and an expert, sorted by expert, in blocks of up to ``block_m`` pairs of one expert.

    ``pairs`` (int32 ``[tokens * top_k]``) are indices ``token * top_k + place`` of the pairs of this rank's experts.
    ``blocks`` (int32 ``[most_blocks, 3]``) has the expert of each block and the range of its pairs, and ``used`` (int32
    ``[1]``) the number of blocks. What follows the used blocks and the sorted pairs is undefined.
    """

    pairs: torch.Tensor
    blocks: torch.Tensor
    used: torch.Tensor
    block_m: int


@triton.jit
def _keys(ids, start, pairs, first, experts, SIZE: tl.constexpr):
    """Return the experts of ``SIZE`` pairs, counted from this rank's first one; -1 for other ranks' experts."""
    at = start + tl.arange(0, SIZE)
    key = tl.load(ids + at, at < pairs, -1) - first
    return tl.where((at < pairs) & (key >= 0) & (key < experts), key, -1)


@triton.jit
def _write_blocks(counts, blocks, used, experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr) -> None:
    expert = tl.arange(0, BLOCK_E)
    starts = tl.cumsum(counts, 0) - counts
    number = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(number, 0)
    tl.store(used, tl.sum(number, 0))
    for turn in range(tl.max(number, 0)):
        entry = blocks + (ends - number + turn) * 3
        present = turn < number
        start = starts + turn * BLOCK_M
        tl.store(entry, expert, present)
        tl.store(entry + 1, start, present)
        tl.store(entry + 2, tl.minimum(start + BLOCK_M, starts + counts), present)


@triton.jit(do_not_specialize=["pairs", "first"])
def sort_pairs(
    ids, order, blocks, used, pairs, first, experts,
    SIZE: tl.constexpr, OWN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Write the blocks (program 0), or place ``OWN`` of the at most ``SIZE`` pairs: the place of a pair is the number of
    pairs of lower experts, and of earlier pairs of its expert."""
    program = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if program == 0:
        key = _keys(ids, 0, pairs, first, experts, SIZE)
        counts = tl.histogram(tl.maximum(key, 0), BLOCK_E, key >= 0)
        _write_blocks(counts, blocks, used, experts, BLOCK_M, BLOCK_E)
    else:
        start = (program - 1) * OWN
        key, at = _keys(ids, 0, pairs, first, experts, SIZE), tl.arange(0, SIZE)
        rank = tl.where(key >= 0, key, BLOCK_E) * SIZE + at
        own, own_at = _keys(ids, start, pairs, first, experts, OWN), start + tl.arange(0, OWN)
        place = tl.sum((rank[None, :] < (own * SIZE + own_at)[:, None]).to(tl.int32), 1)
        tl.store(order + place, own_at, own >= 0)


@triton.jit(do_not_specialize=["pairs", "first"])
def _count_chunk(
    ids, counts, pairs, first, experts, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
) -> None:
    chunk, expert = tl.program_id(0), tl.arange(0, BLOCK_E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    key = _keys(ids, chunk * CHUNK, pairs, first, experts, CHUNK)
    found = tl.histogram(tl.maximum(key, 0), BLOCK_E, key >= 0)
    tl.store(counts + chunk * experts + expert, found, expert < experts)


@triton.jit(do_not_specialize=["chunks"])
def _add_chunks(counts, totals, chunks, experts, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """Replace the counts of an expert in each chunk by those in the chunks before it."""
    expert = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = 0
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        found = tl.load(counts + chunk * experts + expert, chunk < chunks, 0)
        tl.store(counts + chunk * experts + expert, total + tl.cumsum(found, 0) - found, chunk < chunks)
        total += tl.sum(found, 0)
    tl.store(totals + expert, total)


@triton.jit(do_not_specialize=["pairs", "first"])
def _place_chunk(
    ids, order, blocks, used, counts, totals, pairs, first, experts,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    chunk, expert = tl.program_id(0), tl.arange(0, BLOCK_E)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.load(totals + expert, expert < experts, 0)
    if chunk == 0:
        _write_blocks(total, blocks, used, experts, BLOCK_M, BLOCK_E)
    base = tl.cumsum(total, 0) - total + tl.load(counts + chunk * experts + expert, expert < experts, 0)
    start = chunk * CHUNK
    key, at = _keys(ids, start, pairs, first, experts, CHUNK), tl.arange(0, CHUNK)
    for step in range(0, CHUNK, _STEP):
        own, own_at = _keys(ids, start + step, pairs, first, experts, _STEP), step + tl.arange(0, _STEP)
        before = tl.sum(((own[:, None] == key[None, :]) & (at[None, :] < own_at[:, None])).to(tl.int32), 1)
        place = tl.gather(base, tl.maximum(own, 0), 0) + before
        tl.store(order + place, start + own_at, own >= 0)


def most_blocks(tokens: int, top_k: int, experts: int, block_m: int) -> int:
    """Return a number of blocks that is enough for any choice of ``top_k`` experts by each token, of which this rank
    has ``experts``."""
    pairs = tokens * top_k
    return min(pairs, experts * cdiv(tokens, block_m), pairs // block_m + experts)


def empty_order(ids: torch.Tensor, experts: int, block_m: int) -> ExpertOrder:
    """Allocate an order of the pairs of ``ids`` (int32 ``[tokens, top_k]``) for a rank with ``experts`` experts."""
    sizes = (ids.numel(),), (most_blocks(*ids.shape, experts, block_m), 3), (1,)
    return ExpertOrder(*(torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes), block_m)


def _bins(experts: int) -> int:
    return max(
        next_power_of_2(experts), 32
    )  # Triton 3.6 compiles histograms of 64 keys in 4 bins to misaligned accesses


def sort_pairs_constants(pairs: int, experts: int, block_m: int) -> dict[str, int]:
    """Return the constants of ``sort_pairs`` for at most ``ONE_KERNEL`` pairs."""
    size = next(size for size in _SORTED if pairs <= size)
    return {"SIZE": size, "OWN": OWN, "BLOCK_M": block_m, "BLOCK_E": _bins(experts)}


def sort_by_expert(ids: torch.Tensor, first: int, experts: int, block_m: int) -> ExpertOrder:
    """Sort the pairs of ``ids`` (int32 ``[tokens, top_k]``, at least one token) by expert. This rank has ``experts``
    experts from index ``first`` on."""
    assert ids.is_contiguous()
    pairs, device, order = ids.numel(), ids.device, empty_order(ids, experts, block_m)
    if pairs <= ONE_KERNEL:
        launch(
            sort_pairs, (1 + cdiv(pairs, OWN),),
            ids, *order[:3], pairs, first, experts, **sort_pairs_constants(pairs, experts, block_m), num_warps=4,
        )  # fmt: skip
        return order
    bins = _bins(experts)
    chunks = cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, experts, dtype=torch.int32, device=device)
    totals = torch.empty(experts, dtype=torch.int32, device=device)
    launch(_count_chunk, (chunks,), ids, counts, pairs, first, experts, CHUNK=CHUNK, BLOCK_E=bins)
    launch(_add_chunks, (experts,), counts, totals, chunks, experts, BLOCK=256)
    launch(
        _place_chunk, (chunks,),
        ids, *order[:3], counts, totals, pairs, first, experts, CHUNK=CHUNK, BLOCK_M=block_m, BLOCK_E=bins,
    )  # fmt: skip
    return order
