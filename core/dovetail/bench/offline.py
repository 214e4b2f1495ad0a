"""Measure a workload without a server: run the same calls on the engine in this process and make the same record."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from dovetail.bench.answers import CallProgress
from dovetail.bench.call_tracker import CallTracker, OnDone, ignore_measurement
from dovetail.bench.machine import machine_facts, peak_memory
from dovetail.bench.metrics import span
from dovetail.bench.prompts import CallPrompt, encoded, first_prompt, next_prompt
from dovetail.bench.records import LoadCall, Measurement, RunRecord, Workload
from dovetail.config import config_hash, dump
from dovetail.errors import ConfigError, RequestError
from dovetail.llm.interrupts import DeferredInterrupt
from dovetail.llm.runs import Run
from dovetail.messages import FlushCacheMsg, GenerateMsg, RequestFailed, TokenOutput
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from dovetail.llm import LLM


def measure_offline(
    llm: LLM,
    workload: Workload,
    warmup: Workload | None = None,
    *,
    startup_seconds: float | None = None,
    arm: str = "",
    block: int = 0,
    on_done: OnDone = ignore_measurement,
) -> RunRecord:
    """Run ``warmup``, which is not recorded, empty the prefix cache, and run ``workload``. ``llm`` must have no other
    work."""
    if warmup is not None:
        OfflineRun(llm, warmup).run()
    llm.loop.handle(FlushCacheMsg("bench"))
    while llm.loop.has_work:
        llm.loop.step()
    before, started = _counters(llm), datetime.now(UTC)
    measurements = OfflineRun(llm, workload, on_done).run()
    config = llm.resolved.config
    return RunRecord(
        kind="offline",
        arm=arm,
        block=block,
        workload=workload.name,
        workload_hash=workload.content_hash,
        config_hash=config_hash(config),
        config=dump(config),
        target=config.model.name,
        machine=machine_facts(llm.resolved.machine.device_name),
        started=started.isoformat(timespec="seconds"),
        seconds=span(measurements),
        startup_seconds=startup_seconds,
        peak_memory_bytes=peak_memory(os.getpid()),
        peak_device_bytes=_peak_device(llm),
        warmup_calls=len(warmup.calls) if warmup is not None else 0,
        measurements=tuple(measurements),
        counters_before=before,
        counters_after=_counters(llm),
    )


@dataclass(order=True)
class _Due:
    """Describe a call that waits for its time. Calls with equal times are in the order of their creation."""

    due: float
    order: int
    call: LoadCall = field(compare=False)
    prompt: CallPrompt = field(compare=False)
    user: int = field(compare=False)  # the user of a closed loop who makes this call


@dataclass
class _Open:
    """Describe a call that the engine has received."""

    item: _Due
    prompt: CallPrompt
    run: Run
    answer: CallProgress


class OfflineRun:
    """Pass each call to the engine when it is due, between two steps, and record when its tokens leave a step."""

    def __init__(self, llm: LLM, workload: Workload, on_done: OnDone = ignore_measurement) -> None:
        self._llm = llm
        self._users = workload.concurrency
        self._tracker = CallTracker(workload, on_done)
        self._turns = deque(self._tracker.roots)
        self._open: dict[str, _Open] = {}
        self._waiting: list[_Due] = []
        self._left: dict[int, int] = {}  # for each user, the number of calls of the current turn that are not done
        self._order = 0

    def run(self) -> list[Measurement]:
        """Run all calls and return the measurements in the workload's order."""
        self._start = time.perf_counter()
        self._begin()
        while self._waiting or self._open:
            with DeferredInterrupt():  # Ctrl-C ends the run between two steps
                self._submit()
                if self._open:
                    self._step()
            if self._waiting and not self._open:
                time.sleep(max(self._waiting[0].due - self._clock(), 0.0))
        return self._tracker.measurements()

    def _clock(self) -> float:
        return time.perf_counter() - self._start

    def _begin(self) -> None:
        limit = self._users
        for user in range(len(self._turns) if limit is None else min(limit, len(self._turns))):
            self._next_turn(user, self._turns[0].arrival if limit is None else 0.0)

    def _next_turn(self, user: int, due: float) -> None:
        call = self._turns.popleft()
        self._left[user] = 1
        self._wait(call, first_prompt(call), due, user)

    def _wait(self, call: LoadCall, prompt: CallPrompt, due: float, user: int) -> None:
        self._order += 1
        heapq.heappush(self._waiting, _Due(due, self._order, call, prompt, user))

    def _submit(self) -> None:
        """Pass the calls that are due to the engine, up to the number that may wait there."""
        scheduler, now = self._llm.loop.scheduler, self._clock()
        capacity = scheduler.limits.max_waiting - len(scheduler.waiting)
        while self._waiting and self._waiting[0].due <= now and capacity > 0:
            capacity -= 1
            item = heapq.heappop(self._waiting)
            answer = CallProgress(sent=self._clock())
            try:
                msg = self._message(item)
            except RequestError as error:
                self._finish(item, item.prompt, self._failed(answer, str(error)))
                continue
            self._open[msg.rid] = _Open(item, item.prompt, Run(msg, self._llm.tokenizer), answer)
            self._llm.loop.handle(msg)

    def _message(self, item: _Due) -> GenerateMsg:
        tokenizer, call = self._llm.tokenizer, item.call
        if tokenizer is None and call.form != "token_ids":
            raise ConfigError("this model has no tokenizer; use a workload of random token ids (content: tokens)")
        ids = list(item.prompt.token_ids or ()) if tokenizer is None else encoded(item.prompt, tokenizer)
        params = params_of(call)
        return GenerateMsg(f"bench-{call.id}", ids, params, params.seed or 0)

    def _step(self) -> None:
        answers = self._llm.loop.step()
        now = self._clock()
        for message in answers:
            if isinstance(message, TokenOutput | RequestFailed) and (opened := self._open.get(message.rid)) is not None:
                self._take(opened, message, now)

    def _take(self, opened: _Open, message: TokenOutput | RequestFailed, now: float) -> None:
        opened.run.take(message)
        if isinstance(message, TokenOutput):
            opened.answer.token_times += [now] * len(message.token_ids)
            opened.answer.prompt_tokens = message.prompt_tokens
        run, finish = opened.run, opened.run.output.finish
        if run.error is None and finish is None:
            return
        del self._open[message.rid]
        self._finish(opened.item, opened.prompt, self._ended(opened, now))

    def _ended(self, opened: _Open, now: float) -> CallProgress:
        answer, output, error = opened.answer, opened.run.output, opened.run.error
        answer.end, answer.error = now, str(error) if error is not None else None
        answer.text, answer.output_ids = output.text, output.token_ids
        answer.output_tokens, answer.cached_tokens = len(output.token_ids), output.cached_tokens
        answer.finish_reason = output.finish.kind.value if output.finish is not None else None
        if answer.finish_reason in ("abort", "error") and answer.error is None and output.finish is not None:
            answer.error = f"{answer.finish_reason}: {output.finish.message}"
        if output.drafted:
            answer.drafted, answer.accepted = output.drafted, output.accepted
            answer.verify_steps = output.verify_steps
        return answer

    def _failed(self, answer: CallProgress, why: str) -> CallProgress:
        answer.end, answer.error = self._clock(), why
        return answer

    def _finish(self, item: _Due, prompt: CallPrompt, answer: CallProgress) -> None:
        """Record that a call is done, and queue the calls that follow from it. If no call of its user's turn is left, the
        user begins another turn."""
        followers = self._tracker.record(item.call, answer, item.due)
        self._left[item.user] += len(followers) - 1
        for call in followers:
            following = (
                next_prompt(call, prompt, answer.text, answer.output_ids) if call.continues else first_prompt(call)
            )
            self._wait(call, following, answer.end + call.think, item.user)
        if not self._left[item.user] and self._turns:
            self._next_turn(item.user, self._clock())


def params_of(call: LoadCall) -> SamplingParams:
    """Return a call's sampling as the engine's parameters. Raises ``RequestError``."""
    given = call.sampling
    schema = call.json_schema
    return SamplingParams(
        max_new_tokens=call.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=given.seed,
        ignore_eos=given.ignore_eos,
        stop=given.stop,
        grammar=None if schema is None else GrammarSpec(GrammarKind.JSON_SCHEMA, msgspec.json.encode(schema).decode()),
    )


def _counters(llm: LLM) -> dict[str, float]:
    stats = msgspec.structs.asdict(llm.loop.stats())
    return {name: value for name, value in stats.items() if isinstance(value, int | float)}


def _peak_device(llm: LLM) -> int | None:
    if llm.resolved.machine.device_type != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_reserved(llm.resolved.machine.device)
