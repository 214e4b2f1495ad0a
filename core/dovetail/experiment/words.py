"""Write an experiment in words and numbers: headline, sentences, formatted values. Terminal and page share these functions."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.experiment.result import Comparison, ExperimentRecord, GateRecord, SideBySide, Verdict

MINUS = "−"
NONE = "–"


def number(value: float | None) -> str:
    """Format a number with about three digits: 1 234, 83.2, 4.07, 0.912."""
    if value is None:
        return NONE
    size = abs(value)
    digits = 0 if size >= 100 or value == int(value) else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}".replace(",", "\u202f").replace("-", MINUS)


def about(count: int) -> str:
    """Format a count rounded to two digits."""
    return f"{int(float(f'{count:.2g}')):,}".replace(",", "\u202f")


def change(ratio: float | None) -> str:
    """Format a ratio as a signed change: 1.102 is +10.2 %. From 10 it is written as a factor, and above 1000 as "more than 1000"."""
    if ratio is None:
        return NONE
    if ratio > 1000:
        return "> ×1\u202f000"
    if ratio >= 10:
        return f"×{number(round(ratio, 1))}"
    percent = 100 * (ratio - 1)
    digits = 0 if abs(percent) >= 100 else 1
    text = f"{percent:+.{digits}f}".replace("-", MINUS)
    return f"{'±0.0' if text in ('+0.0', MINUS + '0.0') else text}\u202f%"


def interval(c: Comparison) -> str:
    """Format an interval from low to high. An end without a bound is left open."""
    if c.low is None and c.high is None:
        return "unbounded"
    return f"{change(c.low)} … {change(c.high)}"


def floor(c: Comparison) -> str:
    """Format the noise floor. A value above 100 % is only reported as such."""
    if c.noise_floor is None:
        return NONE
    return f"±{100 * c.noise_floor:.1f}\u202f%" if c.noise_floor < 1 else "> 100\u202f%"


def p_text(p: float) -> str:
    """Format a p-value with three decimals."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def duration(seconds: float) -> str:
    """Format a duration: 48 s, 12 min 5 s, 2 h 3 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def direction(c: Comparison) -> str:
    """Return the word for the change of a metric: longer, shorter, higher, lower."""
    assert c.ratio is not None, "only a comparison with a ratio has a direction"
    return ("longer" if c.ratio > 1 else "shorter") if c.better == "lower" else ("higher" if c.ratio > 1 else "lower")


def sentence(c: Comparison, delta: float) -> str:
    """Return a comparison as a sentence without the full stop."""
    if c.ratio is None:
        return f"{c.label}: {c.note}"
    size, between = change(c.ratio).lstrip("+±" + MINUS), f"between {change(c.low)} and {change(c.high)}"
    if c.verdict == "equivalent":
        return f"{c.label} is the same within {delta:.0%}".replace("%", "\u202f%") + f" ({change(c.ratio)}, {between})"
    if c.verdict == "inconclusive":
        about = f"{c.label} is not settled: {change(c.ratio)}"
        return f"{about}, {between}" if c.low and c.high else f"{about}, without bounds yet"
    return f"{c.label} is {size} {direction(c)} ({between})"


def names(e: ExperimentRecord) -> tuple[str, str]:
    """Return the names of the arms, or A and B if both have the same name."""
    return ("A", "B") if e.a.name == e.b.name else (e.a.name, e.b.name)


def headline(e: ExperimentRecord) -> str:
    """Return the verdict in one sentence."""
    a, b = names(e)
    if e.gate.outcome == "failed":
        return f"The outputs of {b} differ from those of {a}. No speed was measured."
    if e.failure:
        return f"An arm failed {f'after {len(e.blocks)} complete blocks' if e.blocks else 'in the first block'}."
    if e.fails_more:
        return f"{b} fails calls that {a} answers."
    if not e.comparisons:
        return "No speed was measured."
    return {
        "faster": f"{b} is faster than {a}.",
        "slower": f"{b} is slower than {a}{_but_also_faster(e.primary)}.",
        "equivalent": f"{a} and {b} are equally fast, within {e.plan.delta:.0%}.".replace("%", "\u202f%"),
        "inconclusive": f"Whether {b} is faster than {a} is not settled{_needs(e.primary)}.",
    }[e.verdict]


def summary(e: ExperimentRecord) -> str:
    """Return the line below the headline: the outputs, the amount of data, and why the experiment ended."""
    rest = f"{len(e.blocks)} blocks of {e.workload.requests} requests for each arm" if e.blocks else ""
    parts = [f"{gate_title(e.gate)}", rest, e.plan.stopped]
    return "; ".join(part for part in parts if part) + "."


def _but_also_faster(primary: Iterable[Comparison]) -> str:
    faster = [c.label for c in primary if c.verdict == "faster"]
    return f" (but faster in {listed(faster)})" if faster else ""


def _needs(primary: Iterable[Comparison]) -> str:
    needed = [c.blocks_needed for c in primary if c.verdict == "inconclusive"]
    known = [n for n in needed if n is not None]
    return f": it needs about {about(max(known))} blocks" if known and len(known) == len(needed) else ""


def listed(words: list[str]) -> str:
    """Join words as in "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def tone(e: ExperimentRecord) -> Verdict | str:
    """Return what determines the colour of the headline: the verdict, or ``differs`` if the gate, an arm or calls failed."""
    return "differs" if e.gate.outcome == "failed" or e.failure or e.fails_more else e.verdict


