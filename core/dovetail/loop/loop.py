"""Drive one engine: take messages, make steps, return answers. Only this package imports both the scheduler and the
engine."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dovetail.errors import QueueFullError, RequestError
from dovetail.loop.adapters import AdapterLoader
from dovetail.loop.adaptive_drafting import AdaptiveDrafting
from dovetail.loop.build import build_constraints, build_scheduler
from dovetail.loop.control import LoopControl
from dovetail.loop.drafter_guard import DrafterGuard
from dovetail.loop.failures import FailureHandler
from dovetail.loop.ranks import build_executor
from dovetail.loop.report import info_of, stats_of
from dovetail.loop.steps import AdaptiveStep, DraftedStep, OverlappedStep, PlainStep
from dovetail.loop.verbs import Verbs
from dovetail.messages import (
    AbortAllMsg,
    AbortLoadsMsg,
    AbortMsg,
    AdapterCommand,
    Answer,
    CommandReply,
    ContinueMsg,
    EngineStats,
    ExpertLoadMsg,
    FlushCacheMsg,
    GenerateMsg,
    HeldAdapterMsg,
    LoadAdapterMsg,
    PauseMsg,
    RequestFailed,
    ShutdownMsg,
    StartProfileMsg,
    StatsRequestMsg,
    StopProfileMsg,
    ToEngine,
    UnloadAdapterMsg,
)

if TYPE_CHECKING:
    from dovetail.loop.steps import StepStrategy
    from dovetail.loop.verbs import InFlight, StepTimes
    from dovetail.registry.resolver import Resolved
    from dovetail.tokenizer import Tokenizer

_IDLE_PAUSE = 0.001

log = logging.getLogger(__name__)


class Loop:
    """Drive one engine: take messages, make steps, return answers. Single-threaded.

    An error in the engine ends the requests of its step. An error in the drafter costs a step its drafts, and an error
    in a grammar matcher ends the matcher's request. An error in the policy costs a step the policy's order. After an
    error or an interrupt in the scheduler (or in its prefix cache) the scheduler's state is unknown, and some errors mean that the device is lost. In both cases the
    loop is ``dead``, and ``handle``, ``step`` and ``idle`` raise ``EngineDeadError`` from then on.
    """

    def __init__(self, resolved: Resolved, tokenizer: Tokenizer | None) -> None:
        gc.unfreeze()  # so that an earlier loop, which was closed, and its pool are collected
        gc.collect()
        gc.freeze()  # modules stay: ``measure_peak`` and the end of this method collect what is new
        self.resolved = resolved
        eos = frozenset(resolved.model_info.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer else ())
        with ExitStack() as undo:
            undo.callback(gc.unfreeze)
            self.executor = build_executor(resolved, eos)
            undo.callback(self.executor.close)
            self.constraints = build_constraints(resolved, tokenizer, eos)
            self.scheduler = build_scheduler(resolved, self.executor, self.constraints, tokenizer, eos)
            section = resolved.config.adapters
            self._adapters = AdapterLoader(section, self.scheduler, self.executor) if section.enabled else None
            undo.pop_all()
        self.overlap = resolved.config.scheduler.overlap is True
        self._failures = FailureHandler(resolved, self.executor, self.scheduler)
        self._guard = DrafterGuard(self.executor, self.scheduler, self._failures)
        info = self.executor.info
        always = resolved.config.scheduler.draft == "always"
        self.adaptive_drafting = AdaptiveDrafting(always=always, must_see_all=info.must_see_all)
        self._verbs = Verbs(self.scheduler, self.executor, self._failures, self._guard)
        self._control = LoopControl(self._verbs, self.executor)
        self._undrafted: StepStrategy = OverlappedStep(self._verbs) if self.overlap else PlainStep(self._verbs)
        drafted = DraftedStep(self._verbs, self._guard, overlap=self.overlap)
        self._adaptive = AdaptiveStep(self._verbs, drafted, self._undrafted, self.adaptive_drafting)
        self._in_flight: InFlight | None = None
        self._outbox: list[Answer] = []
        gc.collect()
        gc.freeze()  # later collections skip what exists now: a full collection would take tens of milliseconds

    # -- messages ----------------------------------------------------------------------------------------------------

    def handle(self, msg: ToEngine) -> None:
        """Take a message. The next ``step`` returns its answers. Raises ``EngineDeadError``."""
        self._failures.run(lambda: self._handle(msg))

    def _handle(self, msg: ToEngine) -> None:
        match msg:
            case GenerateMsg():
                self._add(msg)
            case AbortMsg(rid=rid, message=text):
                self._outbox += self.scheduler.abort(rid, text)
            case AbortAllMsg(message=text):
                self._outbox += self.scheduler.abort_all(text)
            case FlushCacheMsg(call_id=call_id):
                self._outbox.append(self._flush(call_id))
            case LoadAdapterMsg() | HeldAdapterMsg() | UnloadAdapterMsg() | AbortLoadsMsg():
                self._handle_adapter(msg)
            case PauseMsg() | ContinueMsg() | StartProfileMsg() | StopProfileMsg() | ExpertLoadMsg():
                self._outbox.append(self._control.handle(msg))
            case StatsRequestMsg(call_id=call_id):
                self._outbox.append(self.stats(call_id))
            case ShutdownMsg(drain=drain):
                if not drain:
                    self._abort_work("the server is shutting down")

    def _add(self, msg: GenerateMsg) -> None:
        try:
            self.scheduler.add(msg)
        except RequestError as error:
            self._outbox.append(RequestFailed.refused(msg.rid, error, msg.params))
        except QueueFullError as error:
            self._outbox.append(RequestFailed(msg.rid, 503, str(error), "queue_full"))
        except Exception as error:  # nothing was kept of the request, so no other request is concerned
            log.exception("request %s could not be taken", msg.rid)
            self._outbox.append(RequestFailed(msg.rid, 500, f"{type(error).__name__}: {error}", "engine_error"))

    def _handle_adapter(self, msg: AdapterCommand) -> None:
        off = CommandReply(msg.call_id, False, "adapters are off; set adapters.enabled: true (--enable-lora)")
        self._outbox += [off] if self._adapters is None else self._adapters.handle(msg)

    def _abort_work(self, message: str) -> None:
        self._outbox += self.scheduler.abort_all(message)
        if self._adapters is not None:
            self._outbox += self._adapters.abort(message)

    def _flush(self, call_id: str) -> CommandReply:
        if self.scheduler.has_work:
            return CommandReply(call_id, False, "requests are running; the cache is flushed when none is")
        return CommandReply(call_id, True, f"{self.scheduler.flush_cache()} pages freed")

    # -- steps -------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return True while ``step`` has something to do or to return."""
        waiting = self.scheduler.has_work and not self._verbs.paused
        adapters = self._adapters is not None and self._adapters.has_work
        return waiting or bool(self._outbox) or self._in_flight is not None or adapters

    @property
    def has_step_in_flight(self) -> bool:
        """Return True while a step is launched and not committed."""
        return self._in_flight is not None

    def idle(self) -> bool:
        """Use an idle moment to capture a graph, which would otherwise delay a later step. Return False if there is
        nothing to capture now, or if steps are paused. Raises ``EngineDeadError``, also if a rank has ended: a caller
        that waits for messages calls this every second or so. It also captures then what had to wait for kernels."""
        return not self._verbs.paused and self._failures.run_engine(self.executor.idle, "while it was idle")

    def finish_idle_work(self) -> None:
        """Capture everything that an idle engine captures, and wait for the kernels that are compiled for that. For
        measurements, which would otherwise include this work. Raises ``EngineDeadError``."""
        while self.idle() or not (self._verbs.paused or self.executor.progress.done):
            time.sleep(_IDLE_PAUSE)

    def step(self) -> list[Answer]:
        """Make one step and return all answers that are due. Raises ``EngineDeadError``.

        An interrupt (Ctrl-C) while the engine computes ends the requests of the step. An interrupt in a drafter only
        costs drafts. In both cases this method raises the interrupt once the step is over (the first, if there are
        several), and the next call returns the answers of this step.
        """
        answers = self._failures.run(self._step)
        interrupt = self._failures.take_interrupt()
        if interrupt is not None:
            self._outbox = answers + self._outbox
            raise interrupt
        return answers

    def _step(self) -> list[Answer]:
        start = time.perf_counter()
        answers, self._outbox = self._outbox, []
        answers += self.scheduler.poll()
        if self._adapters is not None:
            answers += self._adapters.poll()
        previous, self._in_flight = self._in_flight, None
        if self.scheduler.limits.draft_width:
            end = self._adaptive.run(previous)
            self._guard.forget_departed()
        else:
            end = self._undrafted.run(previous)
        self._in_flight = end.in_flight
        self._verbs.times.step += time.perf_counter() - start
        if self._control.is_profiling:
            self._control.after_step()
        return answers + end.answers

    # -- reports and the end ----------------------------------------------------------------------------

    @property
    def drafter_errors(self) -> int:
        """Return how often the drafter has raised or broken its contract."""
        return self._guard.errors

    @property
    def dead(self) -> str | None:
        """Return why the loop has ended, or None if it has not."""
        return self._failures.dead

    @property
    def times(self) -> StepTimes:
        """Return the number of steps since the start and the seconds that their parts have taken. The loop goes on
        counting in the returned object."""
        return self._verbs.times

    def stats(self, call_id: str = "") -> EngineStats:
        """Return the current values of gauges, and totals since the start."""
        self.scheduler.expire()
        return stats_of(self.scheduler, self._verbs, self._guard.errors, call_id, self.executor.progress)

    @property
    def info(self) -> dict[str, Any]:
        """Return what /server_info reports about the engine, as JSON."""
        found = info_of(self.resolved, self.executor, self.overlap)
        return found if self._adapters is None else {**found, "adapters_max_rank": self._adapters.max_rank}

    def close(self) -> None:
        """Stop the grammar workers and the executor. The loop must not be used again."""
        try:
            self.constraints.close()
        finally:
            self.executor.close()
        gc.unfreeze()
        if self.resolved.machine.device != "cpu":
            gc.collect()  # frees the device's memory: attention backends and batches refer to each other
