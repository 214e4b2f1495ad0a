"""Make plans as a scheduler does: prompts in chunks, decode rows, drafts, grammars, requests that leave and come back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dovetail.sampling_names import LogitsProcessorCall
from dovetail.sampling_params import GrammarKind, GrammarSpec, Pooling, PoolingKind, SamplingParams
from dovetail.testing.executor_ranks import MAX_PAGES, NUM_SLOTS, VOCAB
from dovetail.types import (
    AdmittedRequest,
    Committed,
    DepartedRequest,
    IntArray,
    LogitRows,
    Masks,
    PageUpdates,
    SharedPrefixes,
    StateCopies,
    StateSaves,
    StepPlan,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.types import DraftTree, StepResult

PAGE_SIZE = 4
MASK_WIDTH = -(-VOCAB // 32)

PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.0, max_new_tokens=9, stop=("end", "\N{SNOWMAN}"), stop_token_ids=(5, 7)),
    SamplingParams(top_p=0.9, top_k=40, min_p=0.05, seed=-(2**63), logprobs=3, prompt_logprobs=1),
    SamplingParams(repetition_penalty=1.1, presence_penalty=-0.5, logit_bias={3: -100.0, 49_999: 0.1}),
    SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, "[a-z]+", "xgrammar"), ignore_eos=True),
    SamplingParams(logits_processors=(LogitsProcessorCall("no_repeat_ngram", '{"no_repeat_ngram_size": 3}'),)),
    SamplingParams(max_new_tokens=0, pooling=Pooling(PoolingKind.LABELS, (1, 2, 40_000))),
)


@dataclass(eq=False)
class _Running:
    """Hold a request. ``cached``, ``device`` and ``known`` are the cursors of ``types.Req``."""

    uid: int
    tokens: IntArray
    prompt_len: int
    params: SamplingParams
    seed: int
    namespace: str
    slot: int = 0
    cached: int = 0
    device: int = 0
    known: int = 0
    pages: int = 0
    retracted: bool = False

    @property
    def constrained(self) -> bool:
        return self.params.grammar is not None

    @property
    def needs_host(self) -> bool:
        return self.constrained or bool(self.params.logits_processors)

    @property
    def ended(self) -> bool:
        return self.known >= len(self.tokens)


@dataclass(eq=False)
class PlanTraffic:
    """Make the plans of random requests, from ``seed``. With ``draft_width``, the steps can have drafts. Requests have
    up to ``max_prompt`` tokens of prompt. Writes new pages into ``page_table``."""

    seed: int
    page_table: IntArray
    draft_width: int = 0
    max_prompt: int = 60
    running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._numbers, self._versions = itertools.count(1), itertools.count(1)
        self._uids = itertools.count(100)
        self._free = list(range(NUM_SLOTS, 0, -1))
        self._retracted: list[_Running] = []
        self._departed: list[DepartedRequest] = []
        self._rows: dict[int, list[_Running]] = {}
        self._same: tuple[list[int], int] = [], 0
        self._owed: PageUpdates | None = None

    # -- plans -------------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Return the next plan. It has at least one row."""
        self._let_leave()
        admitted = self._admit()
        prompts = [r for r in self.running if r.cached < r.prompt_len or r.device - r.cached > 1]
        prompts = prompts[: int(self._rng.integers(1, 4))]
        decode = [r for r in self.running if r.cached >= r.prompt_len and r.device - r.cached == 1]
        counts = [int(self._rng.integers(1, r.device - r.cached + 1)) for r in prompts]
        rows = prompts + decode
        lens = np.array(counts + [1] * len(decode), np.int32)
        prefix = np.array([r.cached for r in rows], np.int32)
        samples = np.array([r.cached + n == r.device for r, n in zip(rows, lens.tolist(), strict=True)])
        samples &= np.array([r.device < len(r.tokens) for r in rows])
        plan = StepPlan(
            number=next(self._numbers),
            num_extend=len(prompts),
            slots=np.array([r.slot for r in rows], np.int32),
            prefix_lens=prefix,
            extend_lens=lens,
            samples=samples,
            page_updates=self._updates([(r, r.cached + n) for r, n in zip(rows, lens.tolist(), strict=True)]),
            known_lens=np.array([r.known for r in prompts], np.int32),
            admitted=admitted,
            rows_version=self._version(rows) if not prompts else 0,
            constrained=any(r.needs_host and sampled for r, sampled in zip(rows, samples.tolist(), strict=True)),
            draft_limits=self._limits(len(prompts), decode) if self.draft_width else None,
            shared=self._shared(len(rows)) if not prompts and not self.draft_width else None,
            state_copies=_state_copies(rows, len(admitted)),
            state_saves=_state_saves(counts),
        )
        for r, n, sampled in zip(rows, lens.tolist(), samples.tolist(), strict=True):
            r.cached += n
            r.device += int(sampled)
        self._rows[plan.number] = rows
        return plan

    def _let_leave(self) -> None:
        """Let requests end or be retracted. Those of a step in flight stay, except at random."""
        for r in list(self.running):
            if r.ended or r.cached >= len(r.tokens) or (r.known == r.device and self._rng.random() < 0.06):
                self.running.remove(r)
                self._free.append(r.slot)
                self._departed.append(DepartedRequest(r.uid, r.known))
                if not r.ended and r.cached < len(r.tokens) and self._rng.random() < 0.5:
                    self._retracted.append(r)

    def _admit(self) -> tuple[AdmittedRequest, ...]:
        """Give slots to new or retracted requests."""
        new: list[_Running] = []
        while self._free and (not self.running + new or self._rng.random() < 0.4):
            r = self._retracted.pop() if self._retracted and self._rng.random() < 0.5 else self._make()
            r.slot, r.cached, r.pages, r.device = self._free.pop(), 0, 0, r.known
            new.append(r)
        self.running += new
        return tuple(
            AdmittedRequest(
                r.slot,
                r.uid,
                r.params,
                r.seed,
                r.prompt_len,
                r.tokens,
                r.known,
                r.namespace,
                r.retracted,
                r.constrained,
                _state_slots(r),
            )
            for r in new
        )

    def _make(self) -> _Running:
        rng = self._rng
        length = int(rng.integers(2, self.max_prompt))
        params = PARAMS[int(rng.integers(len(PARAMS)))]
        new = 0 if params.max_new_tokens == 0 else int(rng.integers(1, 30))
        tokens = rng.integers(0, VOCAB, length + new).astype(np.int32)
        tokens[length:] = -7  # nothing may read these before they are known
        seed = int(rng.integers(-(2**63), 2**63 - 1))
        return _Running(
            next(self._uids), tokens, length, params, seed, ("", "tenant")[int(rng.integers(2))], known=length
        )

    def _updates(self, ends: list[tuple[_Running, int]]) -> PageUpdates:
        """Write the pages that rows need, and return the updates, those of a step that failed first."""
        slots, columns, pages = [], [], []
        for r, end in ends:
            while r.pages * PAGE_SIZE < end and r.pages < MAX_PAGES:
                slots.append(r.slot)
                columns.append(r.pages)
                pages.append(self._rng.integers(1, 1000, len(self.page_table)))
                r.pages += 1
        rows, at = np.array(slots, np.int32), np.array(columns, np.int32)
        of_groups = np.array(pages, np.int32).reshape(-1, len(self.page_table)).T
        self.page_table[:, rows, at] = of_groups
        updates = PageUpdates(rows, at, of_groups, next(self._versions) if slots else 0)
        owed, self._owed = self._owed, None
        if owed is None:
            return updates
        joined = [np.concatenate(pair, axis=-1) for pair in zip(owed[:3], updates[:3], strict=True)]
        return PageUpdates(joined[0], joined[1], joined[2], next(self._versions))

    def _version(self, rows: list[_Running]) -> int:
        uids = [r.uid for r in rows]
        if uids != self._same[0]:
            self._same = uids, self._same[1] + 1
        return self._same[1]

    def _limits(self, prompts: int, decode: list[_Running]) -> IntArray:
        most = [min(self.draft_width, len(r.tokens) - r.device - 1) for r in decode]
        return np.array([0] * prompts + [max(0, n) for n in most], np.int32)

    def _shared(self, rows: int) -> SharedPrefixes | None:
        if rows < 3:
            return None
        return SharedPrefixes(
            np.array([0, 2, *range(3, rows + 1)], np.int32), np.array([4] + [0] * (rows - 2), np.int32)
        )

    # -- the rest of a step ------------------------------------------------------------------------------------------

    def attach(self, plan: StepPlan, tree: DraftTree | None) -> None:
        """Attach drafts, as ``Scheduler.attach`` does."""
        if tree is not None and tree.lens.any():
            plan.drafts = tree
            plan.extend_lens = plan.extend_lens + tree.lens

    def masks(self, plan: StepPlan, buffer: Callable[[int, int], IntArray]) -> Masks | None:
        """Return random masks for the sampled rows that have a grammar, in memory of ``buffer``."""
        rows, layout = self._rows[plan.number], LogitRows.of(plan)
        zipped = zip(layout.rows.tolist(), layout.starts.tolist(), layout.spans.tolist(), strict=True)
        found = [start + i for row, start, span in zipped if rows[row].constrained for i in range(span)]
        if not found or self._rng.random() < 0.1:
            return None
        bits = buffer(len(found), MASK_WIDTH)
        bits[:] = np.random.default_rng(plan.number).integers(-(2**31), 2**31 - 1, bits.shape)
        return Masks(bits, np.array(found, np.int64))

    def commit(self, plan: StepPlan, result: StepResult) -> Committed:
        """Append the tokens of a step to its requests."""
        rows = self._rows.pop(plan.number)
        sampled = [r for r, samples in zip(rows, plan.samples.tolist(), strict=True) if samples]
        counts = [1] * len(sampled) if result.accept_lens is None else result.accept_lens.tolist()
        for r, tokens, count in zip(sampled, result.token_ids.tolist(), counts, strict=True):
            new = tokens[: min(count, len(r.tokens) - r.known)]
            r.tokens[r.known : r.known + len(new)] = new
            r.known += len(new)
            if plan.drafts is not None:
                r.device, r.cached = r.known, r.known - 1
        ended = np.array([r.ended or r not in self.running for r in rows])
        return Committed(np.array([r.known for r in rows], np.int32), ended)

    def fail(self, plan: StepPlan, *, take_back: bool) -> None:
        """End the requests of a step that failed. With ``take_back``, the executor may not have got the plan: also end
        those that it admits, and let the next plan bring its page updates again."""
        rows = self._rows.pop(plan.number)
        slots = {request.slot for request in plan.admitted} if take_back else set[int]()
        for r in [*rows, *(r for r in self.running if r.slot in slots and r not in rows)]:
            if r in self.running:
                self.running.remove(r)
                self._free.append(r.slot)
                self._departed.append(DepartedRequest(r.uid, r.known))
        if take_back:
            self._owed = plan.page_updates

    def take_departed(self) -> list[DepartedRequest]:
        """Return the requests that have departed since the last call."""
        departed, self._departed = self._departed, []
        return departed


def _state_slots(request: _Running) -> tuple[int, ...]:
    return (request.uid + 1, 2 * request.uid) if request.uid % 2 else ()


def _state_copies(rows: list[_Running], count: int) -> StateCopies | None:
    """Return copies from the first state slot of each row to others, if ``count`` is odd."""
    slots = [slot for r in rows for slot in _state_slots(r)[:1]]
    if count % 2 == 0 or not slots:
        return None
    sources = np.array(slots, np.int32)
    return StateCopies(np.zeros_like(sources), sources, sources + 100, sources % 2)


def _state_saves(counts: list[int]) -> StateSaves | None:
    """Return a state to save in the middle of each prompt that has two tokens or more."""
    found = [(row, count // 2, row % 2, row + 200) for row, count in enumerate(counts) if count > 1]
    return StateSaves(*np.array(found, np.int32).T) if found else None
