"""Test how answers and metrics say what each cache group had in the prefix cache."""

from __future__ import annotations

from dovetail.api.meta import cached_json
from dovetail.interfaces.api import Acceptance, Usage
from dovetail.messages import EngineStats
from dovetail.scheduler.limits import Totals
from dovetail.server.metrics import Metrics
from dovetail.server.supervisor import _sum
from dovetail_apis.openai.format import usage_json


def test_details_name_the_group_that_limited_the_match() -> None:
    assert cached_json(16, ()) == {"device": 16, "host": 0}
    assert cached_json(16, (48, 16)) == {"device": 16, "host": 0, "groups": [48, 16], "limited_by": 1}
    assert "limited_by" not in cached_json(16, (16, 16)), "no group had more"


def test_usage_has_the_groups_of_models_with_several() -> None:
    assert usage_json(Usage(50, 1, 16, Acceptance()))["prompt_tokens_details"] == {"cached_tokens": 16}
    found = usage_json(Usage(50, 1, 16, Acceptance(), cached_groups=(48, 16)))["prompt_tokens_details"]
    assert found == {"cached_tokens": 16, "cached_tokens_by_group": [48, 16], "limited_by_group": 1}


def test_metrics_count_the_tokens_of_each_group() -> None:
    metrics = Metrics({"version": "1"})
    name = "dovetail_group_cached_prompt_tokens_total"
    assert name not in metrics.render().decode()
    metrics.stats = EngineStats(group_cached_tokens=[48, 16], group_limited=[0, 3])
    text = metrics.render().decode()
    assert f'{name}{{group="0"}} 48.0' in text
    assert f'{name}{{group="1"}} 16.0' in text
    assert 'dovetail_group_limited_prompts_total{group="1"} 3.0' in text


def test_the_scheduler_counts_which_group_limited_a_match() -> None:
    totals = Totals()
    for reached in ((48, 16), (32, 32), (16, 0), (0, 16), (0, 0)):
        totals.add_groups(reached)
    assert totals.group_cached_tokens == [96, 64]
    assert totals.group_limited == [1, 2]


def test_counters_of_groups_add_up_over_engines_that_were_started_again() -> None:
    former = EngineStats(group_cached_tokens=[48, 16], group_limited=[0, 3])
    assert _sum(EngineStats(group_cached_tokens=[1, 2], group_limited=[1, 0]), former).group_cached_tokens == [49, 18]
    assert _sum(EngineStats(), former).group_limited == [0, 3]
