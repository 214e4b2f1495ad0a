"""Test that the code of docs/language.md runs, block after block. Run: python -m pytest tests/e2e/test_lang_docs.py"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import dovetail as sgl

PAGE = Path(__file__).parents[2] / "docs" / "language.md"


def blocks() -> list[tuple[int, str]]:
    """Return the page's Python code, with the lines at which it begins."""
    text = PAGE.read_text(encoding="utf-8")
    return [(text[: m.start(1)].count("\n"), m[1]) for m in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]


def test_every_block_of_the_tutorial_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DOVETAIL_DEVICE", "cpu")
    found, names = blocks(), dict[str, Any]()
    assert len(found) > 8
    try:
        for line, code in found:
            exec(compile("\n" * line + code, str(PAGE), "exec"), names)  # tracebacks name the page's own lines
    finally:
        sgl.set_default_backend(None)
        if "runtime" in names:
            names["runtime"].close()


def test_the_pages_links_lead_somewhere():
    links = re.findall(r"\]\((\.\./[^)#]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) == 11
    assert all((PAGE.parent / link).exists() for link in links)


def test_the_page_names_every_word_of_the_language():
    page = PAGE.read_text(encoding="utf-8")
    parts = {"user": ("user_begin", "user_end")}
    quiet = {
        "Function",
        "ProgramState",
        "gen_int",
        "gen_string",
        *(f"{r}_{e}" for r in ("system", "assistant") for e in ("begin", "end")),
    }
    missing = [name for name in sgl.lang.__all__ if name not in page and name not in quiet]
    assert not missing, missing
    assert all(name in page for name in parts["user"])
