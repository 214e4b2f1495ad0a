"""Test the config of an experiment: what is refused, and the whole config of an arm.

.venv/bin/python -m pytest -q tests/core/test_experiment_config.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.config import Config, config_hash, dump
from dovetail.errors import ConfigError
from dovetail.experiment.online.configs import arm_configs, check_arms
from dovetail.registry.setup import setup

TINY = Path(__file__).parents[2] / "core/dovetail/assets/tiny"
SHADOW = {"arm": "a", "percent": 10, "tokens_per_minute": 1000}


def load(experiment: dict[str, Any], **sections: Any) -> dict[str, Config]:
    config, registry = setup(arguments={**sections, "experiment": experiment})
    return arm_configs(config, registry)


@pytest.mark.parametrize(
    ("experiment", "message"),
    [
        ({"split": {"a": 1}}, "need arms"),
        ({"arms": {"a": {}}}, r"experiment is .*one of split and shadow; give one"),
        ({"arms": {"a": {}}, "split": {"a": 1, "base": 1}, "shadow": SHADOW}, "one of split and shadow; remove one"),
        ({"arms": {"a": {}}, "split": {"a": 1, "c": 1}}, "split names 'c'; allowed: the arms, base, a"),
        ({"arms": {"a": {}}, "shadow": {**SHADOW, "arm": "c"}}, r"shadow\.arm names 'c'"),
        ({"arms": {"a": {}, "b": {}}, "split": {"a": 1, "base": 1}}, r"arms\.b gets no request"),
        ({"arms": {"a": {}}, "split": {"a": 1}}, "two different arms"),
        ({"arms": {"a": {}}, "shadow": {**SHADOW, "primary": "a"}}, "two different arms"),
        ({"arms": {"a": {}}, "split": {"a": 0, "base": 0}}, "no weight above 0"),
        ({"arms": {"a": {}}, "split": {"a": -1, "base": 1}}, r"experiment\.split\.a is -1"),
        ({"arms": {"a": {}}, "split": {"a": float("nan"), "base": 1}}, r"experiment\.split\.a is nan"),
        ({"arms": {"a b": {}}, "split": {"a b": 1, "base": 1}}, "arms has 'a b'"),
        (
            {"arms": {"base": {"cache": "none"}, "a": {}}, "split": {"a": 1, "base": 1}},
            r"arms\.base is the config itself",
        ),
        ({"arms": {"a": {}}, "split": {"a": 1, "base": 1}, "key": "cookie"}, r"experiment\.key is 'cookie'.*header:"),
        ({"arms": {"a": {}}, "splits": {}}, r"experiment\.splits is not a key of experiment"),
        ({"arms": {"a": {}}, "shadow": {"arm": "a", "percent": 0, "tokens_per_minute": 1}}, r"shadow\.percent is 0"),
        ({"arms": {"a": {}}, "shadow": {"arm": "a", "percent": 1}}, r"shadow\.tokens_per_minute is missing"),
    ],
)
def test_a_wrong_experiment_is_refused_by_key(experiment: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        setup(arguments={"experiment": experiment})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "radixx"}, r"arm a: cache.*experiment\.arms\.a"),
        ({"memory": {"page_sise": 8}}, r"arm a: memory\.page_sise is not a key of memory.*page_size"),
        ({"server": {"port": 1}}, r"experiment\.arms\.a\.server would differ"),
        ({"model": {"served_name": "x"}}, r"experiment\.arms\.a\.model\.served_name"),
        ({"experiment": {}}, r"experiment\.arms\.a\.experiment would differ"),
    ],
)
def test_a_wrong_arm_is_refused_by_name(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        load({"arms": {"a": settings}, "split": {"a": 1, "base": 1}})


def test_an_arm_is_the_config_with_its_settings_on_top():
    split = {"base": 3, "a": 1}
    arms = load(
        {"arms": {"a": {"cache": "none", "memory": {"page_size": 32}}}, "split": split}, memory={"num_pages": 9}
    )
    plain, _ = setup(arguments={"memory": {"num_pages": 9}})
    assert list(arms) == ["base", "a"]
    assert arms["base"] == plain
    expected, _ = setup(arguments={"memory": {"num_pages": 9, "page_size": 32}, "cache": "none"})
    assert arms["a"] == expected


def test_a_config_without_an_experiment_is_what_it_was():
    config, registry = setup()
    assert "experiment" not in dump(config)
    with_one, _ = setup(arguments={"experiment": {"arms": {"a": {}}, "split": {"a": 1, "base": 1}}})
    assert dump(with_one)["experiment"]["split"] == {"a": 1, "base": 1}
    assert config_hash(arm_configs(with_one, registry)["base"]) == config_hash(config) != config_hash(with_one)


def test_what_cannot_run_is_refused_before_anything_starts():
    base = {"arms": {"a": {"device": "cpu", "memory": {"kv_dtype": "fp8_e4m3"}, "attention": "flash_attn"}}}
    with pytest.raises(ConfigError, match=r"^arm a: "):
        check_arms(load({**base, "split": {"base": 1, "a": 1}}, device="cpu"))


def test_all_arms_have_one_tokenizer(tmp_path: Path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(f"{text} ", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^arm a: its tokenizer differs from the tokenizer of arm base"):
        check_arms(load({"arms": {"a": {"model": str(tmp_path)}}, "split": {"base": 1, "a": 1}}, device="cpu"))


def test_the_examples_of_the_docs_are_configs():
    text = (Path(__file__).parents[2] / "docs/experiments.md").read_text(encoding="utf-8")
    examples = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S)]
    assert len(examples) == 2
    for example in examples:
        config, registry = setup(arguments=example)
        assert len(arm_configs(config, registry)) == 2
