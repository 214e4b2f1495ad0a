"""Test the collectives of ranks, and the layers that are divided among ranks.

.venv/bin/python -m pytest -q tests/core/test_mesh.py
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.engine.mesh import connect, local_info, rank_device
from dovetail.errors import ConfigError, RankLostError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.mesh import SINGLE, Mesh, OneRank
from dovetail.interfaces.model import ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import ColumnLinear, Linear, RowLinear
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.testing.ranks import run_ranks, thread_meshes
from rank_processes import RankProcesses

SIZES = (2, 3)


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    processes = RankProcesses(request.param)
    yield processes
    processes.close()


def addend(rank: int, dtype: torch.dtype, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    return mesh.tp.all_reduce(addend(mesh.tp.rank, dtype))


def normed(mesh: Mesh, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    residual, weight = addend(9, dtype), addend(10, dtype)[0]
    return *mesh.tp.all_reduce_norm(addend(mesh.tp.rank, dtype), residual, weight, 1e-5), residual


def gathered(mesh: Mesh, width: int | None) -> torch.Tensor:
    return mesh.tp.all_gather(addend(mesh.tp.rank, torch.float32), width)


def numbers(mesh: Mesh) -> tuple[bool, bool, int, int]:
    rank, last = mesh.tp.rank, mesh.tp.size - 1
    return mesh.tp.agree(True), mesh.tp.agree(rank != last), mesh.tp.min(7 - rank), mesh.tp.min(-(2**40) + rank)


def nothing(mesh: Mesh) -> list[torch.Size]:
    empty, weight = torch.empty(0, 8), torch.ones(8)
    norm, total = mesh.tp.all_reduce_norm(empty.clone(), empty, weight, 1e-5)
    return [x.shape for x in (mesh.tp.all_reduce(empty), norm, total, mesh.tp.all_gather(empty, 11))]


def alike(results: list[torch.Tensor]) -> torch.Tensor:
    """Return the result of rank 0, after comparing its bits with those of the other ranks."""
    assert all(result.equal(results[0]) for result in results)
    return results[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gloo_adds_up_with_the_same_bits_on_all_ranks(ranks: RankProcesses, dtype: torch.dtype) -> None:
    size, tolerance = len(ranks.processes), {torch.float32: 1e-6, torch.bfloat16: 3e-2}[dtype]
    exact = sum((addend(rank, dtype).double() for rank in range(size)), torch.zeros(5, 8, dtype=torch.float64))
    torch.testing.assert_close(alike(ranks.run(reduced, dtype)).double(), exact, atol=tolerance, rtol=tolerance)
    results = ranks.run(normed, dtype)
    residual, weight = addend(9, dtype).double(), addend(10, dtype)[0].double()
    total = exact + residual
    norm = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    for index, expected in enumerate((norm, total, residual)):
        found = alike([result[index] for result in results])
        torch.testing.assert_close(found.double(), expected, atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("width", [None, 13])
def test_gloo_gathers_columns_in_the_order_of_ranks(ranks: RankProcesses, width: int | None) -> None:
    whole = torch.cat([addend(rank, torch.float32) for rank in range(len(ranks.processes))], 1)
    found = alike(ranks.run(gathered, width))
    assert found.is_contiguous()
    assert found.equal(whole[:, :width])


def test_gloo_compares_numbers(ranks: RankProcesses) -> None:
    size = len(ranks.processes)
    assert ranks.run(numbers) == [(True, False, 8 - size, -(2**40))] * size


def test_tensors_without_rows_need_no_communication(ranks: RankProcesses) -> None:
    for shapes in ranks.run(nothing):
        assert shapes == [(0, 8), (0, 8), (0, 8), (0, 11)]


def lost(mesh: Mesh, folder: str) -> str:
    (Path(folder) / str(mesh.tp.rank)).write_text(str(os.getpid()))
    start = time.monotonic()
    try:
        while time.monotonic() < start + 30:
            mesh.tp.all_reduce(torch.zeros(4, 4))
    except RankLostError as error:
        return f"{time.monotonic() - start:.1f} {error}"
    return "no error"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_is_reported_within_the_deadline(tmp_path: Path, sign: signal.Signals) -> None:
    processes = RankProcesses(2, timeout=3)
    try:
        processes.run(numbers)
        for pipe in processes._pipes:
            pipe.send((__file__, "lost", (str(tmp_path),)))
        deadline = time.monotonic() + 30
        while not (tmp_path / "1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(processes.processes[1].pid, sign)
        assert processes._pipes[0].poll(30)
        ok, text = pickle.loads(processes._pipes[0].recv_bytes())
        assert ok, text
        seconds, _, message = text.partition(" ")
        assert message.startswith("rank 0 of 2 cannot communicate any more")
        assert float(seconds) < 15
    finally:
        processes.close()


def test_ranks_that_do_not_appear_are_reported(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankLostError, match=r"rank 0 of 2 did not find the other ranks at .* within 0\.5 s"):
        connect(0, 2, torch.device("cpu"), tmp_path / "store", timeout=0.5)
    assert time.monotonic() - start < 20


def test_one_rank_needs_no_connection(tmp_path: Path) -> None:
    assert connect(0, 1, torch.device("cpu"), tmp_path / "store") is SINGLE
    assert not list(tmp_path.iterdir())
    x, residual, weight = (addend(seed, torch.float32) for seed in range(3))
    one = OneRank()
    assert one.all_reduce(x) is x
    assert one.all_gather(x, 6).equal(x[:, :6])
    assert (one.agree(True), one.agree(False), one.min(4)) == (True, False, 4)
    norm, total = one.all_reduce_norm(x, residual, weight[0], 1e-5)
    assert total.equal(x + residual)
    torch.testing.assert_close(norm, torch.nn.functional.rms_norm(x + residual, (8,), weight[0], 1e-5))


def test_ranks_use_consecutive_devices() -> None:
    assert [rank_device("cuda:1", rank) for rank in (0, 2)] == [torch.device("cuda:1"), torch.device("cuda:3")]
    assert rank_device("cpu", 2) == torch.device("cpu")


@given(size=st.integers(1, 8), count=st.integers(1, 64))
def test_shares_are_even_and_cover_everything(size: int, count: int) -> None:
    shares = [mesh.tp for mesh in thread_meshes(size)]
    if count % size and size % count:
        with pytest.raises(ConfigError):
            shares[0].share(count)
    else:
        found = [tp.share(count) for tp in shares]
        assert len({n for _, n in found}) == 1
        covered = [i for start, n in found for i in range(start, start + n)]
        assert sorted(set(covered)) == list(range(count))
        assert covered == sorted(covered)
        assert len(covered) == max(size, count)
    rows = -(-count // size)
    if rows * (size - 1) >= count:
        with pytest.raises(ConfigError):
            shares[-1].ragged_share(count)
    else:
        ragged = [tp.ragged_share(count) for tp in shares]
        assert [i for start, n in ragged for i in range(start, start + n)] == list(range(count))
        assert all(n == rows for _, n in ragged[:-1])


def test_local_info_has_the_heads_of_one_rank() -> None:
    info = ModelInfo("Fake", 100, 48, 2, 12, 2, 4, 64, (CacheGroup(2, 2, 4),))
    assert local_info(info, SINGLE) is info
    for size, heads, kv_heads in ((2, 6, 1), (4, 3, 1)):
        for mesh in thread_meshes(size):
            local = local_info(info, mesh)
            assert (local.num_heads, local.num_kv_heads, local.cache_groups[0].num_kv_heads) == (
                heads,
                kv_heads,
                kv_heads,
            )
            assert (local.vocab_size, local.hidden_size, local.head_dim) == (100, 48, 4)


# -- layers ------------------------------------------------------------------------------------------------------------


def fill(layer: Layer, name: str, target: WeightTarget, whole: torch.Tensor) -> None:
    """Fill the rows of parameter ``name`` that ``target`` names with its share of ``whole``."""
    place = dict(layer.named_parameters())[name]
    place = place if target.start is None else place[target.start : target.start + (target.size or 0)]
    for share in target.shares:
        whole = whole.narrow(share.dim, share.start, share.size)
    place.data.copy_(whole)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5


rank_counts = st.sampled_from([2, 3, 4])
Rows = st.integers(0, 5)


def close(found: list[torch.Tensor], expected: torch.Tensor) -> None:
    for one in found:
        assert one.equal(found[0])
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=20)
@given(
    size=rank_counts, a=st.integers(1, 4), b=st.integers(1, 4), unit=st.integers(1, 3), bias=st.booleans(), rows=Rows
)
def test_column_linear_computes_the_outputs_of_its_rank(
    size: int, a: int, b: int, unit: int, bias: bool, rows: int
) -> None:
    torch.manual_seed(0)
    widths = {"a": a * size * unit, "b": b * size * unit}
    whole = {name: (random(width, 7), random(width)) for name, width in widths.items()}
    x = random(rows, 7)
    outputs = []
    for mesh in thread_meshes(size):
        layer = ColumnLinear(7, widths, mesh, bias=bias, unit=unit)
        for name, (weight, added) in whole.items():
            fill(layer, "weight", layer.target("weight", name), weight)
            if bias:
                fill(layer, "bias", layer.target("bias", name), added)
        outputs.append(layer.forward(x).split([a * unit, b * unit], 1))
    for index, (weight, added) in enumerate(whole.values()):
        expected = torch.nn.functional.linear(x, weight, added if bias else None)
        torch.testing.assert_close(torch.cat([o[index] for o in outputs], 1), expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=20)
@given(size=rank_counts, inputs=st.integers(1, 6), bias=st.booleans(), rows=Rows)
def test_row_linear_adds_up_all_ranks_and_one_bias(size: int, inputs: int, bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight, added, x, residual = random(8, inputs * size), random(8), random(rows, inputs * size), random(rows, 8)
    meshes = thread_meshes(size)
    layers = [RowLinear(inputs * size, 8, mesh, bias=bias) for mesh in meshes]
    norm = RMSNorm(8, 1e-5)
    norm.weight.data.copy_(random(8))
    norm.prepare()
    for layer in layers:
        fill(layer, "weight", layer.target("weight"), weight)
        if bias:
            fill(layer, "bias", layer.target("bias"), added)
    mine = [x[:, i * inputs : (i + 1) * inputs].contiguous() for i in range(size)]
    expected = torch.nn.functional.linear(x, weight, added if bias else None)
    given_ = list(zip(layers, mine, strict=True))
    close(run_ranks(meshes, lambda pair: pair[0].forward(pair[1]), given_), expected)
    sums = run_ranks(meshes, lambda pair: norm.add_forward(pair[0].parts_forward(pair[1]), residual), given_)
    close([total for _, total in sums], expected + residual)
    close([one for one, _ in sums], torch.nn.functional.rms_norm(expected + residual, (8,), norm.weight, 1e-5))


@settings(max_examples=20)
@given(size=rank_counts, vocab=st.integers(10, 40), tied=st.booleans(), rows=Rows)
def test_embedding_and_head_cover_vocabularies_of_any_size(size: int, vocab: int, tied: bool, rows: int) -> None:
    torch.manual_seed(0)
    table, own, x = random(vocab, 6), random(vocab, 6), random(rows, 6)
    ids = torch.cat((torch.randint(vocab, (rows,)), torch.tensor([0, vocab - 1])))
    meshes = thread_meshes(size)
    layers = []
    for mesh in meshes:
        embed = Embedding(vocab, 6, mesh)
        head = LMHead(6, vocab, mesh, tied=embed if tied else None)
        fill(embed, "weight", embed.target("weight"), table)
        if not tied:
            fill(head, "weight", head.target("weight"), own)
        layers.append((embed, head))
    found = run_ranks(meshes, lambda pair: pair[0].forward(ids), layers)
    assert all(one.equal(table[ids]) for one in found)
    assert ids[-1] == vocab - 1, "the ids were changed"
    logits = run_ranks(meshes, lambda pair: pair[1].forward(x), layers)
    assert all(one.is_contiguous() for one in logits)
    close(logits, x @ (table if tied else own).T)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_gated_mlp_is_the_same_on_several_ranks(size: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole = GatedMLP(8, 12, SINGLE, bias=bias)
    tensors = {}
    for part in ("gate", "up"):
        tensors[part] = random(12, 8), random(12)
    down, down_bias, x = random(8, 12), random(8), random(5, 8)
    meshes = thread_meshes(size)
    layers = [whole, *(GatedMLP(8, 12, mesh, bias=bias) for mesh in meshes)]
    for layer in layers:
        for part, (weight, added) in tensors.items():
            fill(layer.gate_up, "weight", layer.gate_up.target("weight", part), weight)
            if bias:
                fill(layer.gate_up, "bias", layer.gate_up.target("bias", part), added)
        fill(layer.down, "weight", layer.down.target("weight"), down)
        if bias:
            fill(layer.down, "bias", layer.down.target("bias"), down_bias)
    gate, up = (torch.nn.functional.linear(x, w, b if bias else None) for w, b in tensors.values())
    expected = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down, down_bias if bias else None)
    close([whole.forward(x)], expected)
    close(run_ranks(meshes, lambda layer: layer.forward(x), layers[1:]), expected)


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "local"), [(2, 4, 2, (2, 1)), (2, 4, 1, (2, 1)), (4, 8, 2, (2, 1)), (3, 6, 6, (2, 2))]
)
def test_attention_has_the_heads_of_its_rank(size: int, heads: int, kv_heads: int, local: tuple[int, int]) -> None:
    shape = AttentionShape(8, heads, kv_heads, 4, qk_norm_eps=1e-5)
    for mesh in thread_meshes(size):
        layer = SelfAttention(shape, AttentionLayer(0, 0.5), mesh)
        assert tuple(layer.counts) == local
        first = mesh.tp.rank * local[0]
        for part, count, start in (("q", heads, first), ("k", kv_heads, first * kv_heads // heads)):
            (share,) = layer.qkv.target("weight", part).shares
            assert share == (0, start * 4, local[part == "k"] * 4, count * 4)
    with pytest.raises(ConfigError):
        SelfAttention(AttentionShape(8, 6, 3, 4), AttentionLayer(0, 0.5), thread_meshes(2)[0])


def test_a_linear_layer_is_whole_on_every_rank() -> None:
    assert Linear(4, 6).target("x.weight") == WeightTarget("x.weight")
