"""Test that a failure ends what it must and nothing else: steps, drafters, policies and caches.

.venv/bin/python -m pytest -q tests/e2e/test_engine_failures.py
"""

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import engine_models as models
import numpy as np
import pytest
from engine_runs import Traffic, TreeDrafter, check_idle, drafting, make_llm, paged, prompts_of

from dovetail import LLM, SamplingParams
from dovetail.errors import EngineDeadError, EngineError
from dovetail.types import DraftTree
from dovetail_executors.local import Local

GREEDY = SamplingParams(max_new_tokens=16, temperature=0)
STORY = SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    return models.Reference(checkpoint)


@pytest.fixture(scope="module")
def tiny():
    return LLM("tiny", device="cpu")


def raise_at(monkeypatch, owner, name, call, error=None):
    """Let the ``call``-th call of a method raise, once."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(calls) == call:
            raise error or RuntimeError("out of luck")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def test_a_loop_that_cannot_be_built_closes_its_executor(monkeypatch):
    closed = []

    def fail(*_):
        raise EngineError("no scheduler")

    monkeypatch.setattr("dovetail.loop.loop.build_scheduler", fail)
    monkeypatch.setattr(Local, "close", lambda self: closed.append(self))
    with pytest.raises(EngineError, match="no scheduler"):
        LLM("tiny", device="cpu")
    assert len(closed) == 1


# -- steps that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("part", "call"), [("forward", 1), ("forward", 5), ("sample", 4), ("wait", 6), ("prepare", 3)])
def test_a_step_that_raises_ends_its_own_requests(checkpoint, reference, monkeypatch, part, call, overlap):
    scheduler = {"max_running": 2, "overlap": overlap, "chunk_size": 20}
    llm = make_llm(checkpoint, **paged(1, scheduler=scheduler))
    engine = llm.loop.executor.rank.engine
    owner = {"forward": engine.model, "sample": engine.sampler, "wait": engine, "prepare": engine.inputs}[part]
    raise_at(monkeypatch, owner, part, call)
    traffic, prompts = Traffic(llm), prompts_of([30, 9, 14, 22, 3])
    for i, prompt in enumerate(prompts):
        traffic.add(f"r{i}", prompt, GREEDY)
    traffic.finish()
    failed = [rid for rid in traffic.ends if traffic.kind(rid) == 500]
    assert 1 <= len(failed) <= 2, "only the running requests end"
    for rid in failed:
        assert traffic.ends[rid].message == "RuntimeError: out of luck"
    for i, prompt in enumerate(prompts):
        if f"r{i}" not in failed:
            assert traffic.kind(f"r{i}") == "length"
        expected = reference.greedy(tuple(prompt), 16)
        assert traffic.tokens[f"r{i}"] == expected[: len(traffic.tokens[f"r{i}"])]
    check_idle(llm)
    for output, prompt in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
        assert output.token_ids == reference.greedy(tuple(prompt), 16)
    check_idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_page_is_cached_whose_step_never_ran(checkpoint, reference, monkeypatch, overlap):
    """With overlap, the step that fails was launched before the host knew that a request had ended in the step before;
    that request's last token has no KV then."""
    prompt = prompts_of([11], seed=8)[0]
    text = reference.greedy(tuple(prompt), 30)
    stop = next(i for i in range(4, 30) if text[i] not in text[:i])
    params = SamplingParams(max_new_tokens=30, temperature=0, stop_token_ids=(text[stop],))
    for call in range(2, stop + 4):
        llm = make_llm(checkpoint, **paged(1, 400, scheduler={"overlap": overlap, "chunk_size": 6}))
        llm.loop.executor.rank.engine.pool.k.fill_(50.0)
        with monkeypatch.context() as patch:
            raise_at(patch, llm.loop.executor.rank.engine.model, "forward", call)
            traffic = Traffic(llm)
            traffic.add("a", prompt, params)
            traffic.finish()
        longer = prompt + text[: stop + 1] + [5, 6]
        for ask in (longer, longer[: len(prompt) + 2]):
            assert llm.generate(ask, GREEDY)[0].token_ids == reference.greedy(tuple(ask), 16)
        check_idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_of_those_who_sat_a_failed_step_out_are_known_afterwards(checkpoint, reference, monkeypatch, overlap):
    """Without mixed steps, decode rows have pages reserved in the step of a prompt that fails, and do not run in it."""
    llm = make_llm(checkpoint, **paged(1, scheduler={"mixed": False, "overlap": overlap}))
    traffic, prompts = Traffic(llm), prompts_of([9, 14])
    traffic.add("a", prompts[0], GREEDY)
    for _ in range(4):
        traffic.step()
    traffic.add("b", prompts[1], GREEDY)
    with monkeypatch.context() as patch:
        raise_at(patch, llm.loop.executor.rank.engine.inputs, "prepare", 1)
        traffic.step()
    traffic.finish()
    assert (traffic.kind("a"), traffic.kind("b")) == ("length", 500)
    assert traffic.tokens["a"] == reference.greedy(tuple(prompts[0]), 16)
    check_idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("call", [1, 3, 6])
