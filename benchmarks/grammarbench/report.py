"""Make tables of the grammar backends' results on the corpora."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dovetail.testing.grammar_corpora import CorpusResult, SchemaCase

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Table:
    """Hold the verdicts of every engine on one corpus. The engines are in the order in which ``auto`` tries them."""

    title: str
    cases: Sequence[SchemaCase]
    verdicts: Mapping[str, Sequence[CorpusResult]]

    def with_auto(self) -> Table:
        """Return the table with ``auto``: the first engine that does not refuse by keyword decides."""
        rows = [_first(answers) for answers in zip(*self.verdicts.values(), strict=True)]
        return replace(self, verdicts={AUTO: rows, **self.verdicts})


def _first(answers: Sequence[CorpusResult]) -> CorpusResult:
    """Return the result of ``auto``: it tries the next engine after a refusal by keyword; if all refuse, the first
    engine's result counts."""
    spent = 0.0
    for answer in answers:
        spent += answer.compile
        if answer.refused is None or answer.keyword is None:
            return replace(answer, compile=spent)
    return replace(answers[0], compile=spent)


def summary(verdicts: Sequence[CorpusResult]) -> dict[str, float]:
    """Return the figures of one engine: counts, shares of the schemas in percent, milliseconds and microseconds."""
    compiled = [v for v in verdicts if not v.refused and not v.timed_out]
    fills = sorted(second for v in verdicts for second in v.fills)
    compiles = sorted(v.compile for v in compiled)
    return {
        "schemas": len(verdicts),
        "covered_percent": 100 * sum(v.covered for v in verdicts) / max(len(verdicts), 1),
        "compiled": len(compiled),
        "valid_passed": sum(v.passed for v in verdicts),
        "valid_blocked": sum(len(v.blocked) for v in verdicts),
        "invalid_stopped": sum(v.stopped for v in verdicts),
        "false_accepts": sum(len(v.false_accepts) for v in verdicts),
        "refused": sum(v.refused is not None for v in verdicts),
        "timed_out": sum(v.timed_out for v in verdicts),
        "compile_p50_ms": 1e3 * _at(compiles, 0.5),
        "compile_p99_ms": 1e3 * _at(compiles, 0.99),
        "mask_p50_us": 1e6 * _at(fills, 0.5),
        "mask_p99_us": 1e6 * _at(fills, 0.99),
        "mask_max_us": 1e6 * _at(fills, 1.0),
    }


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def markdown(table: Table) -> str:
    """Return the table of one corpus."""
    head = "| engine | covered | valid let through | invalid stopped | false accepts | refused | timed out | compile p50 / p99 ms | mask p50 / p99 / max us |"  # fmt: skip
    lines = [f"### {table.title}", "", head, "|" + "---|" * 9]
    for name, verdicts in table.verdicts.items():
        s = summary(verdicts)
        valid, invalid = s["valid_passed"] + s["valid_blocked"], s["invalid_stopped"] + s["false_accepts"]
        lines.append(
            f"| {name} | {s['covered_percent']:.1f} % | {s['valid_passed']:.0f} of {valid:.0f} | {s['invalid_stopped']:.0f} of "
            f"{invalid:.0f} | {s['false_accepts']:.0f} | {s['refused']:.0f} | {s['timed_out']:.0f} | {s['compile_p50_ms']:.1f} / "
            f"{s['compile_p99_ms']:.0f} | {s['mask_p50_us']:.0f} / {s['mask_p99_us']:.0f} / {s['mask_max_us']:.0f} |"
        )
    return "\n".join([*lines, "", *_refusals(table)])


def _refusals(table: Table) -> list[str]:
    lines = ["| engine | schemas refused, by keyword |", "|---|---|"]
    for name, verdicts in table.verdicts.items():
        count = Counter(v.keyword or "(wrong for every backend)" for v in verdicts if v.refused)
        lines.append(f"| {name} | {', '.join(f'`{key}` {n}' for key, n in count.most_common()) or '-'} |")
    return lines


def failures(table: Table) -> list[str]:
    """Return one line for every schema that an engine did not cover without refusing it by keyword."""
    lines: list[str] = []
    for name, verdicts in table.verdicts.items():
        for case, verdict in zip(table.cases, verdicts, strict=True):
            what = [("FALSE ACCEPT", text) for text in verdict.false_accepts] + [
                ("blocked", t) for t in verdict.blocked
            ]
            what += [("timed out", "")] if verdict.timed_out else []
            what += [("refused", verdict.refused)] if verdict.refused else []
            lines += [f"{name}: {case.name}: {kind}: {text[:160]}" for kind, text in what if name != AUTO]
    return lines
