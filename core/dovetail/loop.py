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

from dovetail.engine.engine import Engine
from dovetail.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from dovetail.interfaces.cache import CacheContext
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarContext
from dovetail.interfaces.policy import PolicyContext
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.table import RequestTable
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
from dovetail.ops.cpu.library import library
from dovetail.scheduler.grammar import GrammarService
from dovetail.scheduler.limits import Limits
from dovetail.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from dovetail.plugins.resolver import Resolved
    from dovetail.tokenizer import Tokenizer
    from dovetail.types import Batch, ForwardOutput

T = TypeVar("T")

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.0005
"""Pause of a step in which requests wait for their grammars and nothing else can run."""


class Loop:
    """Drives one engine: takes messages, makes steps, returns answers. Single-threaded.

    What fails in the engine ends the requests of its step, what fails in a drafter costs a step its drafts, what fails in
    a grammar matcher ends its request. What fails in the scheduler (a policy, a prefix cache) leaves the books in doubt:
    the loop is ``dead``, and ``handle`` and ``step`` raise ``EngineDeadError`` from then on.
    """

    def __init__(self, resolved: Resolved, tokenizer: Tokenizer | None) -> None:
        gc.unfreeze()  # a loop that was closed before, and its pool, can be collected
        gc.collect()
        self.resolved = resolved
        eos = frozenset(resolved.model_info.eos_token_ids) | frozenset(tokenizer.eos_token_ids if tokenizer else ())
        self.engine = Engine(resolved, eos)
        self.drafter = self._build_drafter()
        self.grammars = _build_grammars(resolved, tokenizer, tuple(sorted(eos)))
        self.scheduler = self._build_scheduler(tokenizer, eos)
        self.overlap = resolved.config.scheduler.overlap is True
        if self.overlap and resolved.drafter is not None:
            raise ConfigError(
                f"scheduler.overlap is true with speculative {resolved.drafter.spec.name!r}; this engine verifies drafts only "
                "where every token is known to the host: set scheduler.overlap: false (the drafter's plugin should say "
                "that it needs runtime.host_tokens)"
            )
        self.dead: str | None = None
        self._interrupt: BaseException | None = None
        self.drafter_errors = 0
        self._launched: tuple[Batch, ForwardOutput] | None = None
        self._outbox: list[Answer] = []
        self._steps = 0
        self._seconds: dict[str, float] = dict.fromkeys(("step", "schedule", "launch", "wait", "commit"), 0.0)
        gc.collect()
        gc.freeze()  # what lives as long as the loop is not looked at again: a full collection takes tens of milliseconds

    def _build_drafter(self) -> Drafter | None:
        if self.resolved.drafter is None:
            return None
        rows = self.resolved.config.scheduler.rows
        engine = self.engine
        return self.resolved.drafter.build(
            DrafterContext(engine.device, engine.info.vocab_size, rows, engine.context_len)
        )

    def _build_scheduler(self, tokenizer: Tokenizer | None, eos: frozenset[int]) -> Scheduler:
        resolved, engine, section = self.resolved, self.engine, self.resolved.config.scheduler
        cache = resolved.cache.build(CacheContext(engine.page_size))
        table = RequestTable(section.rows, engine.inputs.page_table.shape[1])
        ledger = PageLedger(PageAllocator(engine.num_pages), cache, table, engine.page_size)
        limits = Limits(
            max_running=section.rows,
            max_waiting=section.max_waiting,
            chunk_size=section.chunk,
            context_len=engine.context_len,
            vocab_size=engine.info.vocab_size,
            mixed=section.mixed,
            wait_for_prefix=section.wait_for_prefix and Feature.CACHE_REUSE in resolved.cache.spec.offers,
            shared_prefixes=engine.shares_prefixes,
            draft_width=self.drafter.max_draft_tokens if self.drafter else 0,
        )
        policy = resolved.policy.build(PolicyContext(cache))
        return Scheduler(limits, ledger, policy, self.grammars, tokenizer, eos)

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
        return self._guarded(self.engine.idle)

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Answer]:
        """Run one step and return all that is to be said. Raises ``EngineDeadError``."""
        start = time.perf_counter()
        answers, self._outbox = self._outbox, []
        answers += self._guarded(self.scheduler.poll)
        answers += self._overlapped_step() if self.overlap else self._plain_step()
        if self.drafter is not None:
            self._forget(self.drafter)
        self._seconds["step"] += time.perf_counter() - start
        if self._interrupt is not None:
            self._outbox = answers + self._outbox
            interrupt, self._interrupt = self._interrupt, None
            raise interrupt
        return answers

    def _plain_step(self) -> list[Answer]:
        batch = self._schedule()
        if batch is None:
            return []
        try:
            output = self._timed("launch", lambda: self.engine.forward(batch))
        except BaseException as error:
            self.scheduler.take_back(batch)
            return self._failed(batch, error)
        return self._commit(batch, output)

    def _overlapped_step(self) -> list[Answer]:
        batch = self._schedule(resting=self._launched is None)
        failure: BaseException | None = None
        if batch is not None:
            try:
                self._timed("launch", lambda: self.engine.launch(batch))
            except BaseException as error:
                failure = error
                self.scheduler.take_back(batch)
        answers = self._commit_launched()
        if batch is None:
            return answers
        if failure is None:
            try:
                self._launched = batch, self._timed("launch", lambda: self.engine.sample(batch))
            except BaseException as error:
                failure = error
        if failure is not None:
            return answers + self._failed(batch, failure)
        if not self.scheduler.has_work:  # all have finished meanwhile: nobody waits for the step just launched
            answers += self._commit_launched()
        return answers

    def _commit_launched(self) -> list[Answer]:
        if self._launched is None:
            return []
        (batch, output), self._launched = self._launched, None
        return self._commit(batch, output)

    def _schedule(self, *, resting: bool = True) -> Batch | None:
        batch = self._timed("schedule", lambda: self._guarded(self.scheduler.schedule))
        if batch is None:
            if resting and self.scheduler.has_work:
                time.sleep(IDLE_SECONDS)
            return None
        self._steps += 1
        if self.drafter is not None and batch.num_extend < len(batch.reqs):
            self._draft(self.drafter, batch)
        return batch

    def _draft(self, drafter: Drafter, batch: Batch) -> None:
        """Ask for drafts. A drafter that raises is fenced, as is one whose drafts break its contract: the step goes on
        without them, the error is counted."""
        try:
            drafts = drafter.propose(batch)
            if drafts is not None:
                self.scheduler.attach(batch, drafts)
        except Exception:
            self._drafter_failed("this step runs without drafts")

    def _observe(self, drafter: Drafter, batch: Batch, output: ForwardOutput) -> None:
        try:
            drafter.observe(batch, output)
        except Exception:
            self._drafter_failed("it has not seen what this step accepted")

    def _forget(self, drafter: Drafter) -> None:
        for req in self.scheduler.take_departed():
            try:
                drafter.forget(req)
            except Exception:
                self._drafter_failed(f"it may keep the state of request {req.rid}")

    def _drafter_failed(self, consequence: str) -> None:
        self.drafter_errors += 1
        log.exception("the drafter failed (%d times so far); %s", self.drafter_errors, consequence)

    def _commit(self, batch: Batch, output: ForwardOutput) -> list[Answer]:
        try:
            host = self._timed("wait", lambda: self.engine.wait(batch, output))
        except BaseException as error:
            return self._failed(batch, error)
        start = time.perf_counter()
        answers = self._guarded(lambda: self.scheduler.commit(batch, host))
        if self.drafter is not None:
            self._observe(self.drafter, batch, output)
        self._seconds["commit"] += time.perf_counter() - start
        return answers

    def _failed(self, batch: Batch, error: BaseException) -> list[Answer]:
        """A step that failed ends its requests; a device that is lost ends the process. An interrupt (Ctrl-C) fails the
        step as well: what it has written is not known; it is raised once the books are in order."""
        if self.engine.lost_device(error):
            self.dead = f"the device was lost: {error}"
            raise EngineDeadError(self.dead) from error
        if not isinstance(error, Exception):
            self._interrupt = error
        log.error("a step of %d requests failed", len(batch.reqs), exc_info=error)
        return self._guarded(lambda: self.scheduler.fail(batch.reqs, f"{type(error).__name__}: {error}"))

    def _timed(self, name: str, part: Callable[[], T]) -> T:
        start = time.perf_counter()
        try:
            return part()
        finally:
            self._seconds[name] += time.perf_counter() - start

    def _guarded(self, part: Callable[[], T]) -> T:
        """Run a part of the scheduler; what it raises is the end of the loop."""
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        try:
            return part()
        except Exception as error:
            policy, cache = (chosen.spec.name for chosen in (self.resolved.policy, self.resolved.cache))
            self.dead = (
                f"the scheduler failed: {type(error).__name__}: {error} (policy {policy!r}, prefix cache {cache!r}); "
                "the engine cannot go on and must be started again"
            )
            raise EngineDeadError(self.dead) from error

    # -- what it says of itself --------------------------------------------------------------------------------------

    def stats(self, call_id: str = "") -> EngineStats:
        """Gauges now, totals since the start."""
        scheduler, ledger, totals = self.scheduler, self.scheduler.ledger, self.scheduler.totals
        return EngineStats(
            call_id=call_id,
            running=len(scheduler.prefilling) + len(scheduler.decoding),
            waiting=len(scheduler.waiting),
            pages_total=ledger.allocator.num_total,
            pages_used=ledger.allocator.num_total - ledger.available,
            pages_cached=ledger.cache.total_pages,
            prompt_tokens=totals.prompt_tokens,
            cached_tokens=totals.cached_tokens,
            generated_tokens=totals.generated_tokens,
            steps=self._steps,
            retractions=totals.retractions,
            drafted_tokens=totals.drafted_tokens,
            accepted_tokens=totals.accepted_tokens,
            grammar_compiles=self.grammars.compiles,
            grammar_hits=self.grammars.hits,
            step_seconds=self._seconds["step"],
            schedule_seconds=self._seconds["schedule"],
            launch_seconds=self._seconds["launch"],
            wait_seconds=self._seconds["wait"],
            commit_seconds=self._seconds["commit"],
        )

    @property
    def info(self) -> dict[str, Any]:
        """What /server_info shows of the engine, as JSON."""
        engine = self.engine
        return {
            "architecture": engine.info.architecture,
            "device": str(engine.device),
            "cpu_kernels": library().text if engine.device.type == "cpu" else None,
            "products": engine.products,
            "context_len": engine.context_len,
            "page_size": engine.page_size,
            "num_pages": engine.num_pages - 1,
            "memory": engine.budget.to_json(),
            "overlap": self.overlap,
            "graphs": engine.graphs is not None and engine.graphs.sizes,
            "resolved": self.resolved.to_json(),
        }

    def close(self) -> None:
        """Stop the grammar workers. The loop must not be used again."""
        self.grammars.close()
        gc.unfreeze()


def _build_grammars(resolved: Resolved, tokenizer: Tokenizer | None, eos: tuple[int, ...]) -> GrammarService:
    if resolved.grammar is None:
        return GrammarService(None, reason="no grammar backend is selected or usable; see `dovetail explain`")
    if tokenizer is None:
        return GrammarService(None, reason="the model was loaded without a tokenizer")
    context = GrammarContext(resolved.model_info.vocab_size, tokenizer.token_bytes, eos, tokenizer.json)
    return GrammarService(resolved.grammar.build(context))
