"""Draw the plots of an experiment as SVG text that takes its colours from the page, for light, dark and print.

This is the only module that imports matplotlib (extra ``report``); ``ensure`` reports how to install it.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.errors import ConfigError
from dovetail.experiment.result import Comparison, DistributionRecord, ExperimentRecord, Look
from dovetail.experiment.words import change, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'dovetail[report]'"

# Each of the page's colour variables has a stand-in colour that no plot uses otherwise; _svg replaces it by the variable.
_ROLES = ("ink", "muted", "line", "a", "b", "faster", "slower", "equivalent", "inconclusive", "band")
COLOR = {role: f"#0102{16 + index:02x}" for index, role in enumerate(_ROLES)}
_WIDTH = 9.4
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dovetail",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": COLOR["line"],
    "axes.labelcolor": COLOR["muted"],
    "axes.titlecolor": COLOR["ink"],
    "text.color": COLOR["ink"],
    "xtick.color": COLOR["line"],
    "ytick.color": COLOR["line"],
    "xtick.labelcolor": COLOR["muted"],
    "ytick.labelcolor": COLOR["muted"],
    "grid.color": COLOR["line"],
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


def missing() -> str | None:
    """Return what is missing for plots and the command that installs it, or None if nothing is missing. Call it before a long
    experiment."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"the HTML report needs matplotlib, which is not installed; to install it: {INSTALL}"
    return None


def ensure() -> None:
    """Raise ``ConfigError`` if something is ``missing``."""
    if (why := missing()) is not None:
        raise ConfigError(why)


def plots(e: ExperimentRecord) -> dict[str, str]:
    """Return every plot for which the experiment has data, by name: forest, blocks, looks, distributions."""
    ensure()
    import matplotlib as mpl

    shown = [c for c in e.comparisons if c.ratio is not None]
    with mpl.rc_context(_STYLE):
        made = {
            "forest": _forest(shown, e.plan.delta) if shown else None,
            "blocks": _blocks(e) if e.blocks and shown else None,
            "looks": _looks(e) if e.looks else None,
            "distributions": _distributions(e.distributions) if e.distributions else None,
        }
        return {name: _svg(figure, name) for name, figure in made.items() if figure is not None}


def _empty(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, height))


def _figure(height: float, columns: int, rows: int = 1) -> tuple[Figure, list[Axes]]:
    figure = _empty(height)
    figure.set_layout_engine("constrained", wspace=0.06, hspace=0.06)
    return figure, list(np.atleast_1d(figure.subplots(rows, columns)).flat)


