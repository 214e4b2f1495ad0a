"""Make the plans of steps, and keep the requests of each plan until the step is committed or has failed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dovetail.scheduler.rows import needs_host
from dovetail.types import AdmittedRequest, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.scheduler.rows import DecodeRows
    from dovetail.types import IntArray, PageUpdates, Req

_NO_LENS = np.zeros(0, np.int32)


class Plans:
    """Number the plans, and describe in each of them the requests that were admitted since the plan before.

    A plan has no ``Req``; ``reqs_of`` returns the requests of its rows.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # requests and prefix_lens of the rows, by the number of a plan that is neither committed nor failed
        self._open: dict[int, tuple[list[Req], IntArray]] = {}
        self._admitted: list[Req] = []

    def admit(self, req: Req) -> None:
        """Put ``req``, which has got its slot, into the next plan."""
        self._admitted.append(req)

    def decode(self, rows: DecodeRows, updates: PageUpdates, draft_width: int) -> StepPlan:
        """Return the plan in which the next token of each row enters the forward pass."""
        number, limits = next(self._numbers), self._draft_limits(rows, draft_width)
        self._open[number] = rows.reqs, rows.prefix_lens
        return StepPlan(  # by position, because keywords take twice as long
            number,
            0,
            rows.slots,
            rows.prefix_lens,
            rows.ones,
            rows.samples,
            updates,
            _NO_LENS,
            self._take_admitted() if self._admitted else (),
            rows.version,
            rows.constrained,
            limits,
            rows.grouping.shared if rows.grouping is not None else None,
        )

    def mixed(
        self, extend: Sequence[tuple[Req, int]], rows: DecodeRows, updates: PageUpdates, draft_width: int
    ) -> StepPlan:
        """Return the plan of the prompt tokens of ``extend`` (pairs of a request and the number of its tokens that
        enter), followed by the next token of each decode row. Every row is sampled; the caller corrects ``samples``."""
        prompts, counts = [req for req, _ in extend], [count for _, count in extend]
        number, limits = next(self._numbers), self._draft_limits(rows, draft_width)
        starts = _joined([r.cached_len for r in prompts], rows.prefix_lens)
        self._open[number] = prompts + rows.reqs, starts
        return StepPlan(
            number=number,
            num_extend=len(prompts),
            slots=_joined([r.slot for r in prompts], rows.slots),
            prefix_lens=starts,
            extend_lens=_joined(counts, rows.ones),
            samples=np.ones(len(prompts) + len(rows.reqs), np.bool_),
            page_updates=updates,
            known_lens=np.array([r.known_len for r in prompts], np.int32),
            admitted=self._take_admitted(),
            constrained=rows.constrained or any(map(needs_host, prompts)),
            draft_limits=None if limits is None else _joined([0] * len(prompts), limits),
        )

    def _draft_limits(self, rows: DecodeRows, draft_width: int) -> IntArray | None:
        """Return the draft limits of ``rows``, or None if the next step cannot have drafts: while an earlier plan is
        open, the host does not know the last tokens."""
        return rows.draft_limits if draft_width and not self._open else None

    def _take_admitted(self) -> tuple[AdmittedRequest, ...]:
        admitted, self._admitted = self._admitted, []
        return tuple([_entry(r) for r in admitted if r.slot >= 0])

    def reqs_of(self, plan: StepPlan) -> list[Req]:
        """Return the requests of the rows of a plan that is neither committed nor failed."""
        return self._open[plan.number][0]

    def computed_len(self, req: Req) -> int:
        """Return the number of tokens of ``req`` whose KV does not depend on a plan that is neither committed nor
        failed. The step of such a plan may still fail."""
        if not req.in_flight:
            return req.cached_len
        starts = [int(lens[reqs.index(req)]) for reqs, lens in self._open.values() if req in reqs]
        return min([req.cached_len, *starts])

    def close(self, plan: StepPlan) -> list[Req]:
        """Forget a plan, and return the requests of its rows."""
        return self._open.pop(plan.number)[0]


def _entry(req: Req) -> AdmittedRequest:
    params = req.params
    return AdmittedRequest(
        slot=req.slot,
        uid=req.uid,
        params=params if params.grammar is None else replace(params, grammar=None),
        seed=req.seed,
        prompt_len=req.prompt_len,
        token_ids=req.token_ids,
        known_len=req.known_len,
        namespace=req.namespace,
        retracted=req.num_retractions > 0,
        constrained=req.matcher is not None,
        adapter=0 if req.adapter is None else req.adapter.slot,
        state_slots=() if req.states is None else tuple(req.states.slots.tolist()),
    )


def _joined(prompts: Sequence[int], decode: IntArray) -> IntArray:
    return np.concatenate([np.array(prompts, np.int32), decode])
