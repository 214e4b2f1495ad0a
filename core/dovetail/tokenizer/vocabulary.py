"""Read from tokenizer.json the bytes that each token adds to the text.

Two families of tokenizers are supported. Byte-level BPE (GPT-2) writes each byte as one printable character.
SentencePiece style writes a space as U+2581 and, with byte fallback, a single byte as ``<0xAB>``. In both the text is
the concatenation of the tokens' bytes, decoded as UTF-8. Other families (WordPiece, ...) are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LAST_ID = (1 << 24) - 1
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Hold the vocabulary of a tokenizer.

    ``token_bytes[i]`` are the bytes that token i adds to the text, None for ids without a token. ``special_ids`` are
    skipped when decoding with ``skip_special_tokens``. ``strip_leading_space`` is true if the tokenizer puts a space at
    the very start of a text, which decoding drops.
    """

    token_bytes: list[bytes | None]
    special_ids: frozenset[int]
    strip_leading_space: bool


def read_vocabulary(tokenizer_json: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary of a parsed tokenizer.json. Raises ``ConfigError`` for a decoder of another family."""
    to_bytes, strip = _decoder(tokenizer_json.get("decoder"))
    tokens = _model_tokens(tokenizer_json["model"])
    added = tokenizer_json.get("added_tokens") or []
    tokens.update({token["id"]: token["content"] for token in added})
    if (last := max(tokens, default=0)) > _LAST_ID:
        raise ConfigError(f"tokenizer.json gives {tokens[last]!r:.80} the id {last}; allowed: ids up to {_LAST_ID}")
    token_bytes: list[bytes | None] = [None] * (max(tokens, default=-1) + 1)
    for token_id, text in tokens.items():
        token_bytes[token_id] = to_bytes(text)
    special = frozenset(token["id"] for token in added if token.get("special"))
    return Vocabulary(token_bytes, special, strip)


def _model_tokens(model: Mapping[str, Any]) -> dict[int, str]:
    vocab = model["vocab"]
    if isinstance(vocab, list):  # unigram: [token, score] pairs
        return {token_id: entry[0] for token_id, entry in enumerate(vocab)}
    return {token_id: token for token, token_id in vocab.items()}


def _decoder(decoder: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """Return the function that turns a token's text into bytes, and True if one leading space is stripped."""
    parts = _flatten(decoder)
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _byte_level, False
    strip = any(_strips_space(part) for part in parts)
    if "ByteFallback" in kinds:
        return _byte_fallback, strip
    if "Metaspace" in kinds or any(part["type"] == "Replace" for part in parts):
        return _sentencepiece, strip
    raise ConfigError(
        f"tokenizer.json has decoder {sorted(kinds) or None}; allowed: ByteLevel, or SentencePiece style "
        "(ByteFallback, Metaspace, Replace)"
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for child in decoder["decoders"] for part in _flatten(child)]
    return [decoder]


def _strips_space(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Metaspace":
        return part.get("prepend_scheme", "always") != "never"
    return part["type"] == "Strip" and part["content"] == " " and part["start"] > 0


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 bytes are written as themselves, the others as U+0100 and up, in
    order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token with characters outside of the alphabet stands for its own text
        return token.encode("utf-8", "replace")


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _sentencepiece(token)


def _sentencepiece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode("utf-8", "replace")
