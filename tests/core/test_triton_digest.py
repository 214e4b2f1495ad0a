"""Test that the digest of Triton's files is kept, and computed again if one of them has changed.

.venv/bin/python -m pytest -q tests/core/test_triton_digest.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.ops.triton.digest import kept_digest

TWO_PROCESSES = """
import builtins
from triton.runtime import cache
original, opened = builtins.open, []
def record(file, *args, **kwargs):
    opened.append(str(file))
    return original(file, *args, **kwargs)
computed = cache.triton_key
builtins.open = record
from dovetail.ops.triton.digest import use_kept_digest
use_kept_digest()
read = any("libtriton" in name for name in opened)
print(read, cache.triton_key() == computed(), cache.get_cache_key.__globals__["triton_key"] is cache.triton_key)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "package"
    for name in (
        "_C/library.so",
        "compiler/code.py",
        "__init__.py",
        "__pycache__/__init__.cpython-311.pyc",
        "notes.txt",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def digests(package: Path, *answers: str) -> list[str]:
    """Return what ``kept_digest`` returns in as many calls as there are answers of ``compute``, of which each is used once."""
    left = iter(answers)
    return [kept_digest(package, lambda: next(left)) for _ in answers]


def test_a_digest_is_computed_once(package: Path):
    assert digests(package, "first", "second", "third") == ["first"] * 3


@pytest.mark.parametrize("name", ["_C/library.so", "compiler/code.py", "compiler/more.py"])
@pytest.mark.parametrize("change", ["content", "time", "removed"])
def test_a_changed_file_has_another_digest(package: Path, name: str, change: str):
    file = package / name
    file.write_text("before")
    os.utime(file, ns=(1, 1))
    assert digests(package, "first", "unused") == ["first"] * 2
    if change == "removed":
        file.unlink()
    else:
        file.write_text("before" if change == "time" else "longer than before")
        if change == "content":
            os.utime(file, ns=(1, 1))
    assert digests(package, "second", "unused") == ["second"] * 2


def test_files_behind_a_link_count(package: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/code.py").write_text("before")
    (package / "linked").symlink_to(tmp_path / "elsewhere")
    digests(package, "first")
    (tmp_path / "elsewhere/code.py").write_text("longer than before")
    assert digests(package, "second") == ["second"]


def test_other_files_do_not_count(package: Path):
    digests(package, "first")
    (package / "__pycache__/__init__.cpython-311.pyc").write_text("compiled again")
    (package / "notes.txt").write_text("longer than before")
    assert digests(package, "second") == ["first"]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"files": {}}', "[" * 100_000, None])
def test_a_file_that_was_cut_or_changed_is_written_again(package: Path, content: str | None):
    digests(package, "first")
    [kept] = package.parent.glob("cache/dovetail-digest/*")
    kept.write_text(kept.read_text().replace('"first"', "null") if content is None else content)
    assert digests(package, "second", "unused") == ["second"] * 2


def test_a_cache_that_cannot_be_written_is_no_error(package: Path, monkeypatch: pytest.MonkeyPatch):
    (package / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(package / "file"))
    assert digests(package, "first", "second") == ["first", "second"]


def test_triton_has_the_digest_that_it_would_compute(tmp_path: Path):
    """The second process does not read the library of 400 MB."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-c", TWO_PROCESSES]
    found = [subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120) for _ in range(2)]
    assert [one.stdout.split() for one in found] == [["True"] * 3, ["False", "True", "True"]], found[1].stderr
