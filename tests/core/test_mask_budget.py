"""Test the time of matchers: how much is allowed, which request is charged, and how a constraint that takes too long
ends.

.venv/bin/python -m pytest -q -p no:xdist tests/core/test_mask_budget.py
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dovetail.constraints import mask_budget, masks, probe
from dovetail.constraints.backend_choice import GrammarEngine
from dovetail.constraints.compilers import ThreadCompiler
from dovetail.constraints.mask_budget import MaskBudget, Meter, MeteredMatcher
from dovetail.constraints.masks import fill_masks
from dovetail.constraints.probe import STEPS, Probe
from dovetail.constraints.service import GrammarService
from dovetail.engine.masks import MaskBuffers, mask_logits
from dovetail.errors import GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend, GrammarContext, Matcher
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from dovetail.scheduler.stopping import finish_reason
from dovetail.testing.batches import make_batch
from dovetail.types import FinishKind

SPEC = GrammarSpec(GrammarKind.REGEX, "slow")
VOCAB = 70
EOS = VOCAB - 1


class Clock:
    """Stand in for the module ``time`` where matchers are measured: time passes only in ``spin``."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


clock = Clock()


@pytest.fixture(autouse=True)
def _measured_by_the_clock(monkeypatch):
    for module in (mask_budget, masks, probe):
        monkeypatch.setattr(module, "time", clock)


def spin(seconds):
    clock.now += seconds


class Slow(Matcher):
    """Allow every token. Each call of a kind in ``costs`` takes that number of seconds, times the length of the text
    if it grows."""

    def __init__(self, grows=False, **costs):
        self.grows, self.costs, self.length, self.fills = grows, costs, 0, 0

    def _take(self, what):
        spin(self.costs.get(what, 0.0) * (self.length if self.grows else 1))

    def fill_bitmask(self, bitmask, row):
        self.fills += 1
        self._take("fill")
        bitmask[row] = -1

    def accept(self, token_id):
        self.length += 1
        self._take("accept")
        return token_id != EOS

    def rollback(self, num_tokens):
        self._take("rollback")

    @property
    def is_terminated(self):
        self._take("is_terminated")
        return False

    def jump_forward(self):
        self._take("jump")
        return ""


class Compiled(CompiledGrammar):
    def __init__(self, **costs):
        self.costs = costs

    def matcher(self):
        return Slow(**self.costs)


class Backend(GrammarBackend):
    def __init__(self):
        self.compiled, self.calls = [], []

    def compile(self, spec):
        self.compiled.append(spec.text)
        return Compiled(fill=0.05 if spec.text == "slow" else 0.0)

    def fill_bitmasks(self, matchers, bitmask, rows):
        self.calls.append(len(matchers))
        super().fill_bitmasks(matchers, bitmask, rows)


def meter(budget, errors=None):
    return Meter(SPEC, "fake", budget, errors.append if errors is not None else lambda error: None)


def test_what_a_matcher_takes_is_allowed_by_its_tokens_and_a_burst():
    errors = []
    found = meter(MaskBudget(per_token=0.01, ahead=0.1), errors)
    for _ in range(1000):  # for ever
        found.allow_token()
        found.charge(0.01)
    found.charge(0.085)  # and nearly the whole burst in addition
    for _ in range(3):
        found.allow_token()
    found.charge(0.03)
    assert not errors
    with pytest.raises(GrammarError) as caught:
        found.charge(0.03)
    text = str(caught.value)
    for part in (
        "this regex",
        "backend fake",
        "30 ms for one",
        "1003 tokens",
        "10 ms a token",
        "grammar.mask_ms",
        "100 ms",
    ):
        assert part in text
    assert (caught.value.param, caught.value.keyword) == ("regex", "size")
    with pytest.raises(GrammarError):
        found.charge(0.0)
    assert len(errors) == 1


def test_unused_time_is_not_saved_up():
    found = meter(MaskBudget(per_token=0.01, ahead=0.1))
    for _ in range(1000):
        found.allow_token()
    with pytest.raises(GrammarError):
        found.charge(0.11)


@pytest.mark.parametrize("what", ["fill", "accept", "rollback", "is_terminated", "jump"])
def test_every_call_of_a_matcher_counts(what):
    calls = {
        "fill": lambda matcher: matcher.fill_bitmask(np.zeros((1, 3), np.int32), 0),
        "accept": lambda matcher: matcher.accept(1),
        "rollback": lambda matcher: matcher.rollback(1),
        "is_terminated": lambda matcher: matcher.is_terminated,
        "jump": lambda matcher: matcher.jump_forward(),
    }
    matcher = MeteredMatcher(Slow(**{what: 0.3}), meter(MaskBudget(per_token=0.001, ahead=0.5)))
    for other in calls.keys() - {what}:
        calls[other](matcher)
    calls[what](matcher)
    with pytest.raises(GrammarError, match="take too long"):
        calls[what](matcher)


def wait(ticket):
    while not ticket.ready:
        time.sleep(0.002)
    return ticket


