"""Test the running comparison of arms: blocks of time, and what the statistics report for known differences.

.venv/bin/python -m pytest -q tests/core/test_experiment_online.py
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np

from dovetail.experiment.online.arm_statistics import ENOUGH, TICK_SECONDS, blocks_of, compare_arms
from dovetail.experiment.online.arms import ArmsClient
from dovetail.experiment.online.log import Latency
from dovetail.messages import CommandReply, ExpertLoadMsg


def traffic(
    rng: np.random.Generator, factor: float, users: int, count: int = 1500, seconds: float = 900
) -> list[Latency]:
    """Return the outputs of ``users`` keys at random times, under a load that drifts and is the same for every arm."""
    at = np.sort(rng.uniform(0, seconds, count))
    load = 1 + 0.5 * np.sin(at / 100)
    ttft = 50 * load * factor * rng.lognormal(0, 0.2, count)
    tpot = 5 * load * factor * rng.lognormal(0, 0.1, count)
    who = rng.integers(users, size=count)
    return [
        Latency(float(t), f"{factor}-{u}", float(x), float(y)) for t, u, x, y in zip(at, who, ttft, tpot, strict=True)
    ]


def test_blocks_hold_enough_of_both_sides_and_everything_once():
    rng = np.random.default_rng(0)
    a, b = traffic(rng, 1.0, 50), traffic(rng, 1.1, 50, count=300)
    spans = blocks_of(a, b)
    assert len(spans) > 5
    last = -1
    for left, right in spans:
        assert min(len(left), len(right)) >= ENOUGH
        ticks = [int(one.at // TICK_SECONDS) for one in (*left, *right)]
        assert min(ticks) > last
        last = max(ticks)
    kept = [one for left, _ in spans for one in left]
    assert kept == a[: len(kept)]


def test_a_difference_is_found_and_none_is_not():
    rng = np.random.default_rng(1)
    rows = compare_arms(
        ("base", traffic(rng, 1.0, 300)), [("slow", traffic(rng, 1.2, 300)), ("same", traffic(rng, 1.0, 300))]
    )
    found = {(row.arm, row.metric): row for row in rows}
    assert len(rows) == len(found) == 4
    for metric in ("TTFT, mean", "TPOT, mean"):
        slow, same = found["slow", metric], found["same", metric]
        assert slow.control == "base"
        assert slow.verdict == "slower"
        assert slow.low is not None
        assert slow.high is not None
        assert 1.1 < slow.low < 1.2 < slow.high < 1.3
        assert same.verdict != "slower"
        assert same.low is not None
        assert same.high is not None
        assert same.low < 1 < same.high


def test_without_enough_there_is_no_row():
    rng = np.random.default_rng(2)
    assert compare_arms(("base", []), [("b", traffic(rng, 1.0, 10))]) == []
    assert compare_arms(("base", traffic(rng, 1.0, 10, count=10)), [("b", traffic(rng, 1.0, 10, count=10))]) == []


def test_outputs_of_one_token_have_no_tpot():
    rng = np.random.default_rng(3)
    a, b = ([*traffic(rng, 1.0, 30), *(Latency(i * 1.0, "one", 1e6, None) for i in range(100))] for _ in range(2))
    rows = compare_arms(("base", sorted(a)), [("b", sorted(b))])
    assert {row.metric: row.a is not None and row.a < 50 for row in rows}["TPOT, mean"]


def test_the_load_of_experts_is_added_up_over_arms_with_the_same_layers():
    def answered(*loads):
        async def reply(load):
            return CommandReply("", True, expert_tokens=load)

        arms = ArmsClient.__new__(ArmsClient)
        arms.arms = {
            str(i): SimpleNamespace(client=SimpleNamespace(alive=True, command=lambda msg, load=load: reply(load)))
            for i, load in enumerate(loads)
        }
        return asyncio.run(arms.command(ExpertLoadMsg("")))

    added = answered({0: [1, 2], 3: [0, 4]}, {0: [5, 0], 3: [1, 1]})
    assert added.ok
    assert added.expert_tokens == {0: [6, 2], 3: [1, 5]}
    refused = answered({0: [1, 2]}, {0: [1, 2, 3]})
    assert not refused.ok
    assert "different layers" in refused.message
