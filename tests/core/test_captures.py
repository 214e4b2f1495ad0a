"""Test what is captured when, what follows a failed capture, and the largest step on a CPU.

.venv/bin/python -m pytest -q tests/core/test_captures.py
"""

from __future__ import annotations

import gc
import io
import itertools
import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from dovetail import LLM
from dovetail.engine.captures import (
    NEEDED_BEFORE_CAPTURE,
    STEPS_BETWEEN_CAPTURES,
    UPDATE_BYTES,
    CaptureAgreement,
    CaptureOnDemand,
    GraphRecorder,
    Staging,
    capture_all,
    ladder,
    larger_sizes,
    try_capture,
)
from dovetail.engine.dry_run import dry_run
from dovetail.engine.engine import Engine
from dovetail.engine.inputs import Inputs
from dovetail.engine.plans import PlanRunner
from dovetail.engine.progress import bytes_progress
from dovetail.engine.warmup import IdleCaptures, WarmUp
from dovetail.errors import RankLostError
from dovetail.interfaces.executor import WarmUpProgress
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.model import ModelInfo
from dovetail.testing.ranks import run_ranks, thread_meshes
from dovetail.types import PageUpdates


class Fake:
    """Capture sizes, and raise for the ``impossible`` ones."""

    def __init__(self, sizes, impossible=(), error=RuntimeError):
        self.sizes, self.impossible, self.error = sizes, impossible, error
        self.captured, self.refused = [], set()

    def missing(self):
        return (size for size in self.sizes if size not in self.captured and size not in self.refused)

    @property
    def num_captured(self):
        return len(self.captured)

    def larger(self, size):
        return larger_sizes(self.sizes, size)

    def is_captured(self, size):
        return size in self.captured

    def capture(self, size):
        if size in self.impossible:
            raise self.error("no memory")
        self.captured.append(size)


def test_what_cannot_be_captured_is_tried_once(caplog):
    caplog.set_level(logging.INFO)
    graphs, others = Fake([1, 2, 4], impossible=[2]), Fake([7])
    warm_up = WarmUp(torch.device("cpu"), ModelInfo("", 1, 1, 1, 1, 1, 1, 1, ()), SINGLE)
    before = warm_up.progress([graphs, others])
    assert before == (0, 0, 0, 4, 0)
    assert not before.done
    while warm_up.capture_next([graphs, others]):
        pass
    assert graphs.captured == [1, 4]
    assert graphs.refused == {2}
    assert others.captured == [7]
    assert warm_up.progress([graphs, others]) == (0, 0, 3, 0, 1)
    assert warm_up.progress([graphs, others]).done
    assert not warm_up.capture_next([graphs, others])
    lines = [message for message in caplog.messages if message.startswith("warm-up")]
    assert len(lines) == 2
    assert "4 graphs" in lines[0]
    assert "3 in all; 1 could not be captured" in lines[1]


def test_a_bar_shows_the_captures_of_idle_moments_on_a_terminal():
    shown = io.StringIO()
    report = IdleCaptures(2, Console(file=shown, force_terminal=True, width=100))
    report.advance(0.1)
    assert "capturing graphs" in shown.getvalue()
    assert "50%" in shown.getvalue()
    report.close(WarmUpProgress())


def test_only_the_first_rank_shows_bars():
    """The ranks share a terminal."""
    for rank, mesh in enumerate(thread_meshes(2)):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=True, width=100)
        capture_all(Fake([1, 2]), "sizes", mesh, console)
        IdleCaptures(2, console, shown=mesh.tp.rank == 0).advance(0.1)
        with bytes_progress("weights", 100, console, shown=mesh.tp.rank == 0) as advance:
            advance(50)
        assert [text in shown.getvalue() for text in ("capturing sizes", "capturing graphs", "weights")] == [
            not rank
        ] * 3


def test_a_lost_device_is_no_matter_of_captures():
    lost = getattr(torch, "AcceleratorError", None)
    if lost is None:
        pytest.skip("this torch has no error of its own for it")
    graphs = Fake([1], impossible=[1], error=lost)
    with pytest.raises(lost):
        try_capture(graphs, 1)
    assert not graphs.refused


def test_a_lost_rank_is_no_matter_of_captures():
    graphs = Fake([1], impossible=[1], error=RankLostError)
    with pytest.raises(RankLostError):
        try_capture(graphs, 1)
    assert not graphs.refused


