"""Test that steps are data: plans that were sent as bytes to another process bring the same tokens, and results are read
from packed arrays.

.venv/bin/python -m pytest -q tests/core/test_plans.py
"""

import io
import pickle
import random
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail import LLM
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.results import entries_of, logprobs_of, tokens_of
from dovetail.types import AdmittedRequest, HostLogprobs, Req, StepPlan, StepResult, TokenLogprob

sys.path.insert(0, str(Path(__file__).parent))
from pretended import VOCAB, Device, Run, build, half_right, reqs_of

UNKNOWN = -9
OTHERS = [name for name in AdmittedRequest.__dataclass_fields__ if name != "token_ids"]


PLAIN = ("dovetail.types.plan", "dovetail.types.drafts", "dovetail.types.outputs", "dovetail.sampling_params")


class Plain(pickle.Unpickler):
    """Read arrays, numbers, and the structs of plans, drafts, results and sampling parameters; refuse the rest."""

    def find_class(self, module, name):
        assert module.split(".")[0] == "numpy" or module in PLAIN, module
        assert name != "Req"
        return super().find_class(module, name)


class Sender:
    """Turn plans into bytes. Tokens are sent when a plan states that the host knows them, and not before."""

    def __init__(self):
        self.texts = {}  # the scheduler's own array of tokens, and the number of them that were sent, by slot

    def send(self, plan: StepPlan) -> bytes:
        for request in plan.admitted:
            self.texts[request.slot] = request.token_ids, request.known_len
        tails = [self._tail(plan, row, slot) for row, slot in enumerate(plan.slots.tolist())]
        return pickle.dumps((replace(plan, admitted=tuple(map(_hidden, plan.admitted))), tails))

    def _tail(self, plan, row, slot):
        text, sent = self.texts[slot]
        if row < plan.num_extend:
            known = int(plan.known_lens[row])
        else:
            known = sent if plan.draft_limits is None else int(plan.prefix_lens[row]) + 1
        self.texts[slot] = text, max(sent, known)
        return sent, text[sent : max(sent, known)].copy()


def _hidden(request: AdmittedRequest) -> AdmittedRequest:
    """Return a copy of a request without the tokens that are not known yet."""
    ids = np.full(len(request.token_ids), UNKNOWN, np.int32)
    ids[: request.known_len] = request.token_ids[: request.known_len]
    return replace(request, token_ids=ids)


class RemoteDevice(Device):
    """Read plans from bytes. Nothing of the scheduler is reachable from it."""

    def __init__(self, device, scheduler):
        self.__dict__ |= device.__dict__
        self.sender, self.scheduler = Sender(), scheduler
        self.sent = 0

    def receive(self, plan):
        data = self.sender.send(plan)
        self.sent += 1
        copy, tails = Plain(io.BytesIO(data)).load()
        assert_same(copy, plan)
        if copy.number == self.number:  # sent again with drafts: the requests of the first copy stay
            copy.admitted = ()
        batch = super().receive(copy)
        for request, (start, tail) in zip(batch.reqs, tails, strict=True):
            assert (request.token_ids[start : start + len(tail)] == UNKNOWN).all(), "a token is sent once"
            request.token_ids[start : start + len(tail)] = tail
        for row in range(batch.num_extend):
            start = batch.prefix_lens[row]
            assert UNKNOWN not in batch.reqs[row].token_ids[start : start + batch.extend_lens[row]]
        return batch


def assert_same(copy, plan):
    """Assert that two plans have the same content, except for the tokens that the host does not know yet."""
    for name in StepPlan.__dataclass_fields__:
        found, expected = getattr(copy, name), getattr(plan, name)
        if name == "admitted":
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.token_ids[: mine.known_len].tolist() == theirs.token_ids[: theirs.known_len].tolist()
                assert [getattr(mine, n) for n in OTHERS] == [getattr(theirs, n) for n in OTHERS]
        elif name == "page_updates":
            assert found.version == expected.version
            assert all(map(np.array_equal, found[:3], expected[:3]))
        elif name == "shared":
            assert (found is None) == (expected is None)
            if found is not None:
                assert np.array_equal(found.starts, expected.starts)
                assert np.array_equal(found.lens, expected.lens)
        elif name == "drafts":
            assert (found is None) == (expected is None)
            if found is not None:
                for field in ("token_ids", "parents", "lens"):
                    assert np.array_equal(getattr(found, field), getattr(expected, field))
        else:
            assert np.array_equal(found, expected), name


