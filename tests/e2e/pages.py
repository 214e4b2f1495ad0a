"""Run the examples of a page of docs/ as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run_examples(
    page: str, heading: str, url: str, capsys: pytest.CaptureFixture[str], at_least: int = 1
) -> dict[str, Any]:
    """Run the Python blocks of a section of a page one after another, against the server at ``url``: each text block must be what
    was printed since the one before. Returns the names that the blocks have made."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```(python|text)\n(.*?)```", section, re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") >= at_least, f"docs/{page} has no such examples"
    names: dict[str, Any] = {}
    for kind, block in blocks:
        if kind == "python":
            exec(block.replace("http://127.0.0.1:30000", url), names)
        else:
            assert capsys.readouterr().out == block
    return names
