"""Keep text that a client sends in a chat from becoming special tokens because it spells them."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from dovetail.errors import RequestError

_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that Unicode reserves for use inside of a program (Unicode Standard, section 23.7)."""

_END = -1
_SEARCHED = 1 << 18
"""Search texts of chats in parts of this number of bytes."""

CONTROL_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
"""The shape of tokens that begin and end turns. Some tokenizers do not list all of them as special."""


class MarkedPrompt(str):
    """A prompt in which the characters of some texts may not become special tokens.

    The value is the prompt. ``marked`` is the same with the character ``mark`` between the characters of these texts.
    Slices, and sums with further text, are marked too.
    """

    __slots__ = ("mark", "marked")

    marked: str
    mark: str

    def __new__(cls, marked: str, mark: str) -> MarkedPrompt:
        """Build the prompt. A mark that a template has written as a JSON escape counts as a mark."""
        marked = marked.replace(_escape(mark), mark)
        prompt = super().__new__(cls, marked.replace(mark, ""))
        prompt.marked, prompt.mark = marked, mark
        return prompt

    def __add__(self, other: str) -> MarkedPrompt:
        return MarkedPrompt(self.marked + (other.marked if isinstance(other, MarkedPrompt) else other), self.mark)

    def __radd__(self, other: str) -> MarkedPrompt:
        return MarkedPrompt(other + self.marked, self.mark)

    def __getitem__(self, key: Any) -> str:
        if not isinstance(key, slice):
            return super().__getitem__(key)
        start, stop, step = key.indices(len(self))
        assert step == 1, "prompts are cut, not reordered"
        kept = (place for place, char in enumerate(self.marked) if char != self.mark)
        places = [*itertools.islice(kept, max(start, stop) + 1), len(self.marked)]
        return MarkedPrompt(self.marked[places[start] : places[max(start, stop)]], self.mark)


