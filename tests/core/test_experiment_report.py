"""Test a finished experiment as JSON, in the terminal and as a page: what it must contain, and that the page needs no
other file.

.venv/bin/python -m pytest tests/core/test_experiment_report.py
"""

import math
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dovetail.errors import ConfigError
from dovetail.experiment import words
from dovetail.experiment.plots import COLOR, ensure
from dovetail.experiment.report import html, write_html
from dovetail.experiment.resample import statistic
from dovetail.experiment.result import (
    ArmRecord,
    BlockRow,
    Comparison,
    DecisionPlan,
    DifferenceRecord,
    DistributionRecord,
    Divergence,
    ExperimentRecord,
    GateRecord,
    Look,
    Note,
    SideBySide,
    WorkloadSummary,
    overall,
    read_experiment,
)
from dovetail.experiment.samples import METRICS, PRIMARY, BlockSamples, Sample
from dovetail.experiment.stats import compare
from dovetail.experiment.terminal import render
from dovetail.experiment.verdict import Rules, stop_reason

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REQUESTS, TOKENS = 60, 24
SIZES = {"ttft": 84.0, "tpot": 11.6, "itl": 11.4, "e2e": 390.0}


def simulated(effect: float, noise: float, count: int, seed: int = 1) -> dict[str, list[BlockSamples]]:
    """Simulate blocks of every metric on a machine that drifts; B's latencies are longer by ``effect``."""
    rng = np.random.default_rng(seed)
    base, blocks = rng.lognormal(0, 0.45, REQUESTS), {metric.name: list[BlockSamples]() for metric in METRICS}
    for k in range(count):
        arms: dict[str, dict[str, list[Sample]]] = {m.name: {"a": [], "b": []} for m in METRICS}
        for at, arm in enumerate("abba"):
            shift = (effect if arm == "b" else 0) + 0.004 * (4 * k + at) + noise * rng.standard_normal()
            for metric in METRICS:
                arms[metric.name][arm].append(_run(metric.name, base, shift, 5 * noise, rng))
        for name, both in arms.items():
            blocks[name].append(BlockSamples(tuple(both["a"]), tuple(both["b"])))
    return blocks


def _run(name: str, base: np.ndarray, shift: float, jitter: float, rng: np.random.Generator) -> Sample:
    owners = np.arange(REQUESTS)
    if name in ("throughput", "goodput"):
        values = np.full(REQUESTS, TOKENS if name == "throughput" else 1.0)
        return Sample(values, owners, 4.2 * math.exp(shift + jitter / 8 * rng.standard_normal()))
    source = name.partition("_")[0]
    if source == "itl":
        owners, base = np.repeat(owners, TOKENS), np.ones(REQUESTS * TOKENS)
    return Sample(SIZES[source] * base * np.exp(shift + jitter * rng.standard_normal(len(owners))), owners)