def gate_title(gate: GateRecord) -> str:
    """Return the outcome of the gate in a few words."""
    return {
        "passed": "The outputs are equivalent",
        "failed": "The outputs differ",
        "allowed": "The outputs differ, which was allowed",
        "skipped": "The outputs were not compared",
    }[gate.outcome]


def gate_facts(gate: GateRecord) -> list[tuple[str, str]]:
    """Return what the gate counted, as rows of a name and a text."""
    if not gate.compared:
        return []
    rows = [("Same tokens", f"{gate.identical} of {gate.compared} requests")]
    if gate.aa_identical is not None:
        rows.append(("Same tokens, A against itself", f"{gate.aa_identical} of {gate.compared} requests"))
    rows.append(("Diverge at a near-tie", f"{gate.near_ties} requests"))
    rows.append(("Diverge with a real difference", f"{gate.real} requests"))
    if gate.kl_mean is not None and gate.kl_max is not None:
        rows.append(("KL divergence per token", f"{gate.kl_mean:.2g} nats on average, {gate.kl_max:.2g} at most"))
    if gate.top1 is not None:
        rows.append(("Same most likely token", f"{gate.top1:.2%} of the tokens".replace("%", "\u202f%")))
    for arm, valid in (("A", gate.grammar_valid_a), ("B", gate.grammar_valid_b)):
        if valid is not None:
            rows.append((f"Valid under its grammar, {arm}", f"{valid[0]} of {valid[1]} answers"))
    return rows


def side_ratio(row: SideBySide) -> str:
    """Format B relative to A as a change, if both are known and A is not 0."""
    return change(row.b / row.a) if row.a and row.b is not None else NONE


def confidence(e: ExperimentRecord) -> str:
    """Return how to read the intervals."""
    level = f"{1 - e.plan.alpha:.0%}".replace("%", "\u202f%")
    if e.plan.peeking:
        return f"{level} intervals that are valid at every look: the experiment looked after each block"
    return f"{level} intervals for a number of blocks that was fixed in advance"


def measured_how(e: ExperimentRecord) -> list[tuple[str, str]]:
    """Return the workload and the plan, as rows of a name and a text."""
    w, p = e.workload, e.plan
    requests = (
        f"{w.requests} requests in {w.clusters} clusters" if w.clusters < w.requests else f"{w.requests} requests"
    )
    used = e.blocks[-1].index + 1 if e.blocks else 0
    rows = [
        ("Workload", f"{w.name}: {w.description}" if w.description else w.name),
        ("Requests", f"{requests}; on average {number(w.prompt_tokens)} prompt and {number(w.output_tokens)} output tokens"),
        ("Arrivals", w.arrivals),
        ("Content", f"{w.content_hash}" + (f", seed {w.seed}" if w.seed is not None else "")),
        ("Blocks", f"{used} of at most {p.max_blocks}" + (f", {e.blocks[0].order} each" if e.blocks else "")),
        ("Ended because", p.stopped),
        ("Warm-up", p.warmup),
        ("Intervals", f"{confidence(e)}; {p.resamples} resamples of the requests, seed {p.seed}"),
        ("Verdicts", f"Holm's correction over the primary metrics; equivalent is within ±{p.delta:.0%}".replace("%", "\u202f%")),
        ("Took", duration(e.seconds)),
    ]  # fmt: skip
    return [(name, text) for name, text in rows if text]
