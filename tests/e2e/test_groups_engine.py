"""Test groups, sessions and prompts without new tokens, through the engine.

.venv/bin/python -m pytest -q tests/e2e/test_groups_engine.py
"""

from __future__ import annotations

import pytest
from engine_runs import Traffic, TreeDrafter, check_idle, drafting, make_llm, prompts_of

from dovetail import LLM, SamplingParams
from dovetail.errors import RequestError
from dovetail.messages import AbortAllMsg, FlushCacheMsg
from dovetail.types import FinishKind

GREEDY = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
PREFILL = SamplingParams(max_new_tokens=0)


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlap"])
def llm(request):
    """Start an engine in which only members of a group wait for a prefix."""
    scheduler = {"wait_for_prefix": False, "chunk_size": 512, "overlap": request.param}
    llm = make_llm("tiny", scheduler=scheduler, memory={"num_pages": 120})
    yield llm
    llm.close()


@pytest.fixture(autouse=True)
def fresh(llm: LLM):
    """Empty the cache before each test, and check that all pages are free after it."""
    llm.loop.handle(FlushCacheMsg("flush"))
    assert llm.loop.step()[-1].ok
    yield
    check_idle(llm)
    llm.loop.handle(AbortAllMsg())
    assert llm.loop.stats().pages_pinned == 0


def computed(llm: LLM, work):
    """Return the result of ``work``, and the number of prompt tokens that were computed for it."""
    before = llm.loop.stats()
    result = work()
    after = llm.loop.stats()
    found = after.cached_tokens - before.cached_tokens
    return result, after.prompt_tokens - before.prompt_tokens - found


def test_a_fork_computes_its_prefix_once_and_says_the_same(llm: LLM):
    prompts = prompts_of([9] * 8, shared=160)
    alone, cold = computed(llm, lambda: [llm.generate(p, GREEDY)[0].token_ids for p in prompts[:1]])
    llm.loop.handle(FlushCacheMsg("flush"))
    apart, reuse = computed(llm, lambda: [o.token_ids for o in llm.generate(prompts, GREEDY)])
    llm.loop.handle(FlushCacheMsg("flush"))
    group, once = computed(llm, lambda: [o.token_ids for o in llm.generate(prompts, GREEDY, group="fork")])
    assert group == apart
    assert group[0] == alone[0]
    assert (cold, once) == (169, 169 + 7 * 9)
    assert reuse >= 2 * once, "without a group several compute the same"


def test_the_outputs_of_one_prompt_are_a_group(llm: LLM):
    (prompt,) = prompts_of([163])
    outputs, once = computed(llm, lambda: llm.generate(prompt, SamplingParams(max_new_tokens=4, n=5, seed=1)))
    assert len(outputs) == 5
    assert once == 163 + 4 * 3
    assert llm.loop.stats().pages_pinned == 0


def test_members_that_come_one_by_one(llm: LLM):
    first, *late = prompts_of([9] * 3, shared=160)
    llm.generate(first, GREEDY, group="g", group_size=3)
    assert llm.loop.stats().pages_pinned == 10
    for prompt, left in zip(late, (10, 0), strict=True):
        (output,) = llm.generate(prompt, GREEDY, group="g", group_size=3)
        assert output.cached_tokens == 160
        assert llm.loop.stats().pages_pinned == left


def test_a_session_is_kept_warm_while_others_come(llm: LLM):
    """The pool has 119 pages; the other requests need more than that, one after another."""
    (text,) = prompts_of([200])
    for turn in range(3):
        (output,) = llm.generate(text, GREEDY, session="talk")
        assert output.cached_tokens == (0 if turn == 0 else (len(text) - 10 - 1) // 16 * 16)
        for prompt in prompts_of([300] * 8, seed=10 + turn):
            llm.generate(prompt, PREFILL)
        text = [*text, *output.token_ids, *range(10)]
    assert llm.loop.stats().pages_pinned > 0
    assert llm.loop.stats().pages_used == 0


def test_hints_that_cannot_be_meant(llm: LLM):
    for hints, words in (
        ({"group": 3}, "group is 3"),
        ({"group": "g", "group_size": 0}, "group_size is 0"),
        ({"session": b"s"}, "session is b's'"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate([1, 2], GREEDY, **hints)
    with pytest.raises(RequestError, match="2 outputs of session 's'"):
        llm.generate([[1, 2], [3, 4]], GREEDY, session="s")


@pytest.mark.parametrize("length", [1, 15, 16, 160, 700])
def test_a_prompt_alone(llm: LLM, length: int):
    """The prompt is sent once when nothing is cached and once when all is; then its continuation finds it in the
    cache."""
    (prompt,) = prompts_of([length])
    for _ in range(2):
        (output,) = llm.generate(prompt, PREFILL)
        assert (output.token_ids, output.text, output.finish.kind) == ([], "", FinishKind.LENGTH)
    assert output.cached_tokens == (length - 1) // 16 * 16
    assert llm.loop.stats().pages_cached == length // 16
    (output,) = llm.generate([*prompt, 5], GREEDY)
    assert output.cached_tokens == length // 16 * 16


@pytest.mark.parametrize("cached", [False, True])
def test_log_probabilities_of_a_prompt_alone(llm: LLM, cached: bool):
    (prompt,) = prompts_of([600])
    if cached:
        llm.generate(prompt, PREFILL)
    with_token = SamplingParams(max_new_tokens=1, prompt_logprobs=2)
    (want,) = llm.generate(prompt, with_token)
    (got,) = llm.generate(prompt, SamplingParams(max_new_tokens=0, prompt_logprobs=2))
    assert got.token_ids == []
    assert [e.token_id for e in got.prompt_logprobs] == prompt
    assert got.prompt_logprobs[0].logprob is None
    for a, b in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_prompts_alone_amid_others_and_drafts(llm: LLM):
    prompts = prompts_of([30 + 10 * i for i in range(12)], shared=40)
    params = [PREFILL if i % 3 == 0 else GREEDY for i in range(12)]
    want = [o.token_ids for o in llm.generate(prompts, params)]
    assert [len(tokens) for tokens in want] == [0 if i % 3 == 0 else 6 for i in range(12)]
    drafter = TreeDrafter(chain=True)
    with drafting(llm, drafter):
        assert [o.token_ids for o in llm.generate(prompts, params)] == want


def test_prompts_alone_can_be_aborted(llm: LLM):
    traffic = Traffic(llm)
    for i, prompt in enumerate(prompts_of([700] * 2)):
        traffic.add(f"r{i}", prompt, PREFILL)
    traffic.step()
    traffic.abort("r1")
    traffic.finish()
    assert (traffic.kind("r0"), traffic.kind("r1")) == (FinishKind.LENGTH, FinishKind.ABORT)