@pytest.mark.parametrize("name", [None, "fake"])
def test_a_constraint_that_took_too_long_is_refused_to_others_for_a_while(name):
    backend = Backend()
    engine = GrammarEngine("fake", frozenset({Feature.GRAMMAR_REGEX}), lambda: backend)
    service = GrammarService(ThreadCompiler([engine], 10), budget=MaskBudget(0.001, 0.02))
    spec = GrammarSpec(GrammarKind.REGEX, "slow", name)
    ticket = wait(service.submit(spec))
    matcher = MeteredMatcher(service.matcher(ticket), service.meter(ticket))
    with pytest.raises(GrammarError, match="take too long"):
        matcher.fill_bitmask(np.zeros((1, 3), np.int32), 0)
    for again in (spec, GrammarSpec(GrammarKind.REGEX, "slow", "fake")):
        with pytest.raises(GrammarError, match="take too long"):
            wait(service.submit(again)).matcher()
    assert service.totals.overruns == 1
    assert wait(service.submit(GrammarSpec(GrammarKind.REGEX, "quick", name))).matcher()
    assert backend.compiled == ["slow", "quick"]
    service.close()


def masked(reqs):
    batch = make_batch(4, np.zeros((len(reqs), 4), np.int32), [3] * len(reqs), [1] * len(reqs))
    logits = torch.zeros(len(reqs), VOCAB)
    mask_logits(logits, fill_masks(batch, reqs, -(-VOCAB // 32), MaskBuffers(torch.device("cpu")).take))
    assert (logits == 0).all()


def test_of_a_batch_that_is_slow_the_culprit_is_found_and_ended_and_the_others_stay_together():
    backend, budget = Backend(), MaskBudget(per_token=0.001, ahead=1.0)
    matchers = [Slow(), Slow(fill=0.1), Slow(), Slow()]
    reqs = [
        SimpleNamespace(rid="r", matcher=m, masks=backend, error=None, meter=meter(budget), finish=None)
        for m in matchers
    ]
    masked(reqs)
    assert backend.calls == [4], "slow, so that the next masks are filled one by one"
    masked(reqs)
    assert backend.calls == [4]
    for _ in range(12):
        masked(reqs)
    assert 3 in backend.calls, "the masks of quick matchers are filled in one call again"
    assert backend.calls.count(4) == 1
    assert [req.error is not None for req in reqs] == [False, True, False, False]
    assert "take too long" in reqs[1].error


class Bytes(Probe):
    """Probe over a vocabulary of bytes and pairs."""

    def __init__(self, budget):
        tokens = [*(bytes([i]) for i in range(60)), *(b"ab" for _ in range(60, EOS)), None]
        super().__init__(GrammarContext(VOCAB, tokens, (EOS,), "{}"), budget)


@pytest.mark.parametrize("costs", [{"fill": 0.002}, {"accept": 0.002}, {"is_terminated": 0.002}])
def test_a_probe_finds_what_grows_with_the_text(costs):
    """A mask takes two milliseconds for each token of the text: after 96 tokens, nine seconds in all."""
    start = clock.now
    with pytest.raises(GrammarError, match="take too long with grammar backend fake"):
        Bytes(MaskBudget(0.005, 0.2)).try_out(Compiled(grows=True, **costs), SPEC, "fake")
    assert clock.now - start < 2


def test_a_probe_lets_pass_what_keeps_the_budget_and_ends_in_time():
    Bytes(MaskBudget(0.005, 0.2)).try_out(Compiled(), SPEC, "fake")
    start = clock.now
    Bytes(MaskBudget(per_token=0.05, ahead=0.3)).try_out(Compiled(fill=0.03), SPEC, "fake")
    assert clock.now - start < 0.03 * STEPS


class GivesUp(Slow):
    """Raise after 20 tokens."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def accept(self, token_id):
        if self.length == 20:
            raise self.error
        return super().accept(token_id)


def test_what_a_backend_gives_up_on_in_a_probe_is_refused_and_what_breaks_is_not():
    def try_out(error):
        compiled = Compiled()
        compiled.matcher = lambda: GivesUp(error)
        Bytes(MaskBudget()).try_out(compiled, SPEC, "fake")

    with pytest.raises(GrammarError, match="fake gives up on texts of this regex: too many items") as caught:
        try_out(GrammarError("too many items"))
    assert caught.value.keyword == "size", "another backend may compile it"
    try_out(KeyError("a defect"))


class Unsound(Slow):
    """Refuse the eleventh token, although its mask allows it."""

    def accept(self, token_id):
        return self.length != 10 and super().accept(token_id)


def test_masks_that_allow_what_is_refused_are_left_to_another_backend():
    compiled = Compiled()
    compiled.matcher = Unsound
    with pytest.raises(GrammarError, match=r"fake gives up on .*: its mask allows token \d+, which it then") as caught:
        Bytes(MaskBudget()).try_out(compiled, SPEC, "fake")
    assert caught.value.keyword == "masks"


def test_a_request_whose_token_is_refused_ends_with_the_name_of_the_faulty_backend():
    matcher = Unsound()
    matcher.length = 10
    req = SimpleNamespace(error=None, matcher=matcher, grammar_backend="fake", params=SamplingParams(), known_len=11)
    finish = finish_reason(req, 7, frozenset({EOS}))
    assert finish.kind is FinishKind.ERROR
    assert "grammar backend fake refuses token 7" in finish.message
    assert "another grammar_backend" in finish.message
