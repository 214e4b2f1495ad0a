"""Test uses and misuses of LLM: wrong requests are refused and leave nothing behind, streams may be interleaved and closed.

.venv/bin/python -m pytest -q tests/e2e/test_llm_uses.py
"""

import itertools
from dataclasses import replace

import engine_models as models
import numpy as np
import pytest
from engine_runs import check_idle, make_llm, prompts_of, results

from dovetail import LLM, SamplingParams
from dovetail.errors import RequestError

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


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        (5, None, "prompts is a int"),
        (None, None, "prompts is a NoneType"),
        ({"prompt": "x"}, None, "prompts is a dict"),
        (b"bytes", None, "prompts is a bytes"),
        ([1.5], None, "a prompt is 1.5"),
        ([[1, 2.5]], None, r"a prompt is \[1, 2.5\]"),
        ([1, "x"], None, r"a prompt is \[1, 'x'\]"),
        ([[1], None], None, "a prompt is None"),
        ([[]], None, "the prompt is empty"),
        ("", None, "the prompt is empty"),
        (["fine", ""], None, "the prompt is empty"),
        ([[1], [2**40]], None, r"token ids must be in \[0, "),
        ([[1], [-1]], None, r"token ids must be in \[0, "),
        ("x", {"temperatur": 0}, "no sampling parameter 'temperatur'. Is temperature meant"),
        ("x", [SamplingParams()] * 2, "2 sampling params for 1 prompts"),
        (["x", "y"], [SamplingParams(), None], "params is"),
    ],
)
def test_wrong_uses_are_refused_and_leave_nothing(tiny, prompts, params, text):
    with pytest.raises(RequestError, match=text):
        tiny.generate(prompts, params)
    check_idle(tiny)
    assert tiny._runs == {}


@pytest.mark.parametrize(
    "bad",
    [
        {"stop": ("",)},
        {"stop_token_ids": 5},
        {"stop_token_ids": ("a",)},
        {"logit_bias": [(1, 2.0)]},
        {"logit_bias": {"1": 2.0}},
        {"grammar": "[a-z]+"},
        {"temperature": "hot"},
        {"repetition_penalty": 1e-40},
        {"max_new_tokens": 2.0},
        {"seed": 2**63},
    ],
    ids=str,
)
def test_wrong_sampling_params_are_refused(bad):
    with pytest.raises(RequestError, match=f"{next(iter(bad))} is .*; allowed: "):
        SamplingParams(**bad)


def test_harmless_uses(tiny):
    assert tiny.generate([]) == []
    params = SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True)
    one = tiny.generate([5, 6, 7], params)
    for same in ((5, 6, 7), [[5, 6, 7]], ((5, 6, 7),), list(np.array([5, 6, 7]))):
        assert results(tiny.generate(same, params)) == results(one)
    text, ids = tiny.generate(["Hello", tiny.tokenizer.encode("Hello")], [params, params])
    assert results([text]) == results([ids])
    with_list = replace(params, stop=["zzz"], stop_token_ids=[9])
    assert results(tiny.generate([5, 6, 7], with_list)) == results(one)


def test_streams_join_to_the_text_and_may_take_turns(tiny):
    prompts = ["The quick brown", "What is", "One two three"]
    expected = [o.text for o in tiny.generate(prompts, STORY)]
    streams, texts = [tiny.stream(p, STORY) for p in prompts], [""] * 3
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == expected
    text = ""
    for i, piece in enumerate(tiny.stream(prompts[0], STORY)):
        text += piece
        if i == 3:
            assert [o.text for o in tiny.generate(prompts, STORY)] == expected
    assert text == expected[0]
    check_idle(tiny)


def test_closing_a_stream_early_frees_its_pages(tiny):
    stream, other = tiny.stream("The quick brown", STORY), tiny.stream("What is", STORY)
    text = [next(stream), next(stream)]
    text2 = next(other)
    assert tiny.loop.stats().pages_used > 0
    stream.close()
    assert tiny.loop.stats().running == 1
    assert text2 + "".join(other) == tiny.generate("What is", STORY)[0].text
    check_idle(tiny)
    next(begun := tiny.stream("What is", STORY))
    begun.close()
    tiny.stream("never begun", STORY)
    check_idle(tiny)
    assert "".join(text)


def test_an_error_inside_a_stream_loop_frees_its_pages(tiny):
    def use():
        for _ in tiny.stream("The quick brown", STORY):
            raise LookupError

    with pytest.raises(LookupError):
        use()
    check_idle(tiny)


def test_a_stream_has_one_output_and_says_so_at_once(tiny):
    with pytest.raises(RequestError, match="n is 2; a stream has one output"):
        tiny.stream("x", SamplingParams(n=2))
    with pytest.raises(RequestError, match="a prompt is"):
        tiny.stream(["x", "y"])


def test_a_model_without_tokenizer_takes_ids_only(checkpoint):
    llm = make_llm(checkpoint)
    for call in (
        lambda: llm.generate("text"),
        lambda: llm.stream([1, 2]),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(RequestError, match="loaded without a tokenizer"):
            call()
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([1, 2], SamplingParams(stop=("x",)))
    check_idle(llm)


def test_more_prompts_than_may_wait(checkpoint, reference):
    llm = make_llm(checkpoint, scheduler={"max_waiting": 3, "max_running": 2})
    prompts = prompts_of([4] * 20)
    params = SamplingParams(max_new_tokens=3, temperature=0, n=2)
    outputs = llm.generate(prompts, params)
    for i, output in enumerate(outputs):
        assert output.token_ids == reference.greedy(tuple(prompts[i // 2]), 3)
    check_idle(llm)


def test_a_refused_request_stops_the_others_at_once(checkpoint):
    llm = make_llm(checkpoint)
    with pytest.raises(RequestError, match="token ids must be in"):
        llm.generate([[1, 2, 3]] * 5 + [[models.VOCAB]], SamplingParams(max_new_tokens=400))
    assert llm.loop.stats().steps < 10, "400 and more if the others go on to their end"
    check_idle(llm)
