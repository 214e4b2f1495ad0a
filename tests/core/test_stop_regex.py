"""Test stop expressions against ``re``: where the first match ends, how much of the text it takes, and what is held back.

Run: python -m pytest -q tests/core/test_stop_regex.py
"""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dovetail.errors import RequestError
from dovetail.sampling_params import SamplingParams
from dovetail.stop_regex import MAX_POSITIONS, StopRegexError, StopRegexes
from dovetail.tokenizer.stops import StopCutter

ATOMS = ["a", "b", ".", "[ab]", "[^a]", "\\d", "\\w", "c", "[b-d]", "\\s", "A"]


def joined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequence = st.lists(parts, min_size=1, max_size=3).map("".join)
    choice = st.lists(parts, min_size=2, max_size=3).map(lambda each: f"(?:{'|'.join(each)})")
    repeated = st.tuples(parts, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"]))
    return sequence | choice | repeated.map(lambda pair: f"(?:{pair[0]}){pair[1]}")


PATTERNS = st.tuples(
    st.sampled_from(["", "", "(?i)", "(?s)"]),
    st.sampled_from(["", "", "^", "(?:^|\n)"]),
    st.recursive(st.sampled_from(ATOMS), joined, max_leaves=6),
    st.sampled_from(["", "", "$"]),
).map("".join)
TEXTS = st.text("abcdA1 \n", max_size=24)


def expected(patterns: list[str], text: str) -> tuple[str, str | None]:
    """Return what is left of ``text``, and the expression that ended it, by trying every place with ``re``."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for pattern in patterns:
                if re.compile(pattern).fullmatch(text[:end], start):
                    return text[:start], pattern
    return text, None


@settings(max_examples=400, deadline=None)
@given(patterns=st.lists(PATTERNS, min_size=1, max_size=2), text=TEXTS, cuts=st.lists(st.integers(0, 24), max_size=4))
def test_the_first_match_ends_the_text_however_it_is_cut(patterns: list[str], text: str, cuts: list[int]):
    try:
        made = SamplingParams(stop_regex=tuple(patterns))
    except RequestError:
        assume(False)
        return
    cutter, shown = StopCutter((), False, made.stop_regex), ""
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    for begin, end in itertools.pairwise(places):
        shown += cutter.feed(text[begin:end])
        assert text.startswith(shown), "what was shown is never taken back"
        if cutter.matched is not None:
            break
    if cutter.matched is None:
        shown += cutter.finish()
    kept, matched = expected(patterns, text)
    assert shown == kept
    assert (cutter.matched is None) == (matched is None)


def test_what_ends_first_ends_the_text_and_may_be_kept():
    for include, kept in ((False, "on "), (True, "on 42")):
        cutter = StopCutter(("xyz",), include, ("[0-9]{2}", "[a-z]+!"))
        assert cutter.feed("on 4") + cutter.feed("2xyz") == kept
        assert cutter.matched == "[0-9]{2}"
    both = StopCutter(("b",), False, ("[ab]+",))
    assert (both.feed("cab"), both.matched) == ("c", "[ab]+")
    assert StopCutter(("abc",), False, ("c",)).feed("xabc") == "x"


def test_text_that_may_not_stop_is_ordinary_text():
    cutter = StopCutter((), False, ("ab",))
    assert cutter.feed("ab", may_stop=False) == "ab"
    assert cutter.feed("a") == ""
    assert (cutter.feed("b"), cutter.matched) == ("", "ab")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "no regular expression"),
        ("a*", "empty text"),
        ("^", "empty text"),
        ("(?=a)b", "look-ahead"),
        (r"(a)\1", "references"),
        (r"\bend", "next character"),
        ("(?m)^a", "flag m"),
        ("(a{1000}){1000}", str(MAX_POSITIONS)),
        ("(" * 500 + "a" + ")" * 500, "nested"),
        ("", "characters"),
    ],
)
def test_what_cannot_be_a_stop_is_refused_with_its_reason(pattern: str, reason: str):
    with pytest.raises(RequestError, match=re.escape(reason)) as raised:
        SamplingParams(stop_regex=(pattern,))
    assert raised.value.param == "stop_regex"


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*a){20}b", "(a?){50}a{50}b", "(x+x+)+y"])
def test_hostile_expressions_take_time_linear_in_the_text(pattern: str):
    cutter = StopCutter((), False, (pattern,))
    start = time.monotonic()
    for _ in range(2000):
        cutter.feed("a" * 10)
    assert time.monotonic() - start < 20, "re would take years"
    assert cutter.matched is None


def test_repetitions_of_nothing_are_cheap():
    with pytest.raises(StopRegexError, match="empty"):
        StopRegexes(["(){1000000000}"])
