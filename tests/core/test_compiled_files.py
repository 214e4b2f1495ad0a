"""Test that compiled files which were cut are found and removed, and no others.

.venv/bin/python -m pytest -q tests/core/test_compiled_files.py
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from dovetail.ops.compiled_files import is_whole, remove_cut, remove_cut_kernels

LIBRARIES = [
    *Path(np.__file__).parent.rglob("*.so"),
    *Path(tokenizers.__file__).parent.rglob("*.so"),
    *Path(sysconfig.get_paths()["stdlib"]).glob("lib-dynload/*.so"),
]
LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


def old(file: Path) -> Path:
    os.utime(file, (1, 1))
    return file


def test_whole_libraries_of_other_packages_are_whole():
    assert len(LIBRARIES) > 20
    assert all(is_whole(library) for library in LIBRARIES)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_cut_libraries_are_removed(tmp_path: Path, share: float):
    source = max((library for library in LIBRARIES if "core" in str(library)), key=lambda file: file.stat().st_size)
    data = source.read_bytes()
    whole, cut = tmp_path / "whole.so", tmp_path / "cut.so"
    whole.write_bytes(data)
    cut.write_bytes(data[: int(len(data) * share)])
    if share == 0.6:  # the reason for all of this
        assert subprocess.run([sys.executable, "-c", LOAD, str(cut)], capture_output=True).returncode != 0
    assert remove_cut([old(whole), cut]) == []  # another process may still write it
    assert remove_cut([whole, old(cut), tmp_path / "missing.so"]) == [cut]
    assert whole.exists()
    assert not cut.exists()


def test_the_caches_of_triton_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    remove_cut_kernels()
    for name in ("launcher.so", "kernel.cubin", "kernel.json"):
        (tmp_path / "key").mkdir(exist_ok=True)
        (tmp_path / "key" / name).write_bytes(b"\x7fELF")
        old(tmp_path / "key" / name)
    remove_cut_kernels()
    assert [file.name for file in (tmp_path / "key").iterdir()] == ["kernel.json"]
    assert caplog.text.count("is compiled again") == 2
