"""Test the paged KV pool against plain indexing.

python -m pytest tests/core/test_kv_pool.py
"""

import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.memory import pool as pools
from dovetail.memory.pool import LatentKVPool, PagedKVPool, bytes_per_page, pool_dtype

GROUP = CacheGroup(num_layers=3, num_kv_heads=2, head_dim=8)


LATENTS = CacheGroup(3, 1, 12, CacheGroupKind.LATENT, value_dim=8)


def make_pool(page_size: int = 4, dtype: torch.dtype = torch.float32) -> PagedKVPool:
    return PagedKVPool(GROUP, num_pages=5, page_size=page_size, dtype=dtype, device="cpu")


def test_shapes_and_page_zero():
    pool = make_pool()
    assert pool.keys(0).shape == pool.values(2).shape == (5, 4, 2, 8)
    assert not pool.k[:, 0].any()
    assert not pool.v[:, 0].any()


def test_layers_are_views_of_one_tensor():
    pool = make_pool()
    pool.k.fill_(1)
    pool.v.fill_(2)
    for layer in range(3):
        assert (pool.keys(layer) == 1).all()
        assert (pool.values(layer) == 2).all()


def test_bytes_per_page_is_what_the_tensors_take():
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        pool = make_pool(dtype=dtype)
        assert bytes_per_page(GROUP, 4, dtype) * pool.num_pages == pool.k.nbytes + pool.v.nbytes
        latents = pools.make_pool(LATENTS, 5, 4, dtype, "cpu")
        assert bytes_per_page(LATENTS, 4, dtype) * 5 == latents.k.nbytes == latents.k.untyped_storage().nbytes()
        assert latents.v.data_ptr() == latents.k.data_ptr()


def test_a_token_of_deepseek_v2_lite_takes_31104_bytes():
    group = CacheGroup(27, 1, 512 + 64, CacheGroupKind.LATENT, value_dim=512)
    assert bytes_per_page(group, 16, torch.bfloat16) == 16 * 31_104


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_latents_are_stored_and_moved_once(dtype: torch.dtype):
    pool = pools.make_pool(LATENTS, 5, 4, dtype, "cpu")
    assert isinstance(pool, LatentKVPool)
    assert pool.keys(0).shape == (5, 4, 1, 12)
    assert pool.values(0).shape == (5, 4, 1, 8)
    assert not pool.k[:, 0].float().any()
    pool.k.copy_(torch.full((), -1.0))
    entries = torch.randint(8, (3, 1, 12)).float()
    pool.store(1, entries, None, torch.tensor([7, 19, 4]))
    pool.copy(torch.tensor([7, 19]), torch.tensor([19, 8]))
    wanted = torch.full((3, 20, 1, 12), -1.0)
    wanted[1, [7, 19, 4]] = entries
    wanted[:, [19, 8]] = wanted[:, [7, 19]]
    assert torch.equal(pool.k.flatten(1, 2).float(), wanted)
    assert torch.equal(pool.values(1).flatten(0, 1).float(), wanted[1, ..., :8])


@pytest.mark.parametrize(
    "group",
    [(CacheGroupKind.LATENT, None), (CacheGroupKind.LATENT, 0), (CacheGroupKind.LATENT, 13), (CacheGroupKind.FULL, 8)],
    ids=str,
)
def test_only_latents_have_a_value_dim(group: tuple[CacheGroupKind, int | None]):
    kind, value_dim = group
    with pytest.raises(ValueError, match="value_dim from 1 to head_dim"):
        CacheGroup(3, 1, 12, kind, value_dim=value_dim)


@pytest.mark.parametrize(
    "group", [(CacheGroupKind.SLIDING, None), (CacheGroupKind.SLIDING, 0), (CacheGroupKind.FULL, 8)], ids=str
)
def test_only_sliding_groups_have_a_window(group: tuple[CacheGroupKind, int | None]):
    kind, window = group
    with pytest.raises(ValueError, match="with kind sliding a window of 1 or more"):
        CacheGroup(3, 1, 12, kind, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("places", [[7], [4, 5, 6], [19, 4, 11, 6]])
def test_store_writes_its_places_and_nothing_else(places: list[int], dtype: torch.dtype):
    pool = make_pool(dtype=dtype)
    pool.k.fill_(-1)
    pool.v.fill_(-2)
    k, v = torch.randn(2, len(places), 2, 8)
    pool.store(1, k, v, torch.tensor(places))
    want_k, want_v = torch.full((3, 20, 2, 8), -1.0), torch.full((3, 20, 2, 8), -2.0)
    for i, place in enumerate(places):
        want_k[1, place], want_v[1, place] = k[i].to(dtype), v[i].to(dtype)
    assert torch.equal(pool.k.flatten(1, 2).float(), want_k)
    assert torch.equal(pool.v.flatten(1, 2).float(), want_v)


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_8_bits_saturate_round_once_and_move_whole(name: str, largest: float, given: torch.dtype):
    pool = make_pool(dtype=pool_dtype(name))
    pool.k.copy_(torch.full((), torch.nan))
    k = torch.tensor([0.0, 1.0, -1.0625, 17.0, -1e6, torch.inf, torch.nan, 2**-9], dtype=given).expand(2, 2, 8)
    pool.store(2, k, -k, torch.tensor([6, 9]))
    wanted = torch.tensor([0.0, 1.0, -1.0, 16.0, -largest, largest, torch.nan, 2**-9]).expand(2, 2, 8)
    pool.copy(torch.tensor([6, 9]), torch.tensor([9, 18]))
    keys, values = pool.keys(2).flatten(0, 1), pool.values(2).flatten(0, 1)
    for places in ([6, 9], [18, 6]):
        torch.testing.assert_close(keys[places].float(), wanted, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(values[places].float(), -wanted, equal_nan=True, rtol=0, atol=0)
    assert keys[[4, 5, 7, 8, 10, 17, 19]].float().isnan().all()


def test_store_takes_slices_of_a_fused_projection():
    pool = make_pool()
    qkv = torch.randn(3, 8, 8)
    pool.store(0, qkv[:, 4:6], qkv[:, 6:8], torch.tensor([4, 9, 14]))
    assert torch.equal(pool.keys(0)[1, 0], qkv[0, 4:6])
    assert torch.equal(pool.values(0)[3, 2], qkv[2, 6:8])


def test_copy_reads_everything_before_it_writes():
    pool = make_pool(page_size=1)
    pool.k.copy_(torch.arange(5.0).view(1, 5, 1, 1, 1).expand_as(pool.k))
    pool.v.copy_(-pool.k)
    pool.copy(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1]))
    assert pool.k[:, :, 0, 0, 0].tolist() == [[0, 3, 1, 2, 4]] * 3
    assert torch.equal(pool.v, -pool.k)


def test_states_have_no_pool() -> None:
    with pytest.raises(ConfigError, match="a state for each request"):
        pools.make_pool(CacheGroup.of_states(2, (StateShape((3,)),)), 4, 4, torch.float32, "cpu")
