"""Test captured steps of models with states against steps that are launched kernel by kernel. Graphs are replaced by the steps
themselves.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_state_graphs_triton.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

from state_models import VOCAB, save
from test_runners_triton import ROWS, attention, stand_in

from dovetail import LLM
from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, NO_UPDATES, STEPS_BETWEEN_CAPTURES
from dovetail.engine.graphs import DecodeGraphs
from dovetail.engine.grouped import backends_of, pools_of, states_of
from dovetail.engine.penalties import TokenCounts
from dovetail.engine.pieces import PiecewiseGraphs
from dovetail.engine.runners import DecodeGraphRunner, EagerRunner, EagerSampler
from dovetail.engine.sampler import Sampler
from dovetail.engine.sharing import NO_SHARING
from dovetail.engine.states import draft_rows
from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
from dovetail.interfaces.state_rows import StateRows
from dovetail.interfaces.state_space import ScanChannels, SSDHeads
from dovetail.ops.triton.mixers import TritonMixer
from dovetail.sampling_params import SamplingParams
from dovetail.types import AdmittedRequest, Batch

PREFIX = np.array([12, 7, 21], np.int32)


@pytest.fixture(scope="module", params=["lfm2", "mamba2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = save(request.param, tmp_path_factory.mktemp(request.param))
    memory, scheduler = {"num_pages": 60, "page_size": 4}, {"max_running": ROWS}
    executor: Any = LLM(
        str(directory), device="cpu", model={"dtype": "float32"}, grammar="none", memory=memory, scheduler=scheduler
    ).loop.executor
    engine = executor.rank.engine
    count = engine.budget.arena.pages[-1]
    requests = [SimpleNamespace(slot=slot, state_slots=(count + 3 * slot,)) for slot in range(1, ROWS + 1)]
    engine.inputs.states.admit(requests)
    if len(engine.inputs.page_table) and len(engine.page_table):
        pages = engine.budget.arena.blocks[0] * 2
        engine.page_table[0, 1:, :8] = pages + np.arange(ROWS * 8).reshape(ROWS, 8) % engine.budget.arena.pages[0]
    return engine


def batch_of(engine: Any, lens: list[int], num_extend: int = 0) -> Batch:
    rng, rows = np.random.default_rng(1), len(lens)
    slots, prefix = np.array([4, 1, 7], np.int32), PREFIX.copy()
    texts = [rng.integers(0, VOCAB, p + n + 1).astype(np.int32) for p, n in zip(prefix, lens, strict=True)]
    reqs = [
        AdmittedRequest(int(slots[row]), row, SamplingParams(temperature=0), 0, len(text), text, len(text))
        for row, text in enumerate(texts)
    ]
    return Batch(reqs, num_extend, slots, prefix, np.array(lens, np.int32), np.ones(rows, np.bool_), NO_UPDATES)


def eager_runner(engine: Any, sampler: Any) -> EagerRunner:
    return EagerRunner(engine.model, engine.inputs, engine.pool, attention(engine), attention(engine), sampler)


def states_in(engine: Any) -> list[torch.Tensor]:
    """Return all states but those of the first slab, which has the page to which padding rows write."""
    first = engine.budget.arena.pages[-1]
    return [state[first:] for pool in states_of(engine.pool) for layer in pool.memory for state in layer]


def memory_of(engine: Any) -> list[torch.Tensor]:
    states = [state for pool in states_of(engine.pool) for layer in pool.memory for state in layer]
    keys = [each for pool in pools_of(engine.pool) for layer in range(pool.group.num_layers) for each in (pool.keys(layer), pool.values(layer))]  # fmt: skip
    return states + keys


def fill(engine: Any) -> None:
    """Fill all memory with numbers that depend on the place only."""
    torch.manual_seed(3)
    engine.inputs.last_token.copy_(torch.randint(0, VOCAB, engine.inputs.last_token.shape))
    for each in memory_of(engine):
        each.copy_(torch.randn(each.shape) * 0.3)
    for pool in states_of(engine.pool):
        pool.fill(0, [0])


@torch.inference_mode()
def test_captured_decode_steps_compute_and_write_the_same(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows run in a graph of four, which reads their slots of states from the array by the slots of requests."""
    stand_in(monkeypatch)
    model, inputs, pool = engine.model, engine.inputs, engine.pool
    counts = TokenCounts(ROWS + 1, VOCAB, engine.device)
    sampler = EagerSampler(Sampler(VOCAB, frozenset(), engine.device, counts), inputs)
    graphs = DecodeGraphs(model, inputs, pool, attention(engine), ROWS, 256, NO_SHARING, counts=counts)
    runner, eager = DecodeGraphRunner(graphs, sampler), eager_runner(engine, sampler)
    found: Any = None
    for _ in range(NEEDED_BEFORE_CAPTURE + STEPS_BETWEEN_CAPTURES):
        found = found or runner.can_run(batch_of(engine, [1, 1, 1]))
    assert found is not None
    results: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for run in (runner, eager):
        fill(engine)
        batch = batch_of(engine, [1, 1, 1])
        launched = run.launch(batch, found if run is runner else run.can_run(batch))
        results.append((launched.logits.clone(), [state.clone() for state in states_in(engine)]))
    (logits, states), (expected, wanted) = results
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for state, own in zip(states, wanted, strict=True):
        torch.testing.assert_close(state, own, rtol=1e-4, atol=1e-4)