def test_an_interrupt_reaches_the_caller_and_leaves_order(checkpoint, reference, monkeypatch, overlap, call):
    llm = make_llm(checkpoint, **paged(1, scheduler={"overlap": overlap, "chunk_size": 20}))
    raise_at(monkeypatch, llm.loop.executor.rank.engine.model, "forward", call, KeyboardInterrupt())
    prompts = prompts_of([30, 9])
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, GREEDY)
    check_idle(llm)
    for output, prompt in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
        assert output.token_ids == reference.greedy(tuple(prompt), 16)


def press_ctrl_c(monkeypatch, owner, name, call):
    """Send Ctrl-C in the ``call``-th call of a method, which continues unless the signal's handler raises."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


PLACES = [("schedule", 1), ("schedule", 4), ("commit", 1), ("commit", 3), ("poll", 2), ("add", 2), ("insert", 1)]


def owner_of(llm, part):
    return llm.loop.scheduler.ledger.cache if part == "insert" else llm.loop.scheduler


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("part", "call"), [*PLACES, ("forward", 2), ("wait", 2)])
def test_ctrl_c_waits_for_the_end_of_the_step(checkpoint, reference, monkeypatch, part, call, overlap):
    llm = make_llm(checkpoint, **paged(1, scheduler={"max_running": 2, "overlap": overlap, "chunk_size": 20}))
    handler, prompts = signal.getsignal(signal.SIGINT), prompts_of([30, 9, 14])
    owner = {"forward": llm.loop.executor.rank.engine.model, "wait": llm.loop.executor.rank.engine}.get(
        part
    ) or owner_of(llm, part)
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, owner, part, call)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, GREEDY)
    assert signal.getsignal(signal.SIGINT) is handler
    check_idle(llm)
    assert llm._runs == {}
    for output, prompt in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
        assert output.token_ids == reference.greedy(tuple(prompt), 16)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["second Ctrl-C", "exit"])
@pytest.mark.parametrize(("part", "call"), PLACES)
def test_what_interrupts_the_scheduler_itself_ends_the_engine(checkpoint, monkeypatch, part, call, error, overlap):
    """A handler raises, or Ctrl-C is pressed a second time: the scheduler's state may be half written."""
    llm = make_llm(checkpoint, **paged(1, scheduler={"max_running": 2, "overlap": overlap, "chunk_size": 20}))
    raise_at(monkeypatch, owner_of(llm, part), part, call, error)
    with pytest.raises(type(error)):
        llm.generate(prompts_of([30, 9, 14]), GREEDY)
    with pytest.raises(EngineDeadError, match=f"interrupted by {type(error).__name__}.*must be started again"):
        llm.generate([1, 2, 3], GREEDY)


def test_a_second_ctrl_c_does_not_wait(checkpoint, monkeypatch):
    llm = make_llm(checkpoint)

    def forward(batch):
        signal.raise_signal(signal.SIGINT)
        time.sleep(0)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one was held back")

    with monkeypatch.context() as patch:
        patch.setattr(llm.loop.executor.rank.engine.model, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2, 3], GREEDY)
    check_idle(llm)
    assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 16


def test_ctrl_c_in_one_stream_leaves_the_others(tiny, monkeypatch):
    expected = [tiny.generate(text, STORY)[0].text for text in ("The quick brown", "What is")]
    mine, other = tiny.stream("The quick brown", STORY), tiny.stream("What is", STORY)
    said, heard = [next(mine)], [next(other)]
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, tiny.loop.scheduler, "commit", 2)
        with pytest.raises(KeyboardInterrupt):
            said += mine
    assert expected[0].startswith("".join(said))
    assert "".join([*heard, *other]) == expected[1]
    check_idle(tiny)


def test_answers_that_an_interrupt_has_taken_are_not_waited_for(tiny, monkeypatch):
    mine, other = tiny.stream("The quick brown", STORY), tiny.stream("What is", STORY)
    next(mine), next(other)
    with monkeypatch.context() as patch:
        patch.setattr(tiny.loop, "step", lambda step=tiny.loop.step: step() and [])
        with pytest.raises(EngineError, match="call again"):
            list(mine)
    with pytest.raises(EngineError, match="call again"):
        list(other)
    check_idle(tiny)


