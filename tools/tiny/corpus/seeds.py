"""Seed the suites of ``tools.tiny.evaluate``, so that a suite that is renamed keeps its cases and its published score."""

from __future__ import annotations

from random import Random

FIRST_NAMES = {"recall what the user has stated": "recall what the user told"}
"""The names under which suites were first measured, by their present names. A suite whose name has not changed is not listed."""


def suite_random(seed: int, name: str) -> Random:
    """Return the random numbers from which the cases of a suite are drawn."""
    return Random(f"{seed} {FIRST_NAMES.get(name, name)}")
