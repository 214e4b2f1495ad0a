"""Test what is prepared for Triton's kernels before an engine is built.

.venv/bin/python -m pytest -q tests/core/test_prepare_kernels.py
"""

from __future__ import annotations

import importlib.util

import pytest

from dovetail.ops import start
from dovetail.ops.triton import driver


@pytest.mark.parametrize(
    ("device_type", "installed", "expected"),
    [("cpu", True, []), ("cuda", True, ["files", "digest"]), ("cuda", False, ["files"])],
)
def test_a_cpu_and_machines_without_triton_prepare_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, device_type: str, installed: bool, expected: list[str]
):
    done: list[str] = []
    monkeypatch.setattr(start, "remove_cut_kernels", lambda: done.append("files"))
    monkeypatch.setattr(driver, "start_digest", lambda: done.append("digest"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    start.prepare_kernels(device_type)
    assert done == expected
