"""Shadow traffic: requests that were answered are sent once more to another arm, and the outputs compared.

Nothing of it is in the way of those who wait: a request is looked at once its answer is whole, put into a bounded queue, and
dropped where the queue or the budget is full.
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

from dovetail.config.experiment import ShadowSection
from dovetail.errors import DovetailError
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.server.arm_log import KEPT, ArmLog, Latency, StreamLog
from dovetail.server.routing import uniform
from dovetail.server.streams import OutputStream
from dovetail.types import FinishKind

logger = logging.getLogger("dovetail.server")

WORKERS = 4
"""Shadow requests at the same time."""

Open = Callable[[str, Sequence[GenerateMsg]], OutputStream]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request whose answer was whole: what was asked, and what the primary made of it."""

    rid: str
    msgs: tuple[GenerateMsg, ...]
    log: StreamLog

    @property
    def tokens(self) -> int:
        """Prompt and output, as the primary had them."""
        return sum(len(msg.input_ids) + len(self.log.outputs[msg.rid]) for msg in self.msgs)

    def again(self) -> list[GenerateMsg]:
        """The same for another arm, under other ids. Where the server found the end, which an engine does not see, the output is
        to be as long as the primary's."""
        return [msgspec.structs.replace(msg, rid=f"shadow/{msg.rid}", params=self._params(msg)) for msg in self.msgs]

    def _params(self, msg: GenerateMsg) -> SamplingParams:
        if msg.rid not in self.log.cut:
            return msg.params
        return dataclasses.replace(msg.params, max_new_tokens=len(self.log.outputs[msg.rid]))


@dataclass(frozen=True, slots=True)
class Output:
    """One of the two outputs that are compared. ``text`` is kept where config says so."""

    tokens: int
    sha256: str
    finish: str
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Two outputs. ``divergence`` is the first place at which their tokens differ; None if they are the same."""

    rid: str
    at: float
    greedy: bool
    divergence: int | None
    primary: Output
    shadow: Output


class TokenBudget:
    """Tokens per minute, as a bucket that is full at first and fills steadily. It may be overdrawn by what a request makes
    beyond what was foreseen; nothing is taken until that is paid back."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = self._left = float(per_minute)
        self._clock = clock
        self._then = clock()

    def take(self, tokens: int) -> bool:
        """Spend them if they are there."""
        now = self._clock()
        self._left = min(self._size, self._left + (now - self._then) * self._size / 60)
        self._then = now
        if tokens > self._left:
            return False
        self._left -= tokens
        return True

    def settle(self, tokens: int) -> None:
        """Spend so many more, or give back if negative."""
        self._left -= tokens


class Shadow:
    """The second arm's side of things."""

    def __init__(
        self,
        section: ShadowSection,
        log: ArmLog,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arm = section.arm
        self.primary = section.primary
        self.compared: deque[Compared] = deque(maxlen=section.keep)
        self.pairs: tuple[deque[Latency], deque[Latency]] = (deque(maxlen=KEPT), deque(maxlen=KEPT))
        self.workers: list[asyncio.Task[None]] = []
        self.results = Counter(
            "dovetail_shadow_outcomes",
            "Requests for the shadow arm: dropped_budget, dropped_queue, dropped_arm, sent, failed; outputs: equal, different.",
            ["outcome"],
            registry=None,
        )
        self._section, self._log, self._decode = section, log, decode
        self._budget = TokenBudget(section.tokens_per_minute, clock)
        self._queue: asyncio.Queue[tuple[Finished, Open]] = asyncio.Queue(section.queue)
        self._serial = itertools.count()

    def wants(self, rid: str) -> bool:
        """True for ``percent`` of all ids, always the same ones."""
        return uniform(f"shadow\0{rid}") * 100 < self._section.percent

    def offer(self, finished: Finished, send: Open | None) -> None:
        """A request may be sent again through ``send``, None where the arm takes none. Returns at once."""
        if send is None:
            self._count("dropped_arm")
        elif self._queue.full():
            self._count("dropped_queue")
        elif not self._budget.take(finished.tokens):
            self._count("dropped_budget")
        else:
            self._queue.put_nowait((finished, send))
            if len(self.workers) < WORKERS:
                self.workers.append(asyncio.ensure_future(self._work()))

    def outcomes(self) -> dict[str, int]:
        """How many of each."""
        return {outcome: count for (outcome,), count in self._log.totals(self.results).items()}

    async def _work(self) -> None:
        while True:
            finished, send = await self._queue.get()
            try:
                await self._again(finished, send)
            except DovetailError as error:
                self._count("failed")
                logger.debug("shadow of %s: %s", finished.rid, error)

    async def _again(self, finished: Finished, send: Open) -> None:
        msgs = finished.again()
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
                self._budget.settle(Finished(finished.rid, tuple(msgs), log).tokens - finished.tokens)
        self._compare(finished, log)

    def _compare(self, finished: Finished, log: StreamLog) -> None:
        self._log.latencies[self.arm].extend(log.latencies)
        if not log.complete:
            self._count("failed")
            return
        for msg in finished.msgs:
            ours, theirs = finished.log, f"shadow/{msg.rid}"
            compared = Compared(
                finished.rid, time.time(), msg.params.temperature == 0,
                divergence(ours.outputs[msg.rid], log.outputs[theirs]),
                self._output(ours.outputs[msg.rid], ours.finish[msg.rid]),
                self._output(log.outputs[theirs], log.finish[theirs]),
            )  # fmt: skip
            self.compared.append(compared)
            self._count("equal" if compared.divergence is None else "different")
        now = time.monotonic()
        for side, latencies in zip(self.pairs, (finished.log.latencies, log.latencies), strict=True):
            side.extend(latency._replace(at=now) for latency in latencies)

    def _output(self, ids: list[int], finish: FinishKind) -> Output:
        digest = sha256(",".join(map(str, ids)).encode()).hexdigest()
        return Output(len(ids), digest, finish.value, self._decode(ids) if self._section.keep_texts else None)

    def _count(self, outcome: str) -> None:
        self.results.labels(outcome).inc()

    def to_json(self) -> dict[str, Any]:
        """For people and programs who look; the latest comparison first."""
        return {
            "primary": self.primary,
            "arm": self.arm,
            "percent": self._section.percent,
            "tokens_per_minute": self._section.tokens_per_minute,
            "waiting": self._queue.qsize(),
            "outcomes": self.outcomes(),
            "compared": [dataclasses.asdict(one) for one in reversed(self.compared)],
        }


def divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place at which they differ, the end of the shorter one included; None if they are equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
