"""Compute log-probabilities of prompt tokens. At most ``PROMPT_LOGPROB_ROWS`` rows of logits are in memory at a
time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.sampler import logprobs_of
from dovetail.ops.transfer import to_device
from dovetail.types import Logprobs

if TYPE_CHECKING:
    from dovetail.engine.row_logits import RowLogits
    from dovetail.types import Batch, IntArray

PROMPT_LOGPROB_ROWS = 512
"""The number of prompt tokens whose logits are in memory at one time."""


def prompt_logprobs(logits: RowLogits, batch: Batch, hidden: torch.Tensor) -> list[tuple[int, IntArray, Logprobs]]:
    """Return, for each extend row whose request asks for them, the row, the prompt tokens that the tokens of its chunk
    predict, and the log-probabilities of these prompt tokens. ``hidden`` are the hidden states of all tokens of the
    batch."""
    found: list[tuple[int, IntArray, Logprobs]] = []
    for row in range(batch.num_extend):
        req, start = batch.reqs[row], int(batch.prefix_lens[row])
        if req.params.prompt_logprobs is None or start >= req.prompt_len - 1:
            continue
        begin = max(start + 1, req.params.prompt_logprobs_start)
        next_ids = req.token_ids[begin : min(start + int(batch.extend_lens[row]) + 1, req.prompt_len)]
        if not len(next_ids):
            continue
        first = int(batch.extend_lens[:row].sum()) + begin - start - 1
        own = hidden[first : first + len(next_ids)]
        found.append((row, next_ids, _score(logits, batch, row, own, next_ids)))
    return found


def _score(logits: RowLogits, batch: Batch, row: int, hidden: torch.Tensor, next_ids: IntArray) -> Logprobs:
    params = batch.reqs[row].params
    targets = to_device(next_ids.astype(np.int64), hidden.device)
    top, ids = params.prompt_logprobs or 0, params.token_ids_logprob
    given = None if ids is None else to_device(np.array([ids], np.int64), hidden.device)

    def score(begin: int) -> Logprobs:
        part = slice(begin, begin + PROMPT_LOGPROB_ROWS)
        own = targets[part]
        found = logits.of(batch, hidden[part], np.full(len(own), row, np.int32))
        return logprobs_of(found, own, top, None if given is None else given.expand(len(own), -1))

    parts = [score(begin) for begin in range(0, len(targets), PROMPT_LOGPROB_ROWS)]
    return Logprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))
