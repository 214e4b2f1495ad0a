"""Test shadow traffic against an engine that is a function: budget, queue, what is kept.

.venv/bin/python -m pytest -q tests/core/test_experiment_shadow.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dovetail.bench.divergence import first_difference
from dovetail.config.experiment import ShadowSection
from dovetail.errors import EngineDeadError
from dovetail.experiment.online.log import ArmLog, StreamLog
from dovetail.experiment.online.shadow import WORKERS, FinishedRequest, ShadowTraffic
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.sampling_params import SamplingParams
from dovetail.server.streams import OutputStream
from dovetail.types import FinishKind, FinishReason

LENGTH = FinishReason(FinishKind.LENGTH)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Answer at once with ``answer(msg)``, or never if that is None."""

    def __init__(self, answer: Callable[[GenerateMsg], list[int] | None]) -> None:
        self.answer = answer
        self.got: list[GenerateMsg] = []
        self.open_streams = 0

    def open(self, group: str, msgs: Sequence[GenerateMsg]) -> OutputStream:
        stream = OutputStream(group, (msg.rid for msg in msgs), self._closed, lambda rid: None)
        self.open_streams += 1
        for msg in msgs:
            self.got.append(msg)
            ids = self.answer(msg)
            if ids is not None:
                stream.put(TokenOutput(msg.rid, ids, LENGTH))
        return stream

    def _closed(self, stream: OutputStream) -> None:
        self.open_streams -= 1


def make(clock: Clock | None = None, **settings: Any) -> ShadowTraffic:
    section = ShadowSection.model_validate({"arm": "b", "percent": 100, "tokens_per_minute": 10_000, **settings})
    return ShadowTraffic(section, ArmLog(("base", "b")), lambda ids: " ".join(map(str, ids)), clock or Clock())


def finished(name: str, shadow: ShadowTraffic, tokens: int = 4, cut: bool = False) -> FinishedRequest:
    """Return an answered request with two prompt tokens and ``tokens`` output tokens."""
    msg = GenerateMsg(f"{name}/0", [7, 8], SamplingParams(max_new_tokens=50, temperature=0.0), 5)
    log = StreamLog(shadow._log, "base", "user=x", [msg], "served", keep=True)
    log.observe([TokenOutput(msg.rid, list(range(tokens)), None if cut else LENGTH)])
    if cut:
        log.record_cut(msg.rid)
    assert log.complete
    return FinishedRequest(name, (msg,), log)


