"""Run the engine of one rank: take messages, run them, reply.

Rank 0 replies with the results of steps, every rank with what it raises. A step that needs no masks is sampled as soon as
it is launched. Its result is sent as soon as the device has computed it, also while later messages arrive.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dovetail.interfaces.executor import RankEngine, WarmUpProgress
from dovetail.types import PageUpdates
from dovetail_executors.workers.memory import AnonymousMemory
from dovetail_executors.workers.ring import RingMessage, RingReader, RingWriter, drain, spin
from dovetail_executors.workers.wire import CallResult, PlanReceiver, RankFailure, RankReply, Ready, ReplySender, Verb

if TYPE_CHECKING:
    from dovetail.types import StepPlan

EXIT_FAILED = 70
"""Exit status of a rank that has ended with an exception, or because the process that started it has ended."""

_KEPT_PLANS = 16
_PARENT_SECONDS = 1.0
_REPORT_SECONDS = 0.5
_LEAST_PAUSE = 50e-6  # seconds between two looks at a result that the device computes
_PAUSES = 64  # longer pauses are this part of the time for which the result was awaited

logger = logging.getLogger("dovetail.rank")


class RankSpec(msgspec.Struct):
    """Describe a rank to its process. The numbers that end in ``fd`` are descriptors that it has inherited.

    ``life_fd`` is a pipe that closes when the parent ends. ``messages``, ``replies`` and ``masks`` are shared memory: a
    descriptor and a size.
    """

    rank: int
    size: int
    target: str
    description: bytes
    rendezvous: str
    folder: str
    parent: int
    life_fd: int
    inbox_fd: int
    outbox_fd: int
    messages: tuple[int, int]
    replies: tuple[int, int]
    masks: tuple[int, int]
    spin_seconds: float
    log_level: str


def main(spec_fd: int) -> None:
    """Run the rank that the memory ``spec_fd`` describes. Does not return."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach all processes of a group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    with os.fdopen(spec_fd, "rb") as file:
        file.seek(0)
        spec = msgspec.msgpack.decode(file.read(), type=RankSpec)
    _end_with_parent(spec)
    logging.basicConfig(
        level=spec.log_level.upper(),
        format=f"%(asctime)s %(levelname)s rank {spec.rank} %(name)s: %(message)s",
    )
    logging.getLogger("dovetail.registry").setLevel(logging.WARNING)  # the parent has logged the same choices
    status = EXIT_FAILED
    try:
        server = RankServer(spec)  # kept until the process ends: to free peer memory of a lost device would abort it
        if server.run():
            status = 0
    except BaseException:
        logger.critical("rank %d failed", spec.rank, exc_info=True)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _end_with_parent(spec: RankSpec) -> None:
    """End this process when its parent has ended, in whatever way."""
    for fd in (spec.life_fd, spec.inbox_fd, spec.outbox_fd, spec.messages[0], spec.replies[0], spec.masks[0]):
        os.set_inheritable(fd, False)

    def watch() -> None:
        poller = select.poll()
        poller.register(spec.life_fd, select.POLLIN)
        while os.getppid() == spec.parent and not poller.poll(_PARENT_SECONDS * 1000):
            pass
        shutil.rmtree(spec.folder, ignore_errors=True)
        os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class RankServer:
    """Build the engine of a rank, and run messages on it."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._engine: RankEngine | None = None
        self._inbox = RingReader(AnonymousMemory(*spec.messages), spec.rank)
        self._outbox = RingWriter(AnonymousMemory(*spec.replies), [spec.outbox_fd])
        self._masks = AnonymousMemory(*spec.masks)
        self._registered = 0  # bytes of the memory of masks that the engine knows
        self._receiver, self._sender = PlanReceiver(self._masks, drafts=False), ReplySender()
        self._progress = WarmUpProgress()
        self._reported = 0.0  # when the progress was looked at last
        self._plans: dict[int, StepPlan] = {}
        self._failed: set[int] = set()
        self._sampled: deque[StepPlan] = deque()  # plans whose result is not sent
        self._owed: StepPlan | None = None  # a plan that failed: the next one brings its updates again
        self._pending_since = 0.0  # when the oldest of them was sampled, or the one before it was sent
        self._wake_fd = os.dup(spec.inbox_fd)  # the lowest free number: select takes only numbers below 1024
        os.set_blocking(self._wake_fd, False)
        os.set_blocking(spec.outbox_fd, False)

    def run(self) -> bool:
        """Serve until CLOSE arrives. Return False if the engine could not be built."""
        engine = self._engine = self._build()
        if engine is None:
            return False
        self._receiver = PlanReceiver(self._masks, drafts=engine.info.draft_width > 0)
        groups, rows, columns = engine.page_table.shape
        self._put(RankReply.READY, 0, self._sender.value(Ready(engine.info, (groups, rows, columns))))
        while True:
            if self._sampled:
                self._send_result(engine)
            self._report_progress(engine)
            message = self._inbox.take()
            if message is None:
                self._rest()
            elif message.kind == Verb.CLOSE:
                break
            else:
                self._handle(engine, message)
                self._inbox.finish()
        engine.close()
        return True

    def _report_progress(self, engine: RankEngine) -> None:
        """Report on rank 0 how far the preparation of the engine is, if this has changed."""
        now = time.monotonic()
        if self._spec.rank or now < self._reported + _REPORT_SECONDS:
            return
        self._reported = now
        progress = engine.progress
        if progress != self._progress:
            self._progress = progress
            self._put(RankReply.PROGRESS, 0, self._sender.value(progress))

    def _build(self) -> RankEngine | None:
        spec = self._spec
        try:
            module, _, attribute = spec.target.partition(":")
            build = getattr(importlib.import_module(module), attribute)
            engine = build(spec.description, spec.rank, spec.size, spec.rendezvous)
            self._register_masks(engine)
            return engine
        except BaseException as error:
            logger.debug("rank %d could not be built", spec.rank, exc_info=True)
            failure = RankFailure(0, 0, type(error).__name__, str(error) or type(error).__name__, None)
            self._put(RankReply.FAILURE, 0, self._sender.value(failure))
            return None

    def _rest(self) -> None:
        """Wait for the next message. While the device computes a result that must be sent, return early: at once while
        this process spins, and later after a short part of the time for which it has waited already, so that the result
        is sent at most that much later than it could be."""
        inbox = self._inbox
        if self._sampled:
            waited = time.perf_counter() - self._pending_since
            if waited < self._spec.spin_seconds:
                time.sleep(0)
            else:
                self._block(max(_LEAST_PAUSE, waited / _PAUSES))
        elif not spin(lambda: inbox.waiting, self._spec.spin_seconds):
            self._block(_REPORT_SECONDS)

    def _block(self, seconds: float) -> None:
        """Block until a message arrives, for at most ``seconds``."""
        self._inbox.announce(True)
        if not self._inbox.waiting:
            select.select([self._wake_fd], [], [], min(seconds, _REPORT_SECONDS))  # poll cannot wait for microseconds
            drain(self._wake_fd)
        self._inbox.announce(False)

    def _put(self, kind: RankReply, tag: int, data: bytes) -> None:
        self._outbox.put(kind, tag, data, lambda: time.sleep(0.0001))

    # -- messages ----------------------------------------------------------------------------------------------------

    def _handle(self, engine: RankEngine, message: RingMessage) -> None:
        match message.kind:
            case Verb.LAUNCH:
                self._launch(engine, self._receiver.plan(message.data))
            case Verb.SAMPLE:
                number, masks = self._receiver.sample(message.data)
                if number not in self._failed:
                    self._sample(engine, self._plans[number], masks)
            case _:
                try:
                    self._handle_other(engine, message)
                except BaseException as error:
                    self._report(engine, error, 0, message.number)

    def _handle_other(self, engine: RankEngine, message: RingMessage) -> None:
        number, data = message.number, message.data
        match message.kind:
            case Verb.PROPOSE:
                self._finish_sampled(engine)
                tree = engine.propose(self._receiver.plan(data))
                answer = self._sender.drafts(number, tree)  # every rank raises for a tree that cannot be sent
                if self._spec.rank == 0:
                    self._put(RankReply.ANSWER, number, answer)
            case Verb.OBSERVE:
                plan, committed = self._receiver.observe(data)
                self._finish_sampled(engine)
                engine.observe(self._plans[plan], committed)
            case Verb.FORGET:
                engine.forget(self._receiver.forget(data))
            case Verb.LOCATE:
                engine.locate_updates(self._receiver.updates(data))
            case Verb.IDLE:
                self._put(RankReply.ANSWER, number, self._sender.value(CallResult(number, engine.idle())))
            case Verb.CALL:
                call = self._receiver.call(data)
                value = engine.call(call.name, call.args)
                self._put(RankReply.ANSWER, number, self._sender.value(CallResult(number, value)))
            case Verb.DESCRIBE:
                value = engine.describe()  # every rank raises what this raises
                if self._spec.rank == 0:
                    self._put(RankReply.ANSWER, number, self._sender.value(CallResult(number, value)))
            case _:
                raise AssertionError(f"there is no message of kind {message.kind}")

    # -- steps -------------------------------------------------------------------------------------------------------

    def _launch(self, engine: RankEngine, plan: StepPlan) -> None:
        self._plans[plan.number] = plan
        if len(self._plans) > _KEPT_PLANS:
            del self._plans[next(iter(self._plans))]
        if self._owed is not None:
            _repeat(self._owed, plan)
            self._owed = None
        try:
            engine.launch(plan)
        except BaseException as error:
            self._owed = plan
            self._fail(engine, error, plan)
            return
        if not plan.constrained:
            self._sample(engine, plan, None)

    def _sample(self, engine: RankEngine, plan: StepPlan, masks: object) -> None:
        try:
            self._register_masks(engine)
            engine.sample(plan, masks)  # pyright: ignore[reportArgumentType]
        except BaseException as error:
            self._fail(engine, error, plan)
        else:
            if not self._sampled:
                self._pending_since = time.perf_counter()
            self._sampled.append(plan)

    def _register_masks(self, engine: RankEngine) -> None:
        """Register the memory of masks again if it has grown."""
        if self._masks.size > self._registered:
            engine.register_masks(self._masks.bytes)
            self._registered = self._masks.size

    def _send_result(self, engine: RankEngine, *, block: bool = False) -> None:
        """Send the result of the oldest sampled step if the device has computed it, or ``block`` until it has."""
        plan = self._sampled[0]
        try:
            if not block and not engine.ready(plan):
                return
            result = engine.wait(plan)
            if self._spec.rank == 0:
                self._put(RankReply.RESULT, plan.number, self._sender.result(plan.number, result))
        except BaseException as error:
            self._sampled.popleft()
            self._fail(engine, error, plan)
        else:
            self._sampled.popleft()
            self._inbox.finish_plan(plan.number)
        self._pending_since = time.perf_counter()

    def _finish_sampled(self, engine: RankEngine) -> None:
        """Wait for all steps that were sampled: other ranks than rank 0 may be behind it."""
        while self._sampled:
            self._send_result(engine, block=True)

    def _fail(self, engine: RankEngine, error: BaseException, plan: StepPlan) -> None:
        self._failed.add(plan.number)
        self._report(engine, error, plan.number, 0)
        self._inbox.finish_plan(plan.number)

    def _report(self, engine: RankEngine, error: BaseException, plan: int, message: int) -> None:
        logger.error("rank %d: %s failed", self._spec.rank, f"step {plan}" if plan else "a call", exc_info=error)
        text = str(error).strip().partition("\n")[0]
        failure = RankFailure(plan, message, type(error).__name__, text, engine.lost(error))
        self._put(RankReply.FAILURE, 0, self._sender.value(failure))


def _repeat(failed: StepPlan, plan: StepPlan) -> None:
    """Put the page updates of a step that failed, which may not have reached the device, before those of the next
    ``plan``."""
    old, new = failed.page_updates, plan.page_updates
    if len(old.slots):
        plan.page_updates = PageUpdates(
            np.concatenate([old.slots, new.slots]),
            np.concatenate([old.columns, new.columns]),
            np.concatenate([old.pages, new.pages], axis=1),
        )
