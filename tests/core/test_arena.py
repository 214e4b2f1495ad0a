"""Test the arena that several cache groups share against plain sets.

.venv/bin/python -m pytest -q tests/core/test_arena.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.interfaces.cache import CacheContext, CacheGroup, CacheGroupKind, GroupDescriptor
from dovetail.interfaces.executor import ArenaLayout
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.interfaces.store import KVStore, PageBytes, StoreContext
from dovetail.memory.arena import UNLIMITED, ArenaAllocator, make_layout
from dovetail.memory.ledger import PageLedger
from dovetail.memory.pool import bytes_per_page, make_arena
from dovetail.memory.state_pool import bytes_per_slot
from dovetail.memory.table import RequestTable
from dovetail.sampling_params import SamplingParams
from dovetail.types import Req
from dovetail_cache.config import PagedConfig, RadixConfig, ScaledConfig
from dovetail_cache.radix import RadixCache
from dovetail_cache.stores import PagedStores, ScaledStores

FP8 = torch.float8_e4m3fn
LAYOUTS = [
    ArenaLayout(12, 40, (4, 1), (8, 8)),
    ArenaLayout(9, 96, (3, 5, 2), (12, 24, 6)),
    ArenaLayout(30, 64, (7, 3), (16, 16)),
]


WITH_STATES = [
    ArenaLayout(12, 48, (4, 2), (8, 2), (1,)),
    ArenaLayout(9, 40, (5,), (5,), (0,)),
    ArenaLayout(14, 96, (1, 5, 2), (1, 24, 6), (0,)),
    ArenaLayout(20, 96, (3, 2, 1), (12, 2, 1), (1, 2)),
]


def joined(a: list[np.ndarray], b) -> list[np.ndarray]:
    return [np.concatenate(pair) for pair in zip(a, b, strict=True)]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**31), st.lists(st.integers(0, 14), max_size=50))
def test_pages_have_one_owner_and_promises_hold(layout: ArenaLayout, seed: int, steps: list[int]) -> None:
    """Random pages of each group are freed. What ``allocatable`` states can always be taken, and no more than fits."""
    allocator, rng = ArenaAllocator(layout), np.random.default_rng(seed)
    groups = len(layout.pages)
    held = [np.zeros(0, np.int32) for _ in range(groups)]
    for n in steps:
        if n < 7:
            promised = allocator.num_free
            pages = allocator.alloc(n)
            assert (pages is not None) == (n <= promised)
            if pages is not None:
                assert pages.shape == (groups, n)
                assert (pages > 0).all()
                held = joined(held, pages)
        else:
            keep = [rng.random(len(own)) < rng.random() for own in held]
            given_up = [own[~kept] for own, kept in zip(held, keep, strict=True)]
            extra = [len(own) for own in given_up]
            promised = allocator.allocatable(extra)
            may = allocator.may_suffice(promised + 1, extra)
            need = allocator.shortage(promised, extra)
            assert all(0 <= a <= b for a, b in zip(need, extra, strict=True))
            given_up = [np.concatenate([own, np.zeros(2, np.int32)]) for own in given_up]  # holes
            some = [own[:count] for own, count in zip(given_up, need, strict=True)]
            allocator.free(some)
            held = joined(
                [own[kept] for own, kept in zip(held, keep, strict=True)],
                [own[count:-2] if count < len(own) - 2 else own[:0] for own, count in zip(given_up, need, strict=True)],
            )
            assert allocator.num_free >= promised
            more = allocator.alloc(promised)
            assert more is not None
            held = joined(held, more)
            if not may:
                assert allocator.alloc(1) is None or promised == 0
                held = held if allocator.num_held == tuple(map(len, held)) else pytest.fail("a page was taken")
        allocator.check_integrity(held)
        for group, own in enumerate(held):
            assert (own % layout.blocks[group] < layout.pages[group]).all()
            assert (own // layout.blocks[group] > 0).all()
    allocator.free(held)
    allocator.check_integrity([own[:0] for own in held])
    assert allocator.num_free == allocator.num_total


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(WITH_STATES),
    st.integers(0, 2**31),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=50),
)
def test_slots_have_one_owner_and_promises_hold(layout: ArenaLayout, seed: int, steps: list[tuple[int, int]]) -> None:
    """What ``allocatable`` states for pages and slots together can always be taken, and ``shortage`` frees enough for it."""
    allocator, rng = ArenaAllocator(layout), np.random.default_rng(seed)
    held = [np.zeros(0, np.int32) for _ in layout.pages]
    paged = layout.paged

    def take(count: int, slots: int) -> bool:
        pages = allocator.alloc(count)
        if pages is not None:
            assert pages.shape == (len(paged), count)
            for group, own in zip(paged, pages, strict=True):
                held[group] = np.concatenate([held[group], own])
        for _ in range(slots):
            taken = allocator.alloc_slots()
            if taken is None:
                return False
            assert taken.shape == (len(layout.states),)
            for group, own in zip(layout.states, taken, strict=True):
                held[group] = np.append(held[group], own)
        return pages is not None

    for n, slots in steps:
        if n < 6:
            promised = allocator.allocatable([0] * len(held), slots)
            assert take(min(n, max(0, promised)), slots) == (promised >= 0)
            assert paged or promised in (-1, UNLIMITED)
        else:
            keep = [rng.random(len(own)) < rng.random() for own in held]
            given_up = [own[~kept] for own, kept in zip(held, keep, strict=True)]
            extra = [len(own) for own in given_up]
            promised = min(allocator.allocatable(extra, slots), 40)
            if promised < 0:
                continue
            assert allocator.may_suffice(promised, extra, slots)
            need = allocator.shortage(promised, extra, slots)
            assert all(0 <= a <= b for a, b in zip(need, extra, strict=True))
            assert (
                not any(n for n, group in zip(need, range(len(held)), strict=True) if group in layout.states) or slots
            )
            allocator.free([own[:count] for own, count in zip(given_up, need, strict=True)])
            held = [
                np.concatenate([own[kept], more[count:]])
                for own, kept, more, count in zip(held, keep, given_up, need, strict=True)
            ]
            assert take(promised, slots)
        allocator.check_integrity(held)
        for group, own in enumerate(held):
            assert (own % layout.blocks[group] < layout.pages[group]).all()
            assert (own // layout.blocks[group] > 0).all()
    allocator.free(held)
    allocator.check_integrity([own[:0] for own in held])
    assert allocator.allocatable([0] * len(held), 1) >= allocator.num_total


def test_memory_moves_between_groups() -> None:
    """What one group frees, another one uses, also where a few pages of each slab were in use."""
    allocator = ArenaAllocator(ArenaLayout(11, 0, (4, 4), (8, 8)))
    assert allocator.num_total == 20
    pages = allocator.alloc(20)
    assert pages is not None
    assert allocator.alloc(1) is None
    allocator.free([pages[0][:0], pages[1]])
    assert allocator.num_free == 8  # two of the five slabs for each group
    allocator.free([pages[0][::2], pages[1][:0]])  # ten more for the first group, which needs no slab then
    assert allocator.num_free == 14
    more = allocator.alloc(10)
    assert more is not None
    allocator.free([*more])
    allocator.free([pages[0][1::2], pages[1][:0]])
    assert allocator.num_free == 20


def test_pages_come_from_the_fullest_slab() -> None:
    allocator = ArenaAllocator(ArenaLayout(5, 0, (4, 4), (8, 8)))
    first = allocator.alloc(8)
    assert first is not None
    allocator.free([first[0][[0, 1, 4]], first[1][:0]])  # two free pages in one slab, one in the other
    assert allocator.alloc(1) is None, "the second group has no page and no slab left"
    allocator.free([first[0][:0], first[1]])
    pages = allocator.alloc(1)
    assert pages is not None
    assert pages[0].tolist() == [int(first[0][4])]


def test_a_page_cannot_be_freed_twice() -> None:
    allocator = ArenaAllocator(LAYOUTS[0])
    pages = allocator.alloc(3)
    assert pages is not None
    with pytest.raises(AssertionError, match="twice in one call"):
        allocator.free([pages[0][[0, 0]], pages[1][:0]])
    allocator = ArenaAllocator(LAYOUTS[0])
    pages = allocator.alloc(3)
    assert pages is not None
    allocator.free([*pages])
    with pytest.raises(AssertionError, match="not held"):
        allocator.free([pages[0][:1], pages[1][:0]])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([64, 96, 128])), min_size=2, max_size=3),
    st.integers(10, 5000),
)
def test_layouts_hold_what_they_state(groups: list[tuple[int, int]], columns: int) -> None:
    """Slabs are multiples of all blocks, and pages do not reach into the next slab."""
    sizes = [PageBytes(2 * layers * block, block) for layers, block in groups]
    num_bytes = columns * sum(size.page for size in sizes)
    for layout in (make_layout(sizes, num_bytes, columns), make_layout(sizes, num_bytes)):
        for (layers, block), pages, blocks in zip(groups, layout.pages, layout.blocks, strict=True):
            assert pages >= 1
            assert blocks * block == layout.slab_bytes
            assert 2 * layers * pages <= blocks
    assert make_layout(sizes, num_bytes, columns).columns >= columns
    assert make_layout(sizes, num_bytes).num_slabs * layout.slab_bytes <= num_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from([64, 96, 128])), max_size=2),
    st.lists(st.integers(1, 500), min_size=1, max_size=2),
    st.integers(10, 3000),
    st.integers(1, 40),
)
def test_slots_fill_their_slabs(groups: list[tuple[int, int]], slots: list[int], columns: int, running: int) -> None:
    """Slots are at least as large as their states, begin at multiples of 16 bytes, and no byte of a slab is left over."""
    sizes = [PageBytes(16 * size, 0) for size in slots]
    sizes += [PageBytes(2 * layers * block, block) for layers, block in groups]
    num_bytes = columns * sum(size.page for size in sizes)
    for layout in (make_layout(sizes, num_bytes, columns, running), make_layout(sizes, num_bytes)):
        assert layout.states == tuple(range(len(slots)))
        for size, own, blocks in zip(sizes, layout.pages, layout.blocks, strict=True):
            if size.block == 0:
                stride, rest = divmod(layout.slab_bytes, blocks)
                assert (own, rest, stride % 16) == (blocks, 0, 0)
                assert stride >= size.page
    layout = make_layout(sizes, num_bytes, columns, running)
    assert layout.columns >= (columns if groups else running)
    allocator = ArenaAllocator(layout)
    assert allocator.allocatable([0] * len(sizes), running) >= columns


def test_slots_of_a_large_model_waste_little() -> None:
    """Qwen3-Next in bfloat16 with pages of 16 tokens: 12 full layers of 2 heads of 256, and 75 MB of states in a slot."""
    block, slot = 16 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    layout = make_layout([PageBytes(slot, 0), PageBytes(24 * block, block)], 60 << 30)
    assert layout.slab_bytes // layout.blocks[0] < 1.01 * slot
    assert layout.pages[1] * 24 * block > 0.99 * layout.slab_bytes
    assert layout.columns > 0.9 * (60 << 30) / (24 * block)


def test_a_large_memory_wastes_little() -> None:
    """Gemma-3-27B in bfloat16 with pages of 16 tokens: 10 full layers, 52 with a window, 64 KiB per block."""
    block = 16 * 16 * 128 * 2
    layout = make_layout([PageBytes(20 * block, block), PageBytes(104 * block, block)], 80 << 30)
    for layers, pages in zip((10, 52), layout.pages, strict=True):
        assert 2 * layers * pages * block / layout.slab_bytes > 0.99


def numbers(pool: KVStore, layer: int, pages: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of some pages of a layer as they were stored."""
    keys, values, scales = pool.tensors(layer)
    index = torch.from_numpy(pages).long()
    found = keys[index].float(), values[index].float()
    if scales is None:
        return found
    return found[0] * scales.keys[index].float()[..., None], found[1] * scales.values[index].float()[..., None]


