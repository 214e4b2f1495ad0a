"""Remember outputs of recent requests, for other requests of their namespace."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dovetail.types import AdmittedRequest, DepartedRequest, IntArray
from dovetail_speculative.ngram_index import ngrams_of

_CHUNK = 32  # the number of tokens that are added at once while a request runs
_BITS = 32  # the bits of an entry that hold the position
_PLACE = (1 << _BITS) - 1


@dataclass(slots=True)
class SharedText:
    """Hold the text of one request.

    ``tokens[i]`` is token ``i + offset`` of the text. N-grams that end at ``first`` or later, and at or before
    ``learnt``, have been added to the memory.
    """

    tokens: IntArray
    namespace: str
    salt: bytes
    first: int
    learnt: int
    known: int = 0  # the number of tokens of the text that will not change
    offset: int = 0
    generation: int = 0
    open: bool = True  # whether its request runs


class SharedMemory:
    """Find where n-grams occurred last in the texts of recent requests.

    A request gets drafts only from texts of its own namespace: the key of an n-gram ends with a digest of the
    namespace, and the name itself is compared too. Two generations of n-grams bound the memory, each of at most half of
    ``tokens`` positions. A text is dropped with the last of its n-grams. The n-grams of a running request are added
    some tokens late, so that a request that finds one also finds the tokens that followed it.
    """

    def __init__(self, lengths: range, tokens: int, *, lag: int, prompts: bool) -> None:
        """Build an empty memory for n-grams of these ``lengths``.

        ``lag`` is the number of tokens that should follow an n-gram before it is added. ``prompts`` tells whether
        prompts are added too.
        """
        self._lengths = lengths
        self._half = max(1, tokens // 2)
        self._lag = lag
        self._prompts = prompts
        self._recent: dict[bytes, int] = {}  # n-gram and salt: number of the text, and the position after the n-gram
        self._older: dict[bytes, int] = {}
        self._left = self._half  # the number of positions that can still be added to this generation
        self._generation = 0
        self._texts: dict[int, SharedText] = {}
        self._running: dict[int, int] = {}  # uid: the number of its text
        self._next = 0

    def open(self, req: AdmittedRequest) -> SharedText:
        """Return the text of a running request, and create it if there is none."""
        number = self._running.get(req.uid)
        if number is None:
            number, text = self._next, self._new(req)  # built before it is registered, in case of an interrupt
            self._next += 1
            self._texts[number] = text
            self._running[req.uid] = number
        return self._texts[number]

    def find(self, mine: SharedText, ngram: bytes) -> IntArray | None:
        """Return what followed the last occurrence of ``ngram`` in the namespace of ``mine``.

        Returns None if there is no occurrence, or if the last one is in ``mine``.
        """
        ngram += mine.salt
        entry = self._recent.get(ngram) or self._older.get(ngram)
        text = self._texts.get(entry >> _BITS) if entry is not None else None
        if entry is None or text is None or text is mine or text.namespace != mine.namespace:
            return None
        return text.tokens[(entry & _PLACE) - text.offset : text.known - text.offset]

    def follow(self, req: AdmittedRequest, known_len: int) -> None:
        """Add the n-grams of the first ``known_len`` tokens of a running request, except those of its last tokens."""
        text = self.open(req)
        end = known_len - self._lag
        if end - text.learnt >= _CHUNK:
            self._learn(text, self._running[req.uid], end, known_len)

    def close(self, request: DepartedRequest) -> None:
        """Add the rest of the text of a request that has ended or was retracted, and keep a copy of what was added.

        Nothing is added if the request was never opened."""
        number = self._running.pop(request.uid, None)
        if number is None:
            return
        text, known_len = self._texts[number], request.known_len
        self._learn(text, number, known_len - 1, known_len)
        text.offset = min(text.first, known_len)
        text.tokens = text.tokens[text.offset : known_len].copy()
        text.open = False
        if text.learnt < text.first or text.generation < self._generation - 1:
            del self._texts[number]

    def _new(self, req: AdmittedRequest) -> SharedText:
        """Create the text of a request. A retracted request starts again after the tokens that were already added."""
        first = req.known_len if req.retracted else 0 if self._prompts else req.prompt_len
        salt = hashlib.blake2b(req.namespace.encode(), digest_size=8).digest()
        return SharedText(req.token_ids, req.namespace, salt, first, max(first - 1, 0))

    def _learn(self, text: SharedText, number: int, end: int, known: int) -> None:
        """Add the n-grams that end at ``end`` or before, except those that would be dropped at once."""
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
        """Drop the older generation, and the texts that no n-gram refers to any more."""
        self._older, self._recent, self._left = self._recent, {}, self._half
        self._generation += 1
        last = self._generation - 1
        gone = [number for number, text in self._texts.items() if not text.open and text.generation < last]
        for number in gone:
            del self._texts[number]
