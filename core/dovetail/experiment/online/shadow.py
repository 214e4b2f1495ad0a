"""Send answered requests again, to another arm, and compare the outputs (shadow traffic).

Shadow traffic does not delay clients: a request enters a bounded queue after its answer is complete, and is dropped if the queue
is full or the token budget is spent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
from prometheus_client import Counter

from dovetail.bench.divergence import first_difference
from dovetail.config.experiment import ShadowSection
from dovetail.errors import DovetailError
from dovetail.experiment.online.log import KEPT, ArmLog, Latency, StreamLog
from dovetail.experiment.online.routing import uniform
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.server.streams import OutputStream
from dovetail.server.tenants.buckets import TokenBucket
from dovetail.types import FinishKind

logger = logging.getLogger("dovetail.server")

WORKERS = 4
"""The number of shadow requests that run at the same time."""

Open = Callable[[str, Sequence[GenerateMsg]], OutputStream]


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Hold a request whose answer is complete: its messages and the log of the primary arm's outputs. ``adapter_changes`` is
    ``ShadowTraffic.adapter_changes`` when it was sent, and None if an adapter was being loaded then."""

    rid: str
    msgs: tuple[GenerateMsg, ...]
    log: StreamLog
    adapter_changes: int | None = None

    @property
    def tokens(self) -> int:
        """Return the number of prompt and output tokens in the primary arm."""
        return sum(len(msg.input_ids) + len(self.log.outputs[msg.rid]) for msg in self.msgs)

    def copies(self) -> list[GenerateMsg]:
        """Return the same requests under other ids, for another arm. If the server ended an output at a stop string that the
        engine does not look for, the copy is limited to the length of the primary's output."""
        return [msgspec.structs.replace(msg, rid=f"shadow/{msg.rid}", params=self._params(msg)) for msg in self.msgs]

    def _params(self, msg: GenerateMsg) -> SamplingParams:
        if msg.rid not in self.log.cut:
            return msg.params
        return dataclasses.replace(msg.params, max_new_tokens=len(self.log.outputs[msg.rid]))


@dataclass(frozen=True, slots=True)
class ComparedOutput:
    """Describe one of two outputs that are compared. ``text`` is set if ``keep_texts`` is configured."""

    tokens: int
    sha256: str
    finish: str
    text: str | None = None


@dataclass(frozen=True, slots=True)
class OutputPair:
    """Hold the comparison of two outputs. ``divergence`` is the index of the first token that differs; None if they are equal."""

    rid: str
    at: float
    greedy: bool
    divergence: int | None
    primary: ComparedOutput
    shadow: ComparedOutput


