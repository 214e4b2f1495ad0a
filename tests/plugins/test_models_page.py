"""Test that docs/models.md lists the architectures that are installed.

Run: python -m pytest tests/plugins/test_models_page.py
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest
import transformers

from dovetail.registry.specs import ComponentKind
from dovetail.testing.installed import installed
from dovetail_models.specs import MODELS, without_head

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_lists_every_architecture() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| `(?!architectures)", line)]
    assert all(row.count("|") == 5 for row in rows), "a row with other columns"
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert len(listed) == len(set(listed)), "an architecture has two rows"
    specs = [c.spec for c in installed().components(ComponentKind.MODEL) if c.distribution == "dovetail"]
    specs = [spec for spec in specs if not spec.fallback]
    assert set(listed) <= {alias for spec in specs for alias in spec.aliases}
    missing = [spec.name for spec in specs if not set(spec.aliases) & set(listed)]
    assert not missing, f"docs/models.md has no row for {missing}"


def test_a_checkpoint_without_the_head_has_the_name_that_transformers_writes() -> None:
    for spec in MODELS:
        architecture, headless = spec.aliases[:2]
        assert headless == without_head(architecture)
        theirs = getattr(transformers, architecture, None)
        if theirs is None:  # only as code of a checkpoint
            assert architecture in {"MiMoForCausalLM", "QWenLMHeadModel"}
            continue
        if architecture.startswith(("Gemma3", "Llama4")):  # their models within a checkpoint for images
            continue
        names = {base.__name__ for base in vars(import_module(theirs.__module__)).values() if isinstance(base, type)}
        assert headless in names, f"transformers has no {headless}"


def test_an_architecture_with_an_unknown_end_is_refused() -> None:
    with pytest.raises(ValueError, match="LlamaDecoder does not end in one of ForCausalLM, LMHeadModel"):
        without_head("LlamaDecoder")
