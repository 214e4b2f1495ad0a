"""Test the arms of an experiment: what their settings change in a base config, and what else changes with it.

Run: pytest tests/core/test_ab_arms.py
"""

from __future__ import annotations

import pytest

from dovetail.cli.ab_view import ExperimentView
from dovetail.errors import ConfigError, PluginError
from dovetail.experiment.arms import differences, intended_sections, make_arm
from dovetail.experiment.runner import check_vocabularies, difference_of, warnings


def arms(a=(), b=(), base=(), common=(), env=None):
    return [make_arm(name, base, ("device=cpu", *common), given, env or {}) for name, given in (("a", a), ("b", b))]


def found(*pair):
    return {d.key: (d.a, d.b, d.intended) for d in differences(*pair)}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], {}),
        ([], ["cache=none"], {"cache": ("radix", "none", True)}),
        (["cache=radix"], ["cache={kind: radix, eviction: lfu}"], {"cache.eviction": ("lru", "lfu", True)}),
        ([], ["attention=torch_native"], {}),  # what auto takes anyway
        ([], ["grammar=xgrammar"], {"grammar.backend": ("llguidance, xgrammar", "xgrammar", True)}),
        ([], ["scheduler.chunk_size=64"], {"scheduler.chunk_size": ("2048", "64", True)}),
        (["memory.page_size=8"], ["memory.page_size=32"], {"memory.page_size": ("8", "32", True)}),
        (
            [],
            ["model.dtype=bfloat16"],
            {"model.dtype": ("float32", "bfloat16", True), "memory.kv_dtype": ("float32", "bfloat16", False)},
        ),
        ([], ["model={path: tiny, context_len: 512}"], {"model.context_len": ("2048", "512", True)}),
    ],
)
def test_what_differs_and_whether_it_was_asked_for(a, b, expected):
    pair = arms(a, b)
    shown = found(*pair)
    if "grammar.backend" in expected:  # how many backends are installed is not the point
        assert shown["grammar.backend"][1:] == expected["grammar.backend"][1:]
    else:
        assert shown == expected
    assert (pair[0].hash == pair[1].hash) == (not expected)


def test_what_moved_along_is_warned_of_and_so_are_two_axes():
    pair = arms([], ["model.dtype=bfloat16", "cache=none"])
    shown = [difference_of(d) for d in differences(*pair)]
    texts = warnings(*pair, shown)
    assert texts == [
        "More settings changed than were set: memory.kv_dtype. The measurement covers all of them.",
        "The arms differ in model, cache: the result cannot be attributed to one of these.",
    ]
    assert intended_sections(differences(*pair)) == ["model", "cache"]
    assert warnings(*arms([], ["cache=none"]), []) == []


def test_it_is_said_when_nothing_differs(capsys):
    ExperimentView(quiet=False).explain(*arms([], ["attention=torch_native"]))
    assert "the arms are the same: this experiment measures noise (A/A)" in capsys.readouterr().out
    ExperimentView(quiet=False).explain(*arms([], ["cache=none"]))
    assert "the arms are the same" not in capsys.readouterr().out


def test_two_files_differ_where_they_say_so(tmp_path):
    one, two, base = (tmp_path / f"{name}.yaml" for name in ("one", "two", "base"))
    base.write_text("threads: 1\nmemory: {page_size: 8}\n")
    one.write_text("cache: radix\nscheduler: {chunk_size: 64, max_running: 4}\n")
    two.write_text("cache: none\nscheduler: {chunk_size: 64, max_running: 8}\n")
    pair = arms([str(one)], [str(two)], [base])
    assert found(*pair) == {"cache": ("radix", "none", True), "scheduler.max_running": ("4", "8", True)}
    assert all(arm.config.memory.page_size == 8 for arm in pair)


def test_settings_lie_over_files_and_common_ones_below_both(tmp_path):
    file = tmp_path / "arm.toml"
    file.write_text("[scheduler]\nmax_running = 4\n")
    common = ["scheduler.max_running=2", "scheduler.chunk_size=128"]
    (arm,) = arms([str(file), "scheduler.max_running=3"], common=common)[:1]
    assert (arm.config.scheduler.max_running, arm.config.scheduler.chunk_size) == (3, 128)


def test_where_the_records_are_kept_is_no_difference():
    assert found(*arms(["tuning.path=/somewhere"], ["server.port=1"])) == {}


def test_an_arm_that_is_wrong_is_named():
    with pytest.raises(ConfigError, match=r"(?s)^arm b: .*scheduler\.chunk"):
        arms([], ["scheduler.chunk=3"])
    with pytest.raises(PluginError, match=r"(?s)^arm b: .*flash_attn"):
        arms([], ["attention=flash_attn", "device=cpu"])


def test_a_policy_that_needs_the_cache_is_chosen_anew_or_refused_with_the_fix():
    b = arms([], ["cache=none"], common=["policy=auto"])[1]
    assert [r.chosen for r in b.resolved.resolutions if r.slot == "policy"] == ["fcfs"]
    with pytest.raises(PluginError) as error:
        arms([], ["cache=none"], common=["policy=lpm"])
    lines = str(error.value).splitlines()
    assert lines[0] == "arm b: the chosen parts do not fit together:"
    assert "policy 'lpm' needs cache.reuse" in lines[1]
    assert "  - policy: fcfs" in lines
    assert "--b KEY=VALUE" in lines[-1]
    assert "--set KEY=VALUE" in lines[-1]
    assert found(*arms([], ["cache=none"], common=["policy=lpm", "policy=fcfs"])) == {"cache": ("radix", "none", True)}


def test_models_of_other_vocabularies_are_not_compared():
    pair = arms([], ["model.overrides={vocab_size: 4000}"])
    with pytest.raises(ConfigError, match="vocabularies of 4096 and 4000"):
        check_vocabularies(*pair)
    check_vocabularies(*arms())
