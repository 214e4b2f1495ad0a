"""Run steps on ranks in processes of their own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.interfaces.executor import Executor, ExecutorContext, ExecutorInfo, WarmUpProgress
from dovetail_executors.workers.group import RankGroup
from dovetail_executors.workers.wire import ControlCall, PlanSender, ReplyReceiver, Verb

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    from dovetail_executors.config import WorkersConfig

_TURNS = 4
_AMPLE_SPIN_MS, _SCARCE_SPIN_MS = 10.0, 0.05


class Workers(Executor):
    """Run each rank in a process of its own on this host. Plans go to all ranks as one copy in shared memory; results
    come from rank 0.

    ``launch``, ``sample``, ``observe`` and ``locate_updates`` return when the message is written.
    """

    def __init__(self, config: WorkersConfig, context: ExecutorContext) -> None:
        """See ``Executor``."""
        self._group = RankGroup(
            context, config.start_seconds, config.step_seconds, _spin_seconds(config.spin_ms, context.size)
        )
        self._info = self._group.info._replace(fails_late=True)
        self._page_table = np.zeros(self._group.page_table, np.int32)
        self._size = context.size
        self._sender = PlanSender(lambda: self._group.num_sent, drafts=self._info.draft_width > 0)
        self._receiver = ReplyReceiver()
        self._buffers = _MaskBuffers(self._group)

    @property
    def info(self) -> ExecutorInfo:
        """See ``Executor``."""
        return self._info

    @property
    def progress(self) -> WarmUpProgress:
        """See ``Executor``. It is what rank 0 has reported last, at most about a second ago."""
        return self._group.progress

    @property
    def page_table(self) -> IntArray:
        """See ``Executor``. Each rank keeps another one, from the page updates of the plans."""
        return self._page_table

    def launch(self, plan: StepPlan) -> None:
        """See ``Executor.launch``."""
        self._group.send(Verb.LAUNCH, self._sender.plan(plan))

    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """See ``Executor.mask_buffer``."""
        return self._buffers.take(rows, width)

    def sample(self, plan: StepPlan, masks: Masks | None) -> None:
        """See ``Executor.sample``. A step that is not constrained was sampled when it was launched."""
        if not plan.constrained:
            return
        if masks is None:
            self._group.send(Verb.SAMPLE, self._sender.sample(plan, None, 0, 0))
            return
        bits, offset = self._buffers.placed(masks.bits)
        masks = masks._replace(bits=bits)
        message = self._sender.sample(plan, masks, self._group.masks.size, offset)
        self._buffers.hand_out()
        self._group.send(Verb.SAMPLE, message)

    def wait(self, plan: StepPlan) -> StepResult:
        """See ``Executor.wait``."""
        number, result = self._receiver.result(self._group.result(plan.number))
        assert number == plan.number
        return result

    def propose(self, plan: StepPlan) -> DraftTree | None:
        """See ``Executor.propose``."""
        self._raise_late()
        answers = self._group.ask(Verb.PROPOSE, self._sender.plan(plan, propose=True), 1)
        return self._receiver.drafts(answers[0])

    def observe(self, plan: StepPlan, committed: Committed) -> None:
        """See ``Executor.observe``."""
        self._group.send(Verb.OBSERVE, self._sender.observe(plan, committed))
        self._raise_late()

    def forget(self, departed: Sequence[DepartedRequest]) -> None:
        """See ``Executor.forget``."""
        self._group.send(Verb.FORGET, self._sender.forget(departed))
        self._raise_late()

    def _raise_late(self) -> None:
        late = self._group.take_late()
        if late is not None:
            raise late

    def locate_updates(self, updates: PageUpdates) -> None:
        """See ``Executor.locate_updates``. If there are no updates, nothing is sent."""
        if len(updates.slots):
            self._group.send(Verb.LOCATE, self._sender.value(updates))

    def idle(self) -> bool:
        """See ``Executor.idle``."""
        answers = self._group.ask(Verb.IDLE, self._sender.empty(), self._size)
        return any(self._receiver.call_result(data) for data in answers.values())

    def lost(self, error: BaseException) -> str | None:
        """See ``Executor.lost``."""
        return self._group.reason

    def describe(self) -> dict[str, Any]:
        """See ``Executor.describe``."""
        answers = self._group.ask(Verb.DESCRIBE, self._sender.empty(), 1)
        ranks = [{"rank": handle.rank, "pid": handle.pid} for handle in self._group.handles]
        return {**self._receiver.call_result(answers[0]), "ranks": ranks}

    def call(self, name: str, args: Any = None) -> list[Any]:
        """See ``Executor.call``."""
        answers = self._group.ask(Verb.CALL, self._sender.value(ControlCall(name, args)), self._size)
        return [self._receiver.call_result(answers[rank]) for rank in range(self._size)]

    def close(self) -> None:
        """See ``Executor.close``."""
        self._group.close()


class _MaskBuffers:
    """Hold the memory in which the masks of several steps are written, in turns."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._first = self._each = 0  # the memory has ``_TURNS`` buffers of ``_each`` bytes, from ``_first`` on
        self._turn = 0
        self._used = [0] * _TURNS  # the number of the message with each buffer; it may not have been sent
        self._last: tuple[IntArray, int] | None = None

    def take(self, rows: int, width: int) -> IntArray:
        """Return int32 ``[rows, width]`` in memory that all ranks have finished reading."""
        size = rows * width * 4
        if size > self._each:
            self._first += _TURNS * self._each
            self._each = max(1 << 16, 1 << (size - 1).bit_length())
            self._group.masks.grow(self._first + _TURNS * self._each)
            self._used = [0] * _TURNS
        self._turn = (self._turn + 1) % _TURNS
        self._group.await_finished(min(self._used[self._turn], self._group.num_sent))
        offset = self._first + self._turn * self._each
        bits = np.frombuffer(self._group.masks.view, np.int32, rows * width, offset).reshape(rows, width)
        self._last = bits, offset
        return bits

    def placed(self, bits: IntArray) -> tuple[IntArray, int]:
        """Return ``bits`` and their offset in the shared memory. They are copied there unless ``take`` has returned
        them last."""
        if self._last is None or bits is not self._last[0]:
            self.take(*bits.shape)[:] = bits
        assert self._last is not None
        return self._last

    def hand_out(self) -> None:
        """Note that the next message names the buffer that was taken last."""
        self._used[self._turn] = self._group.num_sent + 1
        self._last = None


def _spin_seconds(spin_ms: float | None, size: int) -> float:
    """Return how long a process spins. By default it spins for longer than most steps take if every rank, this process
    and its threads have cores of their own."""
    if spin_ms is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        spin_ms = _AMPLE_SPIN_MS if cores >= 2 * (size + 1) else _SCARCE_SPIN_MS
    return spin_ms / 1000
