"""Test which drafters may draft with data-parallel attention.

Run: pytest tests/core/test_draft_models.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.registry import resolve

sys.path.insert(0, str(Path(__file__).parent))
from resolving import DRAFT, H100, VERIFY, K, refusal


def test_data_attention_needs_a_drafter_whose_model_can_divide_requests(fakes):
    own = DRAFT | {Feature.DRAFT_DATA_ATTENTION}
    specs = [
        fakes.spec(K.DRAFTER, "heads", offers=DRAFT, needs=frozenset({Feature.KV_DRAFT_CACHE})),
        fakes.spec(K.DRAFTER, "own", offers=own, needs=frozenset({Feature.KV_DRAFT_CACHE})),
        fakes.spec(K.DRAFTER, "ngram", offers=DRAFT),
    ]
    expected = "parallel.attention data needs a drafter without a model, or one that offers draft.data_attention"
    for name in ("heads", "own", "ngram"):  # the model does not offer model.data_attention
        sets = [f"speculative={name}", "parallel.tp=2", "parallel.attention=data"]
        text = refusal(fakes, *specs, sets=sets)
        assert (f"{expected}; speculative is 'heads'" in text) == (name == "heads"), text


def test_data_attention_needs_a_model_of_the_drafter_that_can_divide_requests(fakes, tmp_path):
    """The config.json that the spec of the drafter names is read at resolution, also for a machine that is assumed."""
    own = DRAFT | {Feature.DRAFT_DATA_ATTENTION}
    called_for = []

    def opens(section, config):
        called_for.append(section.path)
        return tmp_path / section.path if section.path else None

    def describe(checkpoint):
        return replace(fakes.module.describe(checkpoint), architecture="DenseForCausalLM", offers=frozenset())

    opens, describe = fakes.put("opens", opens), fakes.put("describe_dense", describe)
    specs = [
        fakes.spec(K.MODEL, "dense", describe=describe, aliases=("DenseForCausalLM",)),
        fakes.spec(K.DRAFTER, "mine", {"path": (str, "")}, offers=own, opens=opens, api=(1, 6)),
        fakes.spec(K.ATTENTION, "verifies", offers=VERIFY),
    ]
    for name in ("Dense", "Fake", "Odd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [f"{name}ForCausalLM"]}))

    def drafted_by(path, attention):
        registry = fakes.registry(*specs)
        fakes.model(offers=frozenset({Feature.MODEL_DATA_ATTENTION, Feature.MODEL_TENSOR_PARALLEL}))
        sets = [f"speculative={{kind: mine, path: {path!r}}}", "parallel.tp=2", f"parallel.attention={attention}"]
        return resolve(fakes.config(registry, *sets), registry, H100).drafter.name

    assert drafted_by("Fake", "data") == drafted_by("", "data") == "mine"
    assert called_for == ["Fake", ""]
    assert drafted_by("Dense", "heads") == "mine"
    with pytest.raises(ConfigError) as refused:
        drafted_by("Dense", "data")
    expected = "parallel.attention data needs a draft model that offers model.data_attention; DenseForCausalLM does not"
    assert f"{tmp_path / 'Dense' / 'config.json'}: {expected}. Select another draft model" in str(refused.value)
    with pytest.raises(
        ConfigError, match=r"OddForCausalLM.*installed models implement DenseForCausalLM, FakeForCausalLM"
    ):
        drafted_by("Odd", "data")
