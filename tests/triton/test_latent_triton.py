"""Test latent attention of the triton backend, interpreted: every phase, tile and division of keys against the suite's
reference in float64. Arithmetic in bfloat16 is wrong where Triton is interpreted.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_latent_triton.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

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
from dovetail.testing.attention_reference import AttentionCase, AttentionStep, reference
from dovetail_attention.triton import backend, tiles
from dovetail_attention.triton import merge as merge_module
from dovetail_attention.triton.attend import PartialResults
from dovetail_attention.triton.latent import LatentPages, attend_latents
from dovetail_attention.triton.merge import merge
from dovetail_attention.triton.schedule import Schedule, ScheduleEntries, fill

CPU = torch.device("cpu")
LATENT: dict[str, Any] = {"heads": 20, "kv_heads": 1, "head_dim": 24, "value_dim": 16}
FORMS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": torch.float16},
    "odd sizes": {"head_dim": 19, "value_dim": 12, "page_size": 7},
    "fp8 pool": {"kv_dtype": torch.float8_e4m3fn, "heads": 3},
    "scales": {"kv_dtype": torch.float8_e4m3fn, "heads": 3, "scales": "token_head", "key_scale": 2.0**-9},
    "scales, fp16": {
        "kv_dtype": torch.float8_e4m3fn,
        "scales": "token_head",
        "key_scale": 2.0**-9,
        "dtype": torch.float16,
    },
}
LENGTHS = [150, 3, 0, 80, 16, 15, 33, 1]
FULL = pytest.mark.full
FLIPPED = pytest.mark.parametrize("flip", [False, True], ids=["rows left", "latents left"])


class Latent(AttentionSuite):
    """The functions of the suite, without its cases: its name does not begin with Test."""

    name = "triton"
    device = "cpu"


SUITE = Latent()


def latent(base: AttentionCase, **changes: Any) -> AttentionCase:
    """Return ``base`` with few heads that share small latents, and with ``changes``."""
    return replace(base, **LATENT | changes)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "CHUNK", 64)


def use_tile(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    *,
    flip: bool = False,
    processors: int = 6,
    keys: int = 16,
    halves: bool = False,
    resident: int = 1,
) -> None:
    """Make a backend choose a tile for latents, on a device of this number of processors."""
    tile = tiles.AttentionTile(rows, keys, 4, 1, resident, flip, halves)
    monkeypatch.setattr(tiles, "choose_latent", lambda *_, **__: tile)
    monkeypatch.setattr(backend, "CPU_PROCESSORS", processors)


@FLIPPED
@pytest.mark.parametrize(
    ("level", "slots"),
    [(True, 4), (False, 4), *(pytest.param(*case, marks=FULL) for case in ((True, 20), (True, 1), (False, 20)))],
)
def test_rows_of_many_lengths_by_any_number_of_programs(
    monkeypatch: pytest.MonkeyPatch, level: bool, slots: int, flip: bool
):
    """Decode rows through page tables: keys are cut anywhere, and rows without keys get nothing. Values are merged whole
    or, as large ones are, in pieces, small or large shares."""
    monkeypatch.setattr(merge_module, "PIECE", 4 if flip else 128)
    case = latent(AttentionCase(LENGTHS, [1] * len(LENGTHS), page_size=16))
    step = AttentionStep(case, CPU)
    rows, heads = len(LENGTHS), case.heads
    tile = tiles.AttentionTile(16, 16, 4, 1, 1, flip)
    per_row = -(-heads // tile.rows)
    entries = ScheduleEntries(
        step.batch.qo_indptr, step.batch.kv_lens, step.batch.page_table, tile, slots, slots * per_row, fewer=True
    )
    entries = entries._replace(level=level)
    schedule = Schedule.empty((rows + slots) * per_row, rows, CPU)
    partial = PartialResults.empty(rows * heads + slots * per_row * tile.rows, 1, 16, CPU)
    out = torch.full((rows, heads, 16), torch.nan)
    fill(schedule, entries, heads, None, partial=False)
    latents = LatentPages(step.pool.keys(case.layer_id), 16)
    attend_latents(step.q, latents, entries, schedule, step.layer.scale, out, partial, leads=True)
    expected = reference(step)
    bounds = ((0, 1 << 40, 8), (1 << 40, 1 << 40, 8), (1 << 40, 1 << 40, 2), (0, 1, 8)) if flip else ((0, 0, 8),)
    for few, many, parts in bounds:
        monkeypatch.setattr(merge_module, "LONG_FEW", few)
        monkeypatch.setattr(merge_module, "LONG_MANY", many)
        monkeypatch.setattr(merge_module, "FEW_SIZES", (2, 8, parts, 1))
        merged = out.clone()
        merge(merged, range(rows), [(schedule, partial)], None)
        torch.testing.assert_close(merged.double(), expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("slots", [1, 7, 100])
@pytest.mark.parametrize("lens", [[5, 0, 0, 17, 16, 0], [64] * 12, [0, 0, 900, 0, 31], [0, 0]], ids=str)
def test_equal_spans(lens: list[int], slots: int):
    """Every key of every row is in exactly one chunk, and no span has more blocks than another one except the last."""
    tile, per_row, rows = tiles.AttentionTile(16, 16, 4, 1, 1), 2, len(lens)
    table = torch.zeros(rows, 1, dtype=torch.int32)
    entries = ScheduleEntries(
        torch.arange(rows + 1, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        table,
        tile,
        slots,
        0,
        level=True,
    )
    schedule = Schedule.empty((rows + slots) * per_row, rows, CPU)
    schedule.records.fill_(-7)
    fill(schedule, entries, 20, None, partial=True)
    count, starts = int(schedule.count), schedule.span_starts[: slots + 1].tolist()
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert starts[-1] * per_row == count
    records = schedule.records[:count].tolist()
    for tile_index in range(per_row):
        found = [record for record in records if record[1] == 16 * tile_index]
        seen = [[] for _ in lens]
        for entry, _, low, high, *_ in found:
            seen[entry] += range(low, high)
        assert seen == [list(range(n)) for n in lens]
        blocks = [-(-(r[3] - r[2]) // 16) for r in found]
        spans = [sum(blocks[a:b]) for a, b in pairwise(starts)]
        assert all(n == spans[0] for n in spans[: spans.index(0) - 1 if 0 in spans else -1])
        assert max(spans) == -(-sum(blocks) // slots)
    bases = {(r[7] + m) for r in records for m in range(r[1], min(r[1] + 16, 20))}
    assert len(bases) == 20 * count // per_row, "each partial result has its own place"


@FLIPPED
@pytest.mark.parametrize(
    ("step", "form"),
    [
        ("mixed", "fp16"),
        ("trees and extend", "odd sizes"),
        ("mixed", "fp8 pool"),
        ("mixed", "scales"),
        ("decode", "scales, fp16"),
        *(
            pytest.param(step, form, marks=FULL)
            for step in ("decode", "extend after a prefix", "verify chains", "trees and extend")
            for form in FORMS
        ),
    ],
)
def test_phases(monkeypatch: pytest.MonkeyPatch, step: str, form: str, flip: bool):
    use_tile(monkeypatch, 32, flip=flip)
    SUITE.compare(latent(STEPS[step][0], **FORMS[form]))


@pytest.mark.parametrize(
    "step", ["decode", "trees and extend", *(pytest.param(step, marks=FULL) for step in ("verify chains", "mixed"))]
)
@pytest.mark.parametrize(
    ("form", "halves", "resident"),
    [({}, True, 1), ({}, True, 2), ({"value_dim": 24}, False, 1), (FORMS["fp8 pool"], False, 1)],
    ids=str,
)
def test_values_in_halves(
    monkeypatch: pytest.MonkeyPatch, step: str, form: dict[str, Any], halves: bool, resident: int
):
    """Latents that would need padding or a conversion are read whole."""
    use_tile(monkeypatch, 16, halves=True, resident=resident)
    found, can_halve = set[bool](), LatentPages.can_halve
    monkeypatch.setattr(LatentPages, "can_halve", lambda *given: found.add(can_halve(*given)) or can_halve(*given))
    SUITE.compare(latent(STEPS[step][0], **{"head_dim": 48, "value_dim": 32, "dtype": torch.float16} | form))
    assert found == {halves}


@FLIPPED
@pytest.mark.parametrize("processors", [8, pytest.param(40, marks=FULL)])
def test_trees_of_several_tiles(monkeypatch: pytest.MonkeyPatch, processors: int, flip: bool):
    """Spans are equal where the heads of all queries of a row fit into a tile; otherwise rows are cut."""
    use_tile(monkeypatch, 32, flip=flip, processors=processors)
    case, _ = STEPS["trees"]
    for heads in (20, 5):
        SUITE.compare(latent(case, heads=heads))


@pytest.mark.parametrize(
    ("step", "flip"),
    [
        ("padding", True),
        *(
            pytest.param(step, flip, marks=FULL)
            for step in ("groups and single rows", "a group of one")
            for flip in (0, 1)
        ),
    ],
)
def test_shared_prefixes(monkeypatch: pytest.MonkeyPatch, step: str, flip: bool):
    use_tile(monkeypatch, 16, flip=bool(flip))
    SUITE.compare(latent(SHARED_STEPS[step]))


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=FULL)], ids=["alone", "shared"])
@torch.inference_mode()
def test_one_plan_serves_all_lengths(monkeypatch: pytest.MonkeyPatch, shared: bool):
    """A graph relies on this: after ``plan_capture``, lengths are read on the device."""
    use_tile(monkeypatch, 16, flip=True, keys=64)
    base = latent(AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS, page_size=16), heads=5)
    whole = AttentionStep(base, CPU)
    built = SUITE.make(whole.context())
    groups = [] if shared else None
    case = replace(base, prefix=[0] * GRAPH_ROWS, padding=GRAPH_ROWS, groups=groups)
    static = AttentionStep(case, CPU, whole)
    static.batch.prefix_lens = np.full(GRAPH_ROWS, 2047, np.int32)
    static.batch.variant = built.variant(static.batch)
    built.plan_capture(static.batch)
    for prefix, groups in REPLAYS:
        padding = GRAPH_ROWS - len(prefix)
        case = replace(base, prefix=prefix + [0] * padding, padding=padding, groups=groups if shared else None)
        step = AttentionStep(case, CPU, whole)
        copy_inputs(step, static)
        built.plan_replay(static.batch)
        SUITE.compare_output(step, built.forward(static.q, static.layer, static.batch))


@pytest.mark.parametrize(
    ("tree", "heads"),
    [(False, 3), (True, 8), pytest.param(True, 3, marks=FULL), pytest.param(False, 20, marks=FULL)],
    ids=["chains, equal spans", "trees, cut rows", "trees, equal spans", "chains, cut rows"],
)
@torch.inference_mode()
def test_one_plan_serves_however_tokens_are_divided_among_rows(monkeypatch: pytest.MonkeyPatch, tree: bool, heads: int):
    """A graph of verify rows relies on this; rows of one query and of none fill it up."""
    use_tile(monkeypatch, 16, flip=tree, processors=12, keys=64)
    base = AttentionCase([200] * VERIFY_TOKENS, [VERIFY_WIDTH] * VERIFY_TOKENS, page_size=16)
    base = latent(base, heads=heads)
    whole = AttentionStep(base, CPU)
    built = SUITE.make(whole.context())
    static = static_verify_step(base, whole, VERIFY_TOKENS, VERIFY_WIDTH, tree=tree)
    built.plan_capture(static.batch)
    for prefix, trees in VERIFY_REPLAYS:
        step = verify_step(base, whole, prefix, trees, VERIFY_TOKENS)
        assert step.drafts is not None
        if tree or step.drafts.is_chain:
            copy_inputs(step, static)
            built.plan_replay(static.batch)
            SUITE.compare_output(step, built.forward(static.q, static.layer, static.batch))


@pytest.mark.parametrize("flip", [True, pytest.param(False, marks=FULL)])
@torch.inference_mode()
def test_batch_invariance(monkeypatch: pytest.MonkeyPatch, flip: bool):
    """Chunks have the same bits in one program and in several, and rows alone have those that they have together."""
    use_tile(monkeypatch, 16, flip=flip)
    case = AttentionCase([70, 33, 130], [5, 1, 1], num_extend=1, batch_invariant=True)
    step = AttentionStep(latent(case, dtype=torch.float16), CPU)
    outs = []
    for most in (backend.CUT_TOKENS, 0):
        monkeypatch.setattr(backend, "CUT_TOKENS", most)
        built = SUITE.make(step.context())
        built.plan(step.batch)
        outs.append(built.forward(step.q, step.layer, step.batch))
        SUITE.compare_output(step, outs[-1])
    assert torch.equal(*outs)


def test_a_window_reads_latents_with_the_general_kernel(monkeypatch: pytest.MonkeyPatch):
    use_tile(monkeypatch, 16, flip=True)
    for step in ("decode", "mixed"):
        SUITE.compare(latent(STEPS[step][0], window=20, sinks=True, soft_cap=2.0, scale=0.5))


def test_tiles_follow_from_the_device_and_the_pool():
    sizes = torch.bfloat16, torch.bfloat16
    assert [tiles.choose_latent(n, *sizes, large_memory=True).rows for n in (1, 16, 20, 40, 512)] == [
        16,
        16,
        32,
        64,
        64,
    ]
    assert tiles.choose_latent(32, *sizes, large_memory=True).flip
    converted = [tiles.choose_latent(n, torch.bfloat16, torch.float8_e4m3fn, large_memory=True) for n in (16, 20, 512)]
    assert [tile.rows for tile in converted] == [16, 64, 64]
    assert not any(tile.flip for tile in converted)
    assert tiles.choose_latent(128, *sizes, large_memory=True, two=True).rows == 16
    small = tiles.choose_latent(128, *sizes, large_memory=False)
    assert (small.rows + 2 * small.keys) * 576 * 2 <= 99 << 10, "the rows and the blocks in flight fit on any device"
