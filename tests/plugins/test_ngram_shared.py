"""Test the n-gram drafter's drafts for one request from the texts of other requests: against a plain search, within
its bounds, and never across namespaces.

Run: python -m pytest -q tests/plugins/test_ngram_shared.py
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.interfaces.speculative import DrafterContext
from dovetail.sampling_params import SamplingParams
from dovetail.testing.drafter import RunningRequest, draft_of, make_committed, make_decode_batch, make_running
from dovetail.types import ForwardOutput
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram import NgramDrafter

CONTEXT = DrafterContext(torch.device("cpu"), vocab_size=64, max_rows=16, max_context=256)
NOTHING = ForwardOutput(torch.zeros(0, 1, dtype=torch.int64))
STORY = list(range(10, 40))


def make(**fields: object) -> NgramDrafter:
    defaults: dict[str, object] = {"min_ngram": 2, "max_ngram": 2, "num_draft_tokens": 4}
    return NgramDrafter(NgramConfig.model_validate(defaults | fields), CONTEXT)


def request(uid: int, text: list[int], prompt_len: int = 0, **fields: Any) -> RunningRequest:
    return make_running(uid, text, prompt_len=prompt_len, **fields)


def observe(drafter: NgramDrafter, *reqs: RunningRequest) -> None:
    """Let the drafter see a step that has been committed."""
    drafter.observe(make_decode_batch(reqs, [9] * len(reqs)), NOTHING, make_committed(reqs))


def say(drafter: NgramDrafter, *reqs: RunningRequest) -> None:
    """Run the requests to their ends."""
    observe(drafter, *reqs)
    for req in reqs:
        drafter.forget(req.departed)


def ask(drafter: NgramDrafter, req: RunningRequest, limit: int = 9) -> list[int]:
    return [token for token, _ in draft_of(drafter.propose(make_decode_batch([req], [limit])), 0)]


def test_the_text_of_one_request_is_drafted_for_the_next():
    drafter = make()
    say(drafter, request(0, STORY))
    assert ask(drafter, request(1, [1, 2, 15, 16])) == [17, 18, 19, 20]
    assert ask(drafter, request(2, [1, 2, 38, 39])) == []
    assert ask(drafter, request(3, [1, 2, 37, 38])) == [39], "not beyond the end"
    assert ask(drafter, request(4, [1, 2, 15, 16]), limit=2) == [17, 18]


def test_the_longest_match_wins_and_then_the_own_text_and_then_the_latest():
    for longest in (2, 3):
        drafter = make(max_ngram=longest)
        say(drafter, request(0, [5, 6, 7, 8]), request(1, [9, 6, 7, 11]))
        assert ask(drafter, request(2, [6, 7, 1, 2, 6, 7])) == [1, 2, 6, 7]
        assert ask(drafter, request(3, [6, 7, 1, 2, 5, 6, 7])) == ([8] if longest == 3 else [1, 2, 5, 6])
        assert ask(drafter, request(4, [1, 2, 6, 7])) == ([11] if longest == 2 else [])


def test_prompts_are_learnt_where_that_is_wanted():
    text = [*STORY, 1, 2, 3]
    for share_prompts in (False, True):
        drafter = make(share_prompts=share_prompts)
        say(drafter, request(0, text, prompt_len=30))
        assert ask(drafter, request(1, [7, 15, 16])) == ([17, 18, 19, 20] if share_prompts else [])
        assert ask(drafter, request(2, [7, 38, 39])) == [1, 2, 3], "the end of the prompt leads to the output"


def test_a_running_request_is_learnt_too_with_what_follows():
    drafter = make(num_draft_tokens=6)
    teller = request(0, STORY * 3, namespace="")
    for known in range(1, 91):
        teller.known_len = known
        observe(drafter, teller)
        draft = ask(drafter, request(1, [1, 2, 15, 16]))
        drafter.forget(request(1, [1, 2, 15, 16]).departed)
        assert draft in ([], list(range(17, 23))), "all that may be drafted, or nothing"
        assert draft or known < 50
    assert ask(drafter, request(2, [1, 2, 15, 16])) == list(range(17, 23))


def test_namespaces_are_separate(monkeypatch: pytest.MonkeyPatch):
    """This holds even if the digests of their names are equal."""
    for same_digest in (False, True):
        if same_digest:
            digest = type("Digest", (), {"digest": lambda self: b"12345678"})()
            monkeypatch.setattr(
                "dovetail_speculative.ngram_memory.hashlib.blake2b", lambda *_, digest=digest, **__: digest
            )
        drafter = make()
        for i, namespace in enumerate(["", "a", "b"]):
            say(drafter, request(i, [20, 21, 22, 23 + i], namespace=namespace))
            others = [name for name in ("", "a", "b", "c") if name > namespace]
            for other in others:
                assert ask(drafter, request(9, [1, 20, 21, 22], namespace=other)) == []
                drafter.forget(request(9, [1]).departed)
            assert ask(drafter, request(9, [1, 20, 21, 22], namespace=namespace)) == [23 + i]
            drafter.forget(request(9, [1]).departed)


def test_an_ngram_that_looks_like_a_shorter_one_and_a_name_is_none():
    name = np.array([8, 9], np.int32).tobytes().decode()
    drafter = make(min_ngram=1, max_ngram=3)
    say(drafter, request(0, [6, 7, 8, 9, 10]))
    assert ask(drafter, request(1, [1, 6, 7], namespace=name)) == []


def follow(drafter: NgramDrafter, req: RunningRequest, text: list[int]) -> list[list[int]]:
    """Return the drafts while ``req`` continues as ``text``, one token at a time."""
    drafts = []
    for token in text:
        batch = make_decode_batch([req], [9])
        drafts.append([token for token, _ in draft_of(drafter.propose(batch), 0)])
        req.append([token])
        drafter.observe(batch, NOTHING, make_committed([req]))
    return drafts


@pytest.mark.parametrize("shared", [0, 1000])
def test_what_came_to_nothing_is_not_drafted_until_it_would_have_been_right(shared: int):
    """After 1, 2 comes another token each time, and after 3, 4 always the same."""
    drafter = make(shared=shared, num_draft_tokens=1)
    text = [1, 2, 10, 3, 4, 5, 1, 2, 11, 3, 4, 5, 1, 2, 12, 3, 4, 5, 1, 2, 12, 3, 4, 5, 1, 2]
    drafts = follow(drafter, request(0, text[:2]), text[2:])
    assert [draft for place, draft in enumerate(drafts, 2) if text[place - 2 : place] == [1, 2]] == [[], [10], [], []]
    assert [draft for place, draft in enumerate(drafts, 2) if text[place - 2 : place] == [3, 4]] == [[], [5], [5], [5]]
    assert follow(drafter, request(0, text), [12]) == [[12]], "it was right, although it was not drafted"


def test_a_single_token_must_prove_itself():
    text = [1, 10, 1, 10, 1, 10, 1, 10]
    assert follow(make(min_ngram=1, max_ngram=1), request(0, text[:1]), text[1:])[2:] == [
        [],
        [],
        [10, 1, 10, 1],
        [1, 10, 1, 10],
        [10, 1, 10, 1],
    ]


def test_requests_without_drafts_teach_nothing():
    drafter = make()
    say(drafter, request(0, STORY, params=SamplingParams(speculative=False)))
    assert ask(drafter, request(1, [1, 2, 15, 16])) == []


@pytest.mark.parametrize("shared", [2, 10, 64, 300])
def test_memory_is_bounded_and_as_long_as_promised(shared: int):
    rng, drafter, said = np.random.default_rng(shared), make(shared=shared, min_ngram=2, max_ngram=3), []
    memory = drafter._shared
    assert memory is not None
    for uid in range(400):
        text = rng.integers(0, 40, rng.integers(1, 60)).tolist()
        say(drafter, request(uid, text))
        said += text
        assert len(memory._recent) + len(memory._older) <= 2 * shared
        assert sum(len(text.tokens) for text in memory._texts.values()) <= 2 * (shared + 60) + len(memory._texts)
        assert len(memory._texts) <= shared + 2
        assert not memory._running
        for start in range(min(len(text), shared // 2) - 4):
            end = text[len(text) - start - 4 :][:3]
            found = ask(drafter, request(1000, [63, *end]), limit=1)
            drafter.forget(request(1000, [63]).departed)
            assert found, "all texts in half of the memory are known"


def test_a_retracted_request_is_not_learnt_twice():
    drafter = make()
    req = request(0, STORY)
    say(drafter, req)
    memory = drafter._shared
    assert memory is not None
    before = memory._left
    again = request(0, STORY, retracted=True)
    again.append([50, 51, 52])
    observe(drafter, again)
    drafter.forget(again.departed)
    assert before - memory._left == 3
    assert ask(drafter, request(1, [1, 38, 39])) == [50, 51, 52]


def test_the_same_history_makes_the_same_drafts():
    def drafts() -> list[list[int]]:
        rng, drafter, out = np.random.default_rng(0), make(shared=100), []
        for uid in range(60):
            req = request(uid, rng.integers(0, 6, 40).tolist())
            out.append(ask(drafter, req))
            say(drafter, req)
        return out

    first = drafts()
    assert drafts() == first
    assert sum(map(len, first)) > 100


def test_the_cost_is_small():
    """Measure the processor time of a step of 64 rows, each two tokens longer than before. The bound is far above the
    need (15 us a row)."""
    drafter, rng = make(), np.random.default_rng(0)
    reqs = [request(uid, rng.integers(0, 50, 200).tolist()) for uid in range(64)]
    seconds = []
    for known in range(20, 200, 2):
        for req in reqs:
            req.known_len = known
        batch, committed = make_decode_batch(reqs, [4] * 64), make_committed(reqs)
        start = time.thread_time()
        drafter.propose(batch)
        drafter.observe(batch, NOTHING, committed)
        seconds.append(time.thread_time() - start)
    assert np.median(seconds) / 64 < 100e-6


@pytest.mark.parametrize("forgotten_first", [False, True])
def test_nothing_is_kept_of_a_request_that_has_ended(forgotten_first: bool):
    """The step in which it ended may be observed before or after it is forgotten."""
    drafter, req = make(), request(0, STORY)
    observe(drafter, req)
    ask(drafter, req)
    req.append([40, 41])
    req.ended = True
    for _ in range(2):
        if forgotten_first:
            drafter.forget(req.departed)
        else:
            observe(drafter, req)
        forgotten_first = not forgotten_first
    memory = drafter._shared
    assert memory is not None
    assert not drafter._states
    assert not memory._running
    assert ask(drafter, request(1, [1, 2, 38, 39])) == [40, 41], "its last tokens are remembered"


def test_a_request_that_was_never_seen_is_forgotten_without_a_trace():
    drafter = make()
    drafter.forget(request(0, STORY).departed)
    assert ask(drafter, request(1, [1, 2, 15, 16])) == []
