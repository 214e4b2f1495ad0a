"""Test what requests may set about sampling, on small engines: with and without overlap, drafts and retraction.

Run: python -m pytest -q tests/e2e/test_sampling_requests.py
"""

from __future__ import annotations

import functools
import re

import engine_models as models
import pytest

from dovetail import LLM, RequestError, SamplingParams
from dovetail.config.checkpoint import EMBEDDED
from dovetail.types import FinishKind

ENGINES = {
    "plain": {},
    "overlap, retraction": {
        "scheduler": {"overlap": True, "chunk_size": 8},
        "memory": {"num_pages": 130, "page_size": 1},
        "model": {"context_len": 120},
    },
    "drafts": {"speculative": "ngram"},
}
THINK = {"enable_thinking": True}
PROMPTS = ["Once upon a time there was a", "The little dog ran to the", "She said: I like the the the"]


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def llm(request: pytest.FixtureRequest):
    sections = {**request.param, "model": {"dtype": "float32", **request.param.get("model", {})}}
    made = LLM("tiny", device="cpu", grammar="none", reasoning_parser="none", **sections)
    yield made
    made.loop.scheduler.check_integrity()
    made.close()


@pytest.fixture(scope="module")
def reference():
    return models.Reference(EMBEDDED["tiny"])


def check_exercised(llm: LLM) -> None:
    """Check that the engine has drafted, or has retracted requests, if it is the one that should."""
    stats = llm.loop.stats()
    assert stats.drafted_tokens or not llm.loop.scheduler.limits.draft_width
    assert stats.retractions or llm.loop.scheduler.ledger.page_size > 1


