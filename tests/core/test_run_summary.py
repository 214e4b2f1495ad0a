"""Test that a test run says at its end which tests were skipped because a tool is missing, and how to get the tool.

.venv/bin/python -m pytest -q -p no:xdist tests/core/test_run_summary.py
"""

import os
import subprocess
import sys
from pathlib import Path

SKIPPING = """
import pytest

@pytest.mark.parametrize("n", range(3))
def test_of_a_page(n):
    pytest.skip("chromium is not installed")

def test_of_another_machine():
    pytest.skip("no GPU")
"""


def test_what_was_skipped_for_a_missing_tool_is_summed_up(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "missing_tools.py").read_text())
    (tmp_path / "test_skipped.py").write_text(SKIPPING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    _, _, summary = done.stdout.partition("skipped because a tool is missing")
    assert "3 tests need Chromium, for the tests of pages: `apt-get install chromium`" in summary, done.stdout
    assert summary.count("tests need") == 1