def traffic(seed, remote, *, lag, drafts, pages=33, **limits):
    """Return the texts of random traffic in little memory, and the run."""
    rng = random.Random(seed)
    scheduler, device = build(4, pages, draft_width=3 if drafts else 0, **limits)
    if remote:
        device = RemoteDevice(device, scheduler)
    run = Run(scheduler, device, lag, half_right if drafts else None, ahead=drafts)
    stems = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
    for i in range(25):
        prompt = rng.choice(stems)[: rng.randrange(31)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        run.add(f"r{i}", prompt, max_new_tokens=rng.randrange(70), ignore_eos=rng.random() < 0.9)
        for _ in range(rng.randrange(3)):
            run.step()
        if rng.random() < 0.1:
            run.take(scheduler.abort(f"r{rng.randrange(i + 1)}", "changed my mind"))
    run.finish()
    return run.texts, run


@pytest.mark.parametrize(("lag", "drafts"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("seed", range(4))
def test_plans_sent_as_bytes_bring_the_same_tokens(seed, lag, drafts):
    limits = {"lag": lag, "drafts": drafts, "shared_prefixes": bool(seed % 2), "mixed": seed != 2}
    texts, _ = traffic(seed, False, **limits)
    remote, run = traffic(seed, True, **limits)
    assert remote == texts
    assert run.device.sent > 100
    assert run.scheduler.totals.retractions > 0, "no request was admitted again"


def test_plans_count_from_one_and_admit_each_request_once():
    scheduler, device = build()
    run = Run(scheduler, device)
    seen, schedule = [], scheduler.schedule

    def noted():
        plan = schedule()
        seen.append(plan)
        return plan

    scheduler.schedule = noted
    for i in range(3):
        run.add(f"r{i}", [i] * 8, max_new_tokens=6, ignore_eos=True)
    run.finish()
    plans = [plan for plan in seen if plan is not None]
    assert [plan.number for plan in plans] == list(range(1, len(plans) + 1))
    admitted = [request for plan in plans for request in plan.admitted]
    assert [request.uid for request in admitted] == [0, 1, 2]
    assert not any(request.retracted or request.constrained for request in admitted)
    assert [request.token_ids[: request.known_len].tolist() for request in admitted] == [[i] * 8 for i in range(3)]
    decode = [plan for plan in plans if not plan.num_extend]
    assert all(plan.known_lens.shape == (0,) and plan.draft_limits is None for plan in decode)
    assert len({plan.rows_version for plan in decode}) < len(decode), "rows that stay keep their number"


def test_a_request_that_was_retracted_is_admitted_again_with_its_tokens():
    scheduler, device = build(num_pages=32)
    run, again = Run(scheduler, device), []
    admit = device._admit

    def noted(requests):
        again.extend(replace(r, token_ids=r.token_ids[: r.known_len].copy()) for r in requests if r.retracted)
        admit(requests)

    device._admit = noted
    for i in range(5):
        run.add(f"r{i}", [i] * 20, max_new_tokens=90, ignore_eos=True)
    run.finish()
    assert len(again) == scheduler.totals.retractions > 0
    for request in again:
        assert request.known_len > request.prompt_len == 20
        assert request.token_ids.tolist() == run.texts[f"r{request.uid}"][: request.known_len]


def test_the_requests_of_a_plan_are_known_until_it_is_committed_or_has_failed():
    scheduler, device = build()
    run = Run(scheduler, device)
    run.add("a", [1, 2, 3], max_new_tokens=4, ignore_eos=True)
    first = scheduler.schedule()
    result = device.forward(first)
    second = scheduler.schedule()
    assert [r.rid for r in reqs_of(scheduler, first)] == [r.rid for r in reqs_of(scheduler, second)] == ["a"]
    scheduler.commit(first, result)
    with pytest.raises(KeyError):
        reqs_of(scheduler, first)
    (answer,) = scheduler.fail(second, "broken")
    assert (answer.rid, answer.status) == ("a", 500)
    with pytest.raises(KeyError):
        scheduler.fail(second, "broken")
    assert not scheduler.has_work


def test_page_updates_of_a_step_that_failed_are_part_of_the_next_plan():
    scheduler, _ = build(num_pages=60, chunk_size=30)
    run = Run(scheduler, None)
    run.add("a", [1] * 20, max_new_tokens=4, ignore_eos=True)
    lost = scheduler.schedule()
    scheduler.take_back(lost)
    scheduler.fail(lost, "broken")
    run.add("b", [2] * 9, max_new_tokens=4, ignore_eos=True)
    plan = scheduler.schedule()
    written = len(lost.page_updates.slots)
    assert written >= 5
    assert plan.page_updates.slots[:written].tolist() == lost.page_updates.slots.tolist()
    assert plan.page_updates.pages[:, :written].tolist() == lost.page_updates.pages.tolist()
    assert [request.uid for request in plan.admitted] == [1]


def test_a_plan_that_overlaps_another_cannot_have_drafts():
    """The device asserts that the host knows the last token of each row of a plan with draft limits."""
    scheduler, device = build(draft_width=3)
    run = Run(scheduler, device, lag=True)
    for rid in "ab":
        run.add(rid, [1, 2, 3], max_new_tokens=12, ignore_eos=True)
    for _ in range(4):
        run.step()
    assert scheduler.schedule().draft_limits is None


@pytest.mark.parametrize("end", ["fail", "abort"])
def test_the_cache_gets_nothing_from_a_step_that_fails_after_the_step_before_it_was_committed(end):
    scheduler, device = build(chunk_size=12, fails_late=True)
    run = Run(scheduler, device)
    run.add("a", range(24), max_new_tokens=4)
    first = scheduler.schedule()
    result = device.forward(first)
    second = scheduler.schedule()
    run.take(scheduler.commit(first, result))
    if end == "abort":
        run.take(scheduler.abort("a", "changed my mind"))
    device.miss(second)
    run.ends.update({answer.rid: answer.status for answer in scheduler.fail(second, "broken")})
    run.add("b", range(24), max_new_tokens=4)
    run.finish()
    assert run.cached["b"] == 12


# -- results --------------------------------------------------------------------------------------------------------


def test_the_tokens_of_a_row_end_where_it_accepted_none():
    tokens = np.array([[1, 2, 3], [4, 77, 77], [5, 6, 77]])
    assert tokens_of(StepResult(tokens, np.array([3, 1, 2]))) == [[1, 2, 3], [4], [5, 6]]
    assert tokens_of(StepResult(tokens[:, :1])) == [[1], [4], [5]]
    assert tokens_of(StepResult(np.zeros((0, 1), np.int64))) == []


def host_logprobs(count, top):
    """Return numbers that differ at every place."""
    values = np.arange(count * top, dtype=np.float32).reshape(count, top)
    return HostLogprobs(-np.arange(count, dtype=np.float32), -100 - values, (1000 + values).astype(np.int64))


def test_entries_stand_beside_their_tokens():
    found = entries_of(np.array([7, 8], np.int32), host_logprobs(2, 2))
    assert found == [
        TokenLogprob(7, 0.0, ((1000, -100.0), (1001, -101.0))),
        TokenLogprob(8, -1.0, ((1002, -102.0), (1003, -103.0))),
    ]


def test_logprobs_are_those_of_the_nodes_of_rows_that_requested_them():
    """Row 0 requested none. The nodes of row 1 begin at 0, and those of row 2, which requested one alternative, at 3."""
    reqs = [
        Req(str(i), np.zeros(9, np.int32), 1, SamplingParams(logprobs=count)) for i, count in enumerate((None, 2, 1))
    ]
    result = StepResult(
        np.array([[1, -1], [2, 3], [4, -1]]),
        np.array([1, 2, 1]),
        np.array([[0, 0], [0, 2], [0, 0]]),
        host_logprobs(5, 2),
        {1: 0, 2: 3},
    )
    assert logprobs_of(result, reqs, tokens_of(result)) == [
        [],
        [
            TokenLogprob(2, 0.0, ((1000, -100.0), (1001, -101.0))),
            TokenLogprob(3, -2.0, ((1004, -104.0), (1005, -105.0))),
        ],
        [TokenLogprob(4, -3.0, ((1006, -106.0),))],
    ]


def test_without_nodes_logprobs_are_those_of_the_roots():
    reqs = [Req(str(i), np.zeros(9, np.int32), 1, SamplingParams(logprobs=0)) for i in range(2)]
    result = StepResult(np.array([[1], [2]]), None, None, host_logprobs(2, 0), {0: 0, 1: 1})
    assert logprobs_of(result, reqs, tokens_of(result)) == [[TokenLogprob(1, 0.0)], [TokenLogprob(2, -1.0)]]


def test_the_engine_of_a_closed_loop_is_freed():
    """Its model and its tables are freed while the loop is still referenced."""
    llm = LLM("tiny", device="cpu", threads=1, grammar="none")
    llm.generate("Hello", SamplingParams(max_new_tokens=3))
    engine = llm.loop.executor.rank.engine
    held = [weakref.ref(part) for part in (engine, engine.model, engine.inputs, engine.sampler)]
    del engine
    llm.close()
    assert [ref() for ref in held] == [None] * 4
    llm.loop.close()


def test_the_engine_of_a_lost_device_is_kept():
    """To free its memory would abort the process."""
    llm = LLM("tiny", device="cpu", threads=1, grammar="none")
    rank = llm.loop.executor.rank
    assert rank.lost(torch.AcceleratorError("the device is gone")) is not None
    llm.close()
    assert rank.engine.model is not None
