"""Compare parsed and rewritten patterns with Python's re. Run: python -m pytest -q
tests/plugins/test_grammar_patterns.py"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail_grammar.formats import FORMATS
from dovetail_grammar.patterns import avoid, bounded, emit, whole, width, without_escapes
from dovetail_grammar.regex_parser import Node, PatternError, parse
from dovetail_grammar.repeats import LONGEST, grouped

ALPHABET = 'ab1-_. \n"'
TEXTS = ["".join(letters) for length in range(4) for letters in itertools.product(ALPHABET, repeat=length)]
PATTERNS = [
    "a", "^a", "b$", "^a|b$", "^(a|b)$", "^[^a]$", r"^\w+$", r"[\w.-]{2}", "^(?:ab){1,2}a?$", "^a*?$", r"\d", "^$", "", "^(|a)b",
    r"^[a\]]$", r"^\x61\u0062$", "(?:a|b1)+", "^a{2,}$", "^a{0,2}$", "^[a-b]$", r"^\.$", r"^\s$", r"^\S+$", "^(?:a|b|)$", "b{1}",
    "^(?P<x>a)[^b]?$", r"\W", r"^[\d_]*$", "^a.b?$",
]  # fmt: skip


def fits(node: Node, text: str) -> bool:
    return re.fullmatch(emit(node), text) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_means_what_it_means_to_python(pattern: str) -> None:
    python = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    searched, matched = whole(parse(pattern), search=True), whole(parse(pattern), search=False)
    least, most = width(matched)
    for text in TEXTS:
        assert fits(searched, text) == bool(python.search(text)), text
        assert fits(matched, text) == bool(python.fullmatch(text)), text
        assert not fits(matched, text) or (least <= len(text) and (most is None or len(text) <= most))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_escapes_loses_only_texts_that_need_them(pattern: str) -> None:
    node = whole(parse(pattern), search=True)
    try:
        plain = without_escapes(node)
    except PatternError:
        assert all(set(text) & {'"', "\n"} for text in TEXTS if fits(node, text))
        return
    for text in TEXTS:
        assert fits(plain, text) == (fits(node, text) and not set(text) & {'"', "\n"}), text


@pytest.mark.parametrize("low", range(4))
@pytest.mark.parametrize("high", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("pattern", ["^[a-b]*$", "^a[ab1]+b?$", "^ab$", "^(a|ab)$", "^-a{1,2}$", "b"])
def test_bounded_is_the_pattern_and_the_length(pattern: str, low: int, high: int | None) -> None:
    node = whole(parse(pattern), search=True)
    try:
        narrow = bounded(node, low, high)
    except PatternError:
        return
    for text in TEXTS:
        inside = low <= len(text) and (high is None or len(text) <= high)
        assert (narrow is not None and fits(narrow, text)) == (fits(node, text) and inside), text


@given(st.sets(st.text("ab1", max_size=3), max_size=6))
def test_avoid_is_everything_else(names: set[str]) -> None:
    node = avoid(names)
    for letters in itertools.chain.from_iterable(itertools.product("ab1", repeat=n) for n in range(4)):
        text = "".join(letters)
        assert fits(node, text) == (text not in names)


@pytest.mark.parametrize(
    "pattern",
    [
        "a^b",
        "(?=a)b",
        "(?i)a",
        r"\bfoo",
        r"(a)\1",
        r"\p{L}",
        "a{3,2}",
        "a**",
        "(",
        "a)",
        "[b-a]",
        "[a",
        "\\",
        "*a",
        "^*",
        "a(^b)",
    ],
)
def test_says_no_to_what_is_not_regular(pattern: str) -> None:
    with pytest.raises(PatternError):
        whole(parse(pattern), search=True)


GOOD = {
    "date": "2024-02-29 1999-12-31 2000-02-29",
    "time": "12:00:00Z 23:59:59.123+01:30",
    "date-time": "2024-02-29T12:00:00Z",
    "duration": "P1Y2M3DT4H5M6S P4W PT36H P1D",
    "email": "joe.bloggs@example.com a+b@c.d",
    "hostname": "example.com a 1a.b-c",
    "ipv4": "127.0.0.1 255.255.255.255",
    "ipv6": "::1 2001:db8::8a2e:370:7334 1:2:3:4:5:6:7:8 ::",
    "uri": "https://example.com/a?b=c#d mailto:a@b.c urn:isbn:1",
    "uuid": "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
    "json-pointer": "/a/b~0~1 /",
}
BAD = {
    "date": "2023-02-29 1900-02-29 2024-04-31 2024-00-10 24-01-01",
    "time": "24:00:00Z 12:60:00Z 12:00:00",
    "date-time": "2024-02-30T12:00:00Z 2024-02-29",
    "duration": "P PT P1 1D P1S P1D2H PT1D P1W1D",
    "email": "joe @b a@ a..b@c.d .a@b.c",
    "hostname": "-a a- a..b a_b",
    "ipv4": "256.0.0.1 1.2.3 01.2.3.4",
    "ipv6": "1:2:3:4:5:6:7 1::2::3 12345:: 1:2:3:4:5:6:7:8:9 :::",
    "uri": "//a.b/c a 1a:b a:b\\c",
    "uuid": "2eb8aa08-aa98-11ea-b4aa-73b441d1638 2eb8aa08aa9811eab4aa73b441d16380",
    "json-pointer": "a /a~ /~2",
}


@pytest.mark.parametrize("name", GOOD)
def test_formats_take_valid_texts_only(name: str) -> None:
    node = whole(parse(FORMATS[name]), search=False)
    assert [text for text in GOOD[name].split() if not fits(node, text)] == []
    assert [text for text in BAD[name].split() if fits(node, text)] == []


@pytest.mark.parametrize(
    "bounds", [(0, 129), (129, 129), (128, 130), (192, 192), (200, None), (0, 300), (1, 191), (0, 9000)]
)
def test_grouped_is_the_same_repetition_without_long_ones(bounds: tuple[int, int | None]) -> None:
    low, high = bounds
    node = parse(f"{{{low},{'' if high is None else high}}}".join(["x(?:[ab]c)", "y"]))
    written = grouped(node)
    counts = [int(n) for n in re.findall(r"\d+", emit(written))]
    assert max(counts, default=0) <= LONGEST
    top = 400 if high is None else high + 2
    for count in {*range(max(low - 2, 0), low + 3), *range(60, 70), *range(120, 131), *range(top - 5, top)}:
        fits_it = low <= count and (high is None or count <= high)
        assert fits(written, "x" + "ac" * count + "y") == fits_it, count
