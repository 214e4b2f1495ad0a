"""Test KV stores: the conformance suite of their interface.

class TestMine(KVStoreSuite):
    name = "mine"
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.store import KVStore, KVStoreFactory
from dovetail.memory.arena import ArenaAllocator, make_layout
from dovetail.memory.pool import make_arena, pool_dtype
from dovetail.testing.store_checks import PAGE_SIZE, check_refused
from dovetail.testing.store_states import StateStoreCases

NUM_PAGES = 7
GROUPS = {
    Feature.STORE_FULL: CacheGroup(3, 2, 16),
    Feature.STORE_SLIDING: CacheGroup(2, 3, 16, CacheGroupKind.SLIDING, 9),
    Feature.STORE_LATENT: CacheGroup(2, 1, 24, CacheGroupKind.LATENT, value_dim=16),
}
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
"""The relative error of a number that is rounded once to each dtype."""
BLOCKS = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-8}
"""The error, in units of the largest number of a token and head, of numbers that are small."""

each_group = pytest.mark.parametrize("feature", GROUPS, ids=str)

Numbers = list[tuple[torch.Tensor, torch.Tensor]]


class KVStoreSuite(StateStoreCases):
    """Test a KV store. Only ``name`` is required."""

    def group(self, feature: Feature) -> CacheGroup:
        """Return the group whose store needs ``feature``. Skips if it is not offered."""
        self.require(feature)
        return GROUPS[feature]

    def filled(self, feature: Feature, seed: int = 0, factory: KVStoreFactory | None = None) -> KVStore:
        """Return a store whose pages from 1 on are full of random numbers."""
        group = self.group(feature)
        store = (factory or self.factory()).make(group, NUM_PAGES)
        places = torch.arange(PAGE_SIZE, NUM_PAGES * PAGE_SIZE, device=self.device)
        self.fill(store, places, seed)
        return store

    def fill(self, store: KVStore, places: torch.Tensor, seed: int = 0) -> Numbers:
        """Store random numbers of very different sizes at ``places`` of all layers, and return them."""
        group, random = store.group, torch.Generator().manual_seed(seed)
        given = []
        for layer in range(group.num_layers):
            shape = (2, len(places), group.num_kv_heads, group.head_dim)
            sizes = torch.rand(2, len(places), group.num_kv_heads, 1, generator=random).mul_(4).exp_()
            k, v = (torch.randn(shape, generator=random) * sizes).to(self.device).unbind(0)
            latent = group.kind is CacheGroupKind.LATENT
            store.store(layer, k, None if latent else v, places)
            given.append((k.cpu(), k[..., : group.value_dim].cpu() if latent else v.cpu()))
        return given

    @each_group
    def test_what_was_stored_is_read(self, feature: Feature) -> None:
        """Keys and values, times their scales, are what was stored at these locations, rounded once; nothing else is
        written."""
        group = self.group(feature)
        for dtype in self.allowed():
            store = self.factory(dtype).make(group, NUM_PAGES)
            store.clear()
            places = torch.tensor([5, 27, 4, 13, 18, 10], device=self.device)
            given = self.fill(store, places)
            others = [place for place in range(NUM_PAGES * PAGE_SIZE) if place not in places.tolist()]
            for layer, wanted in enumerate(given):
                for read, exact in zip(numbers(store, layer), wanted, strict=True):
                    assert rounded_once(read[places.cpu()], exact, dtype), f"{dtype}, layer {layer}"
                    assert not read[others].any(), "a location was written that was not named"

    @each_group
    def test_the_layout_of_tensors(self, feature: Feature) -> None:
        """Tensors have the shapes, the strides and the addresses that kernels rely on."""
        store = self.filled(feature)
        group = store.group
        for layer in range(group.num_layers):
            keys, values, scales = store.tensors(layer)
            assert keys.shape == (NUM_PAGES, PAGE_SIZE, group.num_kv_heads, group.head_dim)
            assert values.shape == (*keys.shape[:3], group.value_dim or group.head_dim)
            assert keys.dtype is values.dtype is store.dtype
            assert keys.is_contiguous()
            assert values.stride() == keys.stride()
            assert store.keys(layer).data_ptr() == keys.data_ptr() == store.tensors(layer).keys.data_ptr()
            assert store.values(layer).data_ptr() == values.data_ptr() == store.tensors(layer).values.data_ptr()
            if group.value_dim:
                assert values.data_ptr() == keys.data_ptr(), "values of latents are a part of the keys"
            for own in scales or ():
                assert own.shape == keys.shape[:3]
                assert own.dtype in (torch.float32, torch.bfloat16)
                computed = own.is_contiguous()
                assert computed or own.stride() == (0, 0, 1), "scales belong to tokens and heads, or to heads"
                assert scales is not None
                assert scales.keys.stride() == scales.values.stride()

    @each_group
    def test_pages_take_the_bytes_that_are_declared(self, feature: Feature) -> None:
        """``page_bytes`` counts all that a page has, scales included, in proportion to its tokens."""
        group = self.group(feature)
        for dtype in self.allowed():
            factory = self.factory(dtype)
            page = factory.page_bytes(group, PAGE_SIZE)
            parts = factory.make(group, 2).layout.parts
            sizes = (torch.Size(shape).numel() * getattr(torch, name).itemsize for name, shape in parts)
            assert page.page == sum(sizes)
            values = 1 if group.value_dim else 2
            assert page.page == page.beside + values * group.num_layers * page.block
            assert factory.page_bytes(group, 3 * PAGE_SIZE) == tuple(3 * size for size in page)

    @each_group
    def test_page_0_is_zero_at_first(self, feature: Feature) -> None:
        """Padding rows read page 0: it holds zeros, and its scales are numbers."""
        store = self.factory().make(self.group(feature), NUM_PAGES)
        for layer in range(store.group.num_layers):
            assert not any(read[:PAGE_SIZE].any() for read in numbers(store, layer))

    @each_group
    def test_copies_take_everything_along(self, feature: Feature) -> None:
        """A copy reads all before it writes any, in all layers, with scales; other locations stay."""
        store = self.filled(feature)
        before = all_numbers(store)
        source, target = torch.tensor([8, 9, 10, 21]), torch.tensor([9, 10, 8, 4])
        store.copy(source.to(self.device), target.to(self.device))
        wanted = torch.arange(NUM_PAGES * PAGE_SIZE)
        wanted[target] = source
        for now, old in zip(all_numbers(store), before, strict=True):
            for x, y in zip(now, old, strict=True):
                assert x.equal(y[wanted])

    @each_group
    def test_exported_pages_give_the_same_numbers(self, feature: Feature) -> None:
        """Pages that one store exports are the same in another one, whatever their numbers are; its other pages stay."""
        first, second = self.filled(feature, seed=1), self.filled(feature, seed=2)
        assert first.layout == second.layout
        before = all_numbers(second)
        second.import_pages(first.export_pages([5, 1, 2]), [3, 6, 1])
        wanted, own = all_numbers(first), all_numbers(second)
        for page, source in ((3, 5), (6, 1), (1, 2), (2, None), (4, None), (5, None), (0, None)):
            for now, theirs, old in zip(own, wanted, before, strict=True):
                for x, y, z in zip(now, theirs, old, strict=True):
                    rows = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
                    expected = z[rows] if source is None else y[source * PAGE_SIZE :][:PAGE_SIZE]
                    assert x[rows].equal(expected), f"page {page}"
        empty = first.export_pages([])
        second.import_pages(empty, [])

    @each_group
    def test_damaged_exports_are_refused(self, feature: Feature) -> None:
        """Bytes that were cut or changed, and pages of another layout or number, are refused by name before anything is
        written."""
        store, other = self.filled(feature, seed=1), self.filled(feature, seed=2)
        data, before = store.export_pages([1, 2]), all_numbers(other)
        rng = np.random.default_rng(0)
        for size in (0, 3, len(data) // 2, len(data) - 1):
            refused(other, data[:size], [1, 2], "truncated")
        refused(other, data + b"\0", [1, 2], "truncated")
        for place in rng.integers(0, len(data), 40).tolist():
            changed = bytearray(data)
            changed[place] ^= 1 << int(rng.integers(8))
            refused(other, bytes(changed), [1, 2])
        refused(other, b"RIFF" + data[4:], [1, 2], "magic")
        refused(other, data, [1, 2, 3], "pages")
        refused(other, data, [1], "pages")
        narrow = replace(store.group, num_layers=store.group.num_layers + 1)
        refused(self.factory().make(narrow, NUM_PAGES), data, [1, 2], "layout")
        for now, old in zip(all_numbers(other), before, strict=True):
            assert all(x.equal(y) for x, y in zip(now, old, strict=True)), "something was written"

    @each_group
    def test_poison_is_seen(self, feature: Feature) -> None:
        """Poisoned pages are NaN in all layers, keys, values and scales; other pages stay."""
        store = self.filled(feature)
        before = all_numbers(store)
        store.poison([2, 5])
        for now, old in zip(all_numbers(store), before, strict=True):
            for x, y in zip(now, old, strict=True):
                found = x.view(NUM_PAGES, -1).isnan()
                assert found[[2, 5]].all()
                rest = [0, 1, 3, 4, 6]
                assert x.view(NUM_PAGES, -1)[rest].equal(y.view(NUM_PAGES, -1)[rest])
        for layer in range(store.group.num_layers):
            for own in store.tensors(layer).scales or ():
                if own.is_contiguous():
                    assert own[[2, 5]].isnan().all(), "scales that belong to pages are poisoned too"
        store.poison()
        assert all(x.isnan().all() for pair in all_numbers(store) for x in pair)
        store.clear()
        assert not any(x.any() for pair in all_numbers(store) for x in pair)

    def test_groups_may_share_slabs(self) -> None:
        """In memory that groups share, no page of a group touches a page of another one."""
        self.require(Feature.STORE_SLABS)
        groups = [GROUPS[feature] for feature in (Feature.STORE_FULL, Feature.STORE_SLIDING) if self.offers(feature)]
        groups.append(CacheGroup(1, 1, 32))
        for dtype in self.allowed():
            factory = self.factory(dtype)
            sizes = [factory.page_bytes(group, PAGE_SIZE) for group in groups]
            layout = make_layout([size._replace(page=size.page - size.beside) for size in sizes], 0, 6)
            stores, _ = make_arena(groups, layout, factory, pool_dtype(dtype), self.device)
            pages = ArenaAllocator(layout).alloc(6)
            assert pages is not None
            read: list[tuple[KVStore, torch.Tensor, Numbers]] = []
            for number, (store, own) in enumerate(zip(stores, pages, strict=True)):
                for layer in range(store.group.num_layers):
                    assert not any(x[:PAGE_SIZE].any() for x in numbers(store, layer)), "page 0 is zero at first"
                index = torch.from_numpy(own.astype(np.int64))
                places = (index[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()
                read.append((store, places, self.fill(store, places.to(self.device), seed=number)))
            data = stores[0].export_pages(pages[0][:2].tolist())
            stores[0].poison(pages[0][:2].tolist())
            stores[0].import_pages(data, pages[0][:2].tolist())
            for store, places, wanted in read:
                for now, old in zip(all_numbers(store), wanted, strict=True):
                    assert all(rounded_once(x[places], y, dtype) for x, y in zip(now, old, strict=True))

    def test_scales_of_the_checkpoint(self) -> None:
        """Scales that a store reads from the checkpoint divide what is stored, and are a part of its layout."""
        factory = self.factory()
        if not factory.reads_scales:
            pytest.skip(f"{self.name} reads no scales with these settings")
        group = self.group(Feature.STORE_FULL)
        stores = [factory.make(group, NUM_PAGES) for _ in range(2)]
        for layer in range(group.num_layers):
            heads = torch.rand(group.num_kv_heads) / 8 + 0.25
            stores[0].load_scales(layer, heads, torch.tensor(0.5))
            scales = stores[0].tensors(layer).scales
            assert scales is not None
            assert scales.keys[1, 2].cpu().equal(heads)
            assert (scales.values == 0.5).all()
        assert stores[0].layout != stores[1].layout
        data = stores[0].export_pages([1])
        refused(stores[1], data, [1], "layout")
        given = self.fill(stores[0], torch.tensor([9], device=self.device))
        for layer, wanted in enumerate(given):
            for read, exact in zip(numbers(stores[0], layer), wanted, strict=True):
                torch.testing.assert_close(read[[9]], exact, rtol=2**-4, atol=2**-9)
        with pytest.raises(ValueError, match=r"k_scale of layer 0.*allowed: one positive number"):
            stores[1].load_scales(0, torch.tensor(-1.0), torch.tensor(1.0))


def rounded_once(read: torch.Tensor, exact: torch.Tensor, dtype: str) -> bool:
    """Return True if numbers differ from exact ones, ``[tokens, heads, size]`` each, as if rounded once."""
    largest = exact.abs().amax(-1, keepdim=True)
    return bool(((read - exact).abs() <= 1.01 * (ROUNDING[dtype] * exact.abs() + BLOCKS[dtype] * largest)).all())


def numbers(store: KVStore, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a layer with their scales, float32 ``[locations, heads, size]`` each, on the CPU."""
    keys, values, scales = store.tensors(layer)
    read = [x.cpu().float().flatten(0, 1).clone(memory_format=torch.contiguous_format) for x in (keys, values)]
    if scales is not None:
        read = [x * own.cpu().float().flatten(0, 1)[..., None] for x, own in zip(read, scales, strict=True)]
    return read[0], read[1]


def all_numbers(store: KVStore) -> Numbers:
    """Return ``numbers`` of all layers."""
    return [numbers(store, layer) for layer in range(store.group.num_layers)]


def refused(store: KVStore, data: bytes, pages: list[int], fault: str | None = None) -> None:
    """Check that an export is refused, with this ``fault``."""
    check_refused(lambda: store.import_pages(data, pages), fault)