class Segments:
    """Stand in for a recorder of CUDA graphs: what runs between ``begin`` and ``end`` is not run again."""

    def __init__(self, device: torch.device) -> None:
        self.segments = 0

    def warm_up(self, step: Any) -> None:
        step()

    def beside(self) -> Any:
        return torch.inference_mode()

    def begin(self) -> Any:
        return SimpleNamespace(replay=lambda: None)

    def end(self, graph: Any) -> Any:
        self.segments += 1
        return graph if self.segments % 2 else None  # as if nothing had been launched between some operations

    def abandon(self, graph: Any) -> None:
        raise AssertionError("the capture failed")


@torch.inference_mode()
def test_pieces_end_at_every_operation_with_states(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation is a call of its own, over the tokens of the step; the padding that is captured writes no state."""
    monkeypatch.setattr("dovetail.engine.pieces.GraphRecorder", Segments)
    pieces = PiecewiseGraphs(engine.model, engine.info.num_heads, engine.pool, 16, torch.float32)
    fill(engine)
    before = [each.clone() for each in states_in(engine)]
    pieces.capture(16)
    assert all(map(torch.equal, before, states_in(engine)))
    operations = {"Lfm2ForCausalLM": 1, "Mamba2ForCausalLM": 2}[engine.info.architecture]  # of each layer with a state
    calls = [each.num_layers * (operations if each.kind == "state" else 1) for each in engine.info.cache_groups]
    assert len(pieces._captured[16].pieces) == sum(calls)
    batch, backend = batch_of(engine, [6, 5, 1], num_extend=2), attention(engine)
    engine.inputs.prepare(batch)
    backend.plan(batch)
    batch.attn = (*backends_of(backend), *engine.inputs.states.of_step(batch))
    batch.kv = pools_of(engine.pool)
    pieces.forward(16, batch)
    first = engine.budget.arena.pages[-1]
    slots = {int(engine.inputs.states.slots[0, slot]) - first for slot in batch.slots}
    for old, new in zip(before, states_in(engine), strict=True):
        assert {int(slot) for slot in (old != new).flatten(1).any(1).nonzero()[:, 0]} == slots


@pytest.mark.parametrize("operation", ["short_conv", "gated_delta", "ssd", "selective_scan"])
def test_rows_of_drafts_of_fixed_addresses(operation: str) -> None:
    """In a captured step the host does not know the lengths: rows may have no token, and padding tokens are rows of slot 0."""
    torch.manual_seed(0)
    lens, rows = [3, 1, 2], 8
    slots = torch.tensor([2, 5, 1, 0, 0, 0, 0, 0], dtype=torch.int32)
    indptr = torch.tensor([0, 3, 4, 6, 7, 8, 8, 8, 8], dtype=torch.int32)
    exact = StateRows.of(slots[:3].numpy(), np.array(lens, np.int32), np.zeros(3, np.bool_), writes=False)
    heads, dim, size = 2, 4, 8
    mixer: Any = TritonMixer()
    if operation == "short_conv":
        x, state = torch.randn(rows, 16), torch.randn(6, 16, 3)
        weight = torch.randn(16, 4)
        found = [
            mixer.short_conv(x[:n], weight, None, state, own)
            for n, own in ((rows, draft_rows(slots, indptr)), (6, exact))
        ]
    elif operation == "gated_delta":
        shape = DeltaShape(heads, heads, 16, 16)
        qkv, state = torch.randn(rows, shape.width), torch.randn(6, *shape.state)
        a, b, rate, bias = torch.randn(rows, heads), torch.randn(rows, heads), torch.rand(heads), torch.randn(heads)
        found = [
            mixer.gated_delta(qkv[:n], DeltaGates(a[:n], b[:n], rate, bias), state, own, shape)
            for n, own in ((rows, draft_rows(slots, indptr)), (6, exact))
        ]
    elif operation == "ssd":
        x, dt, b, c = torch.randn(rows, heads, dim), torch.randn(rows, heads), *torch.randn(2, rows, 1, size)
        state = torch.randn(6, heads, dim, size)
        own_heads = SSDHeads(-torch.rand(heads), torch.randn(heads), torch.randn(heads), (0.0, float("inf")))
        found = [
            mixer.ssd(x[:n], dt[:n], b[:n], c[:n], own_heads, state, own)
            for n, own in ((rows, draft_rows(slots, indptr)), (6, exact))
        ]
    else:
        x, dt, b, c = torch.randn(rows, 16), torch.randn(rows, 16), *torch.randn(2, rows, size)
        state = torch.randn(6, 16, size)
        channels = ScanChannels(-torch.rand(16, size), torch.randn(16), torch.randn(16))
        found = [
            mixer.selective_scan(x[:n], dt[:n], b[:n], c[:n], channels, state, own)
            for n, own in ((rows, draft_rows(slots, indptr)), (6, exact))
        ]
    torch.testing.assert_close(found[0][:6], found[1], rtol=1e-5, atol=1e-5)
