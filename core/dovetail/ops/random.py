"""Compute counter-based random numbers: the same (seed, counter) gives the same number, independently of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def mix(z: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Mix the bits of 64-bit integers, as SplitMix64 does. Products wrap around."""
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def uniform(seeds: np.ndarray[Any, Any], counters: np.ndarray[Any, Any]) -> Floats:
    """Return uniform numbers in [0, 1) with 53 random bits, one for each (seed, counter) pair of 64-bit integers.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the seed is mixed, then the counter steps its sequence.
    """
    start = mix(seeds.astype(np.uint64) + GAMMA)
    bits = mix(start + (counters.astype(np.uint64) + np.uint64(1)) * GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