def test_a_thread_that_no_signal_reaches_generates_as_well(tiny):
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(tiny.generate, "What is", STORY).result(60)
    assert outputs[0].text == tiny.generate("What is", STORY)[0].text


def test_generate_says_what_failed_and_works_again(checkpoint, reference, monkeypatch):
    llm = make_llm(checkpoint)
    raise_at(monkeypatch, llm.loop.executor.rank.engine.model, "forward", 3)
    prompts = prompts_of([3, 4])
    with pytest.raises(EngineError, match="RuntimeError: out of luck"):
        llm.generate(prompts, GREEDY)
    check_idle(llm)
    assert llm.generate(prompts, GREEDY)[1].token_ids == reference.greedy(tuple(prompts[1]), 16)


# -- drafters that fail ----------------------------------------------------------------------------------------------


class OddDrafter(TreeDrafter):
    """Break the drafter's contract, or raise, every other time."""

    def __init__(self, how):
        super().__init__(width=4, right=0.8)
        self.how = how
        self.calls = 0

    def turn(self, name):
        self.calls += self.how == name
        if self.how == name and self.calls % 2:
            raise LookupError(f"odd {name}")

    def observe(self, batch, output, committed):
        self.turn("observe")

    def forget(self, request):
        self.turn("forget")

    def propose(self, batch):
        self.turn("propose")
        tree, last = super().propose(batch), len(batch.slots) - 1
        broken = BREAKS.get(self.how)
        if broken is not None:
            broken(tree, last, batch)
            if self.how == "narrow":
                tree = DraftTree(tree.token_ids[:, :1], tree.parents[:, :1], np.full_like(tree.lens, 3))
        return tree


def too_long(tree, last, batch):
    tree.lens[last] = batch.draft_limits[last] + 1


def extend_rows(tree, last, batch):
    tree.lens[0] = 1
    tree.token_ids[:], tree.parents[:] = 3, -1
    if not batch.num_extend:
        tree.lens[0] = 77


def cyclic(tree, last, batch):
    tree.lens[last] = 1
    tree.token_ids[last, 0], tree.parents[last, 0] = 3, 0


def unknown_token(tree, last, batch):
    tree.lens[last] = 1
    tree.token_ids[last, 0], tree.parents[last, 0] = models.VOCAB, -1


def negative(tree, last, batch):
    tree.lens[last] = -1


def few_rows(tree, last, batch):
    tree.lens = tree.lens[:0]


BREAKS = {
    "too long": too_long,
    "extend rows": extend_rows,
    "cyclic": cyclic,
    "unknown token": unknown_token,
    "negative": negative,
    "few rows": few_rows,
    "narrow": lambda *_: None,
}


@pytest.mark.parametrize("how", ["propose", "observe", "forget", *BREAKS])
def test_a_broken_drafter_costs_its_drafts_only(checkpoint, reference, how):
    llm = make_llm(checkpoint, **paged(1, 230, scheduler={"chunk_size": 20}))
    prompts = prompts_of([30, 9, 14, 22, 3])
    with drafting(llm, OddDrafter(how)):
        for output, prompt in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
            assert output.token_ids == reference.greedy(tuple(prompt), 16)
    assert llm.loop.drafter_errors > 0
    check_idle(llm)


class Immodest(TreeDrafter):
    """Draft for every row as many tokens as ``max_draft_tokens``, regardless of its limit."""

    def propose(self, batch):
        ids = np.full((len(batch.slots), self.width), 3, np.int32)
        return DraftTree.chains(ids, np.full(len(ids), self.width, np.int32))


@pytest.mark.parametrize(
    ("drafter", "says"),
    [(TreeDrafter(width=4, right=0.8), "offers draft.chain only"), (Immodest(width=9), "limits are")],
)
def test_drafts_are_cut_to_what_the_drafter_declares(checkpoint, reference, monkeypatch, caplog, drafter, says):
    """Attention gets neither a tree from a drafter of chains nor more drafts than pages were reserved for."""
    llm = make_llm(checkpoint, **paged(1, 230, scheduler={"chunk_size": 20}))
    prompts, plans, scheduler = prompts_of([30, 9, 14, 22, 3]), [], llm.loop.scheduler
    attach = scheduler.attach
    monkeypatch.setattr(scheduler, "attach", lambda plan, tree: (attach(plan, tree), plans.append(plan))[0])
    drafter.learn(llm.generate(prompts, GREEDY))
    with drafting(llm, drafter):
        scheduler.limits = replace(scheduler.limits, draft_trees=False)
        for output, prompt in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
            assert output.token_ids == reference.greedy(tuple(prompt), 16)
        scheduler.limits = replace(scheduler.limits, draft_trees=True)
    drafted = [plan for plan in plans if plan.drafts is not None]
    assert drafted
    assert all(plan.drafts.is_chain and (plan.drafts.lens <= plan.draft_limits).all() for plan in drafted)
    assert llm.loop.drafter_errors > 1
    logged = [record.getMessage() for record in caplog.records if "the drafter returned" in record.getMessage()]
    assert len(logged) == 1
    assert says in logged[0]
    check_idle(llm)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["Ctrl-C", "exit"])
