"""Test which component computes a model: one that is written for its architecture, or the modules of transformers.

Run: python -m pytest tests/core/test_model_implementation.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ResolutionError
from dovetail.registry import Machine, Resolved, resolve, setup

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SEED = {**LLAMA, "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "head_dim": 12}


DOGE = {**LLAMA, "model_type": "doge", "architectures": ["DogeForCausalLM"]}


def resolved(directory: Path, config: dict[str, Any], *sets: str) -> Resolved:
    (directory / "config.json").write_text(json.dumps(config))
    loaded, registry = setup(env={}, sets=[f"model.path={directory}", *sets])
    return resolve(loaded, registry, Machine.assume("cpu"))


def test_an_architecture_with_a_component_of_its_own_is_computed_by_it(tmp_path: Path) -> None:
    found = resolved(tmp_path, LLAMA)
    assert (found.model.name, found.config.model.implementation) == ("llama", "dovetail")
    assert found.to_json()["model"]["notes"] == []


def test_an_architecture_without_one_runs_through_transformers_and_says_that_it_is_slower(tmp_path: Path) -> None:
    found = resolved(tmp_path, SEED)
    assert (found.model.name, found.config.model.implementation) == ("transformers", "transformers")
    assert "slower" in found.resolution("model").note
    assert "slower" in found.to_json()["model"]["notes"][0]


def test_config_forces_either(tmp_path: Path) -> None:
    assert resolved(tmp_path, LLAMA, "model.implementation=transformers").model.name == "transformers"
    assert resolved(tmp_path, LLAMA, "model.arch=transformers").model.name == "transformers"
    with pytest.raises(ResolutionError, match=r"SeedOssForCausalLM.*no installed model component"):
        resolved(tmp_path, SEED, "model.implementation=dovetail")
    with pytest.raises(ResolutionError, match=r"model.arch is 'llama', and model.implementation 'transformers'"):
        resolved(tmp_path, LLAMA, "model.arch=llama", "model.implementation=transformers")


def test_what_a_component_refuses_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ResolutionError, match=r"(?s)hidden_act is 'gelu'.*set model.implementation: transformers"):
        resolved(tmp_path, {**LLAMA, "hidden_act": "gelu"})
    forced = resolved(tmp_path, {**LLAMA, "hidden_act": "gelu"}, "model.implementation=transformers")
    assert forced.model.name == "transformers"


def test_a_refused_architecture_has_both_reasons(tmp_path: Path) -> None:
    with pytest.raises(ResolutionError, match=r"(?s)DogeForCausalLM.*no installed.*DogeForCausalLM: model\.layers\.0"):
        resolved(tmp_path, DOGE)


def test_transformers_is_imported_only_if_it_is_chosen(tmp_path: Path) -> None:
    """Run in a process of its own, because other tests import it."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    code = (
        "import sys; from dovetail.registry import Machine, resolve, setup; "
        f"config, registry = setup(env={{}}, sets=['model.path={tmp_path}']); "
        "resolve(config, registry, Machine.assume('cpu')); print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
