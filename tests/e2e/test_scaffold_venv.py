"""Test the steps of a new author: a package of each kind is generated, installed in a separate environment, checked,
chosen and served. Nothing is downloaded, because that environment also finds the packages of this one.

.venv/bin/python -m pytest -q tests/e2e/test_scaffold_venv.py
"""

from __future__ import annotations

import json

import httpx
import pytest
from environments import DOVETAIL, Environment
from served import ask, served

from dovetail.config import PluginsSection
from dovetail.llm import LLM
from dovetail.registry import ComponentKind, load_plugins
from dovetail.registry.builtin import KINDS
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from dovetail.scaffold import named, render, write

NAMES = {descriptor.kind: f"begun_{descriptor.kind}" for descriptor in KINDS}
UNUSED = {ComponentKind.EXPERTS, ComponentKind.MIXER}
"""Kinds of which the embedded model uses no component; tests/e2e/test_engine_experts.py serves a model with experts."""
PARTS = {str(kind): name for kind, name in NAMES.items() if kind not in UNUSED} | {
    "model": {"path": "tiny", "arch": NAMES[ComponentKind.MODEL]},
    "api": ["openai", NAMES[ComponentKind.API]],
}
PROMPTS = ["The capital of France is", "Monday Tuesday Wednesday Monday Tuesday Wednesday Monday", "One and one is"]
MEMORY = {"page_size": 4, "num_pages": 200}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with a new package of each kind."""
    environment = Environment(tmp_path_factory.mktemp("begun"))
    registry = load_plugins(PluginsSection())
    for kind, name in NAMES.items():
        write(render(named(registry, kind, name)), environment.folder / kind)
    environment.install(*(f"./{kind}" for kind in NAMES))
    return environment


SCRIPT = """
import json, sys
from dovetail.llm import LLM
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

parts, prompts, memory = json.loads(sys.argv[1])
greedy = SamplingParams(max_new_tokens=24, temperature=0)
once = SamplingParams(max_new_tokens=24, temperature=0, logits_processors=[{"name": parts["logits_processor"], "most": 1}])
choice = GrammarSpec(GrammarKind.CHOICE, '["perhaps", "never", "always"]')
llm = LLM(device="cpu", threads=1, memory=memory, scheduler={"draft": "always"}, **parts)
first, again = llm.generate(prompts, greedy), llm.generate(prompts, greedy)
chosen = llm.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0, grammar=choice))
processed = llm.generate(prompts, once)
answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
resolved = llm.resolved.to_json()
print(json.dumps({
    "tokens": [output.token_ids for output in first],
    "again": [output.token_ids for output in again],
    "chosen": [output.text for output in chosen],
    "cached": [output.cached_tokens for output in again],
    "drafted": sum(output.drafted for output in first),
    "accepted": sum(output.accepted for output in first),
    "processed": [output.token_ids for output in processed],
    "answer": answer.text,
    "parts": [part["name"] for part in [*resolved["chosen"].values(), *sum(resolved["lists"].values(), [])] if part],
}))
llm.close()
"""


@pytest.mark.slow
def test_each_part_is_chosen_and_says_what_the_built_in_ones_say(begun: Environment) -> None:
    said = json.loads(begun.run("-c", SCRIPT, json.dumps([PARTS, PROMPTS, MEMORY])))
    assert {name for kind, name in NAMES.items() if kind not in {ComponentKind.API, *UNUSED}} <= set(said["parts"])
    llm = LLM("tiny", device="cpu", threads=1, memory=MEMORY, plugins={"allow": ["dovetail"]})
    greedy = SamplingParams(max_new_tokens=24, temperature=0)
    choice = GrammarSpec(GrammarKind.CHOICE, '["perhaps", "never", "always"]')
    expected = llm.generate(PROMPTS, greedy)
    chosen = llm.generate(PROMPTS, SamplingParams(max_new_tokens=24, temperature=0, grammar=choice))
    llm.close()
    assert said["tokens"] == said["again"] == [output.token_ids for output in expected]
    assert said["chosen"] == [output.text for output in chosen]
    assert all(len(tokens) == len(set(tokens)) for tokens in said["processed"]), "each token occurs at most once"
    assert max(said["cached"]) > 0
    assert 0 < said["accepted"] <= said["drafted"]
    assert "Paris" in said["answer"]


@pytest.mark.slow
def test_they_are_served(begun: Environment) -> None:
    (begun.folder / "serve.yaml").write_text(json.dumps({**PARTS, "threads": 1, "server": {"port": 0}}))
    command = [begun.python, *DOVETAIL, "serve", "serve.yaml"]
    with served(command, cwd=begun.folder, env=begun.env) as url:
        assert "Paris" in ask(url)
        more = httpx.post(f"{url}/{NAMES[ComponentKind.API]}", json={"text": PROMPTS[0], "tokens": 6}, timeout=60)
        assert "Paris" in more.json()["text"]
