"""Test the output gate: divergences, near ties as measured by A/A, KL, schemas.

Run: pytest tests/core/test_ab_gate.py
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.bench.divergence import first_difference
from dovetail.experiment.agreement import agreement, kl
from dovetail.experiment.gate import (
    CEILING,
    FLOORS,
    ArmOutputs,
    GateThresholds,
    evaluate_gate,
    thresholds_of,
    valid_outputs,
)
from dovetail.experiment.trace import TOP, ForcedOutput, GreedyOutput
from dovetail.types import TokenLogprob

VOCAB = 24
LIMITS = GateThresholds(margin=0.01, kl=1e-4)


def place(logits, chosen=None):
    """Return a place with these logits: the most likely token, unless another is chosen, and the most likely ones."""
    logprobs = np.asarray(logits) - np.logaddexp.reduce(logits)
    best = np.argsort(-logprobs, kind="stable")[:TOP]
    token = int(best[0]) if chosen is None else chosen
    return TokenLogprob(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def logits_of(seed, length):
    return np.random.default_rng(seed).normal(0, 3, (length, VOCAB))


def answer(logits, name="c0", text="", ended=False):
    """Return the greedy output that these logits make."""
    places = [place(row) for row in logits]
    return GreedyOutput(name, [1, 2], [p.token_id for p in places], text, ended, places)


def outputs(*answers, noise=0.0, facts=None):
    """Return the outputs of an arm. The second run has ``noise`` added to every log-probability of the first token of
    a place."""
    forced = [ForcedOutput(a.id, a.logprobs) for a in answers]

    def shaken(p):
        return dataclasses.replace(p, logprob=p.logprob + noise, top=((p.top[0][0], p.top[0][1] + noise), *p.top[1:]))

    again = [
        GreedyOutput(a.id, a.prompt_ids, a.token_ids, a.text, a.ended, [shaken(p) for p in a.logprobs]) for a in answers
    ]
    return ArmOutputs(list(answers), forced, again, [ForcedOutput(a.id, a.logprobs) for a in again])


def with_lead(logits, where, lead):
    """Return the same logits, except that at ``where`` the second best is only ``lead`` behind the best."""
    changed = logits.copy()
    first, second = np.argsort(-changed[where])[:2]
    changed[where, second] = changed[where, first] - lead
    return changed, int(first), int(second)


def test_the_same_outputs_pass():
    a = outputs(*(answer(logits_of(i, 12), f"c{i}") for i in range(3)))
    gate = evaluate_gate(a, a, LIMITS, {})
    assert (gate.outcome, gate.identical, gate.compared, gate.aa_identical) == ("passed", 3, 3, 3)
    assert (gate.kl_mean, gate.top1, gate.near_ties, gate.real) == (0.0, 1.0, 0, 0)
    assert gate.reason == "all 3 outputs are the same"


@pytest.mark.parametrize(("lead", "near"), [(0.004, True), (0.5, False)])
def test_a_divergence_is_a_near_tie_only_where_the_two_tokens_are_as_likely(lead, near):
    """B's logits are A's with a small change that swaps the two best tokens at place 5."""
    base, first, second = with_lead(logits_of(0, 10), 5, lead)
    other = base.copy()
    other[5, second] = base[5, first] + lead
    other[6:] = logits_of(9, 4)  # a different text continues differently
    b = ArmOutputs([answer(other)], [ForcedOutput("c0", [place(row) for row in base])])
    gate = evaluate_gate(outputs(answer(base)), b, LIMITS, {}, decode=lambda ids: f"<{ids[0]}>")
    (divergence,) = gate.divergences
    assert (divergence.position, divergence.near_tie) == (5, near)
    assert (divergence.a_text, divergence.b_text) == (f"<{first}>", f"<{second}>")
    assert divergence.margin == pytest.approx(lead, abs=1e-9)
    assert gate.outcome == ("passed" if near else "failed")
    assert (gate.near_ties, gate.real) == ((1, 0) if near else (0, 1))
    allowed = evaluate_gate(outputs(answer(base)), b, LIMITS, {}, allow=True)
    assert allowed.outcome == ("passed" if near else "allowed")


def test_a_clear_lead_in_either_arm_is_real():
    """The tokens are close in A and far apart in B: B has read something else."""
    base, first, second = with_lead(logits_of(1, 6), 2, 0.001)
    other = base.copy()
    other[2, second] = base[2, first] + 2
    for ours, theirs in ((base, other), (other, base)):
        a = outputs(answer(ours))
        assert evaluate_gate(a, ArmOutputs([answer(theirs)], a.forced), LIMITS, {}).real == 1


def test_an_output_that_ends_early_is_real():
    whole = answer(logits_of(2, 8))
    short = GreedyOutput("c0", [1, 2], whole.token_ids[:5], "", True, whole.logprobs[:5])
    gate = evaluate_gate(outputs(whole), ArmOutputs([short], [ForcedOutput("c0", whole.logprobs)]), LIMITS, {})
    assert (gate.outcome, gate.real) == ("failed", 1)
    assert gate.divergences[0].position == 5


def test_prompts_read_otherwise_are_caught_though_the_outputs_are_the_same():
    a = outputs(answer(logits_of(3, 10)))
    shifted = [place(row + 0.1 * np.arange(VOCAB)) for row in logits_of(3, 10)]
    gate = evaluate_gate(a, ArmOutputs(a.answers, [ForcedOutput("c0", shifted)]), LIMITS, {})
    assert gate.outcome == "failed"
    assert "KL is" in gate.reason
    assert gate.kl_mean is not None
    assert gate.kl_mean > LIMITS.kl


def test_steps_with_other_probabilities_are_caught_though_the_outputs_are_the_same():
    """Decode steps have a defect that has not changed a token yet."""
    base = logits_of(4, 10)
    sharper = [place(row * 1.2) for row in base]
    a = outputs(answer(base))
    b = ArmOutputs([GreedyOutput("c0", [1, 2], a.answers[0].token_ids, "", False, sharper)], a.forced)
    gate = evaluate_gate(a, b, LIMITS, {})
    assert gate.identical == 1
    assert gate.outcome == "failed"
    assert "while generating the same text" in gate.reason


def test_limits_come_from_a_against_itself_and_have_a_floor_and_a_ceiling():
    quiet = outputs(answer(logits_of(5, 8)))
    assert thresholds_of(quiet, ["float32"]) == GateThresholds(*FLOORS["float32"])
    assert thresholds_of(quiet, ["float32", "bfloat16"]) == GateThresholds(*FLOORS["bfloat16"])
    assert thresholds_of(quiet, ["fp8_e4m3"]).margin > FLOORS["bfloat16"][0]
    noisy = thresholds_of(outputs(answer(logits_of(5, 8)), noise=0.05), ["float32"])
    assert noisy.margin == pytest.approx(0.2)
    assert noisy.kl > FLOORS["float32"][1]
    assert thresholds_of(outputs(answer(logits_of(5, 8)), noise=5.0), ["float32"]).margin == CEILING
    assert thresholds_of(quiet, ["float32"], near_tie=0.3).margin == 0.3


def test_an_arm_that_does_not_agree_with_itself_is_reported():
    a = outputs(answer(logits_of(6, 8)))
    torn = ArmOutputs(a.answers, a.forced, [answer(logits_of(7, 8))], a.forced_again)
    gate = evaluate_gate(torn, a, thresholds_of(torn, ["float32"]), {})
    assert gate.outcome == "failed"
    assert "arm a differs from itself" in gate.reason


def test_an_arm_that_refuses_a_call_fails():
    gate = evaluate_gate(outputs(answer(logits_of(6, 8))), ArmOutputs(refused="too long"), LIMITS, {})
    assert (gate.outcome, gate.reason) == ("failed", "arm b refuses a call that arm a answers: too long")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("text", "ended", "counts"),
    [
        ('{"n": 3}', True, (1, 1)),
        ('{"n": "3"}', True, (0, 1)),
        ('{"n": 3', True, (0, 1)),
        ('{"n": 3', False, (0, 0)),  # cut off at its length limit: the schema cannot be checked
    ],
)
def test_constrained_outputs_must_keep_their_schema(text, ended, counts):
    given_answer = answer(logits_of(8, 4), text=text, ended=ended)
    assert valid_outputs([given_answer], {"c0": SCHEMA}) == counts
    gate = evaluate_gate(outputs(given_answer), outputs(given_answer), LIMITS, {"c0": SCHEMA})
    assert gate.outcome == ("passed" if counts[0] == counts[1] else "failed")
    assert valid_outputs([given_answer], {}) is None


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_first_difference_is_where_the_longest_common_prefix_ends(a, b):
    common = next((n for n in range(min(len(a), len(b)), -1, -1) if a[:n] == b[:n]), 0)
    assert first_difference(a, b) == (None if a == b else common)


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.floats(0, 2))
def test_kl_is_never_above_the_true_one_and_near_it(seed, shake):
    """The reference is the KL of the whole distributions."""
    rng = np.random.default_rng(seed)
    p, q = rng.normal(0, 3, VOCAB), np.zeros(VOCAB)
    q = p + shake * rng.normal(0, 1, VOCAB)
    p, q = p - np.logaddexp.reduce(p), q - np.logaddexp.reduce(q)
    true = float(np.sum(np.exp(p) * (p - q)))
    found = kl(place(p), place(q))
    assert 0 <= found <= true + 1e-9
    assert kl(place(p), place(p)) == pytest.approx(0, abs=1e-12)


def test_agreement_measures_kl_and_the_lead_of_other_tokens():
    sure, torn = place([5.0, 1.0] + [0.0] * 22), place([1.0, 3.0] + [0.0] * 22)
    found = agreement([(sure, sure), (sure, torn)])
    assert (found.positions, found.top1) == (2, 0.5)
    assert found.max_lead == pytest.approx(4.0)
    assert found.shift == pytest.approx(abs(sure.top[0][1] - dict(torn.top)[0]))
    assert math.isclose(found.kl_mean * 2, found.kl_max)
