"""Test captured decode and verify steps of a model with states with data-parallel attention, however the requests are divided: on each
rank, the results are those of steps that are launched kernel by kernel, and so are the states that it has afterwards. Graphs are
replaced by the steps themselves, and the other rank adds nothing.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_own_states_triton.py
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
from test_runners_triton import attention, stand_in
from test_state_graphs_triton import fill, states_in

from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, NO_UPDATES, STEPS_BETWEEN_CAPTURES
from dovetail.engine.graphs import DecodeGraphs
from dovetail.engine.own_rows import OwnRowsOfSteps
from dovetail.engine.penalties import TokenCounts
from dovetail.engine.runners import DecodeGraphRunner, EagerRunner, EagerSampler, VerifyGraphRunner
from dovetail.engine.sampler import Sampler
from dovetail.engine.sharing import NO_SHARING
from dovetail.engine.verify_graphs import VerifyGraphs, VerifySizes
from dovetail.memory.arena import ArenaAllocator
from dovetail.sampling_params import SamplingParams
from dovetail.types import AdmittedRequest, Batch, DraftTree, ForwardOutput
from rank_alone import ROWS, build_engine

STEPS = {  # slots, and the number of drafts of each row in a verify step
    "evenly": ([3, 2, 1, 4], [1, 2, 0, 1]),
    "one rank has all rows": ([5, 1, 7], [1, 3, 0]),
    "the other rank has all rows": ([2, 6], [3, 2]),
    "no row of one rank has drafts": ([3, 2, 1, 4], [0, 2, 0, 3]),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_next", tmp_path_factory.mktemp("qwen3_next"), num_hidden_layers=2)


def built(checkpoint: Path, rank: int) -> Any:
    engine: Any = build_engine(checkpoint, rank, 60)
    allocator = ArenaAllocator(engine.budget.arena)
    for slot in range(1, 9):
        pages, taken = allocator.alloc(3), allocator.alloc_slots()
        assert pages is not None
        assert taken is not None
        engine.page_table[0, slot, :3] = pages[0]
        engine.inputs.states.admit([SimpleNamespace(slot=slot, state_slots=tuple(taken))])
    return engine


def batch_of(slots: list[int], drafted: list[int] | None, seed: int) -> Batch:
    rng, rows = np.random.default_rng(seed), len(slots)
    prefix, ones, text = rng.integers(1, 9, rows).astype(np.int32), np.ones(rows, np.int32), np.zeros(16, np.int32)
    reqs = [AdmittedRequest(slot, slot, SamplingParams(temperature=0), 0, 8, text, 9) for slot in slots]
    batch = Batch(reqs, 0, np.array(slots, np.int32), prefix, ones, ones > 0, NO_UPDATES)
    if drafted is not None:
        lens = np.array(drafted, np.int32)
        batch.extend_lens = ones + lens
        batch.drafts = DraftTree.chains(rng.integers(0, VOCAB, (rows, max(drafted))).astype(np.int32), lens)
    return batch


@pytest.mark.parametrize(
    ("rank", "drafts"),
    [(0, False), (1, True), *[pytest.param(*each, marks=pytest.mark.full) for each in ((1, False), (0, True))]],
)
@torch.inference_mode()
def test_captured_steps_keep_the_states_of_the_rank(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int, drafts: bool
) -> None:
    stand_in(monkeypatch)
    engine = built(checkpoint, rank)
    model, inputs, pool, mesh = engine.model, engine.inputs, engine.pool, engine.mesh
    counts = TokenCounts(ROWS + 1, VOCAB, engine.device)
    sampler = EagerSampler(Sampler(VOCAB, frozenset(), engine.device, counts), inputs)
    if drafts:
        runner: Any = VerifyGraphRunner(
            VerifyGraphs(model, inputs, pool, attention(engine), VerifySizes(16, 4, False, 64), mesh=mesh), sampler
        )
    else:
        graphs = DecodeGraphs(model, inputs, pool, attention(engine), ROWS, 64, NO_SHARING, counts=counts, mesh=mesh)
        runner = DecodeGraphRunner(graphs, sampler)
    backends = attention(engine), attention(engine)
    eager: Any = EagerRunner(model, inputs, pool, *backends, sampler, own_rows=OwnRowsOfSteps.of(mesh, inputs))
    for seed, (slots, drafted) in enumerate(STEPS.values()):
        results: list[tuple[Any, list[torch.Tensor]]] = []
        output, before = ForwardOutput(torch.zeros(0, 1)), list[torch.Tensor]()
        right = np.zeros(len(slots), np.int32)  # the first draft of each row, once it is known
        for run in (eager, runner, eager)[not drafts :]:
            batch = batch_of(slots, drafted if drafts else None, seed)
            if batch.drafts is not None:
                batch.drafts.token_ids[:, 0] = right
            found = run.can_run(batch)
            for _ in range(NEEDED_BEFORE_CAPTURE + STEPS_BETWEEN_CAPTURES):
                found = run.can_run(batch) if found is None else found
            fill(engine)
            before = [state.clone() for state in states_in(engine)]
            launched = run.launch(batch, found)
            logits = launched.logits.clone()
            output = run.sample(batch, launched, None)
            right = output.token_ids[:, 0].numpy().astype(np.int32)
            tokens = torch.cat([output.token_ids[:, 0], inputs.last_token[torch.tensor(slots)]])
            results.append(([logits, tokens], [each.clone() for each in states_in(engine)]))
        assert output.accept_lens is None or (output.accept_lens > 1).tolist() == [count > 0 for count in drafted]
        for one, other in zip(*results[-2:], strict=True):
            for found, expected in zip(one, other, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        places = inputs.states.slots[0] - engine.budget.arena.pages[-1]
        own = {slot for slot in slots if (slot - 1) % 2 == rank}
        for old, new in zip(before, results[-1][1], strict=True):
            changed = {slot for slot in range(1, 9) if not old[places[slot]].equal(new[places[slot]])}
            assert changed == own, "states are those of other requests"
