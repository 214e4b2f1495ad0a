"""Define broken executors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from mutant import Mutant, Suite

from dovetail.errors import RankLostError
from dovetail.interfaces.executor import Executor, ExecutorContext, ExecutorInfo, RankEngine, WarmUpProgress
from dovetail.interfaces.features import Feature
from dovetail.testing.executor import ExecutorSuite
from dovetail.types import (
    Committed,
    DepartedRequest,
    DraftTree,
    IntArray,
    Masks,
    PageUpdates,
    StepPlan,
    StepResult,
)

T = TypeVar("T")


class InProcess(Executor):
    """Run all ranks in this process, one after the other. The plans of a rank can be replaced by ``of_rank``."""

    def __init__(self, context: ExecutorContext) -> None:
        self.ranks: list[RankEngine] = [context.build_rank(rank, context.size, "") for rank in range(context.size)]

    def of_rank(self, rank: int, plan: StepPlan) -> StepPlan:
        return plan

    def each(self, call: Callable[[int, RankEngine], T]) -> list[T]:
        """Call every rank, and raise what all of them raise."""
        results, errors = [], []
        for rank, engine in enumerate(self.ranks):
            try:
                results.append(call(rank, engine))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0] if len(errors) == len(self.ranks) else RankLostError("a rank")
        return results

    @property
    def info(self) -> ExecutorInfo:
        return self.ranks[0].info

    @property
    def progress(self) -> WarmUpProgress:
        return self.ranks[0].progress

    @property
    def page_table(self) -> IntArray:
        return self.ranks[0].page_table

    def launch(self, plan: StepPlan) -> None:
        self.each(lambda i, rank: rank.launch(self.of_rank(i, plan)))

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        self.each(lambda i, rank: rank.sample(self.of_rank(i, plan), masks))

    def wait(self, plan: StepPlan) -> StepResult:
        return self.each(lambda i, rank: rank.wait(plan))[0]

    def mask_buffer(self, rows: int, width: int) -> IntArray:
        buffer = self.ranks[0].mask_buffer(rows, width)
        for rank in self.ranks[1:]:
            rank.register_masks(buffer.view(np.uint8))
        return buffer

    def propose(self, plan: StepPlan) -> DraftTree | None:
        return self.each(lambda i, rank: rank.propose(self.of_rank(i, plan)))[0]

    def observe(self, plan: StepPlan, committed: Committed) -> None:
        self.each(lambda _, rank: rank.observe(plan, committed))

    def forget(self, departed: Sequence[DepartedRequest]) -> None:
        self.each(lambda _, rank: rank.forget(departed))

    def locate_updates(self, updates: PageUpdates) -> None:
        self.each(lambda _, rank: rank.locate_updates(updates))

    def idle(self) -> bool:
        return any(self.each(lambda _, rank: rank.idle()))

    def lost(self, error: BaseException) -> str | None:
        return self.ranks[0].lost(error)

    def describe(self) -> dict[str, Any]:
        return {**self.ranks[0].describe(), "ranks": [{"rank": i, "pid": os.getpid()} for i in range(len(self.ranks))]}

    def call(self, name: str, args: Any = None) -> list[Any]:
        return self.each(lambda _, rank: rank.call(name, args))

    def close(self) -> None:
        self.each(lambda _, rank: rank.close())


class LosesAPlan(InProcess):
    """Leave plan 5 out on the last rank, all of it."""

    def each(self, call: Callable[[int, RankEngine], T]) -> list[T]:
        ranks = self.ranks
        if getattr(self, "_skips", False):
            self.ranks = ranks[:-1]
        try:
            return super().each(call)
        finally:
            self.ranks = ranks

    def launch(self, plan: StepPlan) -> None:
        self._skips = plan.number == 5
        super().launch(plan)

    def wait(self, plan: StepPlan) -> StepResult:
        result = super().wait(plan)
        self._skips = False
        return result


class SendsAPlanTwice(InProcess):
    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        if plan.number == 5:
            self.ranks[-1].launch(plan)


class SwapsPlans(InProcess):
    """Bring plan 5 to the last rank after plan 6."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._late: list[Callable[[], object]] = []

    def each(self, call: Callable[[int, RankEngine], T]) -> list[T]:
        if not getattr(self, "_delays", False):
            return super().each(call)
        last = self.ranks[-1]
        self._late.append(lambda: call(len(self.ranks) - 1, last))
        return [call(i, rank) for i, rank in enumerate(self.ranks[:-1])]

    def launch(self, plan: StepPlan) -> None:
        self._delays = plan.number == 5
        super().launch(plan)

    def wait(self, plan: StepPlan) -> StepResult:
        result = super().wait(plan)
        self._delays = False
        if plan.number == 6:
            for call in self._late:
                call()
        return result


class ForgetsAField(InProcess):
    def of_rank(self, rank: int, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, rows_version=0) if rank else plan