@cache
def experiment(effect: float = math.log(1.1), noise: float = 0.02, count: int = 8) -> ExperimentRecord:
    """Make a whole experiment from simulated runs."""
    blocks, clusters = simulated(effect, noise, count), np.repeat(np.arange(REQUESTS // 4), 4)

    def compared(upto: int) -> tuple[Comparison, ...]:
        return compare([(m, blocks[m.name][:upto]) for m in METRICS], clusters, PRIMARY, Rules(), resamples=200)

    rows = []
    for k in range(count):
        values = {arm: {m.name: _mean(m, getattr(blocks[m.name][k], arm)) for m in METRICS} for arm in "ab"}
        rows.append(BlockRow(index=k, order="ABBA", at=40.0 * k, a=values["a"], b=values["b"]))
    config = {"model": {"path": "tiny"}, "attention": {"kind": "torch_native"}}
    return ExperimentRecord(
        dovetail_version="0.1.0",
        title="attention: torch_native against triton",
        started=datetime(2026, 3, 14, 9, 26, tzinfo=UTC),
        seconds=1834,
        command="dovetail ab base.yaml --a attention=torch_native --b attention=triton --blocks 8 --seed 7",
        a=ArmRecord(name="torch_native", given=("attention=torch_native",), config=config, config_hash="84af17351d6ce6a34eef"),
        b=ArmRecord(name="triton", given=("attention=triton",), config=config, config_hash="0b5599705404b9b0ce50", explain="part  <chosen> & why"),
        differences=(
            DifferenceRecord(key="attention.prefill.kind", a="torch_native", b="triton"),
            DifferenceRecord(key="memory.page_size", a="1", b="16", intended=False),
        ),
        machine={"device": "NVIDIA H200", "cpu": "16 cores", "python": "3.11.7", "torch": "2.13.0"},
        workload=WorkloadSummary(
            name="shared_prefix", description="15 prefixes of 512 tokens, four questions about each", requests=REQUESTS, clusters=15,
            prompt_tokens=571.3, output_tokens=24, arrivals="poisson, 12 requests a second", seed=7, content_hash="9f2c4e1a77b03d5e",
        ),
        gate=GateRecord(
            outcome="passed", reason="All outputs that part do so where A itself wavers.", compared=60, identical=58, near_ties=2, real=0,
            aa_identical=59, kl_mean=3.1e-6, kl_max=4.2e-4, top1=0.9993,
            divergences=(Divergence(call="p3-q1", position=17, a_text=" the", b_text=" <a>", margin=0.0021, near_tie=True),),
        ),
        plan=DecisionPlan(primary=PRIMARY, max_blocks=20, warmup="the first 8 requests of each run", stopped=stop_reason(compared(count), PRIMARY, count) or ""),
        comparisons=compared(count),
        side_by_side=(
            SideBySide(label="Peak memory", unit="MiB", a=1843.2, b=1790.5, better="lower"),
            SideBySide(label="Start-up time", unit="s", a=2.41, b=6.93, better="lower"),
            SideBySide(label="Acceptance length", unit="tokens", a=None, b=None, better="higher"),
            SideBySide(label="Prefix hit rate", unit="%", a=71.2, b=71.2, better="higher"),
        ),
        blocks=tuple(rows),
        distributions=tuple(
            DistributionRecord(metric=name, label=label, unit="ms", a=_all(blocks[name], "a"), b=_all(blocks[name], "b"))
            for name, label in (("ttft_p50", "TTFT"), ("tpot_mean", "TPOT"), ("itl_p50", "ITL"), ("e2e_mean", "End to end"))
        ),
        looks=tuple(
            Look(metric=c.metric, blocks=k, ratio=c.ratio, low=c.low, high=c.high)
            for k in range(1, count + 1)
            for c in compared(k)
            if c.metric in PRIMARY and c.ratio
        ),
        notes=(Note(level="warning", text="memory.page_size moved along with what was asked for."),),
    )  # fmt: skip


def _mean(metric, runs) -> float:
    return float(np.exp(np.mean([math.log(statistic(metric, run)) for run in runs])))


def _all(blocks, arm) -> tuple[float, ...]:
    values = np.concatenate([run.values for block in blocks for run in getattr(block, arm)])
    return tuple(float(v) for v in np.quantile(values, np.linspace(0, 1, 200)))


@cache
def failed() -> ExperimentRecord:
    """Make an experiment that the gate has stopped."""
    reason = "12 of 60 outputs part for real: a wrong mask, not noise."
    gate = GateRecord(outcome="failed", reason=reason, compared=60, identical=40, near_ties=8, real=12)
    return experiment().model_copy(
        update={"gate": gate, "comparisons": (), "blocks": (), "distributions": (), "looks": ()}
    )


VARIANTS = {
    "slower": experiment,
    "faster": lambda: experiment(-math.log(1.3), 0.01, 5),
    "equivalent": lambda: experiment(0.0, 0.003, 12),
    "inconclusive": lambda: experiment(0.02, 0.06, 4),
    "differs": failed,
}


@cache
def page_of(variant: str) -> str:
    return html(VARIANTS[variant]())


class Checker(HTMLParser):
    """Check that tags close what was opened, that ids are unique, and that references lead to an id."""

    VOID = frozenset({"meta", "br", "link", "hr", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.references = list[str](), list[str](), list[str]()

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name == "href":
                self.references.append(value)
            self.references += [f"#{found}" for found in re.findall(r"url\(#([^)]+)\)", value or "")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_page_is_whole_and_stands_alone(variant):
    page = page_of(variant)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert {reference.removeprefix("#") for reference in checker.references} <= set(checker.ids)
    assert not re.search(r"https?://|//[a-z]|@import|\bsrc=|<link|<script", page)
    assert not [color for color in COLOR.values() if color in page]
    assert "matplotlib" not in page


@pytest.mark.parametrize("variant", VARIANTS)
def test_headline_and_exit_code_say_the_verdict(variant):
    e = VARIANTS[variant]()
    codes = {"slower": 1, "faster": 0, "equivalent": 0, "inconclusive": 3, "differs": 2}
    says = {
        "slower": "triton is slower than torch_native.",
        "faster": "triton is faster than torch_native.",
        "equivalent": "torch_native and triton are equally fast, within 2\u202f%.",
        "inconclusive": "Whether triton is faster than torch_native is not settled",
        "differs": "The outputs of triton differ from those of torch_native. No speed was measured.",
    }
    assert e.exit_code == codes[variant]
    assert words.headline(e).startswith(says[variant])
    page = page_of(variant)
    assert f"<h1>{words.headline(e)}</h1>" in page
    assert f'<div class="verdict {variant}">' in page


def test_the_page_has_what_a_colleague_asks_for():
    e = experiment()
    page = page_of("slower")
    for c in e.comparisons:
        assert c.label in page
        assert words.interval(c) in page
    for text in (
        e.command, "attention.prefill.kind", "changed as a consequence", "set by you", "NVIDIA H200", "58 of 60 requests", "near-tie",
        "1,843".replace(",", "\u202f"), "9f2c4e1a77b03d5e", "20260314"[:4], "12 requests a second", "memory.page_size moved along",
        "part  &lt;chosen&gt; &amp; why", " &lt;a&gt;",
    ):  # fmt: skip
        assert text in page
    assert page.count("<svg") == 4
    assert page.count('aria-label="') == 4


def test_different_outputs_that_were_allowed_are_said_loudly():
    gate = experiment().gate.model_copy(update={"outcome": "allowed", "reason": "3 of 60 diverge for real"})
    notes = (Note(level="loud", text="Different outputs were allowed."),)
    e = experiment().model_copy(update={"gate": gate, "notes": notes})
    assert e.exit_code == 1
    page = html(e)
    assert "The outputs differ, which was allowed" in page
    assert '<li class="loud">Different outputs were allowed.</li>' in page
    console = Console(width=150, record=True, quiet=True)
    console.print(render(e))


def test_arms_of_one_name_are_called_by_their_letters():
    e = VARIANTS["equivalent"]()
    e = e.model_copy(update={"b": e.a})
    assert words.headline(e).startswith("A and B are equally fast")


def test_a_failed_gate_shows_no_speed():
    page = page_of("differs")
    assert "12 of 60 outputs part for real" in page
    assert "<svg" not in page
    assert "How fast is B" not in page


def test_the_terminal_says_the_same():
    e = experiment()
    console = Console(width=150, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(e))
    console.file.close()
    text = console.export_text()
    assert words.headline(e) in text
    for c in e.comparisons:
        assert words.change(c.ratio) in text
        assert c.verdict in text
    for fact in ("58 of 60 requests", "Peak memory", "moved along"):
        assert fact in text


@pytest.mark.parametrize("variant", VARIANTS)
def test_json_there_and_back(variant, tmp_path):
    e = VARIANTS[variant]()
    e.write(tmp_path / "e.json")
    assert read_experiment(tmp_path / "e.json") == e
    text = (tmp_path / "e.json").read_text().replace('"schema_version": 1', '"schema_version": 99')
    (tmp_path / "later.json").write_text(text)
    with pytest.raises(ConfigError, match="schema version 1"):
        read_experiment(tmp_path / "later.json")


def test_one_regression_outweighs_a_gain():
    slow, fast = experiment().primary[0], VARIANTS["faster"]().primary[0]
    same = VARIANTS["equivalent"]().primary[0]
    assert overall((slow, fast, same)) == "slower"
    assert overall((fast, same)) == "faster"
    assert overall((same, same)) == "equivalent"
    assert overall(()) == "inconclusive"
    e = experiment().model_copy(update={"comparisons": (slow, fast.model_copy(update={"metric": "throughput"}))})
    assert "but faster in" in words.headline(e)


def test_without_matplotlib_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'dovetail[report]'")):
        ensure()
    with pytest.raises(ConfigError, match="matplotlib"):
        html(experiment())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0124, "0.012"),
        (4.068, "4.07"),
        (83.24, "83.2"),
        (1234.5, "1\u202f234"),
        (-2.5, "−2.50"),
        (None, "–"),
    ],
)
def test_numbers_have_about_three_digits(value, text):
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (1.1018, "+10.2"),
        (0.912, "−8.8"),
        (1.0, "±0.0"),
        (0.99999, "±0.0"),
        (3.5, "+250"),
        (18.06, "×18.1"),
        (None, "–"),
    ],
)
def test_changes_have_their_sign(ratio, text):
    assert words.change(ratio).removesuffix("\u202f%") == text


