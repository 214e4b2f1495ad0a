"""Test triton attention, interpreted: the conformance suite without redundant cases, and our own limits. Arithmetic in
bfloat16 is wrong where Triton is interpreted.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_attention_triton.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.store import KVTensors
from dovetail.ops.triton import pages
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import GRAPH_ROWS, REPLAYS, SHARED_STEPS, STEPS
from dovetail.testing.attention_graphs import (
    VERIFY_REPLAYS,
    VERIFY_TOKENS,
    VERIFY_WIDTH,
    copy_inputs,
    static_verify_step,
    verify_step,
)
from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail_attention.config import TritonConfig
from dovetail_attention.triton import backend, tiles
from dovetail_attention.triton.attend import PartialResults, attend
from dovetail_attention.triton.merge import merge
from dovetail_attention.triton.schedule import Schedule, ScheduleEntries, fill
from window_holes import check_holes

CPU = torch.device("cpu")
FEW_STEPS = ("extend after a prefix", "decode", "mixed", "trees", "trees and extend")
MIXED_STEPS = ("decode", "mixed", "trees and extend")
WIDE_TREES = AttentionCase(
    [21, 0, 40],
    [40, 24, 1],
    trees=[[node // 3 - 1 for node in range(39)], [(node * 7) % (node + 1) - 1 for node in range(23)], []],
    heads=8,
)
LATENT: tuple[Mapping[str, Any], ...] = (
    {"head_dim": 24, "value_dim": 16, "heads": 6, "kv_heads": 2, "dtype": torch.float16},
    {"head_dim": 28, "value_dim": 12, "window": 7, "sinks": True, "soft_cap": 2.0, "scale": 0.5},
)
SLOW: Mapping[str, tuple[object, ...]] = {
    "page_size": (4,),
    "head_dim": (64, 128, 576),
    "heads": (2,),
    "window": (1, 1000),
    "kv_heads": (4,),
    "dtype": (torch.bfloat16,),
    "step": ("many rows", "no row shares", "a long chunk"),
    "length": (1580,),
    "variant": ("pages of 1", "pages of 4", "pages of 16", "bfloat16", "head_dim 128", "sinks"),
}


def is_slow(test: str, params: Mapping[str, Any]) -> bool:
    """Return whether other cases stand for these parameters."""
    step = params.get("step")
    if test in ("test_fp8_pools", "test_latents_of_16_bits") and step not in MIXED_STEPS:
        return True
    if test.endswith("_scales") and (params.get("scales") == "head" or step in ("groups and single rows", "trees")):
        return test != "test_scales"
    return any(params.get(name) in values for name, values in SLOW.items()) or (
        step in STEPS and step not in FEW_STEPS and test != "test_phases_and_page_sizes"
    )


@pytest.mark.sample(5)
class TestTriton(AttentionSuite):
    is_slow = staticmethod(is_slow)
    name = "triton"
    device = "cpu"
    dtypes = (torch.float32, torch.float16)
    longest = 400

    @pytest.fixture(autouse=True)
    def _quick(self, request: pytest.FixtureRequest) -> None:
        given = getattr(request.node, "callspec", None)
        if given is not None and is_slow(request.node.originalname, given.params):
            pytest.skip("slow where Triton is interpreted")

    @pytest.fixture(autouse=True)
    def _short_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Use short chunks, so that rows of 150 keys have several."""
        monkeypatch.setattr(backend, "CHUNK", 128)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (7, 1)])
    def test_blocks_of_several_tiles(self, heads: int, kv_heads: int):
        """A query sees the later tokens of its block, also those in the next tile."""
        self.compare(replace(STEPS["blocks in place of trees"][0], heads=heads, kv_heads=kv_heads))

    @pytest.mark.parametrize("window", [5, 18])
    @pytest.mark.parametrize("step", ["extend after a prefix", "decode", "trees"])
    def test_pages_behind_the_window_may_be_gone(self, step: str, window: int):
        check_holes(self.make, step, window)

    @pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
    @pytest.mark.parametrize("variant", [backend.EVEN, backend.UNEVEN], ids=["even", "uneven"])
    @pytest.mark.parametrize("window", [None, 20], ids=["whole", "window"])
    @pytest.mark.parametrize("step", ["decode", "many rows", *SHARED_STEPS])
    @torch.inference_mode()
    def test_either_variant_serves_any_decode_step(
        self, monkeypatch: pytest.MonkeyPatch, step: str, window: int | None, variant: int, few: bool
    ):
        monkeypatch.setattr(backend.TritonAttention, "_few", lambda *_: few)
        case = replace(SHARED_STEPS.get(step) or STEPS[step][0], window=window, sinks=window is not None)
        made = AttentionStep(case, torch.device(self.device))
        built = self.make(made.context())
        made.batch.variant = variant
        built.plan(made.batch)
        self.compare_output(made, built.forward(made.q, made.layer, made.batch))

    @pytest.mark.parametrize("head_dim", [24, 80])
    @pytest.mark.parametrize("page_size", [1, 7])
    @pytest.mark.parametrize("heads", [6, 34])
    def test_sizes_that_are_no_powers_of_two(self, head_dim: int, page_size: int, heads: int):
        case = replace(STEPS["mixed"][0], head_dim=head_dim, page_size=page_size, heads=heads)
        self.compare(case)

    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_trees_of_several_tiles(self, dtype: torch.dtype, window: int | None):
        self.compare(replace(WIDE_TREES, dtype=dtype, window=window))

    @pytest.mark.parametrize("processors", [1, 3, 40])
    @pytest.mark.parametrize("window", [None, 90])
    def test_however_many_programs_there_are(
        self, monkeypatch: pytest.MonkeyPatch, processors: int, window: int | None
    ):
        """Keys are cut in other places, and programs that read shared prefixes do several items each."""
        monkeypatch.setattr(backend, "CPU_PROCESSORS", processors)
        monkeypatch.setattr(backend, "SHARED_PAIRS", 16)
        monkeypatch.setattr(backend, "ROWS_PER_GROUP", 1 << 20)
        sinks = window is not None
        groups = [(3, 160), (4, 64), (1, 32)]
        for case in (
            AttentionCase([190, 160, 161, 64, 90, 65, 70, 40, 3], [1] * 9, groups=groups, heads=8, kv_heads=1),
            AttentionCase([300, 0, 33], [9, 30, 1], num_extend=2),
            AttentionCase([200, 5], [4, 4], trees=[[-1, -1, 0], [-1, 0, 0]]),
        ):
            self.compare(replace(case, window=window, sinks=sinks))

    @pytest.mark.parametrize("window", [None, 90])
    @pytest.mark.parametrize("sinks", [False, True])
    @torch.inference_mode()
    def test_chunks_have_the_same_bits_in_one_program_and_in_several(
        self, monkeypatch: pytest.MonkeyPatch, sinks: bool, window: int | None
    ):
        case = AttentionCase(
            [300, 120, 33, 520], [9, 30, 1, 1], num_extend=2, window=window, sinks=sinks, dtype=torch.float16
        )
        step = AttentionStep(replace(case, batch_invariant=True), torch.device(self.device))
        outs = []
        for most in (backend.CUT_TOKENS, 0):
            monkeypatch.setattr(backend, "CUT_TOKENS", most)
            built = self.make(step.context())
            built.plan(step.batch)
            outs.append(built.forward(step.q, step.layer, step.batch))
            self.compare_output(step, outs[-1])
        assert torch.equal(*outs)

    @pytest.mark.parametrize("step", [*MIXED_STEPS, "groups and single rows", "padding"])
    @pytest.mark.parametrize("whole", [8, 64], ids=["keys in two parts", "keys in one"])
    @pytest.mark.parametrize("settings", LATENT, ids=str)
    def test_values_may_be_the_first_part_of_keys(
        self, monkeypatch: pytest.MonkeyPatch, step: str, whole: int, settings: Mapping[str, Any]
    ):
        """Several key heads, and layers of latent attention with a window, read them with the general kernel. With two
        parts, the first is read once for both."""
        monkeypatch.setattr(pages, "WHOLE", whole)
        case = SHARED_STEPS[step] if step in SHARED_STEPS else STEPS[step][0]
        self.compare(replace(case, **{"heads": 20, "kv_heads": 1, **settings}))

    @pytest.mark.parametrize("variant", [backend.EVEN, backend.UNEVEN], ids=["even", "uneven"])
    @pytest.mark.parametrize("window", [None, 150], ids=["whole", "window"])
    @pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
    @torch.inference_mode()
    def test_one_plan_serves_all_lengths(
        self, monkeypatch: pytest.MonkeyPatch, shared: bool, window: int | None, variant: int
    ):
        """A graph relies on this: after ``plan_capture``, lengths are read on the device."""
        monkeypatch.setattr(backend.TritonAttention, "_few", lambda *_: True)
        base = AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS, padding=0, page_size=16, window=window)
        whole = AttentionStep(base, CPU)
        built = self.make(whole.context())
        static = AttentionStep(
            replace(base, prefix=[0] * GRAPH_ROWS, padding=GRAPH_ROWS, groups=[] if shared else None), CPU, whole
        )
        static.batch.prefix_lens = np.full(GRAPH_ROWS, 2047, np.int32)
        static.batch.variant = variant
        built.plan_capture(static.batch)
        for prefix, groups in REPLAYS:
            padding = GRAPH_ROWS - len(prefix)
            case = replace(base, prefix=prefix + [0] * padding, padding=padding, groups=groups if shared else None)
            step = AttentionStep(case, CPU, whole)
            copy_inputs(step, static)
            built.plan_replay(static.batch)
            self.compare_output(step, built.forward(static.q, static.layer, static.batch))

    @pytest.mark.parametrize("processors", [1, 40])
    @pytest.mark.parametrize("window", [None, 30])
    @pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
    @torch.inference_mode()
    def test_one_plan_serves_however_tokens_are_divided_among_rows(
        self, monkeypatch: pytest.MonkeyPatch, tree: bool, window: int | None, processors: int
    ):
        """A graph of verify rows relies on this; rows of one query and of none fill it up."""
        monkeypatch.setattr(backend, "CPU_PROCESSORS", processors)
        base = AttentionCase([200] * VERIFY_TOKENS, [VERIFY_WIDTH] * VERIFY_TOKENS, page_size=16, window=window)
        whole = AttentionStep(base, CPU)
        built = self.make(whole.context())
        static = static_verify_step(base, whole, VERIFY_TOKENS, VERIFY_WIDTH, tree=tree)
        built.plan_capture(static.batch)
        for prefix, trees in VERIFY_REPLAYS:
            step = verify_step(base, whole, prefix, trees, VERIFY_TOKENS)
            assert step.drafts is not None
            if tree or step.drafts.is_chain:
                copy_inputs(step, static)
                built.plan_replay(static.batch)
                self.compare_output(step, built.forward(static.q, static.layer, static.batch))


