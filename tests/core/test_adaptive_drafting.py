"""Test when drafts are requested, depending on the duration and the tokens of the steps.

.venv/bin/python -m pytest -q tests/core/test_adaptive_drafting.py
"""

import random

import pytest

from dovetail.loop.adaptive_drafting import FIRST_PAUSE, AdaptiveDrafting


def steps(adaptive, rows, *, plain, drafted, verify=None, count=2000, noise=0.0, seed=0):
    """Run ``count`` steps of an engine that makes ``plain`` or ``drafted`` tokens a second; the share of drafted ones among
    the last half, and how many of all."""
    rng, modes = random.Random(seed), []
    for _ in range(count):
        mode = adaptive.should_draft(rows)
        rate = (drafted if mode else plain) * rng.uniform(1 - noise, 1 + noise)
        tokens = rows * (3 if mode else 1)
        seconds = tokens / rate
        adaptive.record(rows, mode, seconds, tokens, verify if verify is not None else seconds)
        modes.append(mode)
    late = modes[count // 2 :]
    return sum(late) / len(late), sum(modes)


@pytest.mark.parametrize("must_see_all", [False, True])
def test_the_faster_way_runs_and_the_other_is_tried_seldom(must_see_all):
    share, _ = steps(AdaptiveDrafting(always=False, must_see_all=must_see_all), 1, plain=100, drafted=200, noise=0.2)
    assert share > 0.9
    adaptive = AdaptiveDrafting(always=False, must_see_all=must_see_all)
    share, drafted = steps(adaptive, 64, plain=200, drafted=100, verify=64 / 200, noise=0.2)
    assert share < 0.05
    assert drafted < 100


def test_loads_are_judged_apart():
    adaptive = AdaptiveDrafting(always=False, must_see_all=False)
    few, _ = steps(adaptive, 1, plain=100, drafted=200)
    many, _ = steps(adaptive, 64, plain=200, drafted=100)
    again, _ = steps(adaptive, 1, plain=100, drafted=200, count=400)
    assert few > 0.9
    assert many < 0.05
    assert again > 0.9


def test_a_change_of_what_pays_is_noticed():
    adaptive = AdaptiveDrafting(always=False, must_see_all=False)
    steps(adaptive, 8, plain=100, drafted=200, count=3 * FIRST_PAUSE)
    share, _ = steps(adaptive, 8, plain=100, drafted=50, count=3000)
    assert share < 0.2
    share, _ = steps(adaptive, 8, plain=100, drafted=200, count=20 * FIRST_PAUSE)
    assert share > 0.8


def test_a_drafter_that_must_see_all_is_not_interrupted_where_it_is_sure_to_win():
    adaptive = AdaptiveDrafting(always=False, must_see_all=True)
    _, drafted = steps(adaptive, 1, plain=100, drafted=300, verify=1 / 150, count=500)
    assert drafted == 500


def test_always_is_always():
    _, drafted = steps(AdaptiveDrafting(always=True, must_see_all=True), 64, plain=200, drafted=1, count=300)
    assert drafted == 300
