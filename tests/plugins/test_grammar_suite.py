"""Check what the suite of grammar backends assumes; tests/mutations has the backends for which it must fail.

Run: python -m pytest -q tests/plugins/test_grammar_suite.py
"""

from __future__ import annotations

from dovetail.testing.grammar_cases import EOS, TOKEN_BYTES, VOCAB_SIZE
from dovetail.testing.grammar_languages import Language, any_char, any_of, follow


def test_the_oracle_knows_utf8_and_ends() -> None:
    state: Language | None = any_char('"')
    for text, whole in [("é", True), ("日", True), ("𝄞", True), ('"', False), ("ab", False)]:
        left = follow(state, text.encode())
        assert (left is not None and left.ends) == whole
    for wrong in (b"\xed\xa0\x80", b"\xc0\x80", b"\xff", b"\xf4\x90\x80\x80", b"\xe0\x80\x80"):
        assert follow(state, wrong) is None
    left = follow(any_of("ab", "abc"), b"ab")
    assert left is not None
    assert left.ends
    assert follow(left, b"c") is not None
    assert follow(left, b"d") is None


def test_the_vocabulary_is_as_hard_as_it_says() -> None:
    assert VOCAB_SIZE % 32
    assert len(TOKEN_BYTES) < VOCAB_SIZE
    assert all(TOKEN_BYTES[token] is None for token in EOS)
    singles = {data for data in TOKEN_BYTES if data and len(data) == 1}
    assert len(singles) == 256