def _svg(figure: Figure, name: str) -> str:
    """Return inline SVG: without prolog, metadata and addresses, with its own ids, and with the colours and font of the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"| version="1.1"', "", svg)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('xlink:href="#', f'href="#{name}-')
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r"font: (?:(bold|\d+) )?([\d.]+px) [^;\"]*", _font, svg)
    for role, color in COLOR.items():
        svg = svg.replace(color, f"var(--{role})")
    return svg.replace("<svg ", '<svg role="img" ', 1)


def _font(found: re.Match[str]) -> str:
    """Return weight and size of the font shorthand that some versions of matplotlib write, without the family."""
    return f"font-size: {found[2]}" + (f"; font-weight: {found[1]}" if found[1] else "")


def _forest(comparisons: Sequence[Comparison], delta: float) -> Figure:
    """Draw a row for each metric, those where less is better first: the change of B with its interval, over the equivalence band."""
    groups = [[c for c in comparisons if c.better == better] for better in ("lower", "higher")]
    rows: list[Comparison | str] = []
    for title, group in zip(("less is better", "more is better"), groups, strict=True):
        rows += [title, *group] if group else []
    height = 0.95 + 0.3 * len(rows)
    figure = _empty(height)
    # the text columns have fixed positions next to the axes
    ax = figure.add_axes((0.16, 0.6 / height, 0.6, 1 - 0.65 / height))
    band = float(np.log1p(delta))
    ax.axvspan(-band, band, color=COLOR["band"], linewidth=0)
    ax.axvline(0, color=COLOR["muted"], linewidth=0.9)
    reach = _reach(comparisons, band)
    for place, row in enumerate(rows):
        _forest_row(ax, place, row, reach)
    ax.set_xlim(-reach, reach)
    ax.set_ylim(len(rows) - 0.4, -0.7)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.grid(axis="x")
    ax.set_axisbelow(True)
    _percent(ax.xaxis)
    ax.set_xlabel("B relative to A (shaded: too small a difference to matter)")
    return figure


def _reach(comparisons: Sequence[Comparison], band: float) -> float:
    """Return the limit of the axis. It includes all points, and intervals up to 0.4 or four times the farthest point; wider intervals get
    arrows."""
    points = [abs(np.log(c.ratio or 1)) for c in comparisons]
    ends = [abs(np.log(x)) for c in comparisons for x in (c.low, c.high) if x]
    return 1.12 * max(min(max(ends, default=0), max(0.4, 4 * max(*points, band))), 1.5 * band, *points)


def _forest_row(ax: Axes, place: int, row: Comparison | str, reach: float) -> None:
    style = {"transform": ax.get_yaxis_transform(), "va": "center"}
    if isinstance(row, str):
        ax.text(-0.2635, place + 0.12, row, color=COLOR["muted"], size=8, style="italic", **style)
        return
    color = COLOR[row.verdict]
    at, low, high = np.log(row.ratio or 1), np.log(row.low or 1e-9), np.log(row.high or 1e9)
    ax.plot([max(low, -reach), min(high, reach)], [place, place], color=color, linewidth=2.2, solid_capstyle="butt")
    for end, edge, marker in ((low, -reach, "<"), (high, reach, ">")):
        beyond = abs(end) > reach
        ax.plot(edge if beyond else end, place, marker if beyond else "|", color=color, markersize=6, clip_on=False)
    ax.plot(at, place, "o", color=color, markersize=6.5, clip_on=False)
    ax.text(-0.2635, place, row.label, **style)
    ax.text(1.105, place, change(row.ratio), weight="bold", color=color, ha="right", **style)
    ax.text(1.135, place, interval(row), color=COLOR["muted"], size=8, **style)


def _percent(axis: Any) -> None:
    """Label an axis of log ratios as changes in per cent, at round values that do not overlap."""
    from matplotlib.ticker import FixedLocator

    low, high = sorted(axis.get_view_interval())
    step = next((s for s in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if (high - low) / s <= 9), None)
    if step is None:
        ups, downs = [1, 4, 9, 49, 99], [-0.5, -0.8, -0.9, -0.98, -0.99]
    else:
        ups = [k * step for k in range(1, 1 + int(np.expm1(high) / step))]
        downs = [-k * step for k in range(1, 1 + int(-np.expm1(low) / step))]
    places = [float(np.log1p(at)) for at in (0, *_apart(ups, (high - low) / 10), *_apart(downs, (high - low) / 10))]
    axis.set_major_locator(FixedLocator([at for at in places if low <= at <= high]))
    axis.set_major_formatter(lambda x, _: _percent_text(float(np.expm1(x)), step or 1))


def _apart(changes: Sequence[float], distance: float) -> list[float]:
    """Return the changes that are at least ``distance`` from the previous one on the log scale."""
    kept = [0.0]
    for at in changes:
        if abs(np.log1p(at) - np.log1p(kept[-1])) >= distance:
            kept.append(at)
    return kept[1:]


def _percent_text(at: float, step: float) -> str:
    if abs(at) < 1e-9:
        return "0 %"
    if at > 8.9:
        return change(1 + at)
    return f"{100 * at:+.{0 if step >= 0.01 else 1}f} %".replace("-", "−")


def _panels(e: ExperimentRecord) -> list[Comparison]:
    return [c for c in e.primary if c.ratio is not None][:4]


def _blocks(e: ExperimentRecord) -> Figure | None:
    """Draw a panel for each primary metric: both arms' values of each block, in the order in which the blocks ran."""
    chosen = _panels(e)
    if not chosen:
        return None
    figure, axes = _figure(2.7, len(chosen))
    x = np.array([row.index + 1 for row in e.blocks])
    for ax, c in zip(axes, chosen, strict=True):
        a, b = (np.array([getattr(row, arm).get(c.metric, np.nan) for row in e.blocks]) for arm in "ab")
        ax.vlines(x, a, b, color=COLOR["line"], linewidth=1.6)
        ax.plot(x, a, "o", color=COLOR["a"], markersize=5.5)
        ax.plot(x, b, "D", color=COLOR["b"], markersize=5)
        ax.set_title(f"{c.label} ({c.unit})")
        _count_axis(ax, int(x.max()))
    return figure