@pytest.mark.parametrize("when", ["before", "in"])
def test_a_capture_that_fails_on_one_rank_fails_the_step_itself(when):
    """Also if it fails while the step is launched, as pieces do: its tokens are never sampled."""
    meshes, launched = thread_meshes(2), []

    def run(mesh):
        graphs = Fake([2], impossible=[2] if mesh.tp.rank else [])

        def launch(batch, graph):
            launched.append(mesh.tp.rank)
            if when == "in":
                try_capture(graphs, 2)

        runner = SimpleNamespace(can_run=lambda batch: True, launch=launch)
        if when == "before":
            try_capture(graphs, 2)
        engine = SimpleNamespace(
            runners=(runner,),
            eager_runner=runner,
            captures=[graphs],
            _agreement=CaptureAgreement(mesh),
            warm_up=SimpleNamespace(between_steps=lambda graphs, batch: None),
            graphs=None,
        )
        engine.check_captures = partial(Engine.check_captures, engine)
        engine._launch = partial(Engine._launch, engine)
        Engine.launch(engine, SimpleNamespace(drafts=object(), shared=None, adapters=None))

    with pytest.raises(RankLostError, match=r"could not be captured on some of 2 ranks"):
        run_ranks(meshes, run, meshes)
    assert sorted(launched) == ([0, 1] if when == "in" else [])


def test_a_capture_of_a_drafter_that_fails_on_one_rank_is_noticed_before_its_drafts_are_used():
    meshes = thread_meshes(2)

    def run(mesh):
        graphs = Fake([2], impossible=[2] if mesh.tp.rank else [])
        drafter = SimpleNamespace(propose=lambda batch: try_capture(graphs, 2))
        engine = SimpleNamespace(
            drafter=drafter,
            adapters=None,
            page_table=np.zeros((1, 1, 1), np.int32),
            device=torch.device("cpu"),
            captures=[graphs],
            _agreement=CaptureAgreement(mesh),
        )
        engine.check_captures = partial(Engine.check_captures, engine)
        runner = PlanRunner(engine)
        runner._batch = lambda plan: None
        return runner.propose(None)

    with pytest.raises(RankLostError, match=r"could not be captured on some of 2 ranks"):
        run_ranks(meshes, run, meshes)


def test_ranks_stop_if_only_some_of_them_could_capture_a_step():
    meshes = thread_meshes(2)

    def run(mesh, impossible):
        graphs, agreement = Fake([1, 2, 4], impossible=[2, *impossible]), CaptureAgreement(mesh)
        agreement.check([graphs])  # nothing was tried, so that the ranks need not wait for each other
        for size in (1, 2):
            try_capture(graphs, size)
            agreement.check([graphs])
        try_capture(graphs, 4)
        agreement.check([graphs])
        return graphs.captured

    assert run_ranks(meshes, lambda mesh: run(mesh, []), meshes) == [[1, 4], [1, 4]]
    with pytest.raises(RankLostError, match=r"could not be captured on some of 2 ranks"):
        run_ranks(meshes, lambda mesh: run(mesh, [4] if mesh.tp.rank else []), meshes)


class CountingRecorder(GraphRecorder):
    """Record steps without a device. The first ``failures`` captures fail, after the step was entered."""

    def __init__(self, mesh, failures):
        self._tp, self._device, self._warm, self._failures = mesh.tp, torch.device("cpu"), True, failures

    def _capture(self, step):
        if self._failures:
            self._failures -= 1
            raise RuntimeError("no memory")
        return "graph", torch.zeros(1)