class ContentTokens:
    """Find texts that spell special tokens, and encode prompts in which such texts stay text.

    Tokens count as special if tokenizer.json says so, or if they look like ``<|this|>``. All other added tokens, such as
    ``<tool_call>`` of many models, may be written by clients.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._json = tokenizer_json
        added = json.loads(tokenizer_json).get("added_tokens") or []
        self._ids = {
            token["content"]: token["id"]
            for token in added
            if len(token["content"].strip()) > 1 and (token.get("special") or CONTROL_SHAPE.fullmatch(token["content"]))
        }
        self._beginnings = {name[:size] for name in self._ids for size in range(1, len(name))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._lock = threading.Lock()
        self._patterns = functools.lru_cache(16)(self._pattern)
        self._endings = functools.lru_cache(16)(self._pickled_pattern)

    def mark_for(self, *values: tuple[Any, frozenset[str]]) -> str | None:
        """Return a character to mark the texts within ``values``; None if none of them spells a special token. Each
        value comes with the tokens that it may spell."""
        if not any(value and self._spells(_pickled(value), kept) for value, kept in values):
            return None
        groups: list[str] = []
        for value, _ in values:
            _collect(value, groups)
        free = (c for c in _NONCHARACTERS if not any(c in group or _escape(c) in group for group in groups))
        return next(free, _NONCHARACTERS[0])

    def marked(self, value: Any, kept: frozenset[str], mark: str) -> Any:
        """Return a copy of ``value``, of any JSON type, with ``mark`` in each text that spells a special token. A text
        that ends with the beginning of one is marked too, because another may complete it."""
        pattern = self._patterns(kept)

        def rewrite(text: str) -> str:
            end = self._open_end(text)
            head, tail = (text[:-end], text[-end:]) if end else (text, "")
            return pattern.sub(lambda found: mark.join(found[0]), head) + "".join(char + mark for char in tail)

        return _rewritten(value, rewrite)

    def encode(self, prompt: MarkedPrompt, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``prompt``. Raises ``RequestError`` if the tokenizer cannot write a token as text."""
        backend, names = self._renamed
        text = self._patterns(frozenset()).sub(lambda found: names[found[0]], prompt.marked).replace(prompt.mark, "")
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _spells(self, pickled: bytes, kept: frozenset[str]) -> bool:
        search, more = self._endings(kept).search, 4 * self._longest + 8  # a character has four bytes at most
        starts = range(0, len(pickled), _SEARCHED)  # other threads run in between: a search holds the GIL
        return any(search(pickled, start, start + _SEARCHED + more) for start in starts)

    def _open_end(self, text: str) -> int:
        """Return the length of the longest end of ``text`` with which a special token begins."""
        return next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._beginnings), 0)

    def _pattern(self, kept: frozenset[str]) -> re.Pattern[str]:
        names = sorted(set(self._ids) - kept, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def _pickled_pattern(self, kept: frozenset[str]) -> re.Pattern[bytes]:
        """Return the pattern that finds, in pickled texts, special tokens except ``kept``, and beginnings of special
        tokens at the end of a text."""
        found = [name.encode() for name in set(self._ids) - kept]
        found += [begin.encode() + pickle.MEMOIZE for begin in self._beginnings]  # which follows every text
        return re.compile(_any_of(found) if found else rb"(?!)")

    @property
    def _renamed(self) -> tuple[Backend, dict[str, str]]:
        with self._lock:
            return self._load()

    @functools.cache  # noqa: B019 (one per tokenizer, which lives as long as the process)
    def _load(self) -> tuple[Backend, dict[str, str]]:
        """Return a tokenizer in which special tokens have names that cannot be guessed, and these names. A prompt whose
        own special tokens were renamed has the same tokens there, and texts that spell the old names are text."""
        tree, secret = json.loads(self._json), secrets.token_hex(8)
        names = {name: f"\U0001fffe{secret}.{i}\U0001ffff" for i, name in enumerate(self._ids)}
        for token in tree["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = tree["model"]
        if isinstance(model["vocab"], list):
            model["vocab"] = [[names.get(name, name), *rest] for name, *rest in model["vocab"]]
        else:
            model["vocab"] = {names.get(name, name): i for name, i in model["vocab"].items()}
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        backend = Backend.from_str(json.dumps(tree))
        backend.no_truncation()
        backend.no_padding()
        wrong = next((name for name, i in self._ids.items() if backend.token_to_id(names[name]) != i), None)
        if wrong is not None:
            raise RequestError(
                f"the conversation spells a special token, and the tokenizer of this model cannot write {wrong!r} as text",
                param="messages",
            )
        return backend, names


def _any_of(names: list[bytes]) -> bytes:
    """Return a pattern of these names that looks at each byte of a text once for all names that begin alike."""
    tree: dict[int, Any] = {}
    for name in names:
        node = tree
        for byte in name:
            node = node.setdefault(byte, {})
        node[_END] = {}

    def written(node: dict[int, Any]) -> bytes:
        if _END in node:
            return b""
        parts = [re.escape(bytes([byte])) + written(rest) for byte, rest in node.items()]
        return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"

    return written(tree)


def pickled_size(*values: Any) -> int:
    """Return the number of bytes of ``values``, or of the texts within them."""
    return len(_pickled(values))


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1]


def _pickled(value: Any) -> bytes:
    """Return bytes with every text within ``value``: one search of them is much faster than a search of each text."""
    try:
        return pickle.dumps(value, 4)
    except (pickle.PicklingError, TypeError, AttributeError):  # a program may give its template anything
        texts: list[str] = []
        _collect(value, texts)
        return pickle.dumps(texts, 4)


def _collect(value: Any, texts: list[str]) -> None:
    """Append every text within ``value`` to ``texts``, keys included."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            texts.append(str(name))
            _collect(each, texts)
        if type(value) is not dict:
            texts.append(str(value))
    elif isinstance(value, list | tuple):
        for each in value:
            _collect(each, texts)


def _rewritten(value: Any, rewrite: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return rewrite(value)
    if isinstance(value, Mapping):
        changed = {_rewritten(name, rewrite): _rewritten(each, rewrite) for name, each in value.items()}
        return value.with_text(changed, rewrite(str(value))) if hasattr(value, "with_text") else changed  # pyright: ignore
    if isinstance(value, list | tuple):
        return [_rewritten(each, rewrite) for each in value]
    return value
