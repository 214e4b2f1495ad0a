"""Test that sampling parameters are taken by the names of vLLM and SGLang.

Run: python -m pytest -q tests/core/test_sampling_names.py
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from dovetail.errors import RequestError
from dovetail.llm.arguments import params_of_each, sampling_params_of
from dovetail.sampling_names import OTHER_NAMES, UNUSED
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

VLLM = {
    "n": 2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "temperature": 0.5, "top_p": 0.9,
    "top_k": -1, "min_p": 0.1, "seed": 5, "stop": "x", "stop_token_ids": [3], "bad_words": ["no"], "ignore_eos": True,
    "max_tokens": 7, "min_tokens": 2, "logprobs": 3, "prompt_logprobs": 1, "detokenize": True, "skip_special_tokens": False,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": True, "logit_bias": {"4": 1.5},
    "allowed_token_ids": [1, 2], "structured_outputs": {"regex": "a+", "json": None, "disable_any_whitespace": False},
}  # fmt: skip
SGLANG = {
    "max_new_tokens": 7, "min_new_tokens": 2, "stop": ["x", "y"], "stop_token_ids": [3], "stop_regex": "a+b", "top_k": 4,
    "sampling_seed": 5, "no_stop_trim": True, "stream_interval": 1, "json_schema": '{"type": "object"}', "n": None,
}  # fmt: skip


def test_mappings_of_either_peer_are_taken():
    made = sampling_params_of(VLLM)
    assert (made.max_new_tokens, made.min_new_tokens, made.stop, made.include_stop) == (7, 2, ("x",), True)
    assert (made.stop_token_ids, made.bad_words, made.allowed_token_ids) == ((3,), ("no",), (1, 2))
    assert (made.logit_bias, made.grammar) == ({4: 1.5}, GrammarSpec(GrammarKind.REGEX, "a+"))
    same = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "seed",
            "ignore_eos", "logprobs", "prompt_logprobs", "skip_special_tokens")  # fmt: skip
    assert {name: getattr(made, name) for name in same} == {name: VLLM[name] for name in same}
    made = sampling_params_of(SGLANG)
    expected = SamplingParams(
        max_new_tokens=7, min_new_tokens=2, stop=("x", "y"), stop_token_ids=(3,), stop_regex=("a+b",), top_k=4, seed=5,
        include_stop=True, grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"object"}'),
    )  # fmt: skip
    assert made == expected
    json_object = sampling_params_of({"guided_decoding": {"json_object": True}}).grammar
    assert json_object == GrammarSpec(GrammarKind.JSON_OBJECT)
    assert params_of_each([{"max_tokens": 1}, made], 2) == [SamplingParams(max_new_tokens=1), made]


def test_the_constructor_takes_other_names_too():
    assert SamplingParams(max_tokens=3, stop="a", bad_words=None) == SamplingParams(max_new_tokens=3, stop=("a",))
    made = SamplingParams(max_tokens=3, stop=["a"])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made


@pytest.mark.parametrize(
    ("given", "param", "text"),
    [
        ({"max_token": 1}, "max_token", "Is max_tokens meant?"),
        ({"zebra": 1}, "zebra", "no sampling parameter 'zebra'; allowed: .*max_new_tokens"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "max_new_tokens", "given twice, as max_tokens and max_new_tokens"),
        ({"detokenize": False}, "detokenize", "allowed: True"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "has xml; allowed: json, regex"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "not supported.*max_whitespace",
        ),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "only one constraint"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"stop": 5}, "stop", "stop is 5"),
    ],
)
def test_what_is_not_understood_is_refused(given: dict[str, Any], param: str, text: str):
    with pytest.raises(RequestError, match=text) as raised:
        sampling_params_of(given)
    assert raised.value.param == param


def test_the_names_are_names():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(OTHER_NAMES.values()) <= fields
    assert not fields & {*OTHER_NAMES, *UNUSED}
