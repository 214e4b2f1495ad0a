"""The loop: the only file that holds both halves, the scheduler and the engine. A step is three verbs.

    batch = scheduler.schedule()          who runs, with which pages
    output = engine.forward(batch)        tokens, on the device
    answers = scheduler.commit(batch)     cursors advance, finished requests leave

Under overlap the third verb lags one step: while the device computes step N + 1, the host reads the tokens of step N,
advances grammars and answers clients.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dovetail.engine.device import explained, first_line
from dovetail.engine.engine import Engine
from dovetail.errors import EngineDeadError, QueueFullError, RequestError
from dovetail.loop.build import build_constraints, build_scheduler
from dovetail.loop.fence import Fence
from dovetail.loop.pace import Pace
from dovetail.loop.report import info_of, stats_of
from dovetail.messages import (
    AbortAllMsg,
    AbortMsg,
    Answer,
    CommandReply,
    EngineStats,
    FlushCacheMsg,
    GenerateMsg,
    RequestFailed,
    ShutdownMsg,
    StatsRequestMsg,
    ToEngine,
)

if TYPE_CHECKING:
    from dovetail.interfaces.speculative import Drafter
    from dovetail.registry.resolver import Resolved
    from dovetail.tokenizer import Tokenizer
    from dovetail.types import Batch, ForwardOutput

T = TypeVar("T")

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.0005
"""Pause of a step in which requests wait for their grammars and nothing else can run."""

_START_AGAIN = "the engine cannot go on and must be started again"


class Loop:
    """Drives one engine: takes messages, makes steps, returns answers. Single-threaded.

    What fails in the engine ends the requests of its step, what fails in a drafter costs a step its drafts, what fails in
    a grammar matcher ends its request. What fails in the scheduler (a policy, a prefix cache), or is interrupted there,
    leaves the books in doubt; a device can be lost: the loop is ``dead`` then, and ``handle``, ``step`` and ``idle`` raise
    ``EngineDeadError`` from then on.
    """

    def __init__(self, resolved: Resolved, tokenizer: Tokenizer | None) -> None:
        gc.unfreeze()  # a loop that was closed before, and its pool, can be collected
        gc.collect()
        self.resolved = resolved
        eos = frozenset(resolved.model_info.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer else ())
        with explained(resolved.config):
            self.engine = Engine(resolved, eos)
        self.drafter = self.engine.drafter
        self.constraints = build_constraints(resolved, tokenizer, eos)
        width = self.drafter.max_draft_tokens if self.drafter else 0
        self.scheduler = build_scheduler(resolved, self.engine, width, self.constraints, tokenizer, eos)
        self.overlap = resolved.config.scheduler.overlap is True
        self.dead: str | None = None
        self._kept: EngineDeadError | None = None  # its traceback holds tensors of a lost device: freeing them aborts
        self._interrupt: BaseException | None = None
        self._fence = Fence(self._end_if_lost, self._interrupted)
        always = resolved.config.scheduler.draft == "always"
        self._pace = Pace(always=always, must_see_all=self.drafter is not None and self.drafter.must_see_all)
        self._drafting = False  # whether the step being made asks the drafter
        self._with_prompts = False  # whether the step scheduled last has rows of prompts
        self._launched: tuple[Batch, ForwardOutput] | None = None
        self._outbox: list[Answer] = []
        self._steps = 0
        self._seconds: dict[str, float] = dict.fromkeys(
            ("step", "schedule", "draft", "launch", "wait", "verify", "commit"), 0.0
        )
        gc.collect()
        gc.freeze()  # what lives as long as the loop is not looked at again: a full collection takes tens of milliseconds

    # -- messages ----------------------------------------------------------------------------------------------------

    def handle(self, msg: ToEngine) -> None:
        """Take a message; what it is answered with comes out of the next ``step``. Raises ``EngineDeadError``."""
        self._guarded(lambda: self._handle(msg))

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
            case StatsRequestMsg(call_id=call_id):
                self._outbox.append(self.stats(call_id))
            case ShutdownMsg(drain=drain):
                if not drain:
                    self._outbox += self.scheduler.abort_all("the server is shutting down")

    def _add(self, msg: GenerateMsg) -> None:
        try:
            self.scheduler.add(msg)
        except RequestError as error:
            self._outbox.append(RequestFailed(msg.rid, 400, str(error), error.code, error.param))
        except QueueFullError as error:
            self._outbox.append(RequestFailed(msg.rid, 503, str(error), "queue_full"))
        except Exception as error:  # nothing was kept of the request, so nobody else is concerned
            log.exception("request %s could not be taken", msg.rid)
            self._outbox.append(RequestFailed(msg.rid, 500, f"{type(error).__name__}: {error}", "engine_error"))

    def _flush(self, call_id: str) -> CommandReply:
        if self.scheduler.has_work:
            return CommandReply(call_id, False, "requests are running; the cache is flushed when none is")
        self.scheduler.release_pins()
        ledger = self.scheduler.ledger
        pages = ledger.cache.reset()
        ledger.allocator.free(pages)
        return CommandReply(call_id, True, f"{pages.shape[1]} pages freed")

    @property
    def has_work(self) -> bool:
        """True while ``step`` has something to do or to say."""
        return bool(self._outbox) or self._launched is not None or self.scheduler.has_work

    def idle(self) -> bool:
        """Use a moment without work for what would otherwise delay a later step; False if there is nothing of the kind."""
        return self._guarded(self._idle)

    def _idle(self) -> bool:
        try:
            return self.engine.idle()
        except Exception as error:
            self._end_if_lost(error)
            raise

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Answer]:
        """Run one step and return all that is to be said. Raises ``EngineDeadError``. An interrupt (Ctrl-C) while the engine
        computes ends the requests of the step, one in a drafter costs drafts; the first is raised when the books are in order, and
        the answers come next time."""
        answers = self._guarded(self._step)
        if self._interrupt is not None:
            self._outbox = answers + self._outbox
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt
        return answers

    def _step(self) -> list[Answer]:
        start = time.perf_counter()
        answers, self._outbox = self._outbox, []
        answers += self.scheduler.poll()
        if self.drafter is not None:
            answers += self._step_with_drafter()
            self._forget_departed(self.drafter)
        else:
            answers += self._overlapped_step() if self.overlap else self._plain_step()
        self._seconds["step"] += time.perf_counter() - start
        return answers

    def _step_with_drafter(self) -> list[Answer]:
        """With drafts where they pay, after the last step has been committed: a drafter is shown every token. Else as if there
        were no drafter."""
        scheduler, seconds = self.scheduler, self._seconds
        rows = len(scheduler.decoding) or len(scheduler.prefilling) + len(scheduler.waiting)
        drafted, self._drafting = self._drafting, self._pace.drafts(rows)
        prompts = self._launched is not None and self._launched[0].num_extend > 0
        tokens, start = scheduler.totals.generated_tokens, time.perf_counter()
        verify = seconds["launch"] + seconds["wait"]
        answers = self._commit_launched(seen=True) if self._drafting or drafted else []
        answers += self._undrafted_step() if not self._drafting else self._drafted_step()
        verify = seconds["launch"] + seconds["wait"] - verify
        if self._drafting:
            seconds["verify"] += verify
        if scheduler.decoding and not (prompts or self._with_prompts):
            took, brought = time.perf_counter() - start, scheduler.totals.generated_tokens - tokens
            self._pace.note(rows, self._drafting, took, brought, verify)
        return answers

    def _undrafted_step(self) -> list[Answer]:
        return self._overlapped_step() if self.overlap else self._plain_step()

    def _drafted_step(self) -> list[Answer]:
        """Under overlap a step is left to compute while its predecessor's answers are sent."""
        return self._launched_step() if self.overlap else self._plain_step()

    def _plain_step(self) -> list[Answer]:
        return self._launched_step() + self._commit_launched(seen=self._drafting)

    def _launched_step(self) -> list[Answer]:
        """Schedule and launch a step, after the last one has been committed. The answers are of those for whom that failed."""
        batch = self._schedule()
        if batch is None:
            return []
        start = time.perf_counter()
        try:
            output = self.engine.forward(batch)
        except BaseException as error:
            self.scheduler.take_back(batch)
            return self._failed(batch, error)
        finally:
            self._seconds["launch"] += time.perf_counter() - start
        if batch.drafts is not None:  # while the device computes: what is done now does not delay the next step
            self.engine.locate_updates(self.scheduler.reserve_ahead())
        self._launched = batch, output
        return []

    def _overlapped_step(self) -> list[Answer]:
        batch = self._schedule(resting=self._launched is None)
        failure: BaseException | None = None
        launched = None
        if batch is not None:
            start = time.perf_counter()
            try:
                launched = self.engine.launch(batch)
            except BaseException as error:
                failure = error
                self.scheduler.take_back(batch)
            self._seconds["launch"] += time.perf_counter() - start
        answers = self._commit_launched()
        if batch is None:
            return answers
        if launched is not None:
            start = time.perf_counter()
            try:
                self._launched = batch, self.engine.sample(batch, launched)
            except BaseException as error:
                failure = error
            self._seconds["launch"] += time.perf_counter() - start
        if failure is not None:
            return answers + self._failed(batch, failure)
        if not self.scheduler.has_work:  # all have finished meanwhile: nobody waits for the step just launched
            answers += self._commit_launched()
        return answers

    def _commit_launched(self, *, seen: bool = False) -> list[Answer]:
        """Bring the books up to the step on its way, if there is one; ``seen`` by the drafter too."""
        if self._launched is None:
            return []
        (batch, output), self._launched = self._launched, None
        return self._commit(batch, output, seen=seen)

    def _schedule(self, *, resting: bool = True) -> Batch | None:
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        self._seconds["schedule"] += time.perf_counter() - start
        self._with_prompts = batch is not None and batch.num_extend > 0
        if batch is None:
            if resting and self.scheduler.has_work:
                time.sleep(IDLE_SECONDS)
            return None
        self._steps += 1
        drafter = self.drafter
        if drafter is None:
            return batch
        self._forget_departed(drafter)  # one of them may be in the batch, as new: retracted, and admitted again
        if self._drafting and batch.num_extend < len(batch.reqs):
            start = time.perf_counter()
            self._fence.propose(drafter, self.scheduler, batch)
            self._seconds["draft"] += time.perf_counter() - start
        return batch

    def _commit(self, batch: Batch, output: ForwardOutput, *, seen: bool) -> list[Answer]:
        start = time.perf_counter()
        try:
            host = self.engine.wait(batch, output)
        except BaseException as error:
            return self._failed(batch, error)
        finally:
            waited = time.perf_counter()
            self._seconds["wait"] += waited - start
        answers = self.scheduler.commit(batch, host)
        committed = time.perf_counter()
        self._seconds["commit"] += committed - waited
        if self.drafter is not None and seen:
            self._fence.observe(self.drafter, batch, output)
            self._seconds["draft"] += time.perf_counter() - committed
        return answers

    def _failed(self, batch: Batch, error: BaseException) -> list[Answer]:
        """A step that failed ends its requests; a device that is lost ends the process. An interrupt (Ctrl-C) fails the
        step as well: what it has written is not known; it is raised once the books are in order."""
        self._end_if_lost(error)
        if not isinstance(error, Exception):
            self._interrupted(error)
        log.error("a step of %d requests failed", len(batch.reqs), exc_info=error)
        return self.scheduler.fail(batch.reqs, f"{type(error).__name__}: {first_line(error)}")

    def _interrupted(self, error: BaseException) -> None:
        self._interrupt = self._interrupt or error

    def _forget_departed(self, drafter: Drafter) -> None:
        departed = self.scheduler.take_departed()
        if departed:
            self._fence.forget(drafter, departed)

    def _end_if_lost(self, error: BaseException) -> None:
        reason = self.engine.lost_device(error)
        if reason is not None:
            log.error("the device was lost", exc_info=error)
            self.dead = f"the device was lost: {reason}; {_START_AGAIN}"
            self._kept = EngineDeadError(self.dead)
            raise self._kept from error

    def _guarded(self, part: Callable[[], T]) -> T:
        """Run what keeps the books; what it raises is the end of the loop."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        try:
            return part()
        except EngineDeadError:
            raise
        except Exception as error:
            policy, cache = (chosen.spec.name for chosen in (self.resolved.policy, self.resolved.cache))
            self.dead = (
                f"the scheduler failed: {type(error).__name__}: {error} (policy {policy!r}, prefix cache {cache!r}); "
                f"{_START_AGAIN}"
            )
            raise EngineDeadError(self.dead) from error
        except BaseException as error:
            self.dead = f"the scheduler was interrupted by {type(error).__name__}; {_START_AGAIN}"
            raise

    # -- what it says of itself --------------------------------------------------------------------------------------

    def stats(self, call_id: str = "") -> EngineStats:
        """Gauges now, totals since the start."""
        self.scheduler.expire()
        seconds = {**self._seconds, "mask": self.engine.sampler.mask_seconds}
        return stats_of(self.scheduler, seconds, self._steps, self._fence.errors, call_id)

    @property
    def drafter_errors(self) -> int:
        """How often the drafter has raised, or broken its contract."""
        return self._fence.errors

    @property
    def info(self) -> dict[str, Any]:
        """What /server_info shows of the engine, as JSON."""
        return info_of(self.resolved, self.engine, self.overlap)

    def close(self) -> None:
        """Stop the grammar workers. The loop must not be used again."""
        self.constraints.close()
        gc.unfreeze()
