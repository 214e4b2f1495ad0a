"""docs/plugins.md names every hook with its arguments, every interface version, every option of every suite, and every
sampling setting that may be None.

Run: pytest tests/core/test_plugin_docs.py
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import get_type_hints

from dovetail.interfaces.parsers import ParserContext
from dovetail.layers.expert_targets import FusedLayout
from dovetail.registry import hookspecs
from dovetail.registry.builtin import KINDS
from dovetail.registry.targets import load_attribute
from dovetail.sampling_params import SamplingParams
from dovetail.testing.component import ComponentSuite

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
METHODS = {
    "ModelSuite": {"reference", "write_checkpoint", "make_attention"},
    "DrafterSuite": {"make_rank"},
    "ToolParserSuite": {"write"},
    "ReasoningParserSuite": {"write"},
    "ApiSuite": {"examples"},
    "QuantizationSuite": {"store", "store_experts"},
}
"""Methods that suites ask authors to override, in addition to ``make``."""


NAMES = {"ParserContext": ParserContext, "FusedLayout": FusedLayout}
"""What the defaults on the page are made of."""


def _section(heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table under ``heading``."""
    text = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_hook_has_a_row_with_its_arguments() -> None:
    marked = [hook for hook in vars(hookspecs).values() if hasattr(hook, f"{hookspecs.PROJECT}_spec")]
    expected = [f"{hook.__name__}({', '.join(inspect.signature(hook).parameters)})" for hook in marked]
    assert [_named(cell)[0] for cell, *_ in _section("Hooks")] == expected


def test_every_kind_has_its_interface_version() -> None:
    rows = {_named(kind)[0]: (version, added) for kind, version, added in _section("Interface versions")}
    assert {kind: version for kind, (version, _) in rows.items()} == {
        str(descriptor.kind): "{}.{}".format(*descriptor.api) for descriptor in KINDS
    }
    for version, added in rows.values():
        major, last = version.split(".")
        minors = [int(minor) for minor in re.findall(rf"(?:^|; ){major}\.(\d+) ", added)]
        assert [minor for minor in minors if minor] == list(range(1, int(last) + 1)), added


def test_every_option_of_every_suite_has_a_row() -> None:
    found: dict[str, set[str]] = {}
    suite = ""
    for first, options, *_ in _section("Options of the suites"):
        suite = (_named(first) or [suite])[0]
        found.setdefault(suite, set()).update(_named(options))
    expected: dict[str, set[str]] = {}
    for descriptor in KINDS:
        cls = load_attribute(descriptor.suite, descriptor.suite)
        own = {name for base in cls.__mro__ if base not in ComponentSuite.__mro__ for name in base.__annotations__}
        expected[cls.__name__] = (own - {"kind", "name", "settings", "undeclared"}) | METHODS.get(cls.__name__, set())
    assert found == expected


def test_the_defaults_of_options_are_those_of_the_code() -> None:
    suites = {cls.__name__: cls for cls in (load_attribute(kind.suite, kind.suite) for kind in KINDS)}
    suite = ""
    for first, options, default, _ in _section("Options of the suites"):
        suite = (_named(first) or [suite])[0]
        for option in _named(options):
            value = getattr(suites[suite], option)
            if default and option not in ("dtypes", "phases", "max_examples"):
                expected = eval(default.strip("`"), NAMES)  # what the page says, as Python
                assert value == expected, option


def test_every_setting_that_may_be_none_has_a_row() -> None:
    hints = get_type_hints(SamplingParams)
    fields = [
        f.name for f in dataclasses.fields(SamplingParams) if type(None) in getattr(hints[f.name], "__args__", ())
    ]
    assert sorted(_named(cell)[0] for cell, *_ in _section("None in sampling settings")) == sorted(fields)