def run(shadow: ShadowTraffic, use: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
    async def main() -> None:
        use()
        for _ in range(200):
            await asyncio.sleep(0)
        after()
        for worker in shadow.workers:
            worker.cancel()
        await asyncio.gather(*shadow.workers, return_exceptions=True)

    asyncio.run(main())


def test_both_outputs_are_compared_and_the_same_was_asked():
    engine = Engine(lambda msg: list(range(4)) if msg.rid.endswith("same/0") else [0, 1, 9, 9, 9])
    shadow = make()
    run(shadow, lambda: [shadow.offer(finished(name, shadow), engine.open) for name in ("same", "other")])
    assert [one.divergence for one in shadow.compared] == [None, 2]
    assert shadow.outcomes() == {"sent": 2, "equal": 1, "different": 1}
    asked = engine.got[0]
    assert (asked.rid, asked.input_ids, asked.seed, asked.params.max_new_tokens) == ("shadow/same/0", [7, 8], 5, 50)
    same = shadow.compared[0]
    assert same.primary == same.shadow
    assert (same.primary.tokens, same.primary.text, same.greedy) == (4, None, True)
    assert shadow.compared[1].shadow.sha256 != same.shadow.sha256
    assert engine.open_streams == 0
    assert [len(side) for side in shadow.pairs] == [2, 2]


def test_texts_are_kept_where_config_says_so_and_only_the_latest():
    shadow = make(keep_texts=True, keep=2)
    engine = Engine(lambda msg: [1])
    run(shadow, lambda: [shadow.offer(finished(f"r{i}", shadow), engine.open) for i in range(5)])
    assert [one.rid for one in shadow.compared] == ["r3", "r4"]
    assert (shadow.compared[0].primary.text, shadow.compared[0].shadow.text) == ("0 1 2 3", "1")
    assert shadow.to_json()["compared"][0]["rid"] == "r4"


def test_an_output_that_the_server_cut_is_compared_as_far_as_it_went():
    engine = Engine(lambda msg: list(range(msg.params.max_new_tokens or 0)))
    shadow = make()
    run(shadow, lambda: shadow.offer(finished("r", shadow, tokens=3, cut=True), engine.open))
    assert engine.got[0].params.max_new_tokens == 3
    assert shadow.outcomes() == {"sent": 1, "equal": 1}


def test_the_budget_bounds_what_is_sent():
    clock = Clock()
    shadow = make(clock, tokens_per_minute=60)
    engine = Engine(lambda msg: list(range(4)))
    run(shadow, lambda: [shadow.offer(finished(f"r{i}", shadow, tokens=18), engine.open) for i in range(10)])
    assert len(engine.got) == 3  # 20 tokens each
    assert shadow.outcomes()["dropped_budget"] == 7


def test_what_exceeds_the_estimate_is_paid_back_first():
    clock = Clock()
    shadow = make(clock, tokens_per_minute=60)
    assert shadow._reserve(60)
    assert not shadow._reserve(1)
    shadow._budget.take(30, clock())  # it made 30 tokens more than were reserved
    clock.now += 30  # thirty tokens
    assert not shadow._reserve(1)
    clock.now += 10
    assert shadow._reserve(10)
    assert not shadow._reserve(1)
    clock.now += 1e6
    assert shadow._reserve(60)
    assert not shadow._reserve(1)  # never more than the tokens of a minute


def test_a_full_queue_drops_requests_without_waiting():
    shadow = make(queue=3)
    stuck = Engine(lambda msg: None)

    def overfill() -> None:
        assert len(stuck.got) == WORKERS
        before = asyncio.get_running_loop().time()
        for i in range(10):
            shadow.offer(finished(f"late{i}", shadow), stuck.open)
        assert asyncio.get_running_loop().time() - before < 1

    async def main() -> None:
        for i in range(WORKERS):
            shadow.offer(finished(f"r{i}", shadow), stuck.open)
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        overfill()
        for worker in shadow.workers:
            worker.cancel()
        await asyncio.gather(*shadow.workers, return_exceptions=True)

    asyncio.run(main())
    assert shadow.outcomes() == {"sent": WORKERS, "dropped_queue": 7}
    assert shadow.to_json()["waiting"] == 3
    assert stuck.open_streams == 0


def test_an_arm_that_is_gone_or_dies_is_counted_and_the_rest_goes_on():
    def dead(group: str, msgs: Sequence[GenerateMsg]) -> OutputStream:
        raise EngineDeadError("it has ended")

    shadow = make()
    engine = Engine(lambda msg: [0, 1, 2, 3])

    def use() -> None:
        shadow.offer(finished("a", shadow), None)
        shadow.offer(finished("b", shadow), dead)
        shadow.offer(finished("c", shadow), engine.open)

    run(shadow, use)
    assert shadow.outcomes() == {"dropped_arm": 1, "failed": 1, "sent": 1, "equal": 1}


def test_the_same_requests_are_chosen_each_time():
    shadow = make(percent=20)
    chosen = [shadow.selects(f"r{i}") for i in range(5000)]
    assert chosen == [make(percent=20).selects(f"r{i}") for i in range(5000)]
    assert 0.17 < sum(chosen) / len(chosen) < 0.23
    assert all(make(percent=100).selects(f"r{i}") for i in range(100))


@pytest.mark.parametrize(
    ("a", "b", "at"), [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [4], 0)]
)
def test_first_difference(a: list[int], b: list[int], at: int | None):
    assert first_difference(a, b) == at
