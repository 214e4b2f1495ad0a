"""Apply repetition, presence and frequency penalties and logit biases to logits. The penalties depend on the tokens
that a request has so far.

The device keeps counts for each penalised request. A batch without penalised requests costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.ops.penalties import apply_penalties
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.sampling_params import SamplingParams
    from dovetail.types import DraftTree, Req


class TokenCounts:
    """Count the tokens of one request. ``prompt`` (bool ``[V]``) is True for the tokens that are in its prompt, and
    ``output`` (float32 ``[V]``) is the number of times that each token is in its output.

    ``counted`` is the number of its tokens that have been counted. ``settings`` are its repetition, presence and
    frequency penalty, float32 ``[1]`` each.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, device: torch.device) -> None:
        given = np.array([params.repetition_penalty, params.presence_penalty, params.frequency_penalty], np.float32)
        self.settings = to_device(given, device).split(1)
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.output = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self.counted = 0

    def count_known(self, req: Req, end: int) -> None:
        """Count the tokens before index ``end`` that the host knows."""
        end = min(end, req.known_len)
        if self.counted < req.prompt_len:
            self.prompt[to_device(req.token_ids[: req.prompt_len].astype(np.int64), self.prompt.device)] = True
            self.counted = req.prompt_len
        if self.counted < end:
            self.add(to_device(req.token_ids[self.counted : end].astype(np.int64), self.output.device))
            self.counted = end

    def add(self, tokens: torch.Tensor, sign: float = 1.0) -> None:
        """Add ``sign`` to the counts of the output tokens int64 ``[n]``."""
        self.output.index_add_(0, tokens, torch.full((len(tokens),), sign, device=self.output.device))


class Penalties:
    """Keep the counts of all penalised requests, and apply their penalties to logits in place."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._counts: dict[int, TokenCounts] = {}

    def forget_all_but(self, uids: set[int]) -> None:
        """Drop the counts of all requests except those with these uids."""
        for uid in [u for u in self._counts if u not in uids]:
            del self._counts[uid]

    def apply(
        self, logits: torch.Tensor, req: Req, length: int, first: torch.Tensor, drafts: list[int], parents: list[int]
    ) -> None:
        """Penalise the rows ``logits [1 + len(drafts), V]`` of one request, float32, in place.

        ``length`` tokens precede the sampled token. The last of them is ``first [1]``, which may be on the device only.
        Row j + 1 also follows the drafts on the path to draft j.
        """
        counts = self._counts.get(req.uid)
        if counts is None:
            counts = self._counts[req.uid] = TokenCounts(req.params, self.vocab_size, self.device)
        counts.count_known(req, length)
        if counts.counted < length:
            counts.add(first)
            counts.counted = length
        _penalise(logits[:1], req.params, counts)
        for node in range(len(drafts)):
            path = to_device(np.array(path_tokens(node, drafts, parents), np.int64), self.device)
            counts.add(path)
            _penalise(logits[node + 1 : node + 2], req.params, counts)
            counts.add(path, -1.0)


def path_tokens(node: int, drafts: list[int], parents: list[int]) -> list[int]:
    """Return the draft tokens on the path from the root down to ``node``. ``node`` -1 is the root, whose path has no
    draft."""
    path: list[int] = []
    while node >= 0:
        path.append(drafts[node])
        node = parents[node]
    return path[::-1]


def _penalise(logits: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    """Penalise ``logits [1, V]`` in place."""
    if params.logit_bias:
        tokens = to_device(np.array(list(params.logit_bias), np.int64), logits.device)
        biases = to_device(np.array(list(params.logit_bias.values()), np.float32), logits.device)
        logits[0].index_add_(0, tokens, biases)
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        apply_penalties(logits, counts.prompt[None], counts.output[None], *counts.settings)


def draft_rows(drafts: DraftTree | None, row: int) -> tuple[list[int], list[int]]:
    """Return the draft tokens of a batch row and their parents."""
    if drafts is None:
        return [], []
    count = int(drafts.lens[row])
    return drafts.token_ids[row, :count].tolist(), drafts.parents[row, :count].tolist()