class ShadowTraffic:
    """Repeat a share of the requests on the shadow arm and compare the outputs."""

    def __init__(
        self,
        section: ShadowSection,
        log: ArmLog,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arm = section.arm
        self.primary = section.primary
        self.compared: deque[OutputPair] = deque(maxlen=section.keep)
        self.pairs: tuple[deque[Latency], deque[Latency]] = (deque(maxlen=KEPT), deque(maxlen=KEPT))
        self.workers: list[asyncio.Task[None]] = []
        self.adapter_changes = 0
        """How many loads and unloads of adapters have begun. Requests with an adapter that were sent before the last of them, or
        during a load, are dropped: the arm would load an adapter again that was unloaded, or compute with another one of its name."""
        self.results = Counter(
            "dovetail_shadow_outcomes",
            "Outcomes of requests for the shadow arm: dropped_budget, dropped_queue, dropped_arm, dropped_adapter, sent, failed; of outputs: equal, different.",
            ["outcome"],
            registry=None,
        )
        self._section, self._log, self._decode = section, log, decode
        self._clock = clock
        self._budget = TokenBucket(section.tokens_per_minute, clock())
        self._queue: asyncio.Queue[tuple[FinishedRequest, Open]] = asyncio.Queue(section.queue)
        self._serial = itertools.count()

    def selects(self, rid: str) -> bool:
        """Return True for ``percent`` of all ids. The result depends on the id alone."""
        return uniform(f"shadow\0{rid}") * 100 < self._section.percent

    def offer(self, finished: FinishedRequest, send: Open | None) -> None:
        """Queue a finished request to be sent again through ``send``, or drop it. ``send`` is None if the arm accepts no requests.
        Returns without waiting."""
        if send is None:
            self._count("dropped_arm")
        elif self._queue.full():
            self._count("dropped_queue")
        elif not self._reserve(finished.tokens):
            self._count("dropped_budget")
        else:
            self._queue.put_nowait((finished, send))
            if len(self.workers) < WORKERS:
                self.workers.append(asyncio.ensure_future(self._work()))

    def outcomes(self) -> dict[str, int]:
        """Return the number of requests or outputs with each outcome."""
        return {outcome: count for (outcome,), count in self._log.totals(self.results).items()}

    def _reserve(self, tokens: int) -> bool:
        """Take ``tokens`` from the budget and return True, or return False if the budget does not hold them now."""
        now = self._clock()
        if tokens > self._budget.capacity or self._budget.wait(tokens, now):
            return False
        self._budget.take(tokens, now)
        return True

    async def _work(self) -> None:
        while True:
            finished, send = await self._queue.get()
            try:
                await self._repeat(finished, send)
            except DovetailError as error:
                self._count("failed")
                logger.debug("shadow of %s: %s", finished.rid, error)

    async def _repeat(self, finished: FinishedRequest, send: Open) -> None:
        if finished.adapter_changes != self.adapter_changes and any(msg.adapter for msg in finished.msgs):
            self._count("dropped_adapter")
            return
        msgs = finished.copies()
        with send(f"shadow/{next(self._serial)}/{finished.rid}", msgs) as stream:
            log = StreamLog(self._log, self.arm, finished.log.key, msgs, "shadow", keep=True)
            self._count("sent")
            try:
                async for batch in stream:
                    log.observe(batch)
            except DovetailError as error:
                log.error(error)
                raise
            finally:
                log.close()
                used = FinishedRequest(finished.rid, tuple(msgs), log).tokens
                self._budget.take(used - finished.tokens, self._clock())
        self._compare(finished, log)

    def _compare(self, finished: FinishedRequest, log: StreamLog) -> None:
        self._log.latencies[self.arm].extend(log.latencies)
        if not log.complete:
            self._count("failed")
            return
        for msg in finished.msgs:
            ours, theirs = finished.log, f"shadow/{msg.rid}"
            pair = OutputPair(
                finished.rid, time.time(), msg.params.temperature == 0,
                first_difference(ours.outputs[msg.rid], log.outputs[theirs]),
                self._output(ours.outputs[msg.rid], ours.finish[msg.rid]),
                self._output(log.outputs[theirs], log.finish[theirs]),
            )  # fmt: skip
            self.compared.append(pair)
            self._count("equal" if pair.divergence is None else "different")
        now = time.monotonic()
        for side, latencies in zip(self.pairs, (finished.log.latencies, log.latencies), strict=True):
            side.extend(latency._replace(at=now) for latency in latencies)

    def _output(self, ids: list[int], finish: FinishKind) -> ComparedOutput:
        digest = sha256(",".join(map(str, ids)).encode()).hexdigest()
        return ComparedOutput(len(ids), digest, finish.value, self._decode(ids) if self._section.keep_texts else None)

    def _count(self, outcome: str) -> None:
        self.results.labels(outcome).inc()

    def to_json(self) -> dict[str, Any]:
        """Return the state for ``/experiment.json`` and the page, the latest comparison first."""
        return {
            "primary": self.primary,
            "arm": self.arm,
            "percent": self._section.percent,
            "tokens_per_minute": self._section.tokens_per_minute,
            "waiting": self._queue.qsize(),
            "outcomes": self.outcomes(),
            "compared": [dataclasses.asdict(one) for one in reversed(self.compared)],
        }
