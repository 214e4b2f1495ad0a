"""Define broken variants of the executor ``workers``, whose ranks run in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from mutant import Mutant, Suite

from dovetail.errors import EngineError
from dovetail.interfaces.executor import Executor, ExecutorContext
from dovetail.testing.executor import ExecutorSuite
from dovetail.types import Masks, StepPlan
from dovetail_executors.config import WorkersConfig
from dovetail_executors.workers import group, handle
from dovetail_executors.workers.executor import Workers
from dovetail_executors.workers.group import RankGroup
from dovetail_executors.workers.handle import RankHandle
from dovetail_executors.workers.texts import TextSender
from dovetail_executors.workers.wire import PlanSender


def workers(
    *,
    changes: Mapping[str, Any] | None = None,
    of_handle: Mapping[str, Any] | None = None,
    start: str = "",
    sender: type[PlanSender] = PlanSender,
    executor_class: type[Workers] = Workers,
    step_seconds: float = 2.0,
) -> Suite:
    """Return the suite of ``workers`` with attributes of ``RankGroup`` and ``RankHandle`` replaced by ``changes`` and
    ``of_handle``. ``sender`` makes the messages. ``start`` is run in the process of a rank before its engine is built."""

    class Suite(ExecutorSuite):
        name = "workers"
        deadline_seconds = 2.0

        def make(self, context: ExecutorContext) -> Executor:
            mutated = type("Group", (RankGroup,), dict(changes or {}))
            of_ranks = type("RankHandle", (RankHandle,), dict(of_handle or {}))
            code = handle._START.replace("; from", f"; {start}; from") if start else handle._START
            with (
                patch("dovetail_executors.workers.executor.RankGroup", mutated),
                patch("dovetail_executors.workers.executor.PlanSender", sender),
                patch.object(group, "RankHandle", of_ranks),
                patch.object(handle, "_START", code),
            ):
                return executor_class(WorkersConfig(step_seconds=step_seconds), context)

    return Suite


def _judge_leniently(self: RankGroup, failures: dict[int, dict[int, Any]], key: int, finished: object) -> Exception:
    """Take the error of one rank as that of all."""
    found = failures.pop(key)
    return RuntimeError(next(iter(found.values())).text)


def _look_at_nothing(self: RankGroup) -> None:
    return


class CountsMessagesTooEarly(PlanSender):
    """Take a message as sent as soon as it is made."""

    def _begin(self) -> None:
        self._before = -1
        super()._begin()


class NeverCloses(Workers):
    def close(self) -> None:
        return


class LeavesADescriptor(Workers):
    def close(self) -> None:
        if self._group.reason is None:
            os.dup(0)
        super().close()


class LeavesZombies(Workers):
    def close(self) -> None:
        if self._group.reason is None:
            for process in [handle.process for handle in self._group.handles if handle.process is not None]:
                process.kill()
                process.returncode = 0  # as if it had been waited for
        super().close()


def _start_error(self: RankGroup) -> Exception:
    return EngineError("a rank could not be built")


class KeepsTexts(Workers):
    """Send no tokens when a step is sampled."""

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        with patch.object(TextSender, "of_sample", lambda self, plan: None):
            super().sample(plan, masks)


WORKERS = workers()
_RANK = "import dovetail_executors.workers.rank_process as r"
_BLIND = {"_look": _look_at_nothing}
_DETACHED = f"{_RANK}; r._end_with_parent = lambda spec: None"
_BUSY = f"{_RANK}; r._LEAST_PAUSE = 0; r._PAUSES = 1e12"
_UNREGISTERED = f"{_RANK}; r.RankServer._register_masks = lambda *_: None"


def _of(fault: str, broken: Suite, case: str, runs: Sequence[tuple[Any, ...]] = ((),), says: str = "") -> Mutant:
    return Mutant(fault, case, broken, WORKERS, runs, says)


MUTANTS = [
    _of(
        "does not send the texts that logits processors read",
        workers(executor_class=KeepsTexts),
        "test_texts_of_logits_processors",
        ((1,), (2,)),
    ),
    _of(
        "goes on when one rank has raised",
        workers(changes={"_judge": _judge_leniently}),
        "test_an_error_of_one_rank_loses_the_group",
        (("launch",),),
    ),
    _of(
        "notices the death of a rank at the deadline",
        workers(changes=_BLIND),
        "test_a_rank_that_dies_ends_the_step",
        (("launched", "kill"), ("idle_between", "exit")),
    ),
    _of(
        "waits for ever for a rank that hangs",
        workers(step_seconds=1e6),
        "test_a_rank_that_hangs_ends_the_step",
        (("hang",),),
    ),
    _of(
        "waits for ever for drafts",
        workers(step_seconds=1e6),
        "test_a_rank_that_is_lost_in_another_call",
        (("propose", "hang"),),
    ),
    _of(
        "hides why a rank could not be built",
        workers(changes={"_start_error": _start_error}),
        "test_it_says_why_a_rank_could_not_be_built",
        says="a rank could not be built",
    ),
    _of(
        "does not name the rank that has died",
        workers(of_handle={"__str__": lambda self: "a rank"}),
        "test_a_rank_that_dies_while_it_is_built",
    ),
    _of(
        "takes a message as sent when it is made",
        workers(sender=CountsMessagesTooEarly),
        "test_an_interrupt_costs_one_call",
        ((1, "observe"),),
    ),
    _of(
        "keeps a processor busy while the device computes",
        workers(start=_BUSY),
        "test_ranks_do_not_look_at_a_slow_device_all_the_time",
    ),
    _of("does not register the memory of masks", workers(start=_UNREGISTERED), "test_masks", ((1,),)),
    _of("leaves its ranks running", workers(executor_class=NeverCloses), "test_close", ((1,),)),
    _of("leaves a descriptor open", workers(executor_class=LeavesADescriptor), "test_close", ((1,),)),
    _of("leaves zombies", workers(executor_class=LeavesZombies), "test_close", ((1,),)),
    _of(
        "lets ranks run on after their parent",
        workers(start=_DETACHED),
        "test_the_ranks_end_with_their_parent",
        ((signal.SIGKILL, False),),
    ),
]
