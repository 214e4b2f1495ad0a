"""Prompt lookup decoding: a text often repeats itself (https://github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

import numpy as np

from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.types import Batch, DraftTree, IntArray, Req
from dovetail_speculative.config import NgramConfig
from dovetail_speculative.ngram_index import NgramIndex


class NgramDrafter(Drafter):
    """Drafts what followed the last occurrence of the longest n-gram that ends the text, prompt and output alike.

    Where that occurrence is so close to the end that too few tokens follow it, the draft repeats them: a text that has
    begun to go round goes round once more.
    """

    def __init__(self, config: NgramConfig, context: DrafterContext) -> None:
        """``context`` is not needed: drafts are made on the host."""
        self._config = config
        self._indices: dict[int, NgramIndex] = {}

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

    def forget(self, req: Req) -> None:
        """Drop the request's index."""
        self._indices.pop(req.uid, None)

    def _draft(self, req: Req, count: int) -> IntArray:
        index = self._indices.get(req.uid)
        if index is None:
            config = self._config
            index = self._indices[req.uid] = NgramIndex(config.min_ngram, config.max_ngram, config.memory)
        text = req.token_ids[: req.known_len]
        at = index.find(text)
        if at is None:
            return text[:0]
        return text[at + np.arange(count) % (len(text) - at)]


def _chains(lens: IntArray, drafts: dict[int, IntArray]) -> DraftTree:
    """``drafts`` by row as chains, ``lens [rows]`` long; zeros elsewhere."""
    width = int(lens.max())
    token_ids = np.zeros((len(lens), width), dtype=np.int32)
    for row, draft in drafts.items():
        token_ids[row, : len(draft)] = draft
    parents = np.tile(np.arange(-1, width - 1, dtype=np.int32), (len(lens), 1))
    return DraftTree(token_ids, parents, lens)
