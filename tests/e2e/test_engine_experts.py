"""Test a backend of experts that a third party has written: what ``dovetail plugins new experts`` generates passes its
suite, is chosen, and serves a model with experts.

.venv/bin/python -m pytest -q tests/e2e/test_engine_experts.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import engine_models as models
import httpx
import pytest
from engine_runs import prompts_of
from environments import DOVETAIL, Environment
from served import served
from transformers import Qwen3MoeConfig

from dovetail.config import PluginsSection
from dovetail.registry import load_plugins
from dovetail.scaffold import named, render, write

STEPS = 12
QWEN3 = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "head_dim": 32,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment in which the generated package is installed."""
    environment = Environment(tmp_path_factory.mktemp("experts"))
    write(render(named(load_plugins(PluginsSection()), "experts", "mine")), environment.folder / "mine")
    environment.install("./mine")
    return environment


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, models.Reference]:
    directory = models.save(tmp_path_factory.mktemp("qwen3"), Qwen3MoeConfig, **QWEN3)
    return directory, models.Reference(directory)


@pytest.mark.full  # tests/core/test_scaffold.py runs it with those of the other kinds
def test_it_passes_its_suite(begun: Environment) -> None:
    said = begun.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "mine/tests")
    assert " passed" in said
    assert "failed" not in said


@pytest.fixture(scope="module")
def url(begun: Environment, checkpoint: tuple[Path, models.Reference]) -> Iterator[str]:
    config = {
        "model": {"path": str(checkpoint[0]), "tokenizer": "tiny", "served_name": "experts"},
        "device": "cpu",
        "threads": 1,
        "server": {"port": 0},
    }
    (begun.folder / "serve.json").write_text(json.dumps({**config, "scheduler": {"chunk_size": 16}}))
    command = [begun.python, *DOVETAIL, "serve", "serve.json", "--experts", "mine", "--set", "experts.block_rows=3"]
    with served(command, "experts", cwd=begun.folder, env=begun.env) as url:
        yield url


@pytest.mark.slow
def test_it_serves_a_model_with_experts(url: str, checkpoint: tuple[Path, models.Reference]) -> None:
    info = httpx.get(f"{url}/server_info", timeout=60).json()
    assert info["engine"]["resolved"]["chosen"]["experts"]["name"] == "mine"
    assert (
        info["engine"]["products"]["8 experts of 48 x 64"]
        == "torch, one expert after the other, up to 3 rows at a time"
    )
    for prompt in prompts_of([3, 40]):
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": STEPS, "temperature": 0}}
        answer = httpx.post(f"{url}/generate", json=body, timeout=60).json()
        assert answer["output_ids"] == checkpoint[1].greedy(tuple(prompt), STEPS)