class SendsOtherDtypes(InProcess):
    def of_rank(self, rank: int, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, known_lens=plan.known_lens.astype(np.int64))


class SwapsResults(InProcess):
    """Sample steps without masks at once, and return the result of the step that was sampled last."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._sampled: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        if not plan.constrained:
            self._sample(plan, None)

    def _sample(self, plan: StepPlan, masks: Masks | None) -> None:
        super().sample(plan, masks)
        self._sampled.append(plan)

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        if plan.constrained:
            self._sample(plan, masks)

    def wait(self, plan: StepPlan) -> StepResult:
        return super().wait(self._sampled.pop())


class WaitsInLaunch(InProcess):
    """Wait for the step before when a step is launched."""

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._open: StepPlan | None = None
        self._results: dict[int, StepResult] = {}

    def launch(self, plan: StepPlan) -> None:
        if self._open is not None:
            self._results[self._open.number] = super().wait(self._open)
        super().launch(plan)

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        super().sample(plan, masks)
        self._open = plan

    def wait(self, plan: StepPlan) -> StepResult:
        if plan.number in self._results:
            return self._results.pop(plan.number)
        self._open = None
        return super().wait(plan)


class CutsTexts(InProcess):
    def of_rank(self, rank: int, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, admitted=tuple(_cut(request) for request in plan.admitted))


def _cut(request: Any) -> Any:
    tokens = request.token_ids.copy()
    tokens[1 << 16 :] = 0
    return dataclasses.replace(request, token_ids=tokens)


class ChangesPlans(InProcess):
    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        plan.extend_lens = plan.extend_lens * 2


class OneMaskBuffer(InProcess):
    def mask_buffer(self, rows: int, width: int) -> IntArray:
        self._memory = getattr(self, "_memory", np.zeros(1 << 22, np.int32))
        return self._memory[: rows * width].reshape(rows, width)


class DropsMasks(InProcess):
    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        super().sample(plan, None)


class KeepsOldTexts(InProcess):
    """Copy the texts of requests when they are admitted, and never again."""

    def of_rank(self, rank: int, plan: StepPlan) -> StepPlan:
        copies = [dataclasses.replace(request, token_ids=request.token_ids.copy()) for request in plan.admitted]
        return dataclasses.replace(plan, admitted=tuple(copies))


class ShowsOneDrafter(InProcess):
    def observe(self, plan: StepPlan, committed: Committed) -> None:
        self.ranks[0].observe(plan, committed)


class NeverForgets(InProcess):
    def forget(self, departed: Sequence[DepartedRequest]) -> None:
        return


class DropsDrafts(InProcess):
    def of_rank(self, rank: int, plan: StepPlan) -> StepPlan:
        return dataclasses.replace(plan, drafts=None)


class SaysNothingOfRanks(InProcess):
    def describe(self) -> dict[str, Any]:
        return {**self.ranks[0].describe(), "ranks": []}


class HidesTheDrafter(InProcess):
    @property
    def info(self) -> ExecutorInfo:
        return self.ranks[0].info._replace(draft_width=0)


class KeepsOldProgress(InProcess):
    @property
    def progress(self) -> WarmUpProgress:
        self._progress = getattr(self, "_progress", self.ranks[0].progress)
        return self._progress


class DescribesItselfByACall(InProcess):
    def call(self, name: str, args: Any = None) -> list[Any]:
        return [rank.describe() for rank in self.ranks] if name == "describe" else super().call(name, args)


class HidesThatTheDrafterObserves(InProcess):
    @property
    def info(self) -> ExecutorInfo:
        return super().info._replace(observes=False)


class CallsOneRank(InProcess):
    def call(self, name: str, args: Any = None) -> list[Any]:
        return [self.ranks[0].call(name, args)] * len(self.ranks)


class FailsForEver(InProcess):
    """Raise the first error of a step again in all later ones."""

    def wait(self, plan: StepPlan) -> StepResult:
        if getattr(self, "_error", None) is not None:
            raise self._error
        return super().wait(plan)

    def each(self, call: Callable[[int, RankEngine], T]) -> list[T]:
        try:
            return super().each(call)
        except RuntimeError as error:
            self._error = error
            raise


class LosesPageUpdates(InProcess):
    """Raise an error of ``launch`` in ``wait``, and do not repeat the page updates."""

    def launch(self, plan: StepPlan) -> None:
        self._error: Exception | None = None
        try:
            super().launch(plan)
        except Exception as error:
            self._error = error

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        if self._error is None:
            super().sample(plan, masks)

    def wait(self, plan: StepPlan) -> StepResult:
        if self._error is not None:
            raise self._error
        return super().wait(plan)


class FailsTheNextStep(InProcess):
    """Return the result of the step before for a step that failed, and raise its error one step later."""

    def wait(self, plan: StepPlan) -> StepResult:
        late, self._late = getattr(self, "_late", None), None
        try:
            self._last = super().wait(plan)
        except Exception as error:
            self._late = error
        if late is not None:
            raise late
        return self._last


class SwallowsErrorsOfDrafters(InProcess):
    def propose(self, plan: StepPlan) -> DraftTree | None:
        with suppress(RuntimeError):
            return super().propose(plan)
        return None

    def observe(self, plan: StepPlan, committed: Committed) -> None:
        with suppress(RuntimeError):
            super().observe(plan, committed)


class LosesTheGroupForDrafts(InProcess):
    _reason: str | None = None

    def propose(self, plan: StepPlan) -> DraftTree | None:
        tree = super().propose(plan)
        if tree is not None and tree.token_ids.dtype == object:
            self._reason = "rank 0 cannot send drafts"
            raise RankLostError(self._reason)
        return tree

    def launch(self, plan: StepPlan) -> None:
        if self._reason is not None:
            raise RankLostError(self._reason)
        super().launch(plan)


class LosesNoDevice(InProcess):
    def lost(self, error: BaseException) -> str | None:
        return None


def in_process(executor_class: type[InProcess]) -> Suite:
    class Suite(ExecutorSuite):
        name = "local"

        def make(self, context: ExecutorContext) -> Executor:
            return executor_class(context)

        def offers(self, feature: Feature) -> bool:
            return True

    return Suite


LOCAL = in_process(InProcess)
SIZES, DRAFTS = ((3,),), ((3, False), (3, True))


def _of(fault: str, executor_class: type[InProcess], case: str, runs: Sequence[tuple[Any, ...]] = ((),)) -> Mutant:
    return Mutant(fault, case, in_process(executor_class), LOCAL, runs)


MUTANTS = [
    _of("loses a plan", LosesAPlan, "test_every_plan_reaches_every_rank", SIZES),
    _of("sends a plan twice", SendsAPlanTwice, "test_every_plan_reaches_every_rank", SIZES),
    _of("brings plans in another order", SwapsPlans, "test_every_plan_reaches_every_rank", SIZES),
    _of("leaves out a field", ForgetsAField, "test_every_plan_reaches_every_rank", SIZES),
    _of("changes the dtype of an array", SendsOtherDtypes, "test_every_plan_reaches_every_rank", SIZES),
    _of("returns results out of order", SwapsResults, "test_overlapped_steps", SIZES),
    _of(
        "waits for a step when the next one is launched",
        WaitsInLaunch,
        "test_a_launch_does_not_wait_for_the_step_before",
    ),
    _of("cuts long texts", CutsTexts, "test_long_plans_and_results"),
    _of("changes plans", ChangesPlans, "test_plans_are_not_changed"),
    _of("writes all masks into one buffer", OneMaskBuffer, "test_masks", SIZES),
    _of("samples without masks", DropsMasks, "test_masks", SIZES),
    _of("does not send what a request has generated", KeepsOldTexts, "test_drafts", DRAFTS),
    _of("shows accepted drafts to one rank", ShowsOneDrafter, "test_drafts", DRAFTS),
    _of("does not report to drafters that a request has left", NeverForgets, "test_drafts", DRAFTS),
    _of("drops drafts", DropsDrafts, "test_drafts", DRAFTS),
    _of("does not describe its ranks", SaysNothingOfRanks, "test_it_describes_the_engine"),
    _of("reports no drafter", HidesTheDrafter, "test_it_describes_the_engine"),
    _of("does not report that the drafter observes", HidesThatTheDrafterObserves, "test_it_describes_the_engine"),
    _of("reports the progress of its start", KeepsOldProgress, "test_it_reports_progress"),
    _of(
        "answers control calls that do not exist",
        DescribesItselfByACall,
        "test_control_calls_reach_every_rank",
        SIZES,
    ),
    _of("sends control calls to one rank", CallsOneRank, "test_control_calls_reach_every_rank", SIZES),
    _of(
        "fails all steps after one",
        FailsForEver,
        "test_an_error_of_all_ranks_fails_one_step",
        ((1, "launch"), (3, "wait")),
    ),
    _of(
        "loses the page updates of a failed step",
        LosesPageUpdates,
        "test_an_error_of_all_ranks_fails_one_step",
        ((3, "launch"),),
    ),
    _of(
        "raises the error of a step in the next one", FailsTheNextStep, "test_an_error_under_overlap_fails_its_own_step"
    ),
    _of(
        "swallows errors of drafters",
        SwallowsErrorsOfDrafters,
        "test_an_error_of_the_drafter_costs_no_step",
        ((1, "propose"), (3, "observe")),
    ),
    _of(
        "loses its ranks when drafts cannot be sent",
        LosesTheGroupForDrafts,
        "test_drafts_that_break_their_contract_cost_no_step",
        SIZES,
    ),
    _of("does not report a lost device", LosesNoDevice, "test_a_lost_device_is_reported"),
]