def test_sharing_must_pay():
    step = AttentionStep(AttentionCase([160] * 4, [1] * 4, groups=[(4, 160)], page_size=16), CPU)
    built, shared = TestTriton().make(step.context()), step.batch.shared
    assert shared is not None
    assert not built.shares(step.batch)
    shared.lens[:] = backend.SHARING_BYTES  # tokens
    assert built.shares(step.batch)
    shared.window, shared.positions = 1000, shared.lens.repeat(4)
    assert not built.shares(step.batch), "rows see few of these tokens"
    shared.window = backend.SHARING_BYTES
    assert built.shares(step.batch)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_draft_whose_values_overflow_harms_no_query_before_it(one_by_one: bool):
    """The draft is alone in its chunk, of which the query before it sees nothing."""
    size = 16
    tile = tiles.choose(4, size, size, torch.float32)
    keys = tile.keys + 1
    k, v = torch.randn(2, 1, 2 * tile.keys, 1, size)
    v[0, keys - 1] = torch.inf
    q, out = torch.randn(2, 1, size), torch.zeros(2, 1, size)
    indptr, lens, table = torch.tensor([0, 2]).int(), torch.tensor([keys]).int(), torch.zeros(1, 1).int()
    entries = ScheduleEntries(indptr, lens, table, tile, slots=4, programs=8, fewer=True)
    made, partial = Schedule.empty(8, 2, CPU), PartialResults.empty(64, 1, size, CPU)
    layer = AttentionLayer(0, size**-0.5)
    fill(made, entries, 1, None, partial=False)
    attend(q, KVTensors(k, v), entries, made, layer, torch.arange(keys - 2, keys), out, partial, leads=True)
    assert made.records[:2, 2].tolist() == [0, tile.keys]
    merge(out, range(2), [(made, partial)], None, one_by_one=one_by_one)
    seen = k[0, : keys - 1, 0] @ q[0, 0] * layer.scale
    torch.testing.assert_close(out[0, 0], seen.softmax(0) @ v[0, : keys - 1, 0], atol=1e-5, rtol=1e-5)
    assert out[1].isinf().all()


