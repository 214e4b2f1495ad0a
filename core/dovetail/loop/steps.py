"""Make one step after another: schedule, launch, commit.

    plain        schedule N | launch N | commit N
    overlapped   schedule N + 1 | launch N + 1 | commit N | sample N + 1
    drafted      commit N | schedule N + 1 | propose drafts | launch N + 1

Under overlap the host reads the tokens of step N, advances grammars and sends answers while the device computes step N
+ 1. A step that is still being computed is passed to the next step as an ``InFlight``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dovetail.loop.verbs import InFlight

if TYPE_CHECKING:
    from dovetail.loop.adaptive_drafting import AdaptiveDrafting
    from dovetail.loop.drafter_guard import DrafterGuard
    from dovetail.loop.verbs import Verbs
    from dovetail.messages import Answer
    from dovetail.types import StepPlan


class StepEnd(NamedTuple):
    """Describe the result of a step: its answers, the step that is left in flight (if any), and the plan that was
    scheduled."""

    answers: list[Answer]
    in_flight: InFlight | None = None
    plan: StepPlan | None = None


class StepStrategy(Protocol):
    """Make a step. ``previous`` is the step in flight, or None."""

    def run(self, previous: InFlight | None) -> StepEnd: ...


class PlainStep:
    """Commit a step before the next one is scheduled. Nothing is left in flight."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def run(self, previous: InFlight | None) -> StepEnd:
        """See ``StepStrategy``."""
        assert previous is None, "plain steps leave nothing in flight"
        verbs = self._verbs
        plan = verbs.schedule()
        if plan is None:
            return StepEnd([])
        failure = verbs.forward(plan)
        if failure is not None:
            return StepEnd(verbs.fail(plan, failure), None, plan)
        return StepEnd(verbs.commit(plan), None, plan)


class OverlappedStep:
    """Launch a step before the one in flight is committed, and leave it in flight."""

    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def run(self, previous: InFlight | None) -> StepEnd:
        """See ``StepStrategy``."""
        verbs = self._verbs
        plan = verbs.schedule(pause=previous is None)
        failure = None if plan is None else verbs.launch(plan)
        answers = [] if previous is None else verbs.commit(previous.plan)
        if plan is None:
            return StepEnd(answers)
        failure = failure or verbs.sample(plan)
        if failure is not None:
            return StepEnd(answers + verbs.fail(plan, failure), None, plan)
        if verbs.scheduler.has_work:
            return StepEnd(answers, InFlight(plan), plan)
        return StepEnd(answers + verbs.commit(plan), None, plan)  # all requests have ended: no later step commits it


class DraftedStep:
    """Let the drafter propose drafts for a step. The drafter needs all earlier tokens, so the step in flight is
    committed first."""

    def __init__(self, verbs: Verbs, guard: DrafterGuard, *, overlap: bool) -> None:
        """With ``overlap``, the step is left in flight, so that the device computes it while the answers of the
        previous step are sent."""
        self._verbs, self._guard, self._overlap = verbs, guard, overlap

    def run(self, previous: InFlight | None) -> StepEnd:
        """See ``StepStrategy``."""
        verbs, guard = self._verbs, self._guard
        answers = self.finish(previous)
        plan = verbs.schedule()
        if plan is None:
            return StepEnd(answers)
        if plan.num_extend < len(plan.slots):
            start = time.perf_counter()
            guard.propose(plan)
            verbs.times.draft += time.perf_counter() - start
        failure = verbs.forward(plan)
        if failure is not None:
            return StepEnd(answers + verbs.fail(plan, failure), None, plan)
        if plan.drafts is not None:
            verbs.reserve_ahead()
        step = InFlight(plan, drafted=True)
        if self._overlap:
            return StepEnd(answers, step, plan)
        return StepEnd(answers + self.finish(step), None, plan)

    def finish(self, step: InFlight | None) -> list[Answer]:
        """Commit a step, if there is one, and show the drafter what it accepted."""
        return [] if step is None else self._verbs.commit(step.plan, self._guard)


class AdaptiveStep:
    """Make steps with drafts while drafts pay, and steps without drafts otherwise. Measures both."""

    def __init__(self, verbs: Verbs, drafted: DraftedStep, undrafted: StepStrategy, adaptive: AdaptiveDrafting) -> None:
        self._verbs, self._drafted, self._undrafted, self._adaptive = verbs, drafted, undrafted, adaptive

    def run(self, previous: InFlight | None) -> StepEnd:
        """See ``StepStrategy``."""
        scheduler, times = self._verbs.scheduler, self._verbs.times
        rows = len(scheduler.decoding) or len(scheduler.prefilling) + len(scheduler.waiting)
        drafting = self._adaptive.should_draft(rows)
        tokens, start = scheduler.totals.generated_tokens, time.perf_counter()
        verify = times.launch + times.wait
        end = self._drafted.run(previous) if drafting else self._run_undrafted(previous)
        verify = times.launch + times.wait - verify
        if drafting:
            times.verify += verify
        if scheduler.decoding and not (_has_prompts(previous and previous.plan) or _has_prompts(end.plan)):
            seconds, brought = time.perf_counter() - start, scheduler.totals.generated_tokens - tokens
            self._adaptive.record(rows, drafting, seconds, brought, verify)
        return end

    def _run_undrafted(self, previous: InFlight | None) -> StepEnd:
        if previous is None or not previous.drafted:
            return self._undrafted.run(previous)
        answers = self._drafted.finish(previous)
        end = self._undrafted.run(None)
        return end._replace(answers=answers + end.answers)


def _has_prompts(plan: StepPlan | None) -> bool:
    return plan is not None and plan.num_extend > 0