def cut_at(text: str, pattern: str, *, keep: bool) -> str:
    """Return ``text`` up to the match of ``pattern`` that ends first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            if re.compile(pattern).fullmatch(text[:end], start):
                return text[: end if keep else start]
    return text


@pytest.mark.sample(2)
@pytest.mark.parametrize("pattern", [r"[a-z]+[.!]", r"\s(a|e)\w{2,}\s", r"e.*e.*e", "^[A-Z ].*,", "nowhere[0-9]{9}"])
def test_a_stop_expression_ends_the_output_where_re_finds_it(llm: LLM, pattern: str):
    given = {"max_new_tokens": 60, "ignore_eos": True, "temperature": 0.8, "seed": 3, "n": 2}
    free = llm.generate(PROMPTS, SamplingParams(**given))
    assert any(re.search(pattern, out.text) for out in free) == ("nowhere" not in pattern)
    for keep in (False, True):
        stopped = llm.generate(PROMPTS, SamplingParams(**given, stop_regex=(pattern,), include_stop=keep))
        for full, out in zip(free, stopped, strict=True):
            assert out.text == cut_at(full.text, pattern, keep=keep)
            assert out.finish is not None
            if re.search(pattern, full.text):
                assert (out.finish.kind, out.finish.matched) == (FinishKind.STOP, pattern)
                assert out.token_ids == full.token_ids[: len(out.token_ids)]
            else:
                assert out.finish == full.finish


def allowed_at(params: SamplingParams, outputs: list[int], words: list[list[int]], vocab: int) -> set[int]:
    """Return the tokens that may follow ``outputs``, by the definition of vLLM."""
    allowed = set(range(vocab)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
    for *prefix, last in words:
        if not prefix or outputs[-len(prefix) :] == prefix:
            allowed.discard(last)
    return allowed


def check_greedy(reference, out, allowed) -> None:
    """Check that each token is the most likely one of ``allowed(outputs so far)``."""
    logits = reference.logprobs(out.prompt_ids + out.token_ids)
    for i, token in enumerate(out.token_ids):
        among = sorted(allowed(out.token_ids[:i]))
        assert token in among
        row = logits[len(out.prompt_ids) + i - 1]
        assert row[token] > row[among].max() - 1e-3


def test_bad_words_and_allowed_tokens_leave_what_the_definition_leaves(llm: LLM, reference):
    assert llm.tokenizer is not None
    encode = lambda text: llm.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    given = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    free = llm.generate(PROMPTS, SamplingParams(**given))
    said = " ".join(out.text for out in free).split()
    bad = ("the", "was", *{word for word in said if len(encode(f" {word}")) > 1}, said[0])
    words = [encode(text) for word in bad for text in (word, f" {word}")]
    words = [ids for i, ids in enumerate(words) if i % 2 == 0 or len(ids) == len(words[i - 1])]
    some = tuple(sorted({token for out in free for token in out.token_ids}))
    for extra in ({"bad_words": bad}, {"allowed_token_ids": some[::2]}, {"bad_words": bad, "allowed_token_ids": some}):
        params = SamplingParams(**given, **extra)
        used = words if params.bad_words else []
        for out in llm.generate(PROMPTS, params):
            check_greedy(reference, out, functools.partial(allowed_at, params, words=used, vocab=4096))
    sampled = SamplingParams(max_new_tokens=40, seed=1, n=3, bad_words=bad, allowed_token_ids=some)
    for out in llm.generate(PROMPTS, sampled):
        assert all(t in allowed_at(sampled, out.token_ids[:i], words, 4096) for i, t in enumerate(out.token_ids))
    check_exercised(llm)


def test_restrictions_that_cannot_be_met_are_refused(llm: LLM):
    assert llm.tokenizer is not None
    (the,) = llm.tokenizer.encode(" the", add_special_tokens=False)
    for params, param in (
        ({"allowed_token_ids": (4096,)}, "allowed_token_ids"),
        ({"bad_words": ("the",), "allowed_token_ids": (the,)}, "bad_words"),
        ({"token_ids_logprob": (9999,)}, "token_ids_logprob"),
    ):
        with pytest.raises(RequestError) as raised:
            llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=3, **params))
        assert raised.value.param == param
    for wrong in (
        {"bad_words": (" ",)},
        {"allowed_token_ids": ()},
        {"thinking_budget": -1},
        {"token_ids_logprob": (-1,)},
    ):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            SamplingParams(**wrong)


def test_log_probabilities_of_given_tokens(llm: LLM, reference):
    ids = (7, 100, 2000)
    many = [
        SamplingParams(max_new_tokens=5, token_ids_logprob=ids, prompt_logprobs=2, seed=1),
        SamplingParams(max_new_tokens=5, token_ids_logprob=ids[:1], logprobs=3, seed=1),
        SamplingParams(max_new_tokens=5, logprobs=1, prompt_logprobs=0, prompt_logprobs_start=2, seed=1),
    ]
    for out, params in zip(llm.generate(PROMPTS, many), many, strict=True):
        expected = reference.logprobs(out.prompt_ids + out.token_ids)
        asked = params.token_ids_logprob or ()
        places = [(len(out.prompt_ids) + i, entry, params.logprobs) for i, entry in enumerate(out.logprobs)]
        places += [
            (params.prompt_logprobs_start + i, entry, params.prompt_logprobs)
            for i, entry in enumerate(out.prompt_logprobs or ())
            if entry.logprob is not None
        ]
        assert len(out.logprobs) == len(out.token_ids)
        for place, entry, top in places:
            row = expected[place - 1]
            assert [token for token, _ in entry.given] == list(asked)
            assert [value for _, value in entry.given] == pytest.approx(row[list(asked)].tolist(), abs=2e-3)
            assert [value for _, value in entry.top] == pytest.approx(row.topk(top or 0).values.tolist(), abs=2e-3)
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)


def test_reasoning_ends_with_its_budget():
    for sections in ENGINES.values():
        llm = LLM("tiny", device="cpu", grammar="none", reasoning_parser="qwen3", **sections)
        assert llm.tokenizer is not None
        end = llm.tokenizer.token_to_id("</think>")
        free = {"max_new_tokens": 20, "seed": 1, "ignore_eos": True, "logit_bias": {end: -100.0}}
        each = [SamplingParams(**free, n=2), *(SamplingParams(**free, n=2, thinking_budget=count) for count in (0, 5))]
        outputs = llm.generate(["Hi <think>\n"] * 3, each)
        for i, out in enumerate(outputs):
            at = (None, 0, 5)[i // 2]
            assert [place for place, token in enumerate(out.token_ids) if token == end] == ([] if at is None else [at])
            assert out.token_ids[:at] == outputs[i % 2].token_ids[:at]
        answers = llm.generate(["Hi </think>"] * 2, [each[0], each[2]])
        assert answers[0].token_ids == answers[2].token_ids, "there is no reasoning to end"
        chat = llm.chat(
            [{"role": "user", "content": "Hi"}], SamplingParams(**free, thinking_budget=3), chat_template_kwargs=THINK
        )
        assert [place for place, token in enumerate(chat.token_ids) if token == end] == [3]
        begin = llm.tokenizer.token_to_id("<think>")
        again = SamplingParams(**free | {"logit_bias": {begin: 100.0, end: -100.0}}, thinking_budget=3)
        ids = llm.generate("Hi <think>\n", again)[0].token_ids
        assert ids[:4] == [begin, begin, begin, end]
        assert not {begin, end} & {*ids[4:]}, "it reasons again"
        llm.close()


def test_a_budget_needs_a_reasoning_parser(llm: LLM):
    for call in (llm.generate, lambda text, params: llm.chat([{"role": "user", "content": text}], params)):
        with pytest.raises(RequestError, match="reasoning parser") as raised:
            call("Hi", SamplingParams(thinking_budget=3))
        assert raised.value.param == "thinking_budget"


def test_calls_take_mappings_under_either_name(llm: LLM):
    own = SamplingParams(max_new_tokens=6, seed=1, stop=("zzz",))
    given = {"max_tokens": 6, "seed": 1, "stop": "zzz"}
    expected = llm.generate(PROMPTS[0], own)[0]
    assert llm.generate(PROMPTS[0], sampling_params=given)[0].token_ids == expected.token_ids
    assert llm.generate([PROMPTS[0]], [given])[0].token_ids == expected.token_ids
    assert "".join(llm.stream(PROMPTS[0], sampling_params=given)) == expected.text
    chat = [{"role": "user", "content": "Hi"}]
    assert llm.chat(chat, sampling_params=given).text == llm.chat(chat, own).text
    assert "".join(llm.stream_chat_text(chat, sampling_params=given)) == llm.chat(chat, own).text
    with pytest.raises(RequestError, match="both given"):
        llm.generate(PROMPTS[0], own, sampling_params=given)