@pytest.mark.parametrize(
    ("lens", "kv_dtype", "expected"),
    [
        ([580], None, backend.EVEN),
        ([16_000], None, backend.EVEN),
        ([32_768], None, backend.UNEVEN),
        ([16_000, 100], None, backend.UNEVEN),
        ([1_000] * 2, None, backend.EVEN),
        ([2_000] * 2, None, backend.UNEVEN),
        ([2_500, 600, 600, 600], None, backend.EVEN),
        ([4_500], None, backend.EVEN),
        ([8_000] * 2, None, backend.UNEVEN),
        ([6_000, 600, 600, 600], None, backend.UNEVEN),
        ([1_500, 600, 600, 600], None, backend.EVEN),
        ([4_000] * 4, None, backend.EVEN),
        ([32_768] * 4, None, backend.UNEVEN),
        ([32_768] * 4, torch.float8_e4m3fn, backend.UNEVEN),
        ([40_000, 30_000, 30_000, 25_000], None, backend.UNEVEN),
        ([120_000, 200, 200, 200], None, backend.UNEVEN),
        ([120_000] + [200] * 7, None, backend.UNEVEN),
        ([16_384] * 8, None, backend.EVEN),
        ([8_192] * 32, None, backend.EVEN),
        (list(range(14_000, 2_000, -375)), None, backend.EVEN),
        ([32_000] + [600] * 63, None, backend.UNEVEN),
        ([580] * 256, None, backend.EVEN),
    ],
    ids=str,
)
def test_the_variant_follows_from_lengths(monkeypatch, lens, kv_dtype, expected):
    """Shapes of an H200, with 8 key heads of 128."""
    assert chosen(monkeypatch, lens, kv_dtype) == expected


