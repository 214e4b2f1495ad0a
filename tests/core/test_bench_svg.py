"""Test that the charts of the bench page have readable axes. Run: python -m pytest -q tests/core/test_bench_svg.py"""

from __future__ import annotations

import re

import pytest

from dovetail.bench.svg import Series, chart


@pytest.mark.parametrize(("low", "high"), [(3.55, 3.61), (53.6, 53.6), (3.0, 5.0), (1.0, 8.0), (0.2, 900.0), (99, 101)])
def test_a_logarithmic_axis_has_ticks_however_little_it_spans(low, high):
    svg = chart([Series("x", [(low, 0.0), (high, 100.0)])], "ms", "%", log_x=True)
    ticks = re.findall(r'<text x="([\d.]+)" y="236" text-anchor="middle">([^<]+)</text>', svg)
    places, numbers = [float(at) for at, _ in ticks], [float(text) for _, text in ticks]
    assert 2 <= len(ticks) <= 12
    assert places == sorted(set(places))
    assert numbers == sorted(set(numbers)), "labels that differ"
    assert low / 1.3 <= numbers[0]
    assert numbers[-1] <= high * 1.3
