"""Test the load client against servers of known behaviour.

The tests cover arrivals that nothing delays, closed loops, conversations, and the search for the highest rate of a
server with known capacity.

Run: python -m pytest -q tests/core/test_bench_load.py
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time

import pytest

from dovetail.bench.answers import CallProgress
from dovetail.bench.arrivals import with_arrivals
from dovetail.bench.load import run_load
from dovetail.bench.metrics import SLO, e2e, ttft
from dovetail.bench.prompts import CallPrompt
from dovetail.bench.records import LoadCall, MachineFacts, Measurement, RunRecord, Workload
from dovetail.bench.specs import ArrivalTrace, FixedConcurrency, Gamma, Poisson
from dovetail.bench.sweep import at_rate, highest_rate, sweep
from dovetail.errors import ConfigError

SLACK = 0.12  # of a machine that is busy with other things


class Server:
    """Serve one call after the other, each in ``seconds``; pause once, starting at ``stall``."""

    def __init__(self, seconds=0.0, stall=(0.0, 0.0), fail=()):
        self.seconds, self.fail, self.prompts = seconds, fail, dict[str, CallPrompt]()
        self.busy, self.most, self._open = asyncio.Lock(), 0, 0
        self.stall = stall

    async def __call__(self, call, prompt, clock):
        self._open += 1
        self.most = max(self.most, self._open)
        self.prompts[call.id] = prompt
        answer = CallProgress(sent=clock())
        async with self.busy:
            at, rest = self.stall
            if rest and clock() >= at:
                self.stall = (0.0, 0.0)
                await asyncio.sleep(rest)
            await asyncio.sleep(self.seconds)
        answer.end = clock()
        answer.token_times, answer.output_tokens, answer.output_ids = [answer.end], 1, [len(call.id)]
        answer.error = "refused" if call.id in self.fail else None
        self._open -= 1
        return answer


def calls(count, **fields):
    return tuple(LoadCall(id=f"c{i}", group=f"c{i}", token_ids=(1,), **fields) for i in range(count))


def load(workload, server, **more):
    return asyncio.run(run_load(workload, server, **more))


def test_a_server_that_stalls_delays_no_arrival_and_the_calls_meanwhile_show_it():
    every = ArrivalTrace(offsets=tuple(i * 0.02 for i in range(30)))
    workload = with_arrivals(Workload(name="w", calls=calls(30)), every)
    measurements, lag = load(workload, Server(0.001, stall=(0.1, 0.4)))
    assert [m.due for m in measurements] == [pytest.approx(i * 0.02) for i in range(30)]
    assert all(0 <= m.sent - m.due < SLACK for m in measurements)
    waited = [ttft(m) for m in measurements]
    assert all(wait < SLACK for wait in waited[:4])
    for i in range(6, 24):  # a call that arrives d seconds into the stall waits 0.4 - d: no call is omitted
        assert waited[i] == pytest.approx(0.5 - i * 0.02, abs=0.03 + SLACK)
    assert sum(wait > 0.1 for wait in waited) >= 13, "one of them with a client that waits for answers"
    assert lag.send_max < SLACK
    closed, _ = load(Workload(name="w", calls=calls(30), concurrency=1), Server(0.001, stall=(0.01, 0.4)))
    assert sum(ttft(m) > 0.3 for m in closed) == 1, "a closed loop asks less of a server that stalls"


def test_latencies_of_a_late_client_count_from_when_the_call_was_due():
    async def run():
        asyncio.get_running_loop().call_later(0.15, time.sleep, 0.2)  # the client itself is blocked
        return await run_load(
            with_arrivals(Workload(name="w", calls=calls(10)), ArrivalTrace(offsets=(0.15, 0.152))), Server()
        )

    measurements, lag = asyncio.run(run())
    assert e2e(measurements[0]) > 0.1
    assert measurements[0].sent - measurements[0].due > 0.1
    assert lag.send_max > 0.1
    assert lag.loop_max > 0.1
    assert lag.cpu_share < 1.1


def test_a_closed_loop_has_the_given_number_of_users():
    server = Server(0.002)
    recorded = []
    workload = with_arrivals(Workload(name="w", calls=calls(20)), FixedConcurrency(limit=3))
    measurements, _ = load(workload, server, on_done=recorded.append)
    assert server.most == 3
    assert [m.id for m in measurements] == [f"c{i}" for i in range(20)]
    assert sorted(m.id for m in recorded) == sorted(m.id for m in measurements)
    assert all(m.sent - m.due < SLACK for m in measurements)


def conversations():
    def call(name, parent=None, **more):
        return LoadCall(id=name, group=name[0], token_ids=(7,), parent=parent, continues=bool(parent), **more)

    made = [call("a"), call("ab", "a", think=0.1), call("abc", "ab"), call("a2", "a"), call("b"), call("bb", "b")]
    return Workload(name="w", calls=tuple(made))


def test_a_turn_is_sent_when_the_answer_before_it_is_there():
    server = Server(0.01)
    measurements, _ = load(conversations(), server)
    done = {m.id: m for m in measurements}
    assert done["ab"].due == pytest.approx(done["a"].end + 0.1)
    assert done["abc"].due == done["ab"].end
    assert done["a2"].due == done["a"].end
    assert server.prompts["abc"].token_ids == (7, 1, 7, 2, 7)
    assert all(m.sent >= m.due for m in measurements)


def test_users_of_a_closed_loop_stay_with_their_conversation():
    one = conversations().model_copy(update={"concurrency": 1})
    done = {m.id: m for m in load(one, Server(0.005))[0]}
    assert done["b"].sent >= max(done[name].end for name in ("a", "ab", "abc", "a2"))


def test_what_follows_a_failed_call_is_not_sent():
    server = Server(fail=("ab",))
    done = {m.id: m for m in load(conversations(), server)[0]}
    assert (done["ab"].ok, done["ab"].error) == (False, "refused")
    assert (done["abc"].ok, done["abc"].error) == (False, "not sent: call 'ab' before it failed")
    assert done["a2"].ok
    assert done["bb"].ok
    assert "abc" not in server.prompts


def queue(rate, spec, capacity, count=800):
    """Run against one worker that serves ``capacity`` calls per second, in simulated time."""
    free = [0.0]
    measurements = []
    draws = random.Random(1)
    workload = with_arrivals(Workload(name="w", calls=calls(count)), at_rate(spec, rate))
    for call in workload.calls:
        begin = max(heapq.heappop(free), call.arrival)
        end = begin + draws.uniform(0.5, 1.5) / capacity
        heapq.heappush(free, end)
        fields = {"ok": True, "due": call.arrival, "sent": call.arrival, "end": end, "output_tokens": 1}
        measurements.append(Measurement(id=call.id, group=call.id, token_times=(end,), **fields))
    return RunRecord(
        kind="serve",
        workload="w",
        workload_hash=workload.content_hash,
        machine=MachineFacts(host_cpu="x", cpus=1, memory_gib=1, device="cpu", platform="x", python="3"),
        started="",
        seconds=1,
        measurements=tuple(measurements),
    )


@pytest.mark.parametrize("capacity", [3.0, 700.0])
def test_the_highest_rate_of_a_server_with_a_known_capacity(capacity):
    tried = []

    async def measure(rate):
        tried.append(rate)
        return queue(rate, None, capacity)

    slo = SLO(ttft_ms=20_000 / capacity)  # the time of twenty requests: the SLO holds until the queue grows without end
    best, points = asyncio.run(highest_rate(measure, slo, 0.9, start=10.0, tolerance=0.05))
    assert best == pytest.approx(capacity, rel=0.15)
    assert [point.rate for point in points] == tried
    assert max(point.rate for point in points if point.meets) == best
    assert min(point.rate for point in points if not point.meets) <= best * 1.05
    assert len(tried) < 20


def test_bursts_allow_a_lower_rate():
    async def even(rate):
        return queue(rate, Gamma(rate=1, burstiness=9), 50.0)

    async def bursts(rate):
        return queue(rate, Gamma(rate=1, burstiness=0.05), 50.0)

    rates = [asyncio.run(highest_rate(measure, SLO(ttft_ms=200), 0.9, start=20.0))[0] for measure in (even, bursts)]
    assert rates[1] < 0.8 * rates[0] < 50


def test_no_rate_is_low_enough():
    async def measure(rate):
        return queue(rate, None, 10.0, count=50)

    best, points = asyncio.run(highest_rate(measure, SLO(ttft_ms=1), 0.9))
    assert best is None
    assert points[-1].rate < 0.01


def test_below_a_single_call_no_lower_rate_is_tried():
    async def measure(rate):
        return queue(rate, None, 10.0, count=max(int(rate * 20), 1))

    best, points = asyncio.run(highest_rate(measure, SLO(ttft_ms=1), 0.9))
    assert best is None
    assert [len(point.record.measurements) for point in points] == [20, 10, 5, 2, 1]


def test_a_sweep_has_a_point_for_each_rate():
    async def measure(rate):
        return queue(rate, None, 10.0, count=300)

    points = asyncio.run(sweep(measure, [2.0, 40.0], SLO(ttft_ms=500), 0.9))
    assert [(point.rate, point.meets) for point in points] == [(2.0, True), (40.0, False)]
    assert points[1].summary.calls_per_second == pytest.approx(10.0, rel=0.05)
    assert asyncio.run(sweep(measure, [2.0], None, 0.9))[0].meets is None


def test_only_arrivals_with_a_rate_can_be_swept():
    assert at_rate(Gamma(rate=1, burstiness=2), 5) == Gamma(rate=5, burstiness=2)
    assert at_rate(None, 5) == Poisson(rate=5)
    with pytest.raises(ConfigError, match="'trace' have no rate"):
        at_rate(ArrivalTrace(offsets=(1.0,)), 5)
