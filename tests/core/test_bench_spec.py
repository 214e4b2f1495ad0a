"""Test ``dovetail bench spec`` on the embedded model, and its prompts.

Run: python -m pytest -q tests/core/test_bench_spec.py
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dovetail import LLM, SamplingParams
from dovetail.bench.spec import largest_divergence
from dovetail.bench.specs import TOPICS, JsonlSpec, QuestionsSpec
from dovetail.bench.workloads import make_workload
from dovetail.cli import main


@pytest.fixture
def bench(capsys, monkeypatch):
    """Run ``dovetail bench spec ...``; return (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words):
        status = 0
        try:
            main(["bench", "spec", "--set", "threads=1", "--set", "device=cpu", *words])
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_rows_of_two_methods(bench):
    status, out, _ = bench("--workloads", "copy,tools", "--count", "4", "--batch", "2", "--json", "-n", "40")
    assert status == 0
    rows = json.loads(out)
    assert list(rows[0])[-2:] == ["same_outputs", "divergence"]
    assert [(r["method"], r["workload"]) for r in rows] == [
        (m, w) for m in ("none", "ngram") for w in ("copy", "tools")
    ]
    for plain, drafted in zip(rows[:2], rows[2:], strict=True):
        assert (plain["drafted"], plain["acceptance_length"], plain["tokens_per_step"]) == (0, 1.0, 1.0)
        assert plain["speedup"] == 1.0
        assert drafted["tokens"] == plain["tokens"] > 40
        assert drafted["same_outputs"] == plain["same_outputs"] == drafted["prompts"] == 4
        assert 0 < drafted["accepted"] <= drafted["drafted"]
        assert drafted["acceptance_rate"] == pytest.approx(drafted["accepted"] / drafted["drafted"])
        assert drafted["acceptance_length"] > 2
        assert drafted["tokens_per_step"] > 1.5
        assert 0 < drafted["draft_share"] < 1
        assert drafted["tokens_per_second"] == pytest.approx(drafted["tokens"] / drafted["seconds"])
        assert drafted["speedup"] == pytest.approx(drafted["tokens_per_second"] / plain["tokens_per_second"])
        assert drafted["drafter_errors"] == 0


def test_a_table_of_a_file_with_settings_of_the_drafter(bench, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('"One two three"\n\n{"prompt": "One two"}\n{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert [call.form for call in make_workload(JsonlSpec(path=file)).calls] == ["text", "text", "messages"]
    sets = ("--set", "speculative={kind: ngram, shared: 0, num_draft_tokens: 2}")
    status, out, _ = bench("--prompts", str(file), "--methods", "none, ngram", "-n", "30", "--rounds", "2", *sets)
    assert status == 0
    lines = [line.split() for line in out.splitlines()]
    assert [line[:2] for line in lines if line and line[-1] == "3/3"] == [["none", "mine"], ["ngram", "mine"]]


def test_mistakes_are_named(bench, tmp_path):
    for words, text in (
        (("--workloads", "facts,poems"), "workload 'poems' is unknown; allowed: facts, arithmetic"),
        (("--methods", "none,telepathy"), "telepathy"),
        (("--prompts", str(tmp_path / "absent")), "cannot be read"),
    ):
        status, _, err = bench(*words)
        assert (status, text in err) == (2, True), err


def test_a_method_that_cannot_run_is_refused_before_others_have(bench, monkeypatch):
    monkeypatch.setattr("dovetail.bench.spec.measure_methods", lambda *_: pytest.fail("it was measured"))
    status, _, err = bench("--methods", "none,ngram", "--set", "scheduler.min_draft_probability=0.05")
    assert (status, "ngram" in err, "scheduler.min_draft_probability" in err) == (2, True, True), err


def test_prompts_repeat_for_a_seed_and_differ_between_seeds():
    for topic in TOPICS:
        spec = QuestionsSpec(topic=topic, count=12)
        assert make_workload(spec, 0) == make_workload(spec, 0) != make_workload(spec, 1)
        assert len({str(call.messages) for call in make_workload(spec, 0).calls}) > 5


def test_where_outputs_part_the_two_tokens_are_compared():
    llm = LLM("tiny", device="cpu", grammar="none")
    params = SamplingParams(max_new_tokens=6, temperature=0.0, logprobs=5)
    first, other = llm.generate([[5, 6, 7], [8, 9]], params)
    assert largest_divergence(llm, params, [first, other], [first, other]) is None
    (best, best_logprob), (second, second_logprob) = first.logprobs[3].top[:2]
    assert best == first.token_ids[3]
    changed = replace(first, token_ids=[*first.token_ids[:3], second, 1, 1])
    gap = largest_divergence(llm, params, [other, changed], [other, first])
    assert gap == pytest.approx(best_logprob - second_logprob, abs=1e-4)
    shorter = replace(first, token_ids=first.token_ids[:2])
    assert largest_divergence(llm, params, [shorter], [first]) is None
    assert largest_divergence(llm, SamplingParams(temperature=1.0), [changed], [first]) is None
    llm.close()
