"""Test that drafts run per request and while they pay, and that no text depends on either.

.venv/bin/python -m pytest -q tests/e2e/test_draft_switch.py
"""

import pytest

from dovetail import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "Sort these numbers: 5, 3, 9, 1, 7, 5, 3, 9, 1, 7."}]


def ask(llm, count=1, **params):
    text = llm.tokenizer.apply_chat_template(QUESTION)
    prompt = llm.tokenizer.encode(text, add_special_tokens=False)
    given = [SamplingParams(max_new_tokens=40, seed=i, **({"temperature": 0.0} | params)) for i in range(count)]
    return [output.token_ids for output in llm.generate([prompt] * count, given)]


@pytest.fixture(scope="module")
def said():
    """Return what the target generates without drafts; computed once."""
    plain, answers = LLM("tiny", device="cpu"), {}

    def answer(count=1, **params):
        key = (count, *sorted(params.items()))
        if key not in answers:
            answers[key] = ask(plain, count, **params)
        return answers[key]

    return answer


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draft", ["adaptive", "always"])
def test_texts_are_the_same_with_overlap_and_drafts(said, overlap, draft):
    llm = LLM("tiny", device="cpu", speculative="ngram", scheduler={"overlap": overlap, "draft": draft})
    for _ in range(3):
        assert ask(llm) == said()
        assert ask(llm, 5, temperature=0.9) == said(5, temperature=0.9)
    assert llm.loop.stats().drafted_tokens > 0
    assert llm.loop.drafter_errors == 0
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_switching_in_the_middle_of_texts_changes_none(said, overlap, monkeypatch):
    llm = LLM("tiny", device="cpu", speculative="ngram", scheduler={"overlap": overlap})
    asked = []

    def in_turns(rows):
        asked.append(rows)
        return len(asked) // 3 % 2 == 0

    monkeypatch.setattr(llm.loop.adaptive_drafting, "should_draft", in_turns)
    assert ask(llm, 4, temperature=0.9) == said(4, temperature=0.9)
    assert len(asked) > 12
    assert llm.loop.stats().drafted_tokens > 0
    llm.loop.scheduler.check_integrity()


def test_nothing_is_kept_of_requests_that_end_while_drafts_are_off(said, monkeypatch):
    """The next step that the drafter sees was launched before the host read their end, and after the drafter had
    forgotten them."""
    llm = LLM("tiny", device="cpu", speculative="ngram", scheduler={"overlap": True})
    drafter, asked, gone, late = llm.loop.executor.rank.drafter, [], set(), []
    observe, forget = drafter.observe, drafter.forget

    def one_in_four(rows):
        asked.append(rows)
        return len(asked) % 4 == 0

    def watch(batch, output, committed):
        late.extend(gone.intersection(req.uid for req in batch.reqs))
        observe(batch, output, committed)

    def note(request):
        gone.add(request.uid)
        forget(request)

    monkeypatch.setattr(llm.loop.adaptive_drafting, "should_draft", one_in_four)
    monkeypatch.setattr(drafter, "observe", watch)
    monkeypatch.setattr(drafter, "forget", note)
    for _ in range(4):
        stops = {"temperature": 2.0, "stop": ("9", "a")}
        assert ask(llm, 12, **stops) == said(12, **stops)
    assert late
    assert not drafter._states
    assert not drafter._shared._running


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_is_retracted_and_admitted_at_once_is_drafted_again(said, monkeypatch, overlap):
    """For a drafter that reads hidden states the request is new: the drafter forgets it before its prompt is shown
    again, not after."""
    scheduling = {"overlap": overlap, "draft": "always"}
    llm = LLM("tiny", device="cpu", speculative="eagle3", scheduler=scheduling)
    rows, drafter, drafted = llm.loop.scheduler._rows, llm.loop.executor.rank.drafter, []
    reserve, propose = rows.reserve, drafter.propose

    def retracting(width, retract):
        if len(drafted) == 3 and rows.reqs:
            drafted.append("retracted")
            retract(rows.reqs[0])
        return reserve(width, retract)

    def watched(batch):
        tree = propose(batch)
        drafted.append(tree is not None)
        return tree

    monkeypatch.setattr(rows, "reserve", retracting)
    monkeypatch.setattr(drafter, "propose", watched)
    assert ask(llm) == said()
    assert llm.loop.stats().retractions == 1
    assert drafted[:3] == [True] * 3
    assert all(drafted[4:-1])
    assert len(drafted) > 6


def test_a_request_may_decline_drafts(said):
    llm = LLM("tiny", device="cpu", speculative="ngram", scheduler={"draft": "always"})
    assert ask(llm, speculative=False) == said()
    assert llm.loop.stats().drafted_tokens == 0
    ask(llm)
    assert llm.loop.stats().drafted_tokens > 0


def test_requests_that_accept_little_get_few_drafts(said):
    llm = LLM("tiny", device="cpu", speculative={"kind": "ngram", "num_draft_tokens": 8})
    widths = []
    propose = llm.loop.executor.rank.drafter.propose

    def watch(batch):
        widths.append(int(batch.draft_limits.max()))
        return propose(batch)

    llm.loop.executor.rank.drafter.propose = watch
    llm.loop.adaptive_drafting._always = True
    assert ask(llm, temperature=5.0, ignore_eos=True) == said(temperature=5.0, ignore_eos=True)
    drafted = llm.loop.stats().drafted_tokens
    assert widths[0] == 8
    assert not drafted or widths[-2] < 8
