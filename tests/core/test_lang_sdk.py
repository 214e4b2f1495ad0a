"""Test how the backends of the official clients convert settings. Run: pytest tests/core/test_lang_sdk.py"""

from __future__ import annotations

import pytest

from dovetail.errors import RequestError
from dovetail.lang.backends.sdk import settings
from dovetail.lang.ir import SamplingOptions

NAMES = {"max_tokens": "max_tokens", "stop": "stop_sequences", "temperature": "temperature"}


def test_settings_take_the_names_of_the_api():
    found = settings(SamplingOptions(max_tokens=4, stop=("a", "b"), temperature=0.0), NAMES, "here")
    assert found == {"max_tokens": 4, "stop_sequences": ["a", "b"], "temperature": 0.0}


@pytest.mark.parametrize(
    "given", [{"seed": 0}, {"seed": 3}, {"top_k": 3}, {"logprob_start_len": 0}, {"ignore_eos": True}]
)
def test_what_an_api_does_not_have_is_refused(given: dict[str, int]):
    with pytest.raises(RequestError, match=f"here has no {next(iter(given))}"):
        settings(SamplingOptions(**given), NAMES, "here")


def test_what_changes_nothing_is_left_out():
    neutral = SamplingOptions(
        min_tokens=0,
        stop_token_ids=(),
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        ignore_eos=False,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        return_text_in_logprobs=False,
    )
    assert settings(neutral, NAMES, "here") == {}
