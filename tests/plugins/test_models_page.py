"""Test that docs/models.md lists the architectures that are installed.

Run: python -m pytest tests/plugins/test_models_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from dovetail.registry.specs import ComponentKind
from dovetail.testing.installed import installed

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_lists_every_architecture() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| `(?!architectures)", line)]
    assert all(row.count("|") == 5 for row in rows), "a row with other columns"
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(listed) == len(set(listed)), "an architecture has two rows"
    specs = [c.spec for c in installed().components(ComponentKind.MODEL) if c.distribution == "dovetail"]
    assert set(listed) <= {alias for spec in specs for alias in spec.aliases}
    missing = [spec.name for spec in specs if not set(spec.aliases) & set(listed)]
    assert not missing, f"docs/models.md has no row for {missing}"
