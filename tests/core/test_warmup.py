"""Test which decode steps are captured before they are needed, and when. Graphs and kernels are stand-ins.

.venv/bin/python -m pytest -q tests/core/test_warmup.py
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dovetail import LLM
from dovetail.engine import engine
from dovetail.engine.captures import NO_UPDATES, larger_sizes
from dovetail.engine.graphs import GraphKey
from dovetail.engine.pieces import StepSeconds
from dovetail.engine.warmup import BUSY_TOKENS, LARGE_STEPS, LAYERS, VARIANTS, WarmUp, likely_keys
from dovetail.errors import RankLostError, WeightsError
from dovetail.interfaces.expert_shapes import ExpertsShape, RoutingRule
from dovetail.interfaces.experts import ExpertsBackend
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.experts import Experts, use_backend
from dovetail.ops.triton.ahead import KernelCounts
from dovetail.testing.ranks import run_ranks, thread_meshes
from dovetail.types import Batch

SIZES = [1, 2, 4, 8]
SECONDS = StepSeconds(token=1e-5, launch=1e-2)


class FakeKernels:
    """Stand in for kernels that other processes compile. ``mode`` is what happens instead of launches."""

    def __init__(self, compiled):
        self.compiled, self.mode, self.waited = compiled, None, False

    is_active, is_known, counts, directory, position = True, False, KernelCounts(), "nowhere", 0

    def has_compiled(self, position):
        return self.compiled

    def wait_for_triton(self):
        assert self.mode is None
        self.waited = True

    @contextmanager
    def noting(self):
        assert self.is_active
        self.mode = "note"
        yield
        self.mode = None

    @contextmanager
    def loading(self):
        self.mode = "load"
        yield
        self.mode = None

    def wait(self, seconds):
        assert seconds == 0, "the engine must not wait for kernels"
        return self.compiled


class FakeGraphs:
    """Capture decode steps, and raise for the ``impossible`` sizes. ``events`` records what happens."""

    shared, most_rows = (False, True), max(SIZES)

    def __init__(self, kernels, impossible=(), broken=()):
        self.sizes, self.kernels, self.impossible, self.broken = SIZES, kernels, impossible, broken
        self.refused, self.loaded, self.events = set(), set(), []

    @property
    def captured(self):
        return [key.rows for what, key in self.events if what == "capture"]

    num_captured = property(lambda self: len(self.captured))

    def missing(self):
        return (
            GraphKey(n, False) for n in self.sizes if n not in self.captured and GraphKey(n, False) not in self.refused
        )

    def graph_has_variant(self, variant, size):
        return variant == 0 or size <= self.most_rows

    def larger(self, key):
        return (key._replace(rows=rows) for rows in larger_sizes(self.sizes, key.rows))

    def is_captured(self, key):
        return ("capture", key) in self.events

    def rehearse(self, key, layers, *, attend):
        assert self.kernels.mode in ("load", "note"), "kernels of a rehearsal were launched"
        assert layers == LAYERS
        if key.rows in self.broken:
            raise RuntimeError("no such kernel")
        self.events.append((self.kernels.mode, key))
        return torch.zeros(key.rows, 8)

    def capture(self, key):
        if key.rows in self.impossible:
            raise RuntimeError("no memory")
        self.events.append(("capture", key))


def make(compiled, mesh=SINGLE, attends=True, **given):
    warm_up = WarmUp(torch.device("cpu"), ModelInfo("", 1, 1, 1, 1, 1, 1, 1, ()), mesh, attend_decode=attends)
    warm_up._kernels = FakeKernels(compiled)
    return warm_up, FakeGraphs(warm_up._kernels, **given)


def step(tokens, num_extend=1):
    one = np.zeros(1, np.int32)
    return Batch([], num_extend, one, one, np.array([tokens], np.int32), np.ones(1, np.bool_), NO_UPDATES)


def test_with_compiled_kernels_steps_are_captured_at_the_start():
    warm_up, graphs = make(True)
    assert warm_up.start(graphs, SECONDS, 512)
    assert [key for what, key in graphs.events if what == "capture"] == [
        GraphKey(rows, shared) for rows in (8, 4, 2, 1) for shared in (False, True)
    ]
    assert graphs.loaded == {GraphKey(rows, shared) for rows in SIZES for shared in (False, True)}
    assert [what for what, _ in graphs.events] == ["load", "capture"] * 8
    warm_up.between_steps(graphs, step(10**6))
    assert len(graphs.captured) == 8


@pytest.mark.parametrize(("factor", "ranks"), [(0.99, 1), (1.01, 1), (1.01, 2)])
def test_large_models_capture_steps_with_shared_prefixes_when_they_are_needed(factor, ranks):
    """Ranks of one model capture nothing between steps, and so capture all at the start."""
    mesh = SimpleNamespace(tp=SimpleNamespace(size=ranks, rank=0, agree=lambda ok: ok))
    warm_up, graphs = make(True, mesh)
    chunk = 1000
    assert warm_up.start(graphs, StepSeconds(factor * LARGE_STEPS / chunk, 1.0), chunk)
    shared = (False,) if factor > 1 and ranks == 1 else (False, True)
    assert [key for what, key in graphs.events if what == "capture"] == [
        GraphKey(rows, shares) for rows in (8, 4, 2, 1) for shares in shared
    ]
    warm_up.between_steps(graphs, step(10**6))
    assert len(graphs.captured) == 4 * len(shared)


def test_steps_without_their_attention_are_run_before_they_are_captured():
    """A backend without attention.rehearsal makes its plan in a run, which must not be the one that is captured."""
    warm_up, graphs = make(True, attends=False)
    assert warm_up.start(graphs, SECONDS, 512)
    assert len(graphs.captured) == 8
    assert not graphs.loaded


class LayerOfExperts(ExpertsBackend):
    """Make no products: what a layer computes with is a name."""

    def __init__(self):
        self.layer = Experts(ExpertsShape(8, 8, RoutingRule(4, 2)), SINGLE)
        use_backend(self.layer, self)

    def product(self, weights):
        return SimpleNamespace(describe="own")


def test_experts_of_backends_without_rehearsal_are_left_out_where_kernels_are_not_launched():
    """They would read experts that no kernel has chosen. Their own kernels run before a step is captured."""
    layer, seen = LayerOfExperts().layer, []
    for leaves_out in (False, True):
        warm_up, graphs = make(True)
        if leaves_out:
            warm_up.leave_out_experts(layer)
        graphs.rehearse = lambda key, layers, *, attend: seen.append(layer.product.describe) or torch.zeros(key.rows, 8)
        assert warm_up._note(lambda: seen.append(layer.product.describe))
        assert warm_up.start(graphs, SECONDS, 512)
        assert set(seen) == {"left out" if leaves_out else "own"}
        assert bool(graphs.loaded) != leaves_out
        warm_up, _ = make(False)
        if leaves_out:
            warm_up.leave_out_experts(layer)
        with warm_up.measuring():
            assert warm_up._kernels.mode == (None if leaves_out else "note")
            assert layer.product.describe == "own"
        seen.clear()


def test_without_kernels_nothing_is_captured_until_they_are_compiled():
    warm_up, graphs = make(False)
    assert not warm_up.start(graphs, SECONDS, 512)
    warm_up.between_steps(graphs, step(BUSY_TOKENS))
    assert graphs.events == []
    warm_up._kernels.compiled = True
    warm_up.between_steps(graphs, step(BUSY_TOKENS - 1))
    warm_up.between_steps(graphs, step(BUSY_TOKENS, num_extend=0))
    warm_up.between_steps(None, step(BUSY_TOKENS))
    assert graphs.events == [], "the device is not busy for as long as a capture takes"
    for count in (1, 2):
        warm_up.between_steps(graphs, step(BUSY_TOKENS))
        assert len(graphs.captured) == count
    graphs.capture(GraphKey(4, False))  # on demand
    for _ in range(SIZES[-1]):
        warm_up.between_steps(graphs, step(BUSY_TOKENS))
    assert graphs.captured == [8, 8, 4, 4, 2, 2, 1, 1]


def test_what_fails_is_left_to_the_steps_that_need_it(caplog):
    warm_up, graphs = make(True, impossible=(4,), broken=(2,))
    assert warm_up.start(graphs, SECONDS, 512)
    assert graphs.captured == [8, 8, 2, 2, 1, 1]
    assert graphs.refused == {GraphKey(4, False), GraphKey(4, True)}
    assert GraphKey(2, False) not in graphs.loaded, "its kernels are not loaded, so that its capture must run it first"
    assert "no such kernel" in caplog.text
    assert "no memory" in caplog.text


@pytest.mark.parametrize("others", [True, False])
def test_ranks_capture_the_same_steps(others):
    """A rank whose kernels are compiled captures at the start only if those of the others are, and never between steps."""
    asked = []
    mesh = SimpleNamespace(tp=SimpleNamespace(size=2, rank=0, agree=lambda ok: asked.append(ok) or (ok and others)))
    warm_up, graphs = make(True, mesh)
    assert warm_up.start(graphs, SECONDS, 512) == others
    assert asked == [True, *([True] * 8 if others else [])], "each step that is loaded must be loaded on all ranks"
    expected = [8, 8, 4, 4, 2, 2, 1, 1] if others else []
    assert graphs.captured == expected
    warm_up.between_steps(graphs, step(BUSY_TOKENS))
    assert graphs.captured == expected
    asked.clear()
    warm_up, graphs = make(False, mesh)
    assert not warm_up.start(graphs, SECONDS, 512)
    assert asked == [False], "a rank that is not ready must report it to the others"


@pytest.mark.parametrize("broken", [[True, True], [True, False]], ids=["all", "one"])
def test_ranks_stop_if_a_step_fails_on_some_of_them_only(broken):
    """Their collectives would meet others from then on. If it fails on all ranks, all of them go on without it."""
    meshes = thread_meshes(2)

    def run(mesh):
        warm_up, graphs = make(True, mesh, broken=(4,) if broken[mesh.tp.rank] else ())
        warm_up.start(graphs, SECONDS, 512)
        return graphs.loaded

    if all(broken):
        rows = [{key.rows for key in loaded} for loaded in run_ranks(meshes, run, meshes)]
        assert rows == [{1, 2, 8}] * 2
    else:
        with pytest.raises(RankLostError, match="could not be prepared on some of 2 ranks"):
            run_ranks(meshes, run, meshes)


@pytest.mark.parametrize(
    ("compiled", "attends", "others", "expected"),
    [
        (False, True, True, "note"),
        (True, True, True, None),  # nothing is waited for
        (False, False, True, None),  # the backend reads what kernels write
        (False, True, False, None),  # all ranks launch their collectives or none does
    ],
)
def test_memory_is_measured_without_waiting_for_kernels(compiled, attends, others, expected):
    mesh = SimpleNamespace(tp=SimpleNamespace(size=2, rank=0, agree=lambda ok: ok and others))
    warm_up, _ = make(compiled, mesh)
    warm_up._attend_prefill = attends
    with warm_up.measuring():
        assert warm_up._kernels.mode == expected
        assert warm_up._kernels.waited == (expected is None), "kernels are launched before Triton can load them"
    assert warm_up._kernels.mode is None
    warm_up._kernels = None
    with warm_up.measuring():
        pass


def test_prompts_are_noted_before_the_weights_are_loaded(monkeypatch):
    events = []
    monkeypatch.setattr(WarmUp, "note_prompts", lambda *_: events.append("note"))
    load = engine.load_weights
    monkeypatch.setattr(engine, "load_weights", lambda *given, **more: events.append("load") or load(*given, **more))
    LLM("tiny", device="cpu", grammar="none")
    assert events == ["note", "load"]


@pytest.mark.parametrize(("here", "others"), [(True, True), (True, False), (False, True)])
def test_all_ranks_note_kernels_or_none_of_them(here, others):
    """Ranks may communicate while they note kernels. After a launch that has waited too long, nothing can be noted."""
    mesh = SimpleNamespace(tp=SimpleNamespace(size=2, rank=0, agree=lambda ok: ok and others))
    warm_up, graphs = make(True, mesh)
    warm_up._kernels.is_active = here
    warm_up.note_decode(graphs)
    assert {what for what, _ in graphs.events} == ({"note"} if here and others else set())


@pytest.mark.parametrize(("here", "others"), [(True, True), (True, False), (False, True)])
def test_known_kernels_are_noted_only_if_another_rank_does_not_know_them(here, others):
    answers = iter([True, here and others])
    mesh = SimpleNamespace(tp=SimpleNamespace(size=2, rank=0, agree=lambda ok: next(answers, ok)))
    warm_up, graphs = make(True, mesh)
    warm_up._kernels.is_known = here
    warm_up.note_decode(graphs)
    assert {what for what, _ in graphs.events} == (set() if here and others else {"note"})


def test_steps_whose_kernels_are_known_are_captured_at_the_start_without_being_noted(caplog):
    caplog.set_level(logging.INFO)
    warm_up, graphs = make(True)
    warm_up._kernels.is_known, warm_up._kernels.counts = True, KernelCounts(9, 9)
    warm_up.note_decode(graphs)
    assert "9 of 9 Triton kernels are in nowhere" in caplog.text
    assert warm_up.start(graphs, SECONDS, 512)
    assert sorted(graphs.captured) == sorted(2 * SIZES)
    assert {what for what, _ in graphs.events} == {"load", "capture"}


def test_an_engine_that_cannot_be_built_ends_the_processes_that_compile(monkeypatch):
    closed = []
    monkeypatch.setattr(WarmUp, "close", lambda self: closed.append(True))

    def load_weights(*given, **more):
        raise WeightsError("no weights")

    monkeypatch.setattr(engine, "load_weights", load_weights)
    with pytest.raises(WeightsError, match="no weights"):
        LLM("tiny", device="cpu", grammar="none")
    assert closed == [True]


def test_one_row_comes_first_among_the_kernels():
    _, graphs = make(True)
    keys = list(likely_keys(graphs))
    assert keys[:8] == [GraphKey(rows, shared) for rows in (1, 8, 4, 2) for shared in (False, True)]
    assert len(keys) == len(set(keys)) == 16
    graphs.most_rows = 2
    assert list(likely_keys(graphs)) == keys[:8] + [
        GraphKey(rows, shared, 1) for rows in (1, 2) for shared in (False, True)
    ]


class Compiling(FakeKernels):
    """Stand in for kernels that are compiled in the order in which they were noted, ``done`` of them so far."""

    position, done = 0, 0

    def wait(self, seconds):
        return super().wait(seconds) and self.has_compiled(self.position)

    def has_compiled(self, position):
        return self.done >= position


def test_idle_moments_capture_what_is_compiled_and_wait_for_nothing(monkeypatch):
    """A graph whose kernels are not compiled would keep the engine from a request that arrives."""
    warm_up, graphs = make(True)
    kernels = warm_up._kernels = graphs.kernels = Compiling(True)
    rehearse = graphs.rehearse

    def noted(key, layers, *, attend):
        kernels.position += kernels.mode == "note"
        return rehearse(key, layers, attend=attend)

    monkeypatch.setattr(graphs, "rehearse", noted)
    warm_up.note_decode(graphs)
    order = [key for what, key in graphs.events if what == "note"]
    assert not warm_up.capture_next([graphs])
    for kernels.done, key in enumerate(order[: 2 * len(SIZES)], 1):
        if key.shared:  # of these, none is missing
            continue
        assert warm_up.capture_next([graphs])
        assert not warm_up.capture_next([graphs]), "a capture would wait for a kernel"
        assert graphs.captured[-1] == key.rows
    assert graphs.captured == [1, 8, 4, 2], "in the order in which kernels are compiled"


def test_likely_steps_are_captured_while_other_kernels_are_compiled(monkeypatch):
    """In the order in which their kernels are compiled, which is that of the steps that many requests meet."""
    warm_up, graphs = make(True)
    kernels = warm_up._kernels = graphs.kernels = Compiling(True)
    rehearse = graphs.rehearse

    def noted(key, layers, *, attend):
        kernels.position += kernels.mode == "note"
        return rehearse(key, layers, attend=attend)

    monkeypatch.setattr(graphs, "rehearse", noted)
    warm_up.note_decode(graphs)
    assert not warm_up.start(graphs, SECONDS, 512), "it captures only if all kernels are compiled"
    for done in range(1 + 2 * len(SIZES)):
        kernels.done = done
        for _ in range(2):
            warm_up.between_steps(graphs, step(BUSY_TOKENS))
        assert len(graphs.captured) == done, "a capture would wait for a kernel"
    keys = [key for what, key in graphs.events if what == "capture"]
    assert keys == list(likely_keys(graphs))[: 2 * len(SIZES)]
    assert graphs.loaded == set(keys)


class FakeDrafts(FakeGraphs):
    """Stand in for graphs of a drafter's passes, whose keys are numbers."""

    def likely(self, variants):
        assert variants == VARIANTS
        return [3, 1]

    def missing(self):
        return (key for key in (1, 2, 3) if ("capture", key) not in self.events)

    def rehearse(self, key):
        assert not torch.empty(8, dtype=torch.int64).any(), "torch would take what a kernel did not write for tokens"
        self.kernels.position += 1
        self.events.append((self.kernels.mode, key))

    def capture(self, key):
        self.events.append(("capture", key))


