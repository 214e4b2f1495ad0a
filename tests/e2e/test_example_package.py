"""Packages outside the core: the example package, and those that docs/plugins.md and README.md build; the README's
snippets of Python too. tests/e2e/test_readme.py runs its commands. Nothing is downloaded.

Run: python -m pytest -q tests/e2e/test_example_package.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from fresh import run_python

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dovetail-example-plugin"
DOVETAIL = ["-c", "from dovetail.cli import main; main()"]
NAMES = {
    "attention": "example_eager",
    "cache": "example_pages",
    "grammar": "example_choices",
    "speculative": "example_bigram",
    "policy": "example_shortest",
    "model": "example",
    "tool_parser": "example_lines",
    "reasoning_parser": "example_comments",
    "api": "example_line",
}


def install(source: Path, target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([*pip, *offline, str(source)], check=True, timeout=120)


def run(target: Path, arguments: list[str], directory: Path) -> str:
    """Run Python in a fresh process that sees what is installed in ``target``. Returns what it prints."""
    paths = [str(target), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_python(arguments, directory, env)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("example")
    install(EXAMPLE, target)
    return target


def test_it_is_listed_beside_the_built_in_ones(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(run(installed, [*DOVETAIL, "plugins", "list", "--json"], tmp_path))
    found = {
        component["kind"]: component["name"] for component in listed["components"] if "example" in component["name"]
    }
    assert found == NAMES


SCRIPT = """
import json, sys
from dovetail.llm import LLM
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

