"""Compare every model of the suites with itself on three gloo ranks. The suites divide their models among two and four ranks.

.venv/bin/python -m pytest -q tests/plugins/test_rank_families.py

The configs are those of the suites, three times as wide, so that three ranks can divide them. Each rank reads its share
of the checkpoint's files.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.checkpoint import read_json
from dovetail.engine.build import build_model
from dovetail.engine.weights import load_weights
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.registry.ranks import divisions
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail.testing.model import ModelSuite, random_tokens
from dovetail.testing.model_rows import ModelRows
from rank_processes import RankProcesses

RANKS = 3
USUAL = {"gemma3", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1", "jamba", "kimi_linear"}
"""The models of the usual run, one for each kind of layer that ranks divide in its own way."""
WIDER = frozenset(
    {
        *("hidden_size", "n_embd", "intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"),
        *("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size", "mamba_d_ssm"),
        *("num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "num_kv_heads", "n_groups"),
        *("mamba_n_heads", "mamba_n_groups", "mamba_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
        "linear_num_heads",
    }
)
"""The settings that are multiplied: sizes that ranks divide, and the sizes of which those are parts."""


def suites() -> dict[str, type[ModelSuite]]:
    """Return a suite of each model component, by the component's name."""
    found: dict[str, type[ModelSuite]] = {}
    for file in sorted(Path(__file__).parent.glob("test_models_*.py")):
        spec = importlib.util.spec_from_file_location(f"suites_of_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        for suite in vars(module).values():
            if isinstance(suite, type) and issubclass(suite, ModelSuite) and suite.__name__.startswith("Test"):
                found.setdefault(suite.name, suite)
    return found


SUITES = suites()


def wider(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with ``RANKS`` times as many heads and channels. One KV head or group stays one."""
    return {
        name: RANKS * value if name in WIDER and isinstance(value, int) and value > 1 else value
        for name, value in config.items()
    }


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(RANKS)
    yield processes
    processes.close()


@torch.inference_mode()
def logits(mesh: Mesh, name: str, directory: str) -> list[torch.Tensor]:
    """Return the logits of two rows: prompts in chunks, mixed steps, and decode steps."""
    component = installed().get(ComponentKind.MODEL, name)
    assert component.spec.describe is not None
    info = load_attribute(component.spec.describe, name)(dict(read_json(Path(directory), "config.json")))
    model = build_model(load_attribute(component.spec.target, name), info, torch.device("cpu"), torch.float32, mesh)
    load_weights(model, Path(directory))
    rows = ModelRows(model, [21, 12], 4, mesh)
    first, second = random_tokens(info, 21, 0), random_tokens(info, 12, 1)
    found = []
    for pieces in (
        {0: first[:9]},
        {0: first[9:16], 1: second[:5]},
        {0: first[16:17], 1: second[5:11]},
        {0: first[17:18], 1: second[11:12]},
    ):
        found += list(rows.enter(pieces).values())
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.full) for name in SUITES]
)
def test_three_ranks_return_the_logits_of_one(ranks: RankProcesses, tmp_path: Path, name: str) -> None:
    suite = SUITES[name]()
    given = {**getattr(suite, "small", {}), **next(iter(suite.configs.values()))}
    suite.write_checkpoint(wider(given), tmp_path)
    info = suite.describe(tmp_path)
    assert Feature.MODEL_TENSOR_PARALLEL in info.offers
    assert RANKS in divisions(info)
    expected = logits(SINGLE, name, str(tmp_path))
    results = ranks.run(logits, name, str(tmp_path))
    for result in results:
        for one, other, whole in zip(result, results[0], expected, strict=True):
            assert one.equal(other)
            torch.testing.assert_close(one, whole, atol=suite.tolerance, rtol=0)
    assert max(float(one.abs().max()) for one in expected) > 0.1, "the logits are not near zero"


def test_every_model_of_this_repository_has_a_suite() -> None:
    components = installed().components(ComponentKind.MODEL)
    assert SUITES.keys() >= USUAL
    missing = {c.spec.name for c in components if c.distribution == "dovetail"} - SUITES.keys()
    assert missing == {"mimo"}, "its layers are those of qwen2; test_rank_models.py divides it"
