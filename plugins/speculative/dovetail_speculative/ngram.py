"""Prompt lookup decoding: a text often repeats itself (https://github.com/apoorvumang/prompt-lookup-decoding), or others."""

from __future__ import annotations

import numpy as np

from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.types import Batch, DraftTree, ForwardOutput, IntArray, Req
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram_index import TOKEN, NgramIndex
from dovetail_speculative.ngram_memory import SharedMemory


class NgramDrafter(Drafter):
    """Drafts what followed the last occurrence of the longest n-gram that ends the text, prompt and output alike, or that ended
    what another request of the namespace said; the request's own text comes first where both know n-grams of one length.

    Where the own occurrence is so close to the end that too few tokens follow it, the draft repeats them: a text that has
    begun to go round goes round once more.
    """

    def __init__(self, config: NgramConfig, context: DrafterContext) -> None:
        """``context`` is not needed: drafts are made on the host."""
        self._config = config
        self._lengths = range(config.min_ngram, config.max_ngram + 1)
        self._indices: dict[int, NgramIndex] = {}
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
        assert batch.draft_room is not None, "pages were reserved for no drafts"
        room = np.minimum(batch.draft_room, self._config.num_draft_tokens).tolist()
        rows = range(batch.num_extend, len(batch.reqs))
        drafts = {row: self._draft(batch.reqs[row], room[row]) for row in rows if room[row] > 0}
        lens = np.zeros(len(batch.reqs), dtype=np.int32)
        for row, draft in drafts.items():
            lens[row] = len(draft)
        return _chains(lens, drafts) if lens.any() else None

    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Learn for others what the requests have said."""
        if self._shared is not None:
            for req in batch.reqs:
                if req.params.speculative:
                    self._shared.follow(req)

    def forget(self, req: Req) -> None:
        """Drop the request's index, and learn the rest of what it has said."""
        self._indices.pop(req.uid, None)
        if self._shared is not None and req.params.speculative:
            self._shared.close(req)

    def _draft(self, req: Req, count: int) -> IntArray:
        text = req.token_ids[: req.known_len]
        index = self._indices.get(req.uid)
        if index is None:
            index = self._indices[req.uid] = NgramIndex(self._lengths, self._config.memory)
        index.extend(text)
        shared = self._shared
        mine = shared.open(req) if shared is not None else None
        end = text[-self._lengths[-1] :].tobytes()
        for n in reversed(self._lengths):
            ngram = end[len(end) - n * TOKEN :] if n * TOKEN <= len(end) else b""
            at = index.find(ngram)
            if at is not None:
                return text[at : at + count] if at + count <= len(text) else _round(text[at:], count)
            if mine is not None and shared is not None:
                draft = shared.find(mine, ngram)
                if draft is not None:
                    return draft[:count]
        return text[:0]


def _round(tokens: IntArray, count: int) -> IntArray:
    return tokens[np.arange(count) % len(tokens)]


def _chains(lens: IntArray, drafts: dict[int, IntArray]) -> DraftTree:
    """``drafts`` by row as chains, ``lens [rows]`` long; zeros elsewhere."""
    width = int(lens.max())
    token_ids = np.zeros((len(lens), width), dtype=np.int32)
    for row, draft in drafts.items():
        token_ids[row, : len(draft)] = draft
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(lens), 1))
    return DraftTree(token_ids, parents, lens)
