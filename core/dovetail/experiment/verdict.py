"""Derive a verdict from an estimate: significance over several metrics, equivalence, and the number of blocks still needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.experiment.result import Better, Comparison, Verdict
from dovetail.experiment.sequential import p_value, radii, radius

MOST_BLOCKS = 10_000


@dataclass(frozen=True, slots=True)
class Rules:
    """Hold the rules by which a verdict is decided: ``alpha`` is the probability of a false alarm over all metrics together, ``delta`` the relative
    difference that is too small to matter (0.02 is 2 %), and ``peeking`` requires that intervals are valid at every look."""

    alpha: float = 0.05
    delta: float = 0.02
    peeking: bool = True

    @property
    def band(self) -> float:
        """Return half the width of the equivalence band on the log scale. The band is symmetric in B/A and A/B: it reaches from
        1/(1+delta) to 1+delta."""
        return math.log1p(self.delta)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Hold the mean log ratio of B to A over ``blocks``. Its variance is ``block_var / blocks + request_var``: the noise between blocks,
    and the contribution of the choice of requests. ``lasting`` is the part of the latter that exceeds chance, which more blocks would
    not reduce. ``df`` are the degrees of freedom."""

    log_ratio: float
    block_var: float
    request_var: float
    blocks: int
    df: float
    lasting: float = 0.0

    @property
    def error(self) -> float:
        """Return the standard error. It is at least the resolution of clocks and floats."""
        return max(math.sqrt(self.block_var / self.blocks + self.request_var), 1e-9)

    def p(self, peeking: bool) -> float:
        """Return the p-value of "no difference"."""
        return p_value(self.log_ratio / self.error, self.df, peeking)

    def bounds(self, alpha: float, peeking: bool) -> tuple[float, float]:
        """Return the interval of the log ratio. It is infinite if there are too few blocks."""
        reach = radius(self.df, alpha, peeking) * self.error
        return self.log_ratio - reach, self.log_ratio + reach


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's method (1979): comparing each with alpha bounds the probability of any false alarm by alpha."""
    m, worst, adjusted = len(p_values), 0.0, [1.0] * len(p_values)
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        worst = max(worst, (m - rank) * p_values[index])
        adjusted[index] = min(1.0, worst)
    return adjusted


def equivalent(estimate: Estimate, rules: Rules) -> bool:
    """Return True if the arms are equivalent by TOST (Schuirmann 1987): both one-sided tests at alpha succeed, that is, the interval of
    confidence 1 - 2 alpha lies within the band."""
    low, high = estimate.bounds(2 * rules.alpha, rules.peeking)
    return -rules.band < low and high < rules.band


def decide(estimate: Estimate, p_adjusted: float, better: Better, rules: Rules) -> Verdict:
    """Return the verdict. Equivalence comes first: a significant difference that is too small to matter is not a difference."""
    if equivalent(estimate, rules):
        return "equivalent"
    if p_adjusted >= rules.alpha:
        return "inconclusive"
    return "faster" if (estimate.log_ratio < 0) == (better == "lower") else "slower"


def blocks_needed(estimate: Estimate, rules: Rules, family: int) -> int | None:
    """Return about how many blocks in total would settle an inconclusive metric if its estimate does not change; None if no number would.

    A metric is settled when it is different (by Bonferroni's bound for ``family`` metrics) or equivalent, whichever comes first.
    """
    at = abs(estimate.log_ratio)
    counts = np.unique(np.geomspace(estimate.blocks + 1, MOST_BLOCKS, 400).astype(int))
    by_chance = (estimate.request_var - estimate.lasting) * estimate.blocks
    errors = np.sqrt((estimate.block_var + by_chance) / counts + estimate.lasting)
    differs = radii(counts - 1.0, rules.alpha / family, rules.peeking) * errors < at
    same = at + radii(counts - 1.0, 2 * rules.alpha, rules.peeking) * errors < rules.band
    settled = np.flatnonzero(differs | same)
    return int(counts[settled[0]]) if len(settled) else None


def stop_reason(comparisons: Sequence[Comparison], primary: Sequence[str], max_blocks: int) -> str | None:
    """Return why an experiment that peeks may end now, or None if it should continue. It ends when every primary metric is settled, or
    when ``max_blocks`` have run; the intervals are valid in both cases."""
    open_ones = [c.label for c in comparisons if c.metric in primary and c.verdict == "inconclusive"]
    blocks = max((c.blocks for c in comparisons), default=0)
    if not open_ones:
        return f"every primary metric was settled after {blocks} blocks"
    if blocks >= max_blocks:
        return f"all of at most {max_blocks} blocks have run; not settled: {', '.join(open_ones)}"
    return None
