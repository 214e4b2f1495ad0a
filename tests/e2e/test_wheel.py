"""Test the wheel as a user of it would: built from this tree, installed by pip into an environment that has its dependencies and
does not have this tree, explained, examined and served, with the probes that deploy/ describes.

.venv/bin/python -m pytest -q tests/e2e/test_wheel.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import httpx
import pytest
import yaml
from environments import Environment
from served import served

ROOT = Path(__file__).parents[2]
KEY = "dvt-" + "k" * 43
KEYS = yaml.safe_dump({"tenants": {"acme": {"keys": [KEY]}}})

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *words], check=True, timeout=240
    )
    (built,) = folder.glob("dovetail-*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the wheel. Other packages are found where this Python has them; Dovetail, which is there as a
    link to this tree, is not, because the folder is added without its .pth files."""
    environment = Environment(tmp_path_factory.mktemp("clean"))
    own = sysconfig.get_path("purelib", vars={"base": str(environment.folder / "venv")})
    Path(own, "what_is_here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    missing = environment.run(
        "-c", "import importlib.util as u; print(u.find_spec('dovetail'), u.find_spec('dovetail_cache'))"
    )
    assert missing.split() == ["None", "None"]
    environment.install(str(wheel))
    return environment


def command(environment: Environment, *words: str) -> str:
    """Run the ``dovetail`` that pip has put beside Python."""
    program = environment.python.with_name("dovetail")
    done = subprocess.run(
        [program, *words],
        cwd=environment.folder,
        env=environment.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "core", "plugins"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if not tracked:
        pytest.skip("needs a git checkout to know which files belong to the packages")
    wanted = {re.sub(r"^(core|plugins/[^/]+)/", "", name) for name in tracked if (ROOT / name).is_file()}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    assert wanted - names == set(), "left out of the wheel"
    assert not [name for name in names if name.endswith(".pyc")]
    assert {"dovetail/assets/tiny/model.safetensors", "dovetail/server/pages/index.html"} <= names
    assert {"cuda", "grammar", "hub", "all"} <= set(fields.get_all("Provides-Extra", []))


def test_it_runs_from_the_wheel(clean: Environment) -> None:
    where = clean.run("-c", "import dovetail, dovetail_apis; print(dovetail.__file__, dovetail_apis.__file__)").split()
    assert all(path.startswith(str(clean.folder)) for path in where)
    explained = json.loads(command(clean, "explain", "--json", "--set", "device=cpu"))
    assert explained["model"]["architecture"] == "LlamaForCausalLM"
    assert explained["model"]["path"].startswith(str(clean.folder))
    found = json.loads(command(clean, "doctor", "--json", "--set", "device=cpu"))
    assert not found["broken"]
    assert found["plugins"] == []
    assert {"Python", "torch", "memory"} <= {finding["what"] for finding in found["machine"]}


@pytest.fixture(scope="module")
def server(clean: Environment) -> Iterator[str]:
    """Serve from the wheel, with a key, as the containers do."""
    settings = ["device=cpu", "threads=1", "server.port=0", "server.keys=env:SERVER_KEYS"]
    words = [word for setting in settings for word in ("--set", setting)]
    program = [clean.python.with_name("dovetail"), "serve", *words]
    with served(program, cwd=clean.folder, env={**clean.env, "SERVER_KEYS": KEYS}) as url:
        yield url


def test_it_serves(server: str) -> None:
    body = {
        "model": "tiny",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    answer = httpx.post(
        f"{server}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60
    )
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    page = httpx.get(server)
    assert page.status_code == 200
    for name in re.findall(r'(?:src|href)="(/[^"]+\.(?:js|css|svg))"', page.text):
        assert httpx.get(server + name).status_code == 200, name


def probes() -> dict[str, str]:
    """Return the programs of the probes in deploy/, each in Python."""
    found = {}
    for file in (ROOT / "deploy").glob("Dockerfile*"):
        (line,) = re.findall(r"^ +CMD (\[.*/health.*\])$", file.read_text(), re.MULTILINE)
        found[file.name] = json.loads(line)[-1]
    for file in (ROOT / "deploy").glob("kubernetes*.yaml"):
        for document in yaml.safe_load_all(file.read_text()):
            if document and document["kind"] == "Deployment":
                (container,) = document["spec"]["template"]["spec"]["containers"]
                found[file.name] = container["startupProbe"]["exec"]["command"][-1]
    return found


@pytest.mark.parametrize("name", sorted(probes()))
def test_the_probes_of_the_containers(server: str, name: str) -> None:
    program = probes()[name]
    assert "http://127.0.0.1:30000/" in program

    def status(url: str, key: str) -> int:
        code = program.replace("http://127.0.0.1:30000", url)
        env = {**os.environ, "PROBE_KEY": key}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, timeout=60, check=False
        ).returncode

    assert status(server, KEY) == 0
    assert status("http://127.0.0.1:1", KEY) != 0
    if "PROBE_KEY" in program:
        assert status(server, "dvt-wrong") != 0
