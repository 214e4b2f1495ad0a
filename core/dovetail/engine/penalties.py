"""Count the tokens of requests on the device, by slot, and apply penalties that depend on these counts.

When a request enters a slot, and when its text changes other than by sampled tokens, the host sends the tokens that it
knows, and the slot is counted anew. Afterwards the device adds every token that it samples for the slot. So penalties
need nothing from the host in a decode step, and the steps can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.ops.penalties import IN_OUTPUT, IN_PROMPT, apply_penalties, count_tokens, penalised
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.types import DraftTree, IntArray


class SlotText(NamedTuple):
    """Hold the tokens of the request in ``slot`` that the host knows."""

    slot: int
    prompt_ids: IntArray
    output_ids: IntArray


class PathTokens(NamedTuple):
    """Hold draft tokens that precede rows of logits: before row ``rows[i]``, the token ``token_ids[i]`` occurs
    ``counts[i]`` times on the path through the drafts. A pair of row and token occurs once."""

    rows: list[int]
    token_ids: list[int]
    counts: list[int]


class TokenCounts:
    """Count the tokens of the requests in all slots. ``table`` is described in ``ops/penalties.py``; its address does
    not change. The entries of a slot are undefined until its first ``recount``, and in slots whose requests have no
    penalties. Not thread-safe."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        """Allocate ``4 * slots * vocab_size`` bytes. ``slots`` includes slot 0, the one of padding rows."""
        self.table = torch.empty(slots, vocab_size, dtype=torch.int32, device=device)
        self._amount = torch.full((1,), IN_OUTPUT, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the table."""
        return self.table.nbytes

    def recount(self, texts: Sequence[SlotText]) -> None:
        """Count the tokens of these slots anew. No slot occurs twice."""
        if not texts:
            return
        table, width = self.table, self.table.shape[1]
        slots = np.array([t.slot for t in texts], np.int64)
        parts = [slots]
        for ids in ([t.prompt_ids for t in texts], [t.output_ids for t in texts]):
            parts.append(np.concatenate(ids).astype(np.int64))
            parts[-1] += np.repeat(slots * width, [len(i) for i in ids])
        sent = to_device(np.concatenate(parts), table.device)
        rows, prompt, output = sent.split([len(part) for part in parts])
        flat = table.view(-1)
        table.index_fill_(0, rows, 0)
        flat.index_fill_(0, prompt, IN_PROMPT)
        flat.index_add_(0, output, self._added().expand(len(output)))

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add one token that was sampled for each of ``slots``. Both are int64 ``[n]``."""
        count_tokens(self.table, slots, tokens, self._amount)

    def add_accepted(self, slots: torch.Tensor, tokens: torch.Tensor, lens: torch.Tensor) -> None:
        """Add the first ``lens[r]`` of ``tokens[r]`` to ``slots[r]``. ``tokens`` is int64 ``[rows, width]``."""
        rows, width = tokens.shape
        inside = torch.arange(width, device=tokens.device) < lens[:, None]
        amounts = (inside * self._amount).int()
        count_tokens(self.table, slots.repeat_interleave(width), tokens.reshape(-1), amounts.view(rows * width))

    def apply(
        self, logits: torch.Tensor, slots: torch.Tensor, settings: torch.Tensor, paths: PathTokens | None = None
    ) -> None:
        """Penalise ``logits [n, V]`` in place, float32. ``slots`` is int64 ``[n]``, ``settings`` as in
        ``ops/penalties.py``. The tokens of ``paths`` are counted in addition to those of the slots."""
        if paths is None or not paths.rows:
            apply_penalties(logits, self.table, slots, settings, logits)
            return
        sent = to_device(np.array(paths, np.int64), self.table.device)
        rows, tokens, counts = sent
        before = logits[rows, tokens]
        apply_penalties(logits, self.table, slots, settings, logits)
        words = self.table[slots[rows], tokens] + (IN_OUTPUT * counts).int()
        logits[rows, tokens] = penalised(before, words, settings[rows])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let ``add`` add nothing meanwhile, also within graphs that are captured or replayed. A capture runs a step
        several times, of which none may be counted."""
        self._amount.zero_()
        try:
            yield
        finally:
            self._amount.fill_(IN_OUTPUT)

    def _added(self) -> torch.Tensor:
        return torch.full((1,), IN_OUTPUT, dtype=torch.int32, device=self.table.device)


def path_tokens(node: int, drafts: list[int], parents: list[int]) -> list[int]:
    """Return the draft tokens on the path from the root down to ``node``. ``node`` -1 is the root, whose path has no
    draft."""
    path: list[int] = []
    while node >= 0:
        path.append(drafts[node])
        node = parents[node]
    return path[::-1]


def paths_of(starts: Sequence[int], rows: Sequence[int], drafts: DraftTree) -> PathTokens:
    """Return the draft tokens before each logit row of the nodes of batch rows ``rows``, whose roots have the logit
    rows ``starts``."""
    found = PathTokens([], [], [])
    for start, row in zip(starts, rows, strict=True):
        tokens, parents = drafts.row(row)
        for node in range(len(tokens)):
            path = path_tokens(node, tokens, parents)
            for token in dict.fromkeys(path):
                found.rows.append(start + node + 1)
                found.token_ids.append(token)
                found.counts.append(path.count(token))
    return found
