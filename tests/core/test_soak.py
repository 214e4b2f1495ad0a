"""Test that the soak notices the defects that it must notice.

.venv/bin/python -m pytest -q tests/core/test_soak.py
"""

import argparse
import random
import sys
from pathlib import Path

import pytest

from dovetail import LLM
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.sampling_params import SamplingParams
from dovetail.types import FinishKind, FinishReason, TokenLogprob

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import soak
import soak_checks
import soak_models
from soak_checks import Memory, Sent, Tally, broken, faults, growth, judge

sys.path.pop(0)


@pytest.fixture(scope="module")
def llm():
    return LLM("tiny", device="cpu", memory={"num_pages": 120}, scheduler={"max_running": 6})


@pytest.fixture
def load(llm, monkeypatch):
    monkeypatch.setattr(soak, "FULL_LOAD", 8)
    monkeypatch.setattr(soak, "STALLED_SECONDS", 4.0)
    return soak.Soak(llm, random.Random(3), 6)


def test_a_sound_engine_has_nothing_wrong(load):
    load.round(1.0)
    assert load.tally.wrong == []
    assert load.tally.sent.total() == load.tally.ended.total() >= 8


@pytest.mark.parametrize("name", [*soak_models.SHAPES])
def test_models_of_every_kind_of_cache_group(name, tmp_path, monkeypatch):
    """Memory is NaN at first, so that what is read before it was written is seen in log-probabilities."""
    monkeypatch.setattr(soak, "FULL_LOAD", 4)
    monkeypatch.setattr(soak, "ROUNDS", 8)
    monkeypatch.setattr(soak, "LEAST_ROUNDS", 1)
    llm = soak.open_engine(argparse.Namespace(model=name, device="cpu", dtype="float32", overlap="auto"), tmp_path)
    load = soak.Soak(llm, random.Random(3), 6)
    soak.run(llm, 1.0, load)
    assert load.tally.wrong == []
    assert load.tally.sent.total() == load.tally.ended.total() >= 4
    llm.close()


def test_a_page_that_is_not_returned(load, llm):
    pages = llm.loop.scheduler.ledger.allocator.alloc(1)
    try:
        load.settle()
    finally:
        llm.loop.scheduler.ledger.allocator.free(pages)
    assert any("inconsistent" in text for text in load.tally.wrong)
    assert any("1 pages are lost" in text for text in load.tally.wrong)


def change_one(monkeypatch, llm, change):
    """Apply ``change`` to the first output that holds an end, once."""
    step, done = llm.loop.step, []

    def changed():
        answers = step()
        ends = [a for a in answers if isinstance(a, TokenOutput) and a.finish]
        if ends and not done:
            done.append(ends[0])
            return change(answers, ends[0])
        return answers

    monkeypatch.setattr(llm.loop, "step", changed)


def test_a_request_that_is_lost(load, llm, monkeypatch):
    change_one(monkeypatch, llm, lambda answers, end: [a for a in answers if a is not end])
    load.round(0.5)
    assert any("1 requests stall" in text for text in load.tally.wrong)
    assert any("were sent" in text for text in judge(load.tally, [Memory(1, 1, 1)] * 6, 1, False))


def test_a_request_that_is_answered_twice(load, llm, monkeypatch):
    change_one(monkeypatch, llm, lambda answers, end: [*answers, end])
    load.round(0.5)
    assert any("answered after its end" in text for text in load.tally.wrong)


def outcome(kind, count, **params):
    sent = Sent("greedy", GenerateMsg("a", [5], SamplingParams(**params), 0), tokens=[7] * count)
    return sent, TokenOutput("a", [], FinishReason(kind), 1, count)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (outcome(FinishKind.LENGTH, 3, max_new_tokens=3), None),
        (outcome(FinishKind.LENGTH, 3, max_new_tokens=4), "3 tokens of 4"),
        (outcome(FinishKind.STOP, 3, max_new_tokens=4, ignore_eos=True), "it stopped"),
        (outcome(FinishKind.LENGTH, 3, max_new_tokens=3, logprobs=2), "0 logprobs for 3"),
        (outcome(FinishKind.ABORT, 3, max_new_tokens=4), "aborted without a request to abort"),
        (outcome(FinishKind.STOP, 3, max_new_tokens=4, grammar=soak.WORDS), "breaks its grammar"),
    ],
)
def test_what_is_wrong_with_an_answer(llm, made, text):
    found = faults(llm, *made)
    assert [text] == [text for fault in found if text in fault] if text else found == []


def test_logprobs_that_cannot_be():
    top = ((1, -0.5), (2, -2.0))
    assert not broken(TokenLogprob(1, -0.5, top), 2)
    for value, rivals in ((None, top), (float("nan"), top), (0.5, top), (-0.5, top[:1])):
        assert broken(TokenLogprob(1, value, rivals), 2)


def test_growth_is_measured_after_the_caches_are_full():
    assert growth([0, 50, 90, 100, 100, 100, 100, 100, 100]) <= 10
    assert growth([100.0 + 20 * i for i in range(12)]) > soak_checks.MOST_GROWTH_MIB["host"]


@pytest.mark.parametrize("name", ["host", "device"])
def test_memory_that_grows_fails(name):
    tally = Tally()
    for kind in (FinishKind.LENGTH, FinishKind.STOP, FinishKind.ABORT):
        tally.sent["x"] += 1
        tally.ended[kind] += 1
    flat = [Memory(100, 100, 100)] * 12
    assert judge(tally, flat, 1, True) == []
    rising = [Memory(**{"host": 100, "device": 100, "objects": 100} | {name: 100 + 9 * i}) for i in range(12)]
    assert [text for text in judge(tally, rising, 1, True) if f"{name} memory grew" in text]
    tally.repeats, tally.changed = 100, 3
    assert "changed their tokens" in judge(tally, flat, 1, True)[0]
    assert judge(tally, flat, 0, False) == ["nothing was ever retracted"]
    assert judge(tally, flat, 0, False, grows=False) == []