def test_a_drafters_passes_are_captured_once_their_kernels_are_compiled():
    warm_up, _ = make(True)
    kernels = warm_up._kernels = Compiling(True)
    drafts = FakeDrafts(kernels)
    warm_up.note_drafts(drafts)
    assert drafts.events == [("note", 3), ("note", 1)]
    assert not warm_up.capture_next([drafts])
    for kernels.done, captured in ((1, 3), (2, 1), (2, 2)):
        assert warm_up.capture_next([drafts])
        assert drafts.events[-1] == ("capture", captured)


def test_drafts_are_not_noted_if_something_would_read_what_kernels_write():
    warm_up, _ = make(True, attends=False)
    drafts = FakeDrafts(warm_up._kernels)
    warm_up.note_drafts(drafts)
    warm_up, _ = make(True)
    warm_up.leave_out_experts(torch.nn.Module())
    warm_up.note_drafts(drafts)
    assert drafts.events == []


def test_graphs_whose_kernels_are_not_noted_wait_for_all():
    warm_up, graphs = make(True)
    kernels = warm_up._kernels = Compiling(True)
    kernels.position = 3
    for kernels.done in (0, 2):
        assert not warm_up.capture_next([graphs])
    kernels.done = 3
    assert warm_up.capture_next([graphs])
    assert graphs.captured == [1]


def test_ranks_capture_nothing_until_the_kernels_of_all_are_compiled():
    meshes = thread_meshes(2)

    def run(mesh):
        warm_up, graphs = make(True, mesh)
        kernels = warm_up._kernels = Compiling(True)
        kernels.position, found = 1, []
        for done in ([0, 1], [1, 0], [1, 1]):
            kernels.done = done[mesh.tp.rank]
            found.append(warm_up.capture_next([graphs]))
        return found

    assert run_ranks(meshes, run, meshes) == [[False, False, True]] * 2