def test_ranks_repeat_a_capture_together(monkeypatch):
    """The repetition runs the step, and with it its collectives. On some ranks only, these would meet those of the others'
    next step."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    meshes = thread_meshes(2)

    def run(mesh):
        runs = []
        CountingRecorder(mesh, failures=mesh.tp.rank).record(lambda: runs.append(mesh.tp.all_reduce(torch.ones(1))))
        return len(runs), mesh.tp.all_reduce(torch.full((1,), 5.0)).item()

    assert run_ranks(meshes, run, meshes) == [(2, 10.0), (2, 10.0)]


class Pools:
    """Follow the rules of torch's allocators for the memory of graphs: a pool whose graphs are all gone cannot be
    captured into again, and neither can one in which a capture has become invalid."""

    def __init__(self):
        self.users, self.recording, self.handles = {}, None, itertools.count(1)
        self.capturing = self.invalid = False

    def graph(self):
        return PoolGraph(self)

    def handle(self):
        return 0, next(self.handles)

    def end_on_device(self, device, pool):
        pass  # the allocator of pinned memory has no such function


class PoolGraph:
    def __init__(self, pools):
        self.pools, self.pool, self.ended = pools, None, False

    def capture_begin(self, pool, capture_error_mode):
        users = self.pools.users
        if users.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        users[pool] = users.get(pool, 0) + 1
        if self.pools.recording == pool:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pool = self.pools.recording = pool
        self.pools.capturing = True

    def capture_end(self):
        self.pools.capturing = False
        if self.pools.invalid:
            self.pools.invalid = False
            raise RuntimeError("operation failed due to a previous error during capture")
        if self.pool is None:
            raise RuntimeError("Capture must end on the same stream it began on.")
        assert self.pools.recording == self.pool
        self.pools.recording, self.ended = None, True

    def __del__(self):
        if self.ended:
            self.pools.users[self.pool] -= 1


class PoolRecorder(GraphRecorder):
    """Record steps without a device."""

    def __init__(self, mesh=SINGLE):
        super().__init__(torch.device("cpu"), mesh)
        self._warm = True

    beside = nullcontext


@pytest.fixture
def pools(monkeypatch):
    found = Pools()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", found.graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", found.handle)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end_on_device, raising=False)
    for name in ("Stream", "current_stream", "default_stream", "synchronize", "empty_cache", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return found


@pytest.mark.parametrize("invalid", [False, True], ids=["valid", "invalid"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_failed_capture_is_repeated_and_leaves_the_others_usable(pools, invalid, before):
    """The first capture of a pool may fail, and a capture after others."""
    recorder = PoolRecorder()
    earlier = [recorder.record(lambda: "earlier", loaded=True)[0] for _ in range(before)]
    calls = []

    def step():
        calls.append(pools.capturing)
        if calls == [True]:
            pools.invalid = invalid
            raise RuntimeError("not allowed in a capture")
        return "result"

    graph, result = recorder.record(step, loaded=True)
    assert (calls, result) == ([True, False, True], "result")
    assert all(one.ended and pools.users[one.pool] for one in [*earlier, graph])
    if not invalid:
        assert {one.pool for one in [*earlier, graph]} == {graph.pool}, "its memory is not used again"
    earlier.clear()
    del graph
    assert recorder.record(lambda: "later", loaded=True)[1] == "later", "all earlier graphs are gone"


@pytest.mark.parametrize("fails", [False, True])
def test_what_loads_a_step_runs_before_the_capture_and_the_step_only_before_a_second_one(pools, fails):
    recorder, calls = PoolRecorder(), []

    def load():
        calls.append(("load", pools.capturing))

    def step():
        calls.append(("step", pools.capturing))
        if fails and pools.capturing and calls.count(("step", True)) == 1:
            raise RuntimeError("a kernel that the first layers do not launch")
        return "result"

    again = [("step", False), ("step", True)] if fails else []
    assert recorder.record(step, load)[1] == "result"
    assert calls == [("load", False), ("step", True), *again]
    calls.clear()
    recorder.record(step, load, loaded=True)
    assert calls == [("step", True), *again]


def test_no_garbage_is_collected_during_a_capture(pools):
    recorder, seen = PoolRecorder(), []

    def step():
        seen.append((pools.capturing, gc.isenabled()))
        if len(seen) == 1:
            raise RuntimeError("not allowed in a capture")
        return "result"

    recorder.record(step, loaded=True)
    assert seen == [(True, False), (False, True), (True, False)]
    assert gc.isenabled()
    gc.disable()
    try:
        recorder.record(step, loaded=True)
        assert not gc.isenabled(), "it was disabled before"
    finally:
        gc.enable()


def test_a_capture_that_cannot_begin_or_end_leaves_the_recorder_usable(pools):
    recorder = PoolRecorder()
    recorder.record(lambda: pools.users, loaded=True)
    pools.recording = recorder._memory  # as if another capture into the pool had not ended
    with pytest.raises(RuntimeError, match="already recording"):
        recorder.begin()
    graph = recorder.begin()
    pools.invalid = True
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.end(graph)
    graph = recorder.begin()
    recorder.end(graph)
    assert graph.ended


def test_start_captures_everything_that_can_be_captured():
    graphs = Fake([1, 2, 4], impossible=[2])
    capture_all(graphs, "sizes")
    assert graphs.captured == [1, 4]
    assert graphs.refused == {2}


@pytest.mark.parametrize("needed", [None, 5])
def test_sizes_met_in_passing_are_not_captured(needed):
    graphs = Fake([1, 2], impossible=[2])
    captures = CaptureOnDemand(graphs, needed)
    least = needed or NEEDED_BEFORE_CAPTURE
    ready = [captures.is_ready(1) for _ in range(least + 2)]
    assert ready == [False] * (least - 1) + [True] * 3
    assert not any(captures.is_ready(2) for _ in range(least + STEPS_BETWEEN_CAPTURES + 2))
    assert graphs.captured == [1]
    assert graphs.refused == {2}


def test_captures_keep_their_distance():
    """A batch that grows in every step is captured in some of its steps only, and all sizes get their graphs later."""
    graphs = Fake(ladder(256))
    captures = CaptureOnDemand(graphs, 1)
    steps = list(range(1, 257))
    when = []
    for step, rows in enumerate(steps):
        before = len(graphs.captured)
        captures.is_ready(next(size for size in graphs.sizes if size >= rows))
        when += [step] * (len(graphs.captured) - before)
    assert len(when) > 5
    assert min(b - a for a, b in itertools.pairwise(when)) >= STEPS_BETWEEN_CAPTURES
    for size in [s for s in graphs.sizes for _ in range(STEPS_BETWEEN_CAPTURES)]:
        captures.is_ready(size)
    assert set(graphs.captured) == set(graphs.sizes)


def test_a_step_runs_in_a_larger_graph_until_its_own_is_captured():
    graphs = Fake([8, 16, 32, 256, 320, 512])
    graphs.captured = [16, 512]
    captures = CaptureOnDemand(graphs, 2)
    assert captures.choose(256) is None, "twice as many rows take longer than launching kernel by kernel"
    assert captures.choose(8) == 16
    assert captures.choose(8) == 8
    graphs.captured.append(320)
    assert captures.choose(256) == 320, "a capture a step ago"
    chosen = [captures.choose(256) for _ in range(STEPS_BETWEEN_CAPTURES)]
    assert chosen[-1] == 256
    assert captures.choose(32) is None
    assert graphs.captured == [16, 512, 8, 320, 256]


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [2]), (8, [16]), (40, [48, 56, 64, 80]), (128, [160]), (256, [320])]
)
def test_larger_sizes_cost_less_than_launching(size, expected):
    assert list(larger_sizes(ladder(512), size)) == expected


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 100, 256, 512, 1000])
def test_ladders_waste_little(rows):
    sizes = ladder(rows)
    assert sizes[-1] == rows
    assert sizes == sorted(set(sizes))
    for real in range(9, rows + 1):
        assert next(size for size in sizes if size >= real) <= real * 1.9


def test_the_largest_step_runs_over_a_single_page():
    engine = LLM("tiny", device="cpu", grammar="none", memory={"num_pages": 8}).loop.executor.rank.engine
    before = engine.pool.k[:, 1:].clone()
    dry_run(engine.model, engine.eager_runner.prefill, engine.pool, [40, 40, 9, 1, 1], 6)
    assert torch.equal(engine.pool.k[:, 1:].nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("size", [UPDATE_BYTES, 64])
def test_a_captured_step_updates_the_page_tables_of_all_cache_groups(size):
    """The device has tables of its own, which the step brings up to date with the step's one copy, or, if the updates do not
    fit in, with a separate one."""
    inputs = Inputs(np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4).copy(), 16, torch.device("cpu"))
    inputs.all_pages = torch.zeros(2, 3, 4, dtype=torch.int32)
    inputs.pages, *inputs.other_pages = inputs.all_pages.unbind(0)
    inputs._flat_pages, inputs.device = inputs.all_pages.view(-1), torch.device("meta")
    inputs.upload = lambda *arrays, updates: inputs._flat_pages.index_copy_(
        0, *map(torch.from_numpy, inputs.entries_of(updates))
    )
    staging = Staging.__new__(Staging)
    staging.size, staging.buffer = size, torch.zeros(size, dtype=torch.uint8)
    staging.send = lambda packed: staging.buffer[: len(packed)].copy_(torch.from_numpy(packed))
    slots, columns = np.array([1, 2, 2], np.int32), np.array([0, 1, 3], np.int32)
    staging.send_step(inputs, [np.arange(3)], PageUpdates(slots, columns, np.zeros((2, 3), np.int32)))
    expected = np.zeros((2, 3, 4), np.int32)
    tables = np.stack([inputs.page_table, *inputs.other_tables])
    expected[:, slots, columns] = tables[:, slots, columns]
    assert inputs.all_pages.tolist() == expected.tolist()
