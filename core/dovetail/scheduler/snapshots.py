"""Decide at which lengths the states of requests are copied, and put the copies into plans.

A request can resume only where a snapshot was made. Snapshots are made at multiples of the page size:

    prompt [ known to the cache | ............ new ............ ]   answer ........................
                     resumes ^  ^ junction        middle ^    end ^        tail ^ moves every 128 tokens ^

- junction: where the prompt departs from what the cache knows, if the states end before. Other prompts depart there too.
- end: the last full page before the prompt's last token, for the same prompt and for the next turn of a conversation.
- middle: for prompts that depart from this one earlier, while nothing is known about where.
- tail: the latest copy while the request decodes, for the next turn.

A step can keep states within a prompt, after each chunk of its tokens in the step. Middle and end are at such places, so that they
cost no step of their own. Elsewhere a prompt is cut, and the next step copies the state with which it begins.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from dovetail.types import StateCopies, StateSaves

if TYPE_CHECKING:
    from dovetail.interfaces.cache import Match
    from dovetail.memory.ledger import PageLedger
    from dovetail.memory.pools import PoolLedgers
    from dovetail.memory.states import RequestStates, StateLedger
    from dovetail.scheduler.limits import SchedulerLimits
    from dovetail.types import IntArray, Req, StepPlan

TAIL_TOKENS = 128
"""Set the number of tokens after which a request that decodes copies its states again."""

LEAST_TOKENS = 512
"""Set the number of tokens that a snapshot must save at least, if nothing suggests that it will be used. Where a prompt is cut
at its snapshots, each cut costs a step."""

LEAST_SHARED = 64
"""The same for a snapshot that others are known to need."""


def choose_points(
    begin: int,
    common: int,
    end: int,
    page_size: int,
    *,
    unit: int = 0,
    every: int | None = None,
    expected: bool = False,
) -> list[int]:
    """Return the lengths at which a prompt that resumes after ``begin`` tokens makes snapshots, in ascending order.

    The cache knows its first ``common`` tokens, and ``end`` is its last full page. All are multiples of the page size. With
    ``every``, there is a snapshot after that number of tokens, rounded up to full pages or units, instead of one in the middle. With
    ``expected``, the end is known to be used. A ``unit``, a multiple of the page size, is the number of tokens after which a
    step can keep states: all points but the junction are multiples of it after the point at which the prompt is cut before, or
    after ``begin``, unless ``every`` is less.
    """
    if every is not None and every < unit:
        unit = 0
    grain, points = unit or page_size, list[int]()
    if every is not None:
        step = -(-every // grain) * grain
        points = list(range(begin + step if unit else begin - begin % step + step, end, step))
    if unit and common >= end:
        common = end = _after(begin, end, unit)
    junction = min(common, end)
    # what the cache knows ends after the tail of its request: this is no junction
    if junction - begin >= (TAIL_TOKENS + page_size if begin else LEAST_SHARED):
        if junction not in points:
            insort(points, junction)
        end = _after(junction, end, unit)
    else:
        end = _after(begin, end, unit)
        middle = _after(begin if unit else 0, (begin + end) // 2, grain)
        if every is None and min(middle - begin, end - middle) >= LEAST_TOKENS:
            points.append(middle)
    latest = points[-1] if points else begin
    if end - latest >= (LEAST_SHARED if expected else LEAST_TOKENS):
        points.append(end)
    return points


def _after(begin: int, end: int, unit: int) -> int:
    """Return the last length up to ``end`` that is a multiple of ``unit`` after ``begin``; ``end`` without a unit."""
    return begin + max(0, end - begin) // unit * unit if unit else end


class Snapshots:
    """Choose the lengths at which snapshots are made, and fill ``StepPlan.state_copies``."""

    def __init__(self, limits: SchedulerLimits, ledger: PageLedger | PoolLedgers) -> None:
        """``ledger`` is that of a model with state groups."""
        self._ledger, self._page_size = ledger, ledger.page_size
        self._unit = math.lcm(limits.state_chunk, ledger.page_size) if limits.state_chunk else 0
        self._keeps, self._every = limits.reuses_prefixes, limits.state_snapshot_tokens
        self._ahead = max(1, ledger.tokens_ahead)  # tokens after a prefix without which it is not found
        # by the number of a plan that is not committed: the requests that it copies for, with their states and lengths
        self._copied: dict[int, list[tuple[Req, RequestStates, int]]] = {}
        self._saved: dict[int, list[tuple[Req, RequestStates, int]]] = {}  # the same of what is kept within prompts

    def _states(self, req: Req) -> StateLedger:
        """Return what manages the states of a running request."""
        states = self._ledger.of(req).states
        assert states is not None, "the model keeps states"
        return states

    def admit(self, req: Req, match: Match) -> None:
        """Choose the points of a request that has got its slots. A request that was retracted has none: its prefixes are not
        known to be used by others."""
        if not self._keeps or req.num_retractions:
            return
        size, pooling = self._page_size, req.params.pooling is not None
        end = (req.device_len - self._ahead) // size * size
        expected = not pooling and (req.prefill_only or req.group_size > 1 or bool(req.session))
        req.states.points = choose_points(
            match.length, match.common, end, size, unit=self._unit, every=self._every, expected=expected
        )

    def limit(self, req: Req, count: int) -> int:
        """Return how many of the next ``count`` tokens of a prompt enter one step: those up to its next point at which the step
        cannot keep states."""
        begin, unit = req.cached_len, self._unit
        ahead = [point for point in req.states.points if point > begin and not (unit and (point - begin) % unit == 0)]
        return min(count, ahead[0] - begin) if ahead else count

    def cut(self, req: Req, count: int) -> int:
        """Return how many of the next ``count`` tokens of a prompt enter the step that is made now. A chunk that does not
        complete the prompt ends with a page, if possible where a step that goes on could keep states, and a snapshot is made
        there if the prompt is twice as long as at the last one: it costs no step."""
        states: RequestStates = req.states
        count, size = self.limit(req, count), self._page_size
        end = req.cached_len + count
        whole = end - end % size
        if self._unit and count >= self._unit and req.cached_len % size == 0 and end not in states.points:
            whole = end - count % self._unit
        if end >= req.device_len or whole <= req.cached_len:
            return count
        if self._keeps and self._every is None and not req.num_retractions and whole not in states.points:
            latest = max(states.latest, states.begin)
            if whole - latest >= LEAST_TOKENS and whole >= 2 * latest:
                insort(states.points, whole)
        return whole - req.cached_len

    def reach(self, req: Req, length: int) -> int:
        """Return the largest length up to ``length`` at which others can resume once ``req``, whose prompt is being computed,
        has passed it. Adds a point there if it has not."""
        states: RequestStates = req.states
        points = states.points
        before = bisect_left(points, length)
        if before < len(points) and points[before] == length:
            return length
        made = [snapshot.length for snapshot in states.copied if snapshot.length <= length]
        best = max(states.offered if states.offered <= length else 0, *made, *points[:before], 0)
        if req.cached_len <= length < states.end and length - best >= LEAST_SHARED:
            insort(points, length)
            return length
        return best

    def fill(self, plan: StepPlan, reqs: list[Req]) -> None:
        """Set ``state_copies`` of a plan whose rows belong to ``reqs``: for requests that resume, and for those of which a
        snapshot is due. Where a tail is overdue, limits drafts so that the request stops at the next full page."""
        size, made = self._page_size, []
        copies: list[tuple[IntArray, IntArray, int]] = []
        for row in np.flatnonzero(plan.prefix_lens % size == 0).tolist():
            req, length = reqs[row], int(plan.prefix_lens[row])
            states: RequestStates = req.states
            if states.source is not None:
                copies.append((states.source, states.slots, self._ledger.of(req).pool))
                states.source = None
            elif length and self._keeps and self._is_due(states, length):
                slots = self._states(req).copy(req, length)
                if slots is not None:
                    copies.append((states.slots, slots, self._ledger.of(req).pool))
                    made.append((req, states, length))
        if made:
            self._copied[plan.number] = made
        if copies:
            plan.state_copies = _packed(copies)
        if self._unit and self._keeps:
            self._fill_saves(plan, reqs)
        if plan.draft_limits is not None and self._keeps:
            self._limit_drafts(plan, plan.draft_limits, reqs)

    def _fill_saves(self, plan: StepPlan, reqs: list[Req]) -> None:
        """Set ``state_saves`` of a plan: for each point within the tokens of a prompt that enter."""
        saves: list[tuple[int, int, IntArray]] = []
        made: list[tuple[Req, RequestStates, int]] = []
        for row in range(plan.num_extend):
            req, begin = reqs[row], int(plan.prefix_lens[row])
            states: RequestStates = req.states
            inside = [point for point in states.points if begin < point < begin + plan.extend_lens[row]]
            for point in inside:
                states.points.remove(point)
                slots = self._states(req).copy(req, point)
                if slots is not None:
                    saves.append((row, point - begin, slots))
                    made.append((req, states, point))
        if made:
            self._saved[plan.number] = made
            plan.state_saves = _packed_saves(saves)

    def _is_due(self, states: RequestStates, length: int) -> bool:
        if length >= states.end:
            states.points.clear()
            return length >= states.latest + TAIL_TOKENS
        points = states.points
        while points and points[0] < length:
            points.pop(0)
        if points and points[0] == length:
            points.pop(0)
            return True
        return False

    def _limit_drafts(self, plan: StepPlan, limits: IntArray, reqs: list[Req]) -> None:
        left = self._page_size - plan.prefix_lens % self._page_size  # tokens up to the next full page
        late = np.flatnonzero(limits >= left)
        overdue = [
            row for row in late.tolist() if plan.prefix_lens[row] + left[row] >= reqs[row].states.latest + TAIL_TOKENS
        ]
        if overdue:
            plan.draft_limits = limits.copy()
            plan.draft_limits[overdue] = left[overdue] - 1
            plan.draft_limits.flags.writeable = False

    def committed(self, number: int) -> None:
        """Offer the snapshots of a plan that is committed to the cache, except those of requests that have left the table since."""
        for req, states, length in self._copied.pop(number, ()):
            if req.states is states:
                self._states(req).confirm(req, length)
        for req, states, length in self._saved.pop(number, ()):
            if req.states is states:
                self._ledger.share(req, length)  # the pages of these tokens are computed now
                self._states(req).confirm(req, length)

    def failed(self, number: int) -> None:
        """Forget the copies of a plan that has failed. Their slots are freed with their requests."""
        self._copied.pop(number, None)
        self._saved.pop(number, None)


def _packed(copies: list[tuple[IntArray, IntArray, int]]) -> StateCopies:
    """Return copies in all state groups from the slots of each first array to those of the second, in a pool."""
    of_sources, of_targets, pools = zip(*copies, strict=True)
    sources, targets = (np.stack(slots, axis=1, dtype=np.int32) for slots in (of_sources, of_targets))
    groups = np.repeat(np.arange(len(sources), dtype=np.int32), len(copies))
    return StateCopies(groups, sources.ravel(), targets.ravel(), np.tile(np.array(pools, np.int32), len(sources)))


def _packed_saves(saves: list[tuple[int, int, IntArray]]) -> StateSaves:
    """Return saves in all state groups: of a row, after a number of its tokens, to the slots of the groups."""
    rows, lens, slots = zip(*saves, strict=True)
    targets = np.stack(slots, axis=1, dtype=np.int32)
    count = len(targets)
    groups = np.repeat(np.arange(count, dtype=np.int32), len(saves))
    return StateSaves(
        np.tile(np.array(rows, np.int32), count), np.tile(np.array(lens, np.int32), count), groups, targets.ravel()
    )