@pytest.mark.parametrize(
    ("store", "dtype"),
    [("paged", torch.float32), ("paged", torch.bfloat16), ("paged", FP8), ("token_head", FP8), ("checkpoint", FP8)],
)
def test_pools_of_an_arena_do_not_overlap(store: str, dtype: torch.dtype) -> None:
    """Every page of every group has its own memory, keys apart from values, in every layer, and scales apart from those of
    other pages; page 0 is zero."""
    groups = [CacheGroup(1, 2, 8), CacheGroup(3, 2, 8, CacheGroupKind.SLIDING, 7), CacheGroup(2, 1, 8)]
    context = StoreContext(4, dtype, torch.device("cpu"), model_dtype=dtype)
    plain = store == "paged"
    stores = PagedStores(PagedConfig(), context) if plain else ScaledStores(ScaledConfig(scales=store), context)  # type: ignore[arg-type]
    sizes = [PageBytes(bytes_per_page(g, 4, dtype), 4 * g.num_kv_heads * g.head_dim * dtype.itemsize) for g in groups]
    layout = make_layout(sizes, 0, 9)
    pools, _ = make_arena(groups, layout, stores, dtype, "cpu")
    pages = ArenaAllocator(layout).alloc(9)
    assert pages is not None
    number, written = 0, []
    for pool, own in zip(pools, pages, strict=True):
        assert pool.num_pages > own.max()
        for layer in range(pool.group.num_layers):
            assert not pool.keys(layer)[0].float().any()
            assert pool.keys(layer).shape == pool.values(layer).shape
            assert pool.keys(layer).is_contiguous()
            places = torch.arange(4).repeat(9) + torch.from_numpy(own.astype(np.int64)).repeat_interleave(4) * 4
            k = torch.full((36, pool.group.num_kv_heads, 8), float(number % 7 + 1))
            pool.store(layer, k, -2 * k, places)
            written.append((pool, layer, own, float(number % 7 + 1)))
            number += 1
    index = torch.from_numpy(pages[1][[0, 3]].astype(np.int64))
    pools[1].copy(index[:1] * 4, index[1:] * 4 + 3)
    exported = pools[1].export_pages(pages[1][2:4].tolist())
    pools[1].poison(pages[1][2:4].tolist())
    pools[1].import_pages(exported, pages[1][2:4].tolist())
    for pool, layer, own, value in written:
        keys, values = numbers(pool, layer, own)
        torch.testing.assert_close(keys, torch.full_like(keys, value), rtol=2**-8, atol=0)
        torch.testing.assert_close(values, torch.full_like(values, -2 * value), rtol=2**-8, atol=0)


