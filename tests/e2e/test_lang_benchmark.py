"""Test benchmarks/language.py at a small size: what each arm makes the engine compute.

Run: python -m pytest tests/e2e/test_lang_benchmark.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PREFIX, SIBLINGS, QUESTIONS = 128, 4, 6


@pytest.fixture(scope="module")
def language() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import language
    finally:
        sys.path.pop(0)
    return language


@pytest.fixture(scope="module")
def found(language: Any) -> dict[str, Any]:
    args = language.arguments(["--rounds", "1"])
    with language.engines(args) as engines:
        words = language.Words(engines["waits"], random.Random(0))
        forks = language.measure(engines, language.FORK_ARMS, lambda: words.work(PREFIX, SIBLINGS, 2), 1)
        return {**forks, **language.measure(engines, language.BATCH_ARMS, lambda: words.work(PREFIX, QUESTIONS, 2), 1)}


def test_cold_arms_compute_everything(found: dict[str, Any]):
    for arm in ("one by one", "at once", "rows"):
        (sample,) = found[arm]
        assert sample.computed == sample.asked > PREFIX * SIBLINGS


def test_a_fork_and_a_batch_compute_their_prefix_once(found: dict[str, Any]):
    for arm, ends in (("fork", SIBLINGS), ("waits", SIBLINGS), ("run_batch", QUESTIONS)):
        (sample,) = found[arm]
        assert PREFIX <= sample.computed < PREFIX + ends * 40, arm


def test_requests_that_come_at_once_and_do_not_wait_compute_it_again(found: dict[str, Any]):
    (sample,) = found["reuse"]
    assert sample.computed > 2 * PREFIX, "else they did not come at once"


def test_the_table_has_a_row_for_each_arm(language: Any, found: dict[str, Any]):
    lines = language.table({arm: found[arm] for arm in language.FORK_ARMS}, "fork")
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == list(language.FORK_ARMS)
    assert " | 1.00 | " in lines[-1]