def test_a_factor_of_millions_takes_no_more_characters():
    assert words.change(1e9) == words.change(3277624848.0) == "> ×1\u202f000"
    assert words.change(1000.0) == "×1\u202f000"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH to look at the page")
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(tmp_path, scheme):
    write_html(experiment(), tmp_path / "page.html")
    picture = screenshot(tmp_path / "page.html", tmp_path, scheme)
    from matplotlib.image import imread

    pixels = imread(picture)[..., :3]
    brightness = pixels.mean()
    assert brightness > 0.8 if scheme == "light" else brightness < 0.35
    assert pixels.std() > 0.05  # something is drawn on it
    red = (pixels[..., 0] > pixels[..., 1] + 0.3) & (pixels[..., 0] > pixels[..., 2] + 0.2)
    assert red.sum() > 2000  # the headline, the tiles, the forest: slower


def screenshot(page: Path, folder: Path, scheme: str, size: str = "1180,2600") -> Path:
    """Return the picture that chromium draws."""
    picture = folder / f"{page.stem}-{scheme}.png"
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars", *dark,
        f"--user-data-dir={folder / 'profile'}", f"--window-size={size}", f"--screenshot={picture}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return picture


def test_a_narrow_terminal_cuts_nothing_off():
    e = VARIANTS["inconclusive"]()
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(e))
    console.file.close()
    text = console.export_text()
    assert "…" not in text.replace(" … ", "")
    rows = text.splitlines()
    for c in e.comparisons:
        (row,) = [row for row in rows if row.startswith((f"{c.label}*, ", f"{c.label}, {c.unit}"))]
        assert words.change(c.ratio) in row
        assert words.interval(c) in row
        assert row.rstrip().endswith(c.verdict)
        assert not c.note or f"  {c.label}: {c.note[:20]}" in text
