"""Test that docs/bench.md agrees with the code: kinds, settings and their defaults, fields of a file; and that its
Python code runs.

Run: python -m pytest -q tests/e2e/test_bench_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from dovetail.bench import specs
from dovetail.bench.workloads.jsonl import Line

PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
WORKLOADS = get_args(get_args(specs.WorkloadSpec)[0])
ARRIVALS = get_args(get_args(specs.ArrivalSpec)[0])


def row(kind):
    (found,) = re.findall(rf"^\| `{kind}` \|.*$", PAGE, re.MULTILINE)
    return found.split("|")[3]


def shown(value):
    if isinstance(value, tuple):
        return f"[{value[0]:g}, {value[1]:g}]"
    return f"{value:g}" if isinstance(value, int | float) else None


@pytest.mark.parametrize("spec", WORKLOADS, ids=lambda spec: spec.model_fields["kind"].default)
def test_settings_and_defaults(spec):
    text = row(spec.model_fields["kind"].default)
    fields = {name: field for name, field in spec.model_fields.items() if name not in ("kind", "content")}
    assert re.findall(r"`(\w+)`", text) == list(fields)
    for name, field in fields.items():
        default = shown(field.default)
        assert default is None or re.search(rf"`{name}` {re.escape(default)}(\D|$)", text), (name, default)


def test_arrivals():
    for spec in ARRIVALS:
        kind = spec.model_fields["kind"].default
        assert kind in PAGE or kind == "as_given"


def test_fields_of_a_line():
    table = PAGE[PAGE.index("A file has one call per line") : PAGE.index("A wrong line is reported")]
    named = [
        name for first in re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", first)
    ]
    assert sorted(named) == sorted(Line.model_fields)


def test_its_python_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(compile(code, "docs/bench.md", "exec"), names)
    names["llm"].close()
    assert float(capsys.readouterr().out) > 0
