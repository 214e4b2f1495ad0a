"""Run plans that are made by hand on engines of models with states, without a scheduler.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_state_plans.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from state_models import MODELS, VOCAB, StateReference, save

from dovetail.engine.engine import Engine
from dovetail.engine.grouped import states_of
from dovetail.engine.plans import PlanRunner
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.registry import Machine, resolve
from dovetail.registry.setup import setup
from dovetail.sampling_params import SamplingParams
from dovetail.types import AdmittedRequest, DraftTree, PageUpdates, StateCopies, StepPlan

PAGE = 4


@dataclass(eq=False)
class Request:
    """Hold a request, its slots, and what it got."""

    slot: int
    tokens: np.ndarray
    prompt_len: int
    state_slots: tuple[int, ...]
    cached: int = 0
    known: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Plans:
    """Make plans and run them on an engine. Every request gets pages for its whole text at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.runner = engine, PlanRunner(engine)
        self._number, self._next_slot = 0, 1
        self._admitted: list[Request] = []
        layout = engine.budget.arena
        assert layout is not None
        kinds = [group.kind for group in engine.info.cache_groups]
        self._groups = [(kind, layout.pages[g], layout.blocks[g]) for g, kind in enumerate(kinds)]
        self._free = list(range(layout.num_slabs - 1, 0, -1))
        self._left: dict[int, list[int]] = {g: [] for g in range(len(kinds))}
        for pool in states_of(engine.pool):
            pool.fill(float("nan"), slice(1, None))

    def take(self, group: int) -> int:
        """Return a page, or a slot, of a group."""
        if not self._left[group]:
            _, pages, blocks = self._groups[group]
            first = self._free.pop() * blocks
            self._left[group] = list(range(first, first + pages))
        return self._left[group].pop()

    def admit(self, prompt: Sequence[int], new: int, cached: int = 0) -> Request:
        """Return a request with a slot, and pages and slots of states."""
        slot, columns = self._next_slot, -(-(len(prompt) + new) // PAGE)
        self._next_slot += 1
        tokens = np.zeros(len(prompt) + new, np.int32)
        tokens[: len(prompt)] = prompt
        paged = [g for g, (kind, _, _) in enumerate(self._groups) if kind is not CacheGroupKind.STATE]
        for row, group in enumerate(paged):
            self.engine.page_table[row, slot, :columns] = [self.take(group) for _ in range(columns)]
        states = tuple(self.take(g) for g, each in enumerate(self._groups) if each[0] is CacheGroupKind.STATE)
        request = Request(slot, tokens, len(prompt), states, cached, len(prompt))
        self._admitted.append(request)
        return request

    def step(
        self,
        prompts: Sequence[tuple[Request, int]] = (),
        decodes: Sequence[Request] = (),
        drafts: Sequence[Sequence[int]] | None = None,
        copies: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        """Run a step in which the next tokens of prompts enter, and one token of each of ``decodes``, with ``drafts``."""
        rows = [each for each, _ in prompts] + list(decodes)
        own = drafts if drafts is not None else [()] * len(decodes)
        lens = np.array([n for _, n in prompts] + [1 + len(each) for each in own], np.int32)
        prefix = np.array([each.cached for each in rows], np.int32)
        samples = np.array([each.cached + n >= each.known for each, n in zip(rows, lens.tolist(), strict=True)])
        nothing = np.zeros(0, np.int32)
        self._number += 1
        plan = StepPlan(
            self._number,
            len(prompts),
            np.array([each.slot for each in rows], np.int32),
            prefix,
            lens,
            samples,
            PageUpdates(nothing, nothing, np.zeros((len(self.engine.page_table), 0), np.int32)),
            np.array([each.known for each, _ in prompts], np.int32),
            admitted=tuple(self._describe(each) for each in self._admitted),
        )
        if copies:
            plan.state_copies = StateCopies(*np.array([(*copy, 0) for copy in copies], np.int32).T)
        if drafts is not None:
            width = max(map(len, drafts))
            ids = np.zeros((len(rows), width), np.int32)
            for row, each in enumerate(drafts, len(prompts)):
                ids[row, : len(each)] = each
            plan.drafts = DraftTree.chains(ids, np.array([0] * len(prompts) + [len(each) for each in drafts], np.int32))
        self._admitted = []
        self.runner.launch(plan)
        self.runner.sample(plan, None)
        result = self.runner.wait(plan)
        assert result.logprobs is not None
        for index, row in enumerate(np.flatnonzero(samples).tolist()):
            request, start = rows[row], result.logprob_start[index]
            count = 1 if result.accept_lens is None else int(result.accept_lens[index])
            new = result.token_ids[index, :count].tolist()
            nodes = range(count)  # chains: the nodes of a walk follow each other
            request.logprobs += [float(result.logprobs.chosen[start + node]) for node in nodes]
            request.output += new
            request.tokens[request.known : request.known + count] = new
            request.cached += int(lens[row]) if row < len(prompts) else count
            request.known += count
        for row in np.flatnonzero(~samples).tolist():
            rows[row].cached += int(lens[row])

    def _describe(self, request: Request) -> AdmittedRequest:
        params = SamplingParams(max_new_tokens=len(request.tokens) - request.prompt_len, temperature=0, logprobs=0)
        return AdmittedRequest(
            request.slot,
            request.slot,
            params,
            0,
            request.prompt_len,
            request.tokens,
            request.prompt_len,
            state_slots=request.state_slots,
        )


@pytest.fixture
def make_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):

    def make(name: str) -> tuple[Plans, StateReference]:
        save(name, tmp_path)
        given = {"model": str(tmp_path), "device": "cpu", "grammar": "none", "attention": "torch_native"}
        memory = {"page_size": PAGE, "num_pages": 100}
        config, registry = setup(env={}, arguments=given | {"memory": memory, "scheduler": {"max_running": 6}})
        return Plans(Engine(resolve(config, registry, Machine.assume("cpu")), frozenset())), StateReference(tmp_path)

    return make


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


NAMES = [pytest.param(name, marks=() if name in ("qwen3_next", "mamba2") else pytest.mark.full) for name in MODELS]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_mixed_steps_copies_and_drafts(make_engine, name: str) -> None:
    plans, reference = make_engine(name)
    first = plans.admit(prompt_of(23, 1), 30)
    second = plans.admit(prompt_of(9, 2), 30)
    plans.step([(first, 7), (second, 9)])
    plans.step([(first, 1)], [second])
    plans.step([(first, 8)], [second])
    snapshot = plans.take(len(plans.engine.info.cache_groups) - 1)
    # ``first`` has 16 tokens now: a snapshot, from which a third request with the same 16 tokens resumes
    plans.step([(first, 7)], [second], copies=[(0, first.state_slots[0], snapshot)])
    third = plans.admit([*first.tokens[:16].tolist(), *prompt_of(5, 3)], 30, cached=16)
    plans.engine.page_table[:, third.slot, :4] = plans.engine.page_table[:, first.slot, :4]
    fourth = plans.admit(prompt_of(6, 4), 30)
    copies = [(0, snapshot, third.state_slots[0])]
    plans.step([(third, 5), (fourth, 6)], [first, second], copies=copies)
    for _ in range(3):
        plans.step([], [first, second, third, fourth])
    after = [0, 0]
    for _ in range(3):  # right and wrong drafts, and none
        rows = [first, second, third, fourth]
        after = [reference.logprobs(each.tokens[: each.known]).argmax(1)[-1].item() for each in rows[:2]]
        plans.step([], rows, [[after[0], 7, 9], [after[1]], [], [3, 3]])
    fifth = plans.admit(prompt_of(11, 5), 30)
    plans.step([(fifth, 11)], [first, second], [[1, 2], [after[1], 5]])
    plans.step([], [fifth, second, first])
    assert len(first.output) > 12
    for request in (first, second, third, fourth, fifth):
        text = request.tokens[: request.prompt_len].tolist()
        reference.check(text, request.output, request.logprobs)
    for pool in states_of(plans.engine.pool):
        assert all(not state[0].any() for layer in pool.memory for state in layer), "slot 0 was written"
    plans.engine.close()
