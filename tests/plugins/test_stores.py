"""Test the built-in KV stores with their conformance suite.

.venv/bin/python -m pytest -q tests/plugins/test_stores.py
"""

from __future__ import annotations

import struct
import zlib

import pytest
import torch

from dovetail.config import Config
from dovetail.engine.memory import Budget, Needs, with_arena
from dovetail.errors import PageFormatError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.store import KVStoreFactory, StoreContext
from dovetail.memory.arena import ArenaAllocator, make_layout
from dovetail.memory.pool import make_arena
from dovetail.testing.store import KVStoreSuite
from dovetail_cache.config import PagedConfig, ScaledConfig
from dovetail_cache.scales import declares_kv_scales, refuses
from dovetail_cache.stores import PagedStores, ScaledStores

FP8 = torch.float8_e4m3fn
SLIDING = CacheGroupKind.SLIDING


def scaled(scales: str = "token_head", page_size: int = 16) -> KVStoreFactory:
    config = ScaledConfig.model_validate({"scales": scales})
    return ScaledStores(config, StoreContext(page_size, FP8, torch.device("cpu")))


@pytest.mark.parametrize(("scales", "factor"), [("token_head", 256 / 130), ("checkpoint", 2.0)])
def test_how_many_tokens_fit(scales: str, factor: float) -> None:
    """With heads of 128 numbers, a page takes at least 1.95 times less than in bfloat16, scales included."""
    group = CacheGroup(32, 8, 128)
    half = PagedStores(PagedConfig(), StoreContext(16, torch.bfloat16, torch.device("cpu"))).page_bytes(group, 16)
    page = scaled(scales).page_bytes(group, 16)
    assert half.page == 32 * 2 * 16 * 8 * 256
    assert half.page / page.page == factor >= 1.95


def test_how_many_latents_fit() -> None:
    """A latent has one scale, whatever the setting is."""
    group = CacheGroup(27, 1, 576, CacheGroupKind.LATENT, value_dim=512)
    half = PagedStores(PagedConfig(), StoreContext(16, torch.bfloat16, torch.device("cpu"))).page_bytes(group, 16)
    assert half.page == 16 * 31_104
    for scales in ("token_head", "checkpoint"):
        page = scaled(scales).page_bytes(group, 16)
        assert page.page == 16 * 27 * (576 + 2)
        assert half.page / page.page > 1.99


def test_latents_and_keys_share_slabs_with_scales() -> None:
    """Latents in slabs have one scale each, in the memory that is beside the slabs."""
    groups = [CacheGroup(2, 1, 24, CacheGroupKind.LATENT, value_dim=16), CacheGroup(1, 2, 12)]
    factory = scaled(page_size=4)
    sizes = [factory.page_bytes(group, 4) for group in groups]
    layout = make_layout([size._replace(page=size.page - size.beside) for size in sizes], 0, 6)
    (latents, keys), _ = make_arena(groups, layout, factory, FP8, "cpu")
    allocator = ArenaAllocator(layout)
    pages = allocator.alloc(3)
    assert pages is not None
    random = torch.Generator().manual_seed(0)
    places = [torch.from_numpy(own.astype("int64"))[:, None] * 4 + torch.arange(4) for own in pages]
    wide, k, v = (torch.randn(12, heads, size, generator=random) * 900 for heads, size in ((1, 24), (2, 12), (2, 12)))
    for layer in range(2):
        latents.store(layer, wide + layer, None, places[0].flatten())
    keys.store(0, k, v, places[1].flatten())
    for layer in range(2):
        tensors = latents.tensors(layer)
        assert tensors.scales is not None
        assert tensors.scales.keys.data_ptr() == tensors.scales.values.data_ptr()
        read = tensors.keys.float() * tensors.scales.keys.float()[..., None]
        torch.testing.assert_close(read.flatten(0, 1)[places[0].flatten()], wide + layer, rtol=0.07, atol=5)
    tensors = keys.tensors(0)
    assert tensors.scales is not None
    read = tensors.keys.float() * tensors.scales.keys.float()[..., None]
    torch.testing.assert_close(read.flatten(0, 1)[places[1].flatten()], k, rtol=0.07, atol=5)


def test_scales_are_a_part_of_the_shared_memory() -> None:
    """The budget counts the scales of all groups, once for each size of heads; the memory takes as many bytes."""
    groups = [CacheGroup(1, 2, 16), CacheGroup(3, 2, 16, SLIDING, 7), CacheGroup(2, 1, 32)]
    factory = scaled(page_size=4)
    sizes = [factory.page_bytes(group, 4) for group in groups]
    given = Budget(0, Needs(), 1 << 20, 2, 4, 0)
    budget = with_arena(
        given, Config.model_validate({"memory": {"page_size": 4}, "scheduler": {"max_running": 4}}), sizes
    )
    assert budget.arena is not None
    assert 0.97 * given.pool < budget.pool <= given.pool
    stores, _ = make_arena(groups, budget.arena, factory, FP8, "cpu")
    tensors = [tensor for store in stores for tensor in (store.keys(0), *(store.tensors(0).scales or ()))]
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert len(memories) == 3, "the slabs, and scales of heads of 16 and of 32"
    assert sum(memories.values()) == budget.pool


def test_exports_with_a_right_checksum_may_still_be_wrong() -> None:
    """A header that is no header, and a content of another size than its pages, are refused before anything is written."""
    group = CacheGroup(1, 2, 16)
    factory = PagedStores(PagedConfig(), StoreContext(4, torch.float32, torch.device("cpu")))
    store = factory.make(group, 8)
    store.clear()
    data = store.export_pages([1, 2])
    start = struct.Struct("<4sHIIQ")
    magic, version, size, _, _ = start.unpack_from(data)
    header, content = data[start.size :][:size], data[start.size + size :]

    def export(header: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(header + content)
        return start.pack(magic, version, len(header), checksum, len(content)) + header + content

    store.keys(0).fill_(1.0)
    for damaged, fault in (
        (export(b"{}", content), "header"),
        (export(b"\xff{", content), "header"),
        (export(header, content[:-4]), "size"),
        (export(header, content + bytes(4)), "size"),
        (export(header, b""), "size"),
    ):
        with pytest.raises(PageFormatError) as error:
            store.import_pages(damaged, [1, 2])
        assert error.value.fault == fault
    assert (store.keys(0) == 1).all()
    store.import_pages(export(header, content), [1, 2])
    assert (store.keys(0)[1:3] == 0).all()


STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("checkpoint", "declared"),
    [
        (None, False),
        ({"quant_method": "fp8"}, False),
        ({"kv_cache_scheme": "static"}, True),
        ({"kv_cache_scheme": STATIC}, True),
        ({"kv_cache_scheme": {**STATIC, "dynamic": True}}, False),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_quant_algo": None}, False),
    ],
)
def test_auto_takes_scales_that_a_checkpoint_declares(checkpoint: dict | None, declared: bool) -> None:
    assert declares_kv_scales(checkpoint) is declared
    assert (refuses(checkpoint, ScaledConfig(), False) is None) is declared
    assert refuses(checkpoint, ScaledConfig(), True) is None
    context = StoreContext(16, FP8, torch.device("cpu"), checkpoint)
    assert ScaledStores(ScaledConfig(), context).reads_scales is declared


class TestPaged(KVStoreSuite):
    name = "paged"


class TestScaled(KVStoreSuite):
    name = "scaled"


class TestScaledByTheCheckpoint(KVStoreSuite):
    name = "scaled"
    settings = {"scales": "checkpoint"}  # noqa: RUF012