def _count_axis(ax: Axes, most: int) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(0.5, most + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ax.set_xlabel("block")
    ax.grid(axis="y")
    ax.set_axisbelow(True)
    ax.margins(y=0.14)


def _looks(e: ExperimentRecord) -> Figure | None:
    """Draw a panel for each primary metric: how estimate and interval changed from block to block."""
    chosen = [c for c in _panels(e) if any(look.metric == c.metric for look in e.looks)]
    if not chosen:
        return None
    figure, axes = _figure(2.5, len(chosen))
    for ax, c in zip(axes, chosen, strict=True):
        _funnel(ax, [k for k in e.looks if k.metric == c.metric], float(np.log1p(e.plan.delta)), COLOR[c.verdict])
        ax.set_title(c.label)
    axes[0].set_ylabel("B relative to A")
    return figure


def _funnel(ax: Axes, looks: Sequence[Look], band: float, color: str) -> None:
    x, at = np.array([look.blocks for look in looks]), np.log([look.ratio for look in looks])
    low, high = np.log([look.low or 1e-9 for look in looks]), np.log([look.high or 1e9 for look in looks])
    reach = float(1.4 * max(np.abs(at).max(), *(min(abs(end[-1]), 2) for end in (low, high)), 1.5 * band))
    ax.axhspan(-band, band, color=COLOR["band"], linewidth=0)
    ax.axhline(0, color=COLOR["muted"], linewidth=0.9)
    ax.fill_between(x, np.clip(low, -reach, reach), np.clip(high, -reach, reach), color=color, alpha=0.2, linewidth=0)
    ax.plot(x, at, "o-", color=color, markersize=4, linewidth=1.4)
    _count_axis(ax, int(x.max()))
    ax.set_ylim(-reach, reach)
    _percent(ax.yaxis)


def _distributions(distributions: Sequence[DistributionRecord]) -> Figure:
    """Draw a panel for each distribution: the share of values up to x, for each arm."""
    chosen = list(distributions)[:4]
    figure, axes = _figure(2.9, len(chosen)) if len(chosen) < 4 else _figure(5.2, 2, rows=2)
    for ax, d in zip(axes, chosen, strict=True):
        for values, role, dash, name in ((d.a, "a", "-", "A"), (d.b, "b", (0, (4, 1.6)), "B")):
            if values:
                share = np.arange(1, len(values) + 1) / len(values)
                ax.step(values, share, where="post", color=COLOR[role], linestyle=dash, linewidth=1.7, label=name)
        ax.set_title(d.label)
        ax.set_xlabel(d.unit)
        ax.set_ylim(0, 1.02)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
        _spread(ax, [v for v in (*d.a, *d.b) if v > 0])
        ax.grid()
        ax.set_axisbelow(True)
    axes[0].set_ylabel("share of values up to x")
    axes[0].legend(loc="lower right", labelcolor=COLOR["ink"])
    return figure


def _spread(ax: Axes, values: Sequence[float]) -> None:
    """Use a log axis with round labels if the values span a factor of eight or more."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not values or max(values) / min(values) < 8:
        return
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) / min(values) < 80 else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
