"""Forbid tokens that would repeat a sequence of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dovetail.interfaces.logits import LogitsProcessor, ProcessedRow, ProcessorContext
from dovetail.ops.transfer import to_device
from dovetail_logits.config import NoRepeatNgramConfig, NoRepeatNgramParams


class Ngrams:
    """Hold the sequences of ``size`` tokens in a text that grows: for the tokens before its last one, the last tokens
    that have followed them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._followers: dict[tuple[int, ...], set[int]] = {}
        self._read = 0  # tokens that were read

    def read(self, tokens: list[int], start: int) -> None:
        """Read the text up to its end. ``tokens`` are those from index ``start`` on, of which enough were read before to
        complete the first new sequence."""
        for end in range(max(self._read, self.size - 1), start + len(tokens)):
            first = end - start - self.size + 1
            key = tuple(tokens[first : first + self.size - 1])
            self._followers.setdefault(key, set()).add(tokens[first + self.size - 1])
        self._read = start + len(tokens)

    def needed_from(self) -> int:
        """Return the index from which on ``read`` needs the tokens."""
        return max(0, self._read - self.size + 1)

    def banned(self, last: list[int]) -> set[int]:
        """Return the tokens that have followed ``last``, the last ``size - 1`` tokens of a text."""
        return self._followers.get(tuple(last), set())


class NoRepeatNgram(LogitsProcessor):
    """Let no sequence of ``no_repeat_ngram_size`` tokens occur twice, in prompt and output together. A call costs the
    host O(new tokens), and the device one write for each forbidden token."""

    def __init__(self, config: NoRepeatNgramConfig, context: ProcessorContext) -> None:
        """See ``LogitsProcessor``."""

    def begin(self, params: NoRepeatNgramParams) -> Ngrams:
        """See ``LogitsProcessor``."""
        return Ngrams(params.no_repeat_ngram_size)

    def process(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
        """See ``LogitsProcessor``."""
        places: list[tuple[int, int]] = []
        for i, row in enumerate(rows):
            places += [(i, token) for token in sorted(self._banned(row))]
        if places:
            at = to_device(np.array(places, np.int64).T.copy(), logits.device)
            logits[at[0], at[1]] = -torch.inf

    def _banned(self, row: ProcessedRow) -> set[int]:
        ngrams: Ngrams = row.state
        size, known = ngrams.size, row.known_len
        begin = ngrams.needed_from()
        ngrams.read(row.token_ids[begin:known].tolist(), begin)
        total = len(row.token_ids)
        if total < size - 1:
            return set()
        last = row.token_ids[total - size + 1 :].tolist()
        banned = ngrams.banned(last)
        if total > known:  # sequences that end in drafts are not kept
            path = Ngrams(size)
            start = max(0, known - size + 1)
            path.read(row.token_ids[start:].tolist(), 0)
            banned = banned | path.banned(last)
        return banned
