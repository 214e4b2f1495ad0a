"""What requests have said of late, for other requests of their namespace."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dovetail.types import IntArray, Req
from dovetail_speculative.ngram_index import ngrams_of

_CHUNK = 32  # tokens that are learnt at once, while a request runs
_BITS = 32  # of an entry, for the place
_PLACE = (1 << _BITS) - 1


@dataclass(slots=True)
class SharedText:
    """What one request says. ``tokens[i]`` is token ``i + offset`` of its text; n-grams that end at or before ``learnt`` are
    known, of those that end at ``first`` or later."""

    tokens: IntArray
    namespace: str
    salt: bytes
    first: int
    learnt: int
    known: int = 0  # tokens of the text that will not change
    offset: int = 0
    generation: int = 0
    open: bool = True  # its request runs


class SharedMemory:
    """Where n-grams occurred last in the texts of recent requests.

    A request is drafted from its own namespace alone: keys end with a digest of it, and the name itself is compared. Two
    generations of n-grams bound the memory, each of half of ``tokens`` positions; a text goes with the last of its n-grams.
    What a running request says is learnt some tokens late, so that whoever finds it finds what followed as well.
    """

    def __init__(self, lengths: range, tokens: int, *, lag: int, prompts: bool) -> None:
        """``lengths`` of n-grams; ``lag`` is how many tokens should follow; ``prompts`` are learnt too if that is set."""
        self._lengths = lengths
        self._half = max(1, tokens // 2)
        self._lag = lag
        self._prompts = prompts
        self._recent: dict[bytes, int] = {}  # n-gram and salt: number of the text, and the position after the n-gram
        self._older: dict[bytes, int] = {}
        self._left = self._half  # positions that this generation may still learn
        self._generation = 0
        self._texts: dict[int, SharedText] = {}
        self._running: dict[int, int] = {}  # uid: number of its text
        self._next = 0

    def open(self, req: Req) -> SharedText:
        """The text of a running request."""
        number = self._running.get(req.uid)
        if number is None:
            number, text = self._next, self._new(req)  # made before anything is registered: an interrupt leaves no half
            self._next += 1
            self._texts[number] = text
            self._running[req.uid] = number
        return self._texts[number]

    def find(self, mine: SharedText, ngram: bytes) -> IntArray | None:
        """What followed the last occurrence of ``ngram`` in the namespace of ``mine``; None if it is not known, or occurred in
        ``mine`` itself."""
        ngram += mine.salt
        entry = self._recent.get(ngram) or self._older.get(ngram)
        text = self._texts.get(entry >> _BITS) if entry is not None else None
        if entry is None or text is None or text is mine or text.namespace != mine.namespace:
            return None
        return text.tokens[(entry & _PLACE) - text.offset : text.known - text.offset]

    def follow(self, req: Req) -> None:
        """Learn what a running request has said, but for its last tokens."""
        text = self.open(req)
        end = req.known_len - self._lag
        if end - text.learnt >= _CHUNK:
            self._learn(text, self._running[req.uid], end, req.known_len)

    def close(self, req: Req) -> None:
        """The request has ended or was retracted: learn the rest, and keep a copy of what is learnt."""
        text = self.open(req)
        number = self._running.pop(req.uid)
        self._learn(text, number, req.known_len - 1, req.known_len)
        text.offset = min(text.first, req.known_len)
        text.tokens = text.tokens[text.offset : req.known_len].copy()
        text.open = False
        if text.learnt < text.first or text.generation < self._generation - 1:
            del self._texts[number]

    def _new(self, req: Req) -> SharedText:
        """A request that was retracted comes back with what has been learnt: it goes on from there."""
        first = req.known_len if req.num_retractions else 0 if self._prompts else req.prompt_len
        salt = hashlib.blake2b(req.namespace.encode(), digest_size=8).digest()
        return SharedText(req.token_ids, req.namespace, salt, first, max(first - 1, 0))

    def _learn(self, text: SharedText, number: int, end: int, known: int) -> None:
        """Learn the n-grams that end at ``end`` or before, but for those that would be forgotten at once."""
        start = max(text.learnt, end - 2 * self._half)
        while start < end:
            if self._left == 0:
                self._turn()
            stop = min(end, start + self._left)
            base, salt = number << _BITS, text.salt
            found = ngrams_of(text.tokens, self._lengths, start, stop)
            self._recent.update({ngram + salt: base | place for ngram, place in found})
            self._left -= stop - start
            text.generation, start = self._generation, stop
        text.learnt, text.known = max(text.learnt, end), known

    def _turn(self) -> None:
        """Forget the older half, and the texts that nothing leads to any more."""
        self._older, self._recent, self._left = self._recent, {}, self._half
        self._generation += 1
        last = self._generation - 1
        gone = [number for number, text in self._texts.items() if not text.open and text.generation < last]
        for number in gone:
            del self._texts[number]
