"""Test the course of an experiment with invented jobs: the order of the runs, when it ends, what is written.

Run: pytest tests/core/test_ab_runner.py
"""

from __future__ import annotations

import io
import json

import msgspec
import numpy as np
import pytest

from dovetail.bench.machine import machine_facts
from dovetail.bench.metrics import SLO
from dovetail.bench.records import CallSampling, LoadCall, Measurement, RunRecord, Workload, write_json
from dovetail.errors import ConfigError, EngineError
from dovetail.experiment import words
from dovetail.experiment.arms import make_arm
from dovetail.experiment.gate import ArmOutputs
from dovetail.experiment.jobs import ArmJob, run_job
from dovetail.experiment.runner import ExperimentRunner, ExperimentSettings
from dovetail.experiment.trace import ForcedOutput, GreedyOutput, frozen_trace, warm_up
from dovetail.experiment.verdict import Rules
from dovetail.types import TokenLogprob

CALLS, TOKENS = 12, 8


def workload():
    fields = {"max_tokens": TOKENS, "sampling": CallSampling(ignore_eos=True)}
    return Workload(
        name="made",
        calls=tuple(LoadCall(id=f"c{i}", group=f"g{i // 2}", token_ids=(i, 5, 7), **fields) for i in range(CALLS)),
    )


def answers(shift=0):
    def place(token):
        return TokenLogprob(token, -0.1, ((token, -0.1), (token + 1, -3.0)))

    return [
        GreedyOutput(f"c{i}", [i, 5, 7], [9 + shift] * TOKENS, "", False, [place(9 + shift)] * TOKENS)
        for i in range(CALLS)
    ]


class Made:
    """Stand in for the processes. ``slower`` is how many times as long arm B takes, ``noise`` the spread of runs;
    ``shift`` changes B's outputs. After ``interrupt`` runs the user presses Ctrl-C, after ``crash`` runs a process
    fails; ``failed`` calls of ``failing`` arms fail."""

    def __init__(self, slower=1.0, noise=0.004, shift=0, interrupt=None, failed=0, failing="ab", crash=None):
        self.slower, self.noise, self.shift, self.interrupt, self.failed = slower, noise, shift, interrupt, failed
        self.crash, self.failing = crash, failing
        self.rng = np.random.default_rng(0)
        self.jobs: list[ArmJob] = []

    def __call__(self, job):
        self.jobs.append(job)
        if job.kind == "measure":
            if self.interrupt is not None and len(self.measured) > self.interrupt:
                raise KeyboardInterrupt
            if self.crash is not None and len(self.measured) > self.crash:
                raise EngineError(f"arm {job.arm}, measure: out of memory")
            return write_json(self.run(job), job.output)
        given = answers(self.shift if job.arm == "b" else 0)
        if job.kind == "record":
            write_json(frozen_trace(workload(), given), job.trace)
        forced = [ForcedOutput(a.id, a.logprobs) for a in answers()]
        again = {"again": given, "forced_again": forced} if job.kind == "record" else {}
        facts = {"page_size": "16", "num_pages": "100" if job.arm == "a" else "90"}
        job.output.write_bytes(msgspec.msgpack.encode(ArmOutputs(given, forced, facts=facts, **again)))

    @property
    def measured(self):
        return [job for job in self.jobs if job.kind == "measure"]

    def run(self, job):
        seconds_per_token = 0.01 * (self.slower if job.arm == "b" else 1.0) * np.exp(self.rng.normal(0, self.noise))
        found = []
        for i in range(CALLS):
            step = seconds_per_token * np.exp(self.rng.normal(0, self.noise))
            times = tuple(float(0.05 + step * (k + 1)) for k in range(TOKENS))
            fields = {"due": 0.0, "sent": 0.0, "end": times[-1], "token_times": times, "output_tokens": TOKENS}
            ok = i >= self.failed or job.arm not in self.failing
            found.append(
                Measurement(id=f"c{i}", group=f"g{i // 2}", ok=ok, error=None if ok else "no", prompt_tokens=3,
                            drafted=4, accepted=3, verify_steps=2, **fields)
            )  # fmt: skip
        zero = {"cached_tokens": 0.0, "prompt_tokens": 0.0, "mask_seconds": 0.0, "generated_tokens": 0.0, "steps": 0.0}
        after = {
            "cached_tokens": 9.0,
            "prompt_tokens": 36.0,
            "mask_seconds": 0.5,
            "generated_tokens": 100.0,
            "steps": 8.0,
        }
        return RunRecord(
            kind="offline", arm=job.arm, block=job.block, workload="made", workload_hash="0", machine=machine_facts("cpu"),
            started="2026-11-21T10:00:00+00:00", seconds=1.0, startup_seconds=2.0, peak_memory_bytes=2**30,
            measurements=tuple(found), counters_before=zero, counters_after=after,
        )  # fmt: skip


