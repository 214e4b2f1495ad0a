"""The tables of docs/grammar.md about the regex dialect are true of every engine.

Run: python -m pytest -q tests/plugins/test_grammar_dialect.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dovetail.errors import GrammarError, PluginLoadError
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.testing.grammar import allowed_tokens, tokenizations
from dovetail.testing.grammar_cases import EOS, context
from dovetail.testing.installed import installed

PAGE = (Path(__file__).parents[2] / "docs" / "grammar.md").read_text("utf-8")
SECTION = PAGE.partition("## The regex dialect")[2].partition("\n## ")[0]
ENGINES = ("llguidance", "xgrammar", "outlines", "lm_format_enforcer")


def _rows(head: str) -> list[list[list[str]]]:
    """Return the code spans of each cell of the table whose first cell is ``head``."""
    table = SECTION.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"(?<!\\)\|", line.strip("|")) for line in table]
    return [[[span.replace(r"\|", "|") for span in re.findall(r"`([^`]*)`", cell)] for cell in row] for row in cells]


SUPPORTED = [(regex, good, bad) for _, (regex,), good, bad in _rows("supported")]
REFUSED = [regex for _, regexes in _rows("refused") for regex in regexes]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> GrammarBackend:
    component = installed().get(ComponentKind.GRAMMAR, request.param)
    config = installed().config_class(ComponentKind.GRAMMAR, request.param)(kind=request.param)
    try:
        backend_class = load_attribute(component.spec.target, component.label)
    except PluginLoadError as error:
        pytest.skip(f"{request.param} is not installed: {error}")
    return backend_class(config, context())


def _allows(grammar: CompiledGrammar, text: str) -> bool:
    """Return True if the masks allow the text in every byte, and its end."""
    matcher = grammar.matcher()
    for token in tokenizations(text.encode(), None, 0)[0]:  # type: ignore[arg-type]
        if token not in allowed_tokens(matcher):
            return False
        assert matcher.accept(token)
    return bool(allowed_tokens(matcher) & frozenset(EOS))


def test_the_tables_are_read() -> None:
    assert len(SUPPORTED) >= 15
    assert len(REFUSED) >= 30
    assert all(good and bad for _, good, bad in SUPPORTED)


def test_what_is_supported(engine: GrammarBackend) -> None:
    for regex, good, bad in SUPPORTED:
        grammar = engine.compile(GrammarSpec(GrammarKind.REGEX, regex))
        for text in (*good, *bad):
            assert _allows(grammar, text) == (text in good), f"{regex} and {text!r}"


def test_what_is_refused(engine: GrammarBackend) -> None:
    for regex in REFUSED:
        try:
            engine.compile(GrammarSpec(GrammarKind.REGEX, regex))
        except GrammarError:
            continue
        pytest.fail(f"{regex} is not refused")


def test_what_the_section_says_of_sizes(engine: GrammarBackend, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["engine"]
    most = {"xgrammar": 3000, "llguidance": 20_000}.get(name)
    if most is None:
        pytest.skip(f"the section states no size for {name}")
    engine.check(GrammarSpec(GrammarKind.REGEX, f"a{{1,{most - 1}}}"))
    with pytest.raises(GrammarError, match=f"allowed: {most}"):
        engine.compile(GrammarSpec(GrammarKind.REGEX, f"a{{1,{most}}}"))
