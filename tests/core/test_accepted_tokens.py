"""Test that tokens which one step brings together are taken as if they had come one by one.

.venv/bin/python -m pytest -q tests/core/test_accepted_tokens.py
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import Totals
from dovetail.scheduler.outcome import take_tokens
from dovetail.types import FinishKind, Req, TokenLogprob

VOCAB, EOS = 12, frozenset([3, 4])
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw):
    """Draw a prompt, the tokens so far, and how the request ends."""
    limit = draw(st.integers(1, 12))
    params = SamplingParams(
        max_new_tokens=limit,
        min_new_tokens=draw(st.integers(0, limit)),
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=3))),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 0])),
    )
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=5))
    said = draw(st.lists(st.just(0), max_size=limit - 1))
    return prompt, said, params


def running(prompt, said, params):
    ids = np.zeros(len(prompt) + params.max_new_tokens, np.int32)
    ids[: len(prompt) + len(said)] = prompt + said
    return Req("r", ids, len(prompt), params, known_len=len(prompt) + len(said))


def end_of(params, said, tokens):
    """Return how many of ``tokens`` are taken, and why the rest is not."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS)
    for i, token in enumerate(tokens):
        count = len(said) + i + 1
        if token in stops and count >= params.min_new_tokens:
            return i + 1, FinishKind.STOP
        if count == params.max_new_tokens:
            return i + 1, FinishKind.LENGTH
    return len(tokens), None


@given(requests(), st.lists(TOKENS, min_size=1, max_size=9))
def test_a_run_is_taken_up_to_the_token_that_ends_the_request(request, tokens):
    prompt, said, params = request
    req = running(prompt, said, params)
    logprobs = None if params.logprobs is None else [TokenLogprob(token, -1.0) for token in tokens]
    totals = Totals()
    answer = take_tokens(req, tokens, logprobs, EOS, totals)
    count, kind = end_of(params, said, tokens)

    assert (req.finish.kind if req.finish else None) == kind
    assert answer.finish is req.finish
    assert answer.token_ids == tokens[:count]
    assert answer.completion_tokens == len(said) + count
    assert req.accepted == totals.accepted_tokens == count - 1, (
        "the tokens of a step beyond the one that every step brings"
    )
    assert req.token_ids[: req.known_len].tolist() == prompt + said + tokens[:count]
    assert not req.token_ids[req.known_len :].any(), "tokens after the end do not belong to the request"
    assert answer.logprobs == (None if logprobs is None else logprobs[:count])
    if kind is FinishKind.STOP:
        assert req.finish.matched == tokens[count - 1]