class Silent:
    """Watch an experiment and record its stages."""

    def __init__(self):
        self.stages = []

    def stage(self, text, total):
        self.stages.append((text, total))

    def step(self, text):
        pass


@pytest.fixture(scope="module")
def arms():
    return [make_arm(name, (), ("device=cpu",), given, {}) for name, given in (("a", ()), ("b", ("cache=none",)))]


def experiment(arms, folder, made, **settings):
    return ExperimentRunner(*arms, workload(), ExperimentSettings(**settings), folder, Silent(), made).run()


def test_blocks_are_abba_and_baab_in_fresh_jobs_on_one_trace(arms, tmp_path):
    made = Made()
    found = experiment(arms, tmp_path, made, rules=Rules(peeking=False), max_blocks=3)
    assert [job.kind for job in made.jobs[:2]] == ["record", "answer"]
    assert "".join(job.arm for job in made.measured) == "abbabaababba"
    assert {job.workload for job in made.measured} == {tmp_path / "trace.json"}
    assert [job.block for job in made.measured] == [0] * 4 + [1] * 4 + [2] * 4
    assert {job.config_hash for job in made.measured if job.arm == "b"} == {arms[1].hash}
    assert made.measured[0].config["cache"] == "auto"
    assert made.measured[1].config["cache"]["kind"] == "none"
    assert [row.order for row in found.blocks] == ["abba", "baab", "abba"]
    assert found.plan.stopped == "the 3 requested blocks are done"
    assert {look.blocks for look in found.looks} == {1, 2, 3}


@pytest.mark.parametrize(
    ("slower", "verdict", "status"), [(1.1, "slower", 1), (1 / 1.1, "faster", 0), (1.0, "equivalent", 0)]
)
def test_it_stops_as_soon_as_it_knows(arms, tmp_path, slower, verdict, status):
    found = experiment(arms, tmp_path, Made(slower), max_blocks=20)
    assert (found.verdict, found.exit_code) == (verdict, status)
    assert 2 <= len(found.blocks) < 20
    assert "was settled" in found.plan.stopped
    tpot = next(c for c in found.comparisons if c.metric == "tpot_mean")
    assert tpot.ratio == pytest.approx(slower, rel=0.02)


def test_what_is_not_settled_says_so(arms, tmp_path):
    found = experiment(arms, tmp_path, Made(1.02, noise=0.2), max_blocks=3)
    assert (found.verdict, found.exit_code) == ("inconclusive", 3)
    assert "blocks have run; not settled" in found.plan.stopped


def test_other_outputs_stop_it_before_any_run(arms, tmp_path):
    made = Made(shift=2)
    found = experiment(arms, tmp_path, made)
    assert (found.gate.outcome, found.exit_code, found.plan.stopped) == ("failed", 2, "the outputs differ")
    assert not made.measured
    assert not found.comparisons


def test_different_outputs_that_are_allowed_are_marked_in_every_report(arms, tmp_path):
    from rich.console import Console

    from dovetail.experiment.report import html
    from dovetail.experiment.terminal import render

    found = experiment(arms, tmp_path, Made(1.2, shift=2), allow=True, max_blocks=8)
    assert (found.gate.outcome, found.exit_code) == ("allowed", 1)
    (loud,) = [note for note in found.notes if note.level == "loud"]
    assert loud.text.startswith("Different outputs were allowed.")
    console = Console(record=True, width=200, file=io.StringIO(), force_terminal=True)
    console.print(render(found))
    styled = console.export_text(styles=True)
    assert "Different outputs were allowed" in styled
    before = styled.partition("Different outputs were allowed")[0]
    assert "\x1b[1;" in before[-20:], "in bold"
    page = html(found)
    assert '<li class="loud">Different outputs were allowed.' in page
    assert "are equivalent" not in page
    assert json.loads(found.model_dump_json())["notes"][0]["level"] == "loud"


def test_ctrl_c_keeps_the_blocks_that_are_whole(arms, tmp_path):
    found = experiment(arms, tmp_path, Made(interrupt=10), max_blocks=20)
    assert found.plan.stopped == "interrupted after 2 complete blocks"
    assert [row.index for row in found.blocks] == [0, 1]
    assert found.comparisons[0].blocks == 2
    nothing = experiment(arms, tmp_path / "again", Made(interrupt=2), max_blocks=20)
    assert nothing.plan.stopped == "interrupted after 0 complete blocks"
    assert (nothing.comparisons, nothing.exit_code) == ((), 3)


def test_an_arm_that_fails_ends_it_with_the_blocks_that_are_whole(arms, tmp_path):
    from dovetail.experiment.report import html

    found = experiment(arms, tmp_path, Made(1.2, crash=10), max_blocks=20)
    assert (len(found.blocks), found.exit_code, found.plan.stopped) == (2, 4, "an arm failed in block 3")
    assert found.comparisons[0].blocks == 2
    page = html(found)
    assert "An arm failed after 2 complete blocks." in page
    assert "measure: out of memory" in page
    nothing = experiment(arms, tmp_path / "again", Made(crash=1), max_blocks=20)
    assert (nothing.comparisons, nothing.exit_code) == ((), 4)
    assert "An arm failed in the first block." in html(nothing)


