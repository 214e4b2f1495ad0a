"""Run every grammar backend, and ``auto``, on the JSON Schema Test Suite and on real schemas: what passes, what is
refused, how fast.

    python benchmarks/grammar.py --data DIR --json grammar.json --docs docs/grammar.md [--engines xgrammar ...] [--failures]

DIR (or $GRAMMAR_CORPORA) contains json-schema-test-suite/ and real-schemas.jsonl.gz. Each engine runs in a separate
process, which is ended if one schema takes longer than the limit. ``auto`` is computed from the engines' results: in
the order of their priorities, the first engine that does not refuse the schema by keyword. The vocabulary is the tiny
model's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dovetail.testing.grammar_corpora import SchemaCase, real_schemas, suite_schemas
from grammarbench.report import Table, failures, markdown, summary
from grammarbench.runner import Runner, engine_names

CORPORA = {
    "real": ("Real schemas (JSONSchemaBench)", real_schemas),
    "suite": ("JSON Schema Test Suite, draft 2020-12", suite_schemas),
}
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", default=os.environ.get("GRAMMAR_CORPORA"), help="folder of the corpora")
    parser.add_argument("--engines", nargs="+", default=None, help="backends, in the order of `auto` (default: all)")
    parser.add_argument("--corpora", nargs="+", choices=list(CORPORA), default=list(CORPORA))
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for one schema with all its instances")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--docs", type=Path, help="replace the measured part of this page")
    parser.add_argument("--failures", action="store_true", help="name every schema that is not covered")
    chosen = parser.parse_args(given)
    if not chosen.data:
        parser.error("--data DIR or $GRAMMAR_CORPORA must name the folder of the corpora")
    return chosen


def measure(title: str, cases: Sequence[SchemaCase], engines: Sequence[str], limit: float) -> Table:
    """Run every engine on one corpus."""
    verdicts = {name: Runner(name, cases, limit).verdicts() for name in engines}
    return Table(title, cases, verdicts).with_auto()


def write_docs(page: Path, tables: Sequence[Table]) -> None:
    """Put the tables between the marks of the page."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n\n".join(markdown(table) for table in tables)
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", "utf-8")


def main() -> int:
    """Measure, print, write. The exit status is 1 if an invalid instance was accepted."""
    chosen = arguments()
    tables = []
    for key in chosen.corpora:
        title, load = CORPORA[key]
        tables.append(measure(title, list(load(Path(chosen.data))), chosen.engines or engine_names(), chosen.limit))
        lines = [markdown(tables[-1]), *(failures(tables[-1]) if chosen.failures else ())]
        sys.stdout.write("\n".join([*lines, "", ""]))
        sys.stdout.flush()
    figures = {table.title: {name: summary(v) for name, v in table.verdicts.items()} for table in tables}
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    if chosen.docs:
        write_docs(chosen.docs, tables)
    return int(any(row["false_accepts"] for rows in figures.values() for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
