"""Compute counter-based random numbers: the same (seed, counter) gives the same number, independently of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray[Any, Any], counters: np.ndarray[Any, Any]) -> Floats:
    """Return uniform numbers in [0, 1) with 53 random bits, one for each (seed, counter) pair of 64-bit integers.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the seed is mixed, then the counter steps its sequence.
    """
    start = _mix(seeds.astype(np.uint64) + _GAMMA)
    bits = _mix(start + (counters.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n outputs of one request; index 0 keeps the seed itself."""
    if index == 0:
        return seed
    start = np.array([seed], np.int64).astype(np.uint64)
    mixed = _mix(start + np.array([index], np.uint64) * _GAMMA)
    return int(mixed.astype(np.int64)[0])
