"""Test tokens to text: against the tokenizers library itself, and against decoding at once.

.venv/bin/python -m pytest -q tests/core/test_tokenizer_text.py
"""

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer

TINY = Tokenizer.from_dir(locate("tiny"))
TINY_REFERENCE = tokenizers.Tokenizer.from_file(str(locate("tiny") / "tokenizer.json"))


def sentencepiece_json() -> str:
    """Return a Llama 2 style tokenizer: spaces as U+2581, byte fallback, one leading space added and stripped."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"\u2581abcdefghinorstuy.,!é",
        "\u2581a",
        "th",
    ]
    model = {
        "type": "BPE",
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": ["\u2581 a", "t h"],
        "byte_fallback": True,
        "unk_token": "<unk>",
        "fuse_unk": True,
    }
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": tokens[i], **special} for i in range(3)],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space]},
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
            "model": model,
        }
    )


PIECES = Tokenizer(sentencepiece_json(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True})
PIECES_REFERENCE = tokenizers.Tokenizer.from_str(sentencepiece_json())

token_lists = st.lists(st.integers(0, TINY.vocab_size - 1), max_size=24)
any_text = st.text(max_size=40)


@given(token_lists)
@pytest.mark.parametrize("skip", [True, False])
def test_byte_level_decode_equals_the_library(skip: bool, ids: list[int]):
    assert TINY.decode(ids, skip) == TINY_REFERENCE.decode(ids, skip_special_tokens=skip)


@given(any_text)
def test_text_survives(text: str):
    assert TINY.decode(TINY.encode(text), skip_special_tokens=False) == text
    assert PIECES.decode(PIECES.encode(text)) == PIECES_REFERENCE.decode(PIECES_REFERENCE.encode(text).ids)


@given(any_text)
def test_sentencepiece_bytes_are_the_text(text: str):
    ids = PIECES.encode(text, add_special_tokens=False)
    assert b"".join(PIECES.bytes_of(i) for i in ids if i).decode().removeprefix(" ") == PIECES.decode(ids)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


@given(token_lists, st.lists(st.integers(0, 100), max_size=8))
@pytest.mark.parametrize("tokenizer", [TINY, PIECES], ids=["byte-level", "sentencepiece"])
def test_any_split_gives_the_text_at_once(tokenizer: Tokenizer, ids: list[int], cuts: list[int]):
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(part) for part in split(ids, cuts)]
    whole = tokenizer.decode(ids)
    assert whole.startswith("".join(pieces))
    assert "".join(pieces) + detokenizer.finish() == whole


@given(any_text)
def test_no_piece_holds_half_a_character(text: str):
    detokenizer = IncrementalDetokenizer(TINY, skip_special_tokens=False)
    pieces = [detokenizer.push([token]) for token in TINY.encode(text)]
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Find by brute force where the stop string that ends first begins: the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - len(max(ending, key=len)), max(ending, key=len)
    return None


few = st.text(alphabet="ab é", min_size=1, max_size=4)


@settings(max_examples=300)
@given(
    st.text(alphabet="ab é日", max_size=30),
    st.lists(few, min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.integers(0, 100)),
)
@example("aab", ["aaa", "ab"], False, [])
@example("abab aba", ["abac", "ba ", "bab a"], True, [1, 2])
def test_stop_strings_across_token_borders(text: str, stops: list[str], include: bool, cuts: list[int]):
    ids = [token for char in text for token in TINY.encode(char)]  # borders inside stop strings and characters
    detokenizer = IncrementalDetokenizer(TINY, stops, include_stop=include)
    pieces = [detokenizer.push(part) for part in split(ids, cuts)]
    start, stop = first_stop(text, stops) or (len(text), None)
    expected = text[:start] + (stop if include and stop else "")
    assert expected.startswith("".join(pieces)), "text was released that belongs to a stop string"
    assert "".join(pieces) + detokenizer.finish() == expected
    assert detokenizer.matched == stop


@given(st.text(alphabet="ab", max_size=20), st.text(alphabet="ab", min_size=1, max_size=5))
def test_held_back_text_is_exactly_what_may_become_a_stop(text: str, stop: str):
    detokenizer = IncrementalDetokenizer(TINY, [stop])
    released = "".join(detokenizer.push(TINY.encode(char)) for char in text)
    if detokenizer.matched is None:
        held = max(k for k in range(len(stop)) if text.endswith(stop[:k]))
        assert released == text[: len(text) - held]


@given(st.text(alphabet="ab", max_size=12), st.integers(0, 12), st.lists(st.integers(0, 100)))
def test_stops_before_min_tokens_are_text(text: str, min_tokens: int, cuts: list[int]):
    ids = [token for char in text for token in TINY.encode(char)]
    detokenizer = IncrementalDetokenizer(TINY, ["ab", "bb"], min_tokens=min_tokens)
    got = "".join(detokenizer.push(part) for part in split(ids, cuts)) + detokenizer.finish()
    ends = [end for end in range(max(min_tokens, 1), len(text) + 1) if text[:end].endswith(("ab", "bb"))]
    assert got == (text[: ends[0] - 2] if ends else text)


def test_nothing_follows_a_stop():
    detokenizer = IncrementalDetokenizer(TINY, ["END"])
    assert detokenizer.push(TINY.encode("one END two")) == "one "
    assert detokenizer.push(TINY.encode("three")) == ""
    assert detokenizer.finish() == ""


def test_continued_text_keeps_its_leading_space():
    ids = PIECES.encode("a b", add_special_tokens=False)
    assert PIECES.decode(ids) == "a b"
    assert IncrementalDetokenizer(PIECES, continues=True).push(ids) == " a b"


def test_token_bytes():
    assert PIECES.token_bytes[0] is None
    assert PIECES.token_bytes[PIECES.token_to_id("<0xE9>")] == b"\xe9"
    assert PIECES.token_bytes[PIECES.token_to_id("\u2581a")] == b" a"
    assert PIECES.token_bytes[PIECES.token_to_id("é")] == "é".encode()
    assert {bytes([byte]) for byte in range(256)} <= set(TINY.token_bytes)
    assert all(TINY.token_bytes[i] is None for i in TINY.special_token_ids)
    assert len(TINY.token_bytes) == TINY.vocab_size == TINY_REFERENCE.get_vocab_size()


def test_ids_beyond_the_vocabulary_add_nothing():
    assert TINY.decode([TINY.vocab_size, TINY.vocab_size + 7, *TINY.encode("x")]) == "x"


def test_bos_is_added_where_the_config_asks():
    assert PIECES.encode("a")[0] == PIECES.bos_token_id == 1
    assert PIECES.encode("a", add_special_tokens=False)[0] != 1


def test_eos_ids_come_from_every_file(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(sentencepiece_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Tokenizer.from_dir(tmp_path).eos_token_ids == (2, 7, 9)


def test_unusable_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer("{}")
    wordpiece = json.loads(sentencepiece_json()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    with pytest.raises(ConfigError, match=r"WordPiece.*ByteLevel"):
        Tokenizer(json.dumps(wordpiece))
