"""Compute intervals and p-values that stay valid for any number of looks, so that an experiment may stop as soon as it is decided.

Block-level log ratios are few and their variance is unknown, so the test martingale is based on the t-statistic: the Bayes
factor with a normal prior of variance ``PRIOR`` on the standardised effect and the right Haar prior on the scale. Under "no
difference" it is a martingale that starts at 1 for any scale. By Ville's inequality the probability that it ever exceeds 1/alpha is
at most alpha, so looking after each block costs nothing beyond the wider interval. Lai 1976 (confidence
sequences of t-statistics); Wang and Ramdas 2023, arXiv:2310.03722, theorem 4.9 and the results next to it (e-processes of the t-test);
Howard et al. 2021, arXiv:1810.08240, for confidence sequences in general. The log ratios of
blocks must be independent and nearly normal; the order ABBA ensures this when the machine drifts.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

PRIOR = 10.0
"""The variance of the prior. Relevant block-level effects are a multiple of their noise; for 4 to 20 blocks, 10 gives the narrowest
bounds."""


def radius(df: float, alpha: float, peeking: bool) -> float:
    """Return half the width of an interval of confidence 1 - ``alpha``, in standard errors. It is infinite if ``df`` (degrees of
    freedom: blocks - 1) is too small for a bound."""
    return float(radii(np.array([df], dtype=np.float64), alpha, peeking)[0])


def radii(df: Floats, alpha: float, peeking: bool) -> Floats:
    """Return ``radius`` for many values of ``df`` [n] at once."""
    safe = np.maximum(df, 1)
    if not peeking:
        return np.where(df < 1, np.inf, stats.t.ppf(1 - alpha / 2, safe))
    n = safe + 1
    r = 1 + n * PRIOR
    c = (r / alpha**2) ** (1 / n)
    bounded = (df >= 1) & (c < r)
    return np.where(bounded, np.sqrt(safe * (c - 1) / np.where(bounded, 1 - c / r, 1)), np.inf)


def p_value(t: float, df: float, peeking: bool) -> float:
    """Return the two-sided p-value of "no difference" for an effect of ``t`` standard errors. With ``peeking`` it is the reciprocal of
    the martingale: the probability that it is ever below alpha is at most alpha."""
    if df < 1:
        return 1.0
    if not peeking:
        return float(2 * stats.t.sf(abs(t), df))
    return min(1.0, math.exp(-log_evidence(t, df)))


def log_evidence(t: float, df: float) -> float:
    """Return the logarithm of the martingale, the odds of the data against "no difference"."""
    n = df + 1
    r, x = 1 + n * PRIOR, t * t / df
    return float(-0.5 * math.log(r) + n / 2 * (np.log1p(x) - np.log1p(x / r)))
