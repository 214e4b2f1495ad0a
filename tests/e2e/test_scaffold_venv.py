"""As a new author would: a package of each kind is begun, installed in an environment of its own, checked, chosen and served.
Nothing is downloaded: what this environment has, that one sees too.

.venv/bin/python -m pytest -q tests/e2e/test_scaffold_venv.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import httpx
import pytest

from dovetail.config import PluginsSection
from dovetail.llm import LLM
from dovetail.plugins import ComponentKind, load_plugins
from dovetail.scaffold import named, render, write
from dovetail.types import GrammarKind, GrammarSpec, SamplingParams

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
DOVETAIL = ["-c", "from dovetail.cli import main; main()"]
PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]
NAMES = {kind: f"begun_{kind.name.lower()}" for kind in ComponentKind}
PARTS = {kind.value: name for kind, name in NAMES.items()} | {
    "model": {"path": "tiny", "arch": NAMES[ComponentKind.MODEL]},
    "api": ["openai", NAMES[ComponentKind.API]],
}
PROMPTS = ["The capital of France is", "Monday Tuesday Wednesday Monday Tuesday Wednesday Monday", "One and one is"]
MEMORY = {"page_size": 4, "num_pages": 200}


class Environment:
    """A virtual environment that begins with what this one has."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        own = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
        here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        Path(own, "what_is_here.pth").write_text(here)

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "XDG_DATA_HOME": str(self.folder / "data"), "COLUMNS": "200"}

    def run(self, *arguments: str) -> str:
        """Run Python in it. Returns what it prints."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *sources: str) -> None:
        """pip, as far as it works without a network."""
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.python), *PIP[2:], *OFFLINE, *sources],
            cwd=self.folder,
            env=self.env,
            check=True,
            timeout=280,
        )


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with a new package of each kind."""
    environment = Environment(tmp_path_factory.mktemp("begun"))
    registry = load_plugins(PluginsSection())
    for kind, name in NAMES.items():
        write(render(named(registry, kind, name)), environment.folder / kind)
    environment.install(*(f"./{kind}" for kind in NAMES))
    return environment


SCRIPT = """
import json, sys
from dovetail.llm import LLM
from dovetail.types import GrammarKind, GrammarSpec, SamplingParams

parts, prompts, memory = json.loads(sys.argv[1])
greedy = SamplingParams(max_new_tokens=24, temperature=0)
choice = GrammarSpec(GrammarKind.CHOICE, '["perhaps", "never", "always"]')
llm = LLM(device="cpu", threads=1, memory=memory, scheduler={"draft": "always"}, **parts)
first, again = llm.generate(prompts, greedy), llm.generate(prompts, greedy)
chosen = llm.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0, grammar=choice))
answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0))
resolved = llm.resolved.to_json()["chosen"]
print(json.dumps({
    "tokens": [output.token_ids for output in first],
    "again": [output.token_ids for output in again],
    "chosen": [output.text for output in chosen],
    "cached": [output.cached_tokens for output in again],
    "drafted": sum(output.drafted for output in first),
    "accepted": sum(output.accepted for output in first),
    "answer": answer.text,
    "parts": {slot: part["name"] for slot, part in resolved.items() if part},
}))
llm.close()
"""


@pytest.mark.slow
def test_each_part_is_chosen_and_says_what_the_built_in_ones_say(begun: Environment) -> None:
    said = json.loads(begun.run("-c", SCRIPT, json.dumps([PARTS, PROMPTS, MEMORY])))
    assert {name for kind, name in NAMES.items() if kind is not ComponentKind.API} <= set(said["parts"].values())
    llm = LLM("tiny", device="cpu", threads=1, memory=MEMORY, plugins={"allow": ["dovetail"]})
    greedy = SamplingParams(max_new_tokens=24, temperature=0)
    choice = GrammarSpec(GrammarKind.CHOICE, '["perhaps", "never", "always"]')
    expected = llm.generate(PROMPTS, greedy)
    chosen = llm.generate(PROMPTS, SamplingParams(max_new_tokens=24, temperature=0, grammar=choice))
    llm.close()
    assert said["tokens"] == said["again"] == [output.token_ids for output in expected]
    assert said["chosen"] == [output.text for output in chosen]
    assert max(said["cached"]) > 0
    assert 0 < said["accepted"] <= said["drafted"]
    assert "Paris" in said["answer"]


@pytest.mark.slow
def test_they_are_served(begun: Environment) -> None:
    (begun.folder / "serve.yaml").write_text(json.dumps({**PARTS, "threads": 1, "server": {"port": 0}}))
    command = [str(begun.python), *DOVETAIL, "serve", "serve.yaml"]
    process = subprocess.Popen(command, cwd=begun.folder, env=begun.env, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stderr
        seen: list[str] = []
        for line in process.stderr:
            seen.append(line)
            if "ready in" in line:
                break
        found = re.search(r"(http://127\.0\.0\.1:\d+), ready in", seen[-1])
        assert found, "".join(seen)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        more = httpx.post(f"{found[1]}/{NAMES[ComponentKind.API]}", json={"text": PROMPTS[0], "tokens": 6}, timeout=60)
        assert "Paris" in more.json()["text"]
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(20) == 0
        assert "Traceback" not in "".join(seen) + rest


@pytest.mark.slow
def test_the_first_steps_of_the_docs(tmp_path: Path) -> None:
    (commands,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    environment, printed = Environment(tmp_path), []
    for program, *arguments in map(shlex.split, commands.splitlines()):
        if program == "pip":
            assert arguments[:2] == ["install", "-e"]
            environment.install(f"./{arguments[2].partition('[')[0]}")  # as -e needs more of hatchling than is here
        else:
            assert program == "dovetail"
            printed.append(environment.run(*DOVETAIL, *arguments))
    new, check, show, doctor, generate = printed
    assert "pip install -e 'dovetail-my-turn[dev]'" in new
    found = re.search(r"policy/my_turn: (\d+) passed, 0 failed", check)
    assert found, check
    assert f"version 0.1.0: {found[1]} passed" in show
    assert "policy/my_turn" in doctor
    assert generate.strip()