def test_an_arm_whose_calls_fail_does_not_win(arms, tmp_path):
    found = experiment(arms, tmp_path, Made(0.5, failed=3, failing="b"), max_blocks=4)
    assert (found.verdict, found.exit_code) == ("faster", 1)
    assert words.headline(found).endswith("fails calls that the base config answers.")
    assert words.tone(found) == "differs"
    none_left = experiment(arms, tmp_path / "all", Made(failed=CALLS, failing="b"), max_blocks=2)
    assert none_left.exit_code == 1
    better = experiment(arms, tmp_path / "better", Made(0.5, failed=3, failing="a"), max_blocks=4)
    assert better.exit_code == 0


def test_a_folder_that_cannot_be_written_is_said_at_once(arms, tmp_path):
    (tmp_path / "file").write_text("")
    made = Made()
    with pytest.raises(ConfigError, match="cannot be written"):
        experiment(arms, tmp_path / "file" / "in", made)
    assert not made.jobs


def test_a_folder_that_holds_something_is_left_alone(arms, tmp_path):
    experiment(arms, tmp_path, Made(shift=2))
    made = Made()
    with pytest.raises(ConfigError, match="is not empty; choose another"):
        experiment(arms, tmp_path, made)
    assert not made.jobs


def test_what_is_reported_beside_the_verdict(arms, tmp_path):
    found = experiment(arms, tmp_path, Made(failed=1), max_blocks=2, slo=SLO(ttft_ms=1000.0))
    beside = {row.label: (row.a, row.unit) for row in found.side_by_side}
    assert beside == {
        "Start-up, process to ready": (2.0, "s"),
        "Peak host memory": (1.0, "GiB"),
        "Acceptance length": (2.5, "tokens"),
        "Prompt tokens found in the prefix cache": (25.0, "%"),
        "Grammar masks, per output token": (5000.0, "µs"),
        "Engine steps": (8.0, "steps"),
    }
    assert any(c.metric == "goodput" for c in found.comparisons)
    assert {d.metric for d in found.distributions} == {"ttft", "tpot", "itl", "e2e"}
    assert list(found.distributions[0].a) == sorted(found.distributions[0].a)
    texts = [note.text for note in found.notes]
    assert "8 calls of arm a failed; they have no latencies." not in texts
    assert any("calls of arm a failed" in text for text in texts)
    moved = {d.key: (d.a, d.b) for d in found.differences if not d.intended}
    assert moved == {"engine: num_pages": ("100", "90")}
    assert any("More settings changed than were set: engine: num_pages" in text for text in texts)
    assert (found.workload.requests, found.workload.clusters, found.workload.prompt_tokens) == (CALLS, CALLS // 2, 3.0)


def test_a_frozen_trace_asks_token_ids_and_lengths():
    given = LoadCall(
        id="x", group="x", text="go on", max_tokens=50, sampling=CallSampling(stop=("x",), temperature=0.5)
    )
    schema = LoadCall(
        id="y",
        group="y",
        text="sheet",
        max_tokens=50,
        json_schema={"type": "object"},
        parent="x",
        think=0.5,
        continues=True,
    )
    asked = Workload(name="w", calls=(given, schema))
    recorded = [GreedyOutput("x", [1, 2, 3], [4, 5], "", True), GreedyOutput("y", [1, 2, 3, 4, 5, 6], [7], "", True)]
    first, second = frozen_trace(asked, recorded).calls
    assert (first.token_ids, first.max_tokens, first.sampling.ignore_eos, first.sampling.stop) == (
        (1, 2, 3),
        2,
        True,
        (),
    )
    assert first.sampling.temperature == 0.5
    assert (second.token_ids, second.max_tokens, second.sampling.ignore_eos) == ((1, 2, 3, 4, 5, 6), 50, False)
    assert (second.parent, second.think, second.continues, second.json_schema) == ("x", 0.5, False, {"type": "object"})
    warm = warm_up(frozen_trace(asked, recorded), 5).calls
    assert [call.token_ids for call in warm] == [(3, 2, 1)]


def test_a_job_that_fails_says_why(arms, tmp_path):
    """The process finds another config than the one that it was sent."""
    write_json(workload(), tmp_path / "workload.json")
    job = ArmJob(
        kind="measure", arm="b", config={"model": {"path": "no-such-model"}}, config_hash="0", workload=tmp_path / "workload.json",
        output=tmp_path / "run.json",
    )  # fmt: skip
    with pytest.raises(EngineError, match=r"(?s)^arm b, measure: .*no-such-model"):
        run_job(job)
