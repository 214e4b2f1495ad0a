"""Draft by prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding): texts often repeat themselves or each
other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.types import AdmittedRequest, Batch, Committed, DepartedRequest, DraftTree, ForwardOutput, IntArray
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram_confidence import NgramConfidence
from dovetail_speculative.ngram_index import TOKEN, NgramIndex
from dovetail_speculative.ngram_memory import SharedMemory, SharedText

_NONE = np.zeros(0, dtype=np.int32)


class _Guess(NamedTuple):
    """Describe a guess: ``token`` was drafted for index ``place``, or would have been if the confidence of ``key`` were
    not 0."""

    place: int
    token: int
    key: bytes
    start: int


@dataclass(slots=True)
class _State:
    """Hold the state of one request. ``confidence`` belongs to the request, or to the whole server if outputs are
    shared."""

    index: NgramIndex
    confidence: NgramConfidence
    shared: SharedText | None
    guess: _Guess | None = None


class NgramDrafter(Drafter):
    """Draft what followed the last occurrence of the longest n-gram that ends the text, in prompt and output alike.

    The occurrence can also be in the text of another request of the namespace. For n-grams of one length, the request's
    own text comes first. No draft is made after an n-gram if recent drafts after it were wrong. After single tokens,
    and after n-grams of other requests that are shorter than the longest length, a draft is made only if an earlier
    guess after the same n-gram was right.

    If fewer tokens follow the occurrence in the request's own text than may be drafted, the draft repeats them, because
    a text that has begun to repeat itself often continues to do so.
    """

    def __init__(self, config: NgramConfig, context: DrafterContext) -> None:
        """Build the drafter. ``context`` is not used: drafts are made on the host."""
        self._config = config
        self._lengths = range(config.min_ngram, config.max_ngram + 1)
        self._states: dict[int, _State] = {}
        self._confidence = NgramConfidence(config.shared)
        self._shared = (
            SharedMemory(self._lengths, config.shared, lag=config.num_draft_tokens, prompts=config.share_prompts)
            if config.shared
            else None
        )

    @property
    def max_draft_tokens(self) -> int:
        """Return ``num_draft_tokens`` of the config."""
        return self._config.num_draft_tokens

    def propose(self, batch: Batch) -> DraftTree | None:
        """Return a chain for each decode row whose latest tokens have occurred before."""
        assert batch.draft_limits is not None, "no pages were reserved for drafts"
        reqs, starts = batch.reqs, batch.prefix_lens.tolist()
        limits = np.minimum(batch.draft_limits, self._config.num_draft_tokens).tolist()
        rows = range(batch.num_extend, len(limits))
        drafts = {row: self._draft(reqs[row], starts[row] + 1, limits[row]) for row in rows if limits[row] > 0}
        lens = np.zeros(len(limits), dtype=np.int32)
        for row, draft in drafts.items():
            lens[row] = len(draft)
        return _chains(lens, drafts) if lens.any() else None

    def observe(self, batch: Batch, output: ForwardOutput, committed: Committed) -> None:
        """Record whether drafts were right and, if outputs are shared, add what the requests generated."""
        known_lens, ended = committed.known_lens.tolist(), committed.ended.tolist()
        for req, known_len, has_ended in zip(batch.reqs, known_lens, ended, strict=True):
            state = self._states.get(req.uid)
            if state is not None and state.guess is not None and known_len > state.guess.place:
                place, token, key, start = state.guess
                state.confidence.update(key, start, req.token_ids[place] == token)
                state.guess = None
            if self._shared is not None and req.params.speculative and not has_ended:
                self._shared.follow(req, known_len)  # ``forget`` closes, or has closed, requests that have ended

    def forget(self, request: DepartedRequest) -> None:
        """Drop the request's state, and add the rest of its text to the shared memory."""
        self._states.pop(request.uid, None)
        if self._shared is not None:
            self._shared.close(request)

    def _state(self, req: AdmittedRequest) -> _State:
        state = self._states.get(req.uid)
        if state is None:
            shared, memory = self._shared, self._config.memory
            confidence, text = (
                (self._confidence, shared.open(req)) if shared is not None else (NgramConfidence(memory), None)
            )
            state = self._states[req.uid] = _State(NgramIndex(self._lengths, memory), confidence, text)
        return state

    def _draft(self, req: AdmittedRequest, end: int, count: int) -> IntArray:
        """Return at most ``count`` drafts after the first ``end`` tokens of a request."""
        state, text = self._state(req), req.token_ids[:end]
        state.index.extend(text)
        draft, ngram, kind = self._longest(state, text)
        if not len(draft):
            return draft
        key = ngram + kind + state.shared.salt if state.shared is not None else ngram
        start = 1 if len(ngram) >= TOKEN * (2 if kind == _OWN else self._lengths[-1]) else 0
        state.guess = _Guess(len(text), int(draft[0]), key, start)
        if not state.confidence.counter(key, start):
            return _NONE
        if kind == _OWN and count > len(draft):
            return draft[np.arange(count) % len(draft)]
        return draft[:count]

    def _longest(self, state: _State, text: IntArray) -> tuple[IntArray, bytes, bytes]:
        """Return what follows the longest n-gram that has occurred, that n-gram, and the kind of text in which it has
        occurred."""
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
    """Return ``drafts`` (by row) as chains of lengths ``lens [rows]``, with zeros elsewhere."""
    width = int(lens.max())
    token_ids = np.zeros((len(lens), width), dtype=np.int32)
    for row, draft in drafts.items():
        token_ids[row, : len(draft)] = draft
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(lens), 1))
    return DraftTree(token_ids, parents, lens)