def test_latents_of_an_arena_are_stored_once() -> None:
    """Values are the first numbers of the keys, and layers and pages have memory of their own beside states."""
    latents = CacheGroup(3, 1, 12, CacheGroupKind.LATENT, value_dim=8)
    groups = [latents, CacheGroup.of_states(2, (StateShape((4, 6)),))]
    page = bytes_per_page(latents, 4, torch.float32)
    assert page == 3 * 4 * 12 * 4
    stores = PagedStores(PagedConfig(), StoreContext(4, torch.float32, torch.device("cpu"), model_dtype=torch.float32))
    layout = make_layout([PageBytes(page, page // 3), PageBytes(bytes_per_slot(groups[1], torch.float32), 0)], 0, 9, 2)
    (pool,), (states,) = make_arena(groups, layout, stores, torch.float32, "cpu")
    allocator = ArenaAllocator(layout)
    pages, slots = allocator.alloc(9), allocator.alloc_slots()
    assert pages is not None
    assert slots is not None
    for own in states.memory:
        for state in own:
            state[torch.from_numpy(slots).long()] = 7.0
    own = torch.from_numpy(pages[0]).long()
    places = (own[:, None] * 4 + torch.arange(4)).flatten()
    written = [torch.randn(36, 1, 12) for _ in range(3)]
    for layer, rows in enumerate(written):
        pool.store(layer, rows, None, places)
    pool.copy(places[:4], places[4:8])
    for layer, rows in enumerate(written):
        expected = torch.cat((rows[:4], rows[:4], rows[8:]))
        assert pool.keys(layer)[own].flatten(0, 1).equal(expected)
        assert pool.values(layer)[own].flatten(0, 1).equal(expected[..., :8])
        assert pool.values(layer).data_ptr() == pool.keys(layer).data_ptr()
        assert not pool.keys(layer)[0].any()
    assert all((state[torch.from_numpy(slots).long()] == 7).all() for each in states.memory for state in each)


GEMMA = {None: 10, 1024: 52}  # layers of Gemma-3-27B by window


@pytest.mark.parametrize(
    ("context", "most", "times"), [(8192, 8, 3.0), pytest.param(32768, 64, 5.0, marks=pytest.mark.full)]
)
def test_requests_of_gemma_that_fit(context: int, most: int, times: float) -> None:
    """Where memory holds ``most`` requests that keep all pages, it holds ``times`` as many that keep windows. No tensor is
    allocated: requests enter in chunks, one after the other, and all of them stay."""
    size, block = 16, 16 * 16 * 128 * 2
    sizes = [PageBytes(2 * layers * block, block) for layers in GEMMA.values()]
    columns = context // size
    layout = make_layout(sizes, most * columns * sum(own.page for own in sizes))
    groups = tuple(
        GroupDescriptor(CacheGroupKind.FULL if window is None else CacheGroupKind.SLIDING, window, own.page)
        for window, own in zip(GEMMA, sizes, strict=True)
    )
    slots = int(most * 7)
    cache, allocator = RadixCache(RadixConfig(kind="radix"), CacheContext(size, groups)), ArenaAllocator(layout)
    table = RequestTable(np.zeros((2, slots, columns + 1), np.int32))
    ledger, rng, reqs = PageLedger(allocator, cache, table, size, 0, groups), np.random.default_rng(0), []
    while True:
        tokens = rng.integers(0, 100_000, context).astype(np.int32)
        req = Req(str(len(reqs)), tokens, context, SamplingParams(), known_len=context, device_len=context)
        match = cache.match(tokens)
        cache.lock(match.handle)
        if not ledger.ensure_available(columns):
            break
        ledger.admit(req, match)
        assert ledger.reserve(req, context)
        for end in range(4096, context + 1, 4096):
            ledger.share(req, end)
            ledger.release_behind(req, end)
        reqs.append(req)
    assert len(reqs) >= times * most
    ledger.check_integrity(reqs)
    for req in reqs:
        ledger.release(req)
    ledger.flush()
    assert allocator.num_free == allocator.num_total


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_postponed_pages_are_handed_out_last(layout: ArenaLayout) -> None:
    first = ArenaAllocator(layout).alloc(2)
    allocator = ArenaAllocator(layout)
    everything = allocator.num_free
    allocator.postpone(2)
    assert allocator.num_free == everything
    assert first is not None
    other = allocator.alloc(2)
    assert other is not None
    for early, late in zip(first, other, strict=True):
        assert not np.isin(early, late).any()
    while (pages := allocator.alloc(1)) is not None:
        other = np.concatenate([other, pages], axis=1)
    assert other.shape[1] == everything


@pytest.mark.parametrize("window", [2, 3, 16, 17, 18, 40])
def test_a_request_may_end_at_any_length(window: int) -> None:
    """The cache can resume after the full pages of a request that ends some tokens after its windows gave back pages, as
    accepted drafts let it."""
    groups = (GroupDescriptor(), GroupDescriptor(CacheGroupKind.SLIDING, window))
    for length in range(33, 80):
        cache, allocator = RadixCache(RadixConfig(kind="radix"), CacheContext(16, groups)), ArenaAllocator(LAYOUTS[2])
        table = RequestTable(np.zeros((2, 2, 9), np.int32))
        ledger = PageLedger(allocator, cache, table, 16, 0, groups)
        tokens = np.arange(80, dtype=np.int32)
        req = Req("a", tokens, 80, SamplingParams(), known_len=80, device_len=80)
        match = cache.match(tokens)
        cache.lock(match.handle)
        ledger.admit(req, match)
        assert ledger.reserve(req, 80)
        ledger.release_behind(req, length)
        ledger.release(req, computed_len=length)
        assert cache.match(tokens).length == length // 16 * 16
        ledger.flush()
        assert allocator.num_free == allocator.num_total