@pytest.mark.parametrize("rows", [96, 112, 128])
def test_the_variant_is_the_faster_of_those_that_were_measured(monkeypatch, rows):
    """docs/benchmarks.md has the times of both."""
    random = np.random.default_rng(0)
    for shortest, longest in ((100, 1024), (100, 2048), (900, 2048)):
        lens = random.integers(shortest, longest, rows, endpoint=True)
        assert chosen(monkeypatch, lens, None) == backend.UNEVEN
        assert chosen(monkeypatch, np.full(rows, longest), None) == backend.EVEN


@pytest.mark.parametrize("rows", [56, 64])
def test_few_rows_in_one_part_are_even_unless_one_of_them_is_very_long(monkeypatch, rows):
    lens = np.sort(np.random.default_rng(0).integers(500, 1900, rows))[::-1]
    for even in (lens, np.full(rows, 580)):
        assert chosen(monkeypatch, even, None) == backend.EVEN
        assert chosen(monkeypatch, [8_000, *even[1:]], None) == backend.UNEVEN


@pytest.mark.parametrize("rows", [160, 192, 224, 256])
def test_rows_of_several_rounds_are_even_if_the_longest_start_first(monkeypatch, rows):
    lens = np.random.default_rng(0).integers(100, 1024, rows, endpoint=True)
    assert chosen(monkeypatch, lens, None) == backend.UNEVEN
    assert chosen(monkeypatch, np.sort(lens)[::-1], None) == backend.EVEN


def test_the_variant_follows_from_the_tile_of_the_graph(monkeypatch):
    """98 rows have the largest tile, of which two rounds run. A graph of 112 rows has the smallest one, all of which run at once."""
    lens = np.sort(np.random.default_rng(0).integers(900, 2048, 98, endpoint=True))[::-1]
    assert chosen(monkeypatch, lens, None) == backend.EVEN
    assert chosen(monkeypatch, lens, None, captured=(64, 112, 128)) == backend.UNEVEN
    assert chosen(monkeypatch, lens, None, captured=(64,)) == backend.EVEN


def test_few_rows_are_even_if_the_other_variant_is_a_schedule(monkeypatch):
    """Rows of heads of 64 are not read in more parts by the other variant."""
    assert chosen(monkeypatch, [3_000] * 4, None, head_dim=64) == backend.EVEN


def test_rows_start_in_the_place_that_is_free_first():
    lens = np.array([9, 4, 6, 5, 5, 1, 2], np.int32)
    assert sorted(backend.keys_of_places(lens, 3)) == [10, 11, 11]  # 9 + 1, 4 + 5 + 2, 6 + 5
    assert backend.keys_of_places(lens, 7).tolist() == lens.tolist()
    assert backend.keys_of_places(lens, 1).tolist() == [lens.sum()]
    assert lens.tolist() == [9, 4, 6, 5, 5, 1, 2], "the lengths of the batch are not changed"


def chosen(monkeypatch, lens, kv_dtype, captured=(), head_dim=128):
    """Return the variant of a decode step of rows of these lengths on an H200, after graphs of ``captured`` rows."""
    monkeypatch.setattr(backend, "CPU_PROCESSORS", 132)
    case = AttentionCase([3], [1], heads=32, kv_heads=8, head_dim=head_dim, dtype=torch.float16, kv_dtype=kv_dtype)
    step = AttentionStep(case, CPU)
    built = backend.TritonAttention(TritonConfig(), step.context())
    for rows in captured:
        built.plan_capture(AttentionStep(replace(case, prefix=[3] * rows, extend=[1] * rows), CPU).batch)
    batch = step.batch
    batch.prefix_lens = np.array(lens, np.int32) - 1
    batch.slots = np.arange(len(lens), dtype=np.int32)
    return built.variant(batch)