prompts = ["The capital of France is", "Monday Tuesday Wednesday Monday Tuesday Wednesday Monday Tuesday", "One and one is"]
greedy = SamplingParams(max_new_tokens=24, temperature=0)
choice = GrammarSpec(GrammarKind.REGEX, "perhaps|never|always")
llm = LLM("tiny", device="cpu", memory={"page_size": 4, "num_pages": 200}, **json.loads(sys.argv[1]))
first, again = llm.generate(prompts, greedy), llm.generate(prompts, greedy)
chosen = llm.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0, grammar=choice))
print(json.dumps({
    "tokens": [output.token_ids for output in first],
    "again": [output.token_ids for output in again],
    "chosen": [output.text for output in chosen],
    "cached": [output.cached_tokens for output in again],
    "drafted": sum(output.drafted for output in first),
    "accepted": sum(output.accepted for output in first),
    "classes": sorted({type(part).__module__ for part in (llm.loop.scheduler.ledger.cache, llm.loop.executor.rank.engine.model)}),
}))
llm.close()
"""


def test_all_of_them_together_generate_what_the_built_in_ones_do(installed: Path, tmp_path: Path) -> None:
    ours = {**NAMES, "model": {"arch": NAMES["model"]}}
    built_in = json.loads(run(installed, ["-c", SCRIPT, "{}"], tmp_path))
    example = json.loads(run(installed, ["-c", SCRIPT, json.dumps(ours)], tmp_path))
    assert example["classes"] == ["dovetail_example.cache", "dovetail_example.model"]
    assert not any("example" in name for name in built_in["classes"]), "`auto` prefers the built-in ones"
    assert example["tokens"] == example["again"] == built_in["tokens"]
    assert example["chosen"] == built_in["chosen"]
    assert set(example["chosen"]) <= {"perhaps", "never", "always"}
    assert example["cached"] == built_in["cached"]
    assert max(example["cached"]) > 0
    assert example["drafted"] > 0
    assert example["accepted"] > 0


def test_what_its_grammar_cannot_honour_is_refused_with_the_way_out(installed: Path, tmp_path: Path) -> None:
    script = (
        "from dovetail.llm import LLM\n"
        "from dovetail.errors import GrammarError, RequestError\n"
        "from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams\n"
        "llm = LLM('tiny', device='cpu', grammar='example_choices')\n"
        "try:\n"
        "    llm.generate('x', SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, '[a-z]+')))\n"
        "except RequestError as error:\n"
        "    print(error)\n"
        "llm.close()\n"
    )
    assert "grammar: xgrammar" in run(installed, ["-c", script], tmp_path)


def test_the_command_of_its_readme_answers(installed: Path, tmp_path: Path) -> None:
    (line,) = re.findall(r"^    dovetail (generate .*)$", (EXAMPLE / "README.md").read_text("utf-8"), re.MULTILINE)
    assert "Paris" in run(installed, [*DOVETAIL, *shlex.split(line), "-n", "8"], tmp_path)


@pytest.mark.slow
def test_it_passes_the_suites_of_every_kind(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-rs",
        *("-p", "no:cacheprovider", "-p", "no:xdist"),
        "-p",
        "quick_engines",
        "-k",
        "not (test_outputs_are_those_of_decoding_without_drafts and 1-2048 or test_agrees_with_a_dictionary and not 1-1)",
        "tests",
    ]
    printed = run(installed, arguments, EXAMPLE)
    assert " passed" in printed
    assert "dovetail-example-plugin is not installed" not in printed


# -- the other examples ------------------------------------------------------------------------------------------------


def test_the_config_file_resolves(tmp_path: Path) -> None:
    printed = run(tmp_path, [*DOVETAIL, "explain", str(ROOT / "examples" / "config.yaml")], tmp_path)
    assert "xgrammar" in printed
    assert "radix" in printed


def test_the_offline_example_runs(tmp_path: Path) -> None:
    *_, last = run(tmp_path, [str(ROOT / "examples" / "offline.py")], tmp_path).splitlines()
    assert set(json.loads(last)) == {"name", "age"}


def test_the_client_example_runs(tiny_url: str, tmp_path: Path) -> None:
    *_, last = run(tmp_path, [str(ROOT / "examples" / "openai_client.py"), f"{tiny_url}/v1"], tmp_path).splitlines()
    assert set(json.loads(last)) == {"name", "age"}


# -- docs/plugins.md ---------------------------------------------------------------------------------------------------


def test_the_tutorial_builds_a_plugin_that_works(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text("utf-8")
    project, target = tmp_path / "project", tmp_path / "installed"
    files = re.findall(r"^`([\w/.]+)`\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(files) == 5
    for name, text in files:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, "utf-8")
    (project / "config.yaml").write_text(*re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL), "utf-8")
    install(project, target)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    printed = [run_line(line, project, target) for line in commands.splitlines()[1:]]
    assert " passed" in printed[0]
    assert "patience: 5.0" in printed[1]
    assert "modest" in printed[2]
    assert printed[3].strip()
    assert "modest" in run(target, [*DOVETAIL, "explain", "config.yaml"], project)


def run_line(line: str, project: Path, target: Path) -> str:
    program, *arguments = shlex.split(line)
    return run(target, arguments if program == "python" else [*DOVETAIL, *arguments], project)


# -- README.md ---------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text("utf-8")
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "my-policies"
version = "0.1.0"
{}
{}
[tool.hatch.build.targets.wheel]
packages = ["my_policies"]
"""


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_readmes_clients_are_answered(tiny_url: str, tmp_path: Path) -> None:
    client, offline, *_ = blocks("python")
    for code in (client.replace("http://127.0.0.1:30000", tiny_url), offline):
        assert "Paris" in run(tmp_path, ["-c", code], tmp_path)
    _, url, _, header, _, body = shlex.split(blocks("bash")[0].replace("\\\n", " "))
    url, headers = url.replace("http://127.0.0.1:30000", tiny_url), dict([header.split(": ")])
    assert "Paris" in httpx.post(url, content=body, headers=headers, timeout=60).text


def test_the_readmes_plugin_passes_its_suite(tmp_path: Path) -> None:
    project, target = tmp_path / "project", tmp_path / "installed"
    (project / "my_policies").mkdir(parents=True)
    for name, text in zip(("plugin", "shortest", "config"), blocks("python")[-3:], strict=True):
        (project / "my_policies" / f"{name}.py").write_text(text, "utf-8")
    (entry_point,) = re.findall(r"`(\[project\.entry-points.*?\]) (.*?)`", README)
    (project / "pyproject.toml").write_text(PROJECT.format(*entry_point), "utf-8")
    (suite,) = re.findall(r"`(class \w+\(PolicySuite\): .*?)`", README)
    (project / "test_it.py").write_text(f"from dovetail.testing.policy import PolicySuite\n{suite}\n", "utf-8")
    install(project, target)
    assert " passed" in run(target, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"], project)
    explained = json.loads(run(target, [*DOVETAIL, "explain", "--set", "policy=shortest", "--json"], project))
    assert explained["config"]["policy"] == {"kind": "shortest"}