@pytest.mark.parametrize(
    ("part", "call"), [("propose", 1), ("propose", 4), ("observe", 1), ("observe", 3), ("forget", 1)]
)
def test_an_interrupt_in_a_drafter_costs_its_drafts_only(
    checkpoint, reference, monkeypatch, part, call, error, overlap
):
    llm = make_llm(checkpoint, **paged(1, 230, scheduler={"chunk_size": 20, "overlap": overlap}))
    traffic, prompts = Traffic(llm), prompts_of([30, 9, 14])
    with drafting(llm, TreeDrafter(width=4, right=0.8)), monkeypatch.context() as patch:
        raise_at(patch, llm.loop.executor.rank.drafter, part, call, error)
        for i, prompt in enumerate(prompts):
            traffic.add(str(i), prompt, GREEDY)
        with pytest.raises(type(error)):
            traffic.finish()
        traffic.finish()
    assert llm.loop.drafter_errors == 0
    assert [traffic.tokens[str(i)] for i in range(3)] == [reference.greedy(tuple(p), 16) for p in prompts]
    check_idle(llm)


# -- policies and caches that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("part", "call"),
    [("match", 1), ("match", 3), ("insert", 1), ("insert", 3), ("lock", 2), ("unlock", 2)],
)
def test_a_cache_that_raises_ends_the_engine_with_a_clear_error(checkpoint, monkeypatch, part, call, overlap):
    llm = make_llm(checkpoint, **paged(1, scheduler={"max_running": 2, "overlap": overlap}))
    raise_at(monkeypatch, llm.loop.scheduler.ledger.cache, part, call)
    with pytest.raises(EngineDeadError, match="RuntimeError: out of luck") as caught:
        llm.generate(prompts_of([30, 9, 14, 22, 3]), GREEDY)
    assert "policy 'lpm'" in str(caught.value) or "policy 'fcfs'" in str(caught.value)
    assert "prefix cache 'radix'" in str(caught.value)
    with pytest.raises(EngineDeadError, match="must be started again"):
        llm.generate([1, 2, 3], GREEDY)


def never(waiting, running):
    raise KeyError("max_new_tokens")


BROKEN_ORDERS = {
    "raises": never,
    "loses": lambda waiting, running: waiting[1:],
    "doubles": lambda waiting, running: waiting[:1] * len(waiting) + waiting[:1],
    "invents": lambda waiting, running: [replace(req) for req in waiting],
    "empties the queue": lambda waiting, running: waiting.clear(),
    "returns None": lambda waiting, running: None,
}


@pytest.mark.parametrize("how", BROKEN_ORDERS)
def test_a_broken_policy_costs_its_order_only(checkpoint, reference, monkeypatch, caplog, how):
    """Requests are admitted first come first served, the traceback is logged once, and every failure is counted."""
    llm = make_llm(checkpoint, **paged(1, scheduler={"max_running": 2}))
    monkeypatch.setattr(llm.loop.scheduler._admission.guard.policy, "order", BROKEN_ORDERS[how])
    prompts = prompts_of([30, 9, 14, 22, 3])
    for output, prompt in zip(llm.generate(prompts, GREEDY), prompts, strict=True):
        assert output.token_ids == reference.greedy(tuple(prompt), 16)
    assert llm.loop.stats().policy_errors > 1
    logged = [record for record in caplog.records if "the policy" in record.message]
    assert len(logged) == 1
    assert logged[0].exc_info
    check_idle(llm)


@pytest.mark.parametrize("call", [1, 2])
def test_a_policy_that_raises_once_orders_again_afterwards(checkpoint, monkeypatch, call):
    llm = make_llm(checkpoint, **paged(1, scheduler={"max_running": 2}))
    raise_at(monkeypatch, llm.loop.scheduler._admission.guard.policy, "order", call)
    assert len(llm.generate(prompts_of([30, 9, 14, 22, 3]), GREEDY)) == 5
    assert llm.loop.stats().policy_errors == 1
    check_idle(llm)
