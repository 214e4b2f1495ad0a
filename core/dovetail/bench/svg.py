"""Draw charts as SVG text that takes its colours from the page that contains it (classes ``s0``, ``s1``, ...)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 460, 260
_SHORT = 10
"""A logarithmic axis whose range is smaller than this factor gets evenly spaced ticks, because it contains few powers
of ten."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 40


@dataclass(frozen=True, slots=True)
class Series:
    """Hold points (x, y) in the order of their line. If ``line`` is False, only the points are drawn."""

    label: str
    points: Sequence[tuple[float, float]]
    line: bool = True
    dots: bool = True


class _Axis:
    """Map values to pixels and choose round tick values."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool) -> None:
        self.log = log
        top = max(values) * (1.3 if log else 1.05)
        self._low = min(values) / 1.3 if log else 0.0
        self._high = top if top > self._low else self._low + 1.0
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self._low, self._high, value))
        return round(self._start + (value - low) / (high - low) * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        if not self.log or self._high < _SHORT * self._low:
            return self._even()
        powers = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
        steps = (1, 2, 5) if len(powers) <= 4 else (1,)
        found = [step * 10.0**power for power in powers for step in steps]
        return [tick for tick in found if self._low <= tick <= self._high]

    def _even(self) -> list[float]:
        raw = (self._high - self._low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * k for k in (1, 2, 5, 10) if size * k >= raw)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [i * step for i in range(first, last + 1)]


def chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    bound: float | None = None,
) -> str:
    """Draw lines and points over common axes; ``bound`` is a horizontal line. Values on logarithmic axes must be above
    0."""
    every = [point for one in series for point in one.points]
    x = _Axis([p[0] for p in every], _LEFT, _WIDTH - _RIGHT, log_x)
    y = _Axis([p[1] for p in every] + ([bound] if bound else []), _HEIGHT - _BOTTOM, _TOP, log_y)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">']
    parts += _grid(x, y, x_label, y_label)
    if bound:
        at = y.at(bound)
        parts.append(f'<line class="bound" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at}" y2="{at}"/>')
    for index, one in enumerate(series):
        parts += _drawn(one, index, x, y)
    return "".join(parts) + "</svg>"


def _grid(x: _Axis, y: _Axis, x_label: str, y_label: str) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts: list[str] = []
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4}" text-anchor="end">{tick:g}</text>')
    parts += [f'<text x="{x.at(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>' for tick in x.ticks()]
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text class="label" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'transform="rotate(-90 12 {bottom / 2})"'
    parts.append(f'<text class="label" x="12" y="{bottom / 2}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return parts


def _drawn(one: Series, index: int, x: _Axis, y: _Axis) -> list[str]:
    places = [(x.at(px), y.at(py)) for px, py in one.points]
    parts: list[str] = []
    if one.line and len(places) > 1:
        path = " ".join(f"{px},{py}" for px, py in places)
        parts.append(f'<polyline class="line s{index}" points="{path}"/>')
    if one.dots:
        parts += [f'<circle class="dot s{index}" cx="{px}" cy="{py}" r="3"/>' for px, py in places]
    return parts
