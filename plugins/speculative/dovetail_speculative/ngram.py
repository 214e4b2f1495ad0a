"""Prompt lookup decoding: a text often repeats itself (https://github.com/apoorvumang/prompt-lookup-decoding), or others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.types import Batch, DraftTree, ForwardOutput, IntArray, Req
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram_doubts import Doubts
from dovetail_speculative.ngram_index import TOKEN, NgramIndex
from dovetail_speculative.ngram_memory import SharedMemory, SharedText

_NONE = np.zeros(0, dtype=np.int32)


class _Guess(NamedTuple):
    """``token`` was drafted for ``place``, or would have been, but for doubts of ``key``."""

    place: int
    token: int
    key: bytes
    start: int


@dataclass(slots=True)
class _State:
    """What is known of one request. ``doubts`` are its own, or the server's where memory is shared."""

    index: NgramIndex
    doubts: Doubts
    shared: SharedText | None
    guess: _Guess | None = None


class NgramDrafter(Drafter):
    """Drafts what followed the last occurrence of the longest n-gram that ends the text, prompt and output alike, or that ended
    what another request of the namespace said; the request's own text comes first where both know n-grams of one length.
    It does not after n-grams where that came to nothing lately, nor, unless it was right there before, after single tokens and
    what others said after less than the longest n-gram.

    Where the own occurrence is so close to the end that too few tokens follow it, the draft repeats them: a text that has
    begun to go round goes round once more.
    """

    def __init__(self, config: NgramConfig, context: DrafterContext) -> None:
        """``context`` is not needed: drafts are made on the host."""
        self._config = config
        self._lengths = range(config.min_ngram, config.max_ngram + 1)
        self._states: dict[int, _State] = {}
        self._doubts = Doubts(config.shared)
        self._shared = (
            SharedMemory(self._lengths, config.shared, lag=config.num_draft_tokens, prompts=config.share_prompts)
            if config.shared
            else None
        )

    @property
    def max_draft_tokens(self) -> int:
        """``num_draft_tokens`` of the config."""
        return self._config.num_draft_tokens

    def propose(self, batch: Batch) -> DraftTree | None:
        """A chain for each decode row whose latest tokens have occurred before."""
        assert batch.draft_limits is not None, "pages were reserved for no drafts"
        limits = np.minimum(batch.draft_limits, self._config.num_draft_tokens).tolist()
        rows = range(batch.num_extend, len(batch.reqs))
        drafts = {row: self._draft(batch.reqs[row], limits[row]) for row in rows if limits[row] > 0}
        lens = np.zeros(len(batch.reqs), dtype=np.int32)
        for row, draft in drafts.items():
            lens[row] = len(draft)
        return _chains(lens, drafts) if lens.any() else None

    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Learn what came of the drafts and, for others, what the requests have said."""
        for req in batch.reqs:
            state = self._states.get(req.uid)
            if state is not None and state.guess is not None and req.known_len > state.guess.place:
                place, token, key, start = state.guess
                state.doubts.settle(key, start, req.token_ids[place] == token)
                state.guess = None
            if self._shared is not None and req.params.speculative and req.finish is None:
                self._shared.follow(req)  # one that has ended is closed by ``forget``, or has been

    def forget(self, req: Req) -> None:
        """Drop the request's state, and learn the rest of what it has said."""
        self._states.pop(req.uid, None)
        if self._shared is not None and req.params.speculative:
            self._shared.close(req)

    def _state(self, req: Req) -> _State:
        state = self._states.get(req.uid)
        if state is None:
            shared, memory = self._shared, self._config.memory
            doubts, text = (self._doubts, shared.open(req)) if shared is not None else (Doubts(memory), None)
            state = self._states[req.uid] = _State(NgramIndex(self._lengths, memory), doubts, text)
        return state

    def _draft(self, req: Req, count: int) -> IntArray:
        state, text = self._state(req), req.token_ids[: req.known_len]
        state.index.extend(text)
        draft, ngram, kind = self._longest(state, text)
        if not len(draft):
            return draft
        key = ngram + kind + state.shared.salt if state.shared is not None else ngram
        start = 1 if len(ngram) >= TOKEN * (2 if kind == _OWN else self._lengths[-1]) else 0
        state.guess = _Guess(len(text), int(draft[0]), key, start)
        if not state.doubts.mark(key, start):
            return _NONE
        if kind == _OWN and count > len(draft):
            return draft[np.arange(count) % len(draft)]
        return draft[:count]

    def _longest(self, state: _State, text: IntArray) -> tuple[IntArray, bytes, bytes]:
        """What follows the longest n-gram that has occurred; that n-gram; and where it has."""
        end, mine, shared = text[-self._lengths[-1] :].tobytes(), state.shared, self._shared
        for n in reversed(self._lengths):
            ngram = end[len(end) - n * TOKEN :] if n * TOKEN <= len(end) else b""
            at = state.index.find(ngram)
            if at is not None:
                return text[at:], ngram, _OWN
            if mine is not None and shared is not None:
                draft = shared.find(mine, ngram)
                if draft is not None:
                    return draft, ngram, _OTHERS
        return _NONE, b"", _OWN


_OWN, _OTHERS = b"o", b"t"


def _chains(lens: IntArray, drafts: dict[int, IntArray]) -> DraftTree:
    """``drafts`` by row as chains, ``lens [rows]`` long; zeros elsewhere."""
    width = int(lens.max())
    token_ids = np.zeros((len(lens), width), dtype=np.int32)
    for row, draft in drafts.items():
        token_ids[row, : len(draft)] = draft
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(lens), 1))
    return DraftTree(token_ids, parents, lens)
