"""Run a model over a KV pool, for the suite of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.cache import CacheGroupKind, KVPool
from dovetail.interfaces.model import ModelArchitecture
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.eager import EagerAttention
from dovetail.testing.model_states import RowStates
from dovetail.types import Batch


class ModelRows:
    """Run a model over its own pool. Tokens of rows enter in pieces of any size, and their logits are returned.

    A model has at most one paged cache group, for ``attention`` and ``pool``, and at most one of states, which these
    rows keep themselves."""

    def __init__(
        self, model: ModelArchitecture, attention: AttentionBackend, pool: KVPool, lens: Sequence[int]
    ) -> None:
        self.model = model
        self._attention, self._pool = attention, pool
        self._kinds = [group.kind for group in model.info.cache_groups]
        self._states = RowStates(model, len(lens)) if CacheGroupKind.STATE in self._kinds else None
        self._page_size = pool.page_size
        self._table = make_page_table(lens, pool.page_size, pool.num_pages)
        self._prefix = [0] * len(lens)

    @torch.inference_mode()
    def enter(self, pieces: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some rows in one batch. Return the logits ``[tokens, vocab_size]`` of each row."""
        rows = sorted(pieces, key=lambda row: -len(pieces[row]))  # extend rows first
        lens = [len(pieces[row]) for row in rows]
        batch = self._batch(rows, lens, [token for row in rows for token in pieces[row]])
        logits = self.model.logits(self.model.forward(batch)).split(lens)
        self._advance(pieces)
        return dict(zip(rows, logits, strict=True))

    @torch.inference_mode()
    def enter_for(self, sampled: Sequence[int], pieces: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Compute ``enter`` for a model that offers model.last_rows, with only the rows ``sampled`` sampled. Return
        their last logits, ``[sampled rows, vocab_size]``."""
        rows = sorted(pieces)
        lens = [len(pieces[row]) for row in rows]
        batch = self._batch(rows, lens, [token for row in rows for token in pieces[row]])
        last = [rows.index(row) for row in sampled]
        batch.logit_rows = torch.tensor([sum(lens[: row + 1]) - 1 for row in last], dtype=torch.int64)
        ends = [self._prefix[row] + len(pieces[row]) - 1 for row in sampled]
        attention = EagerAttention(self._pool)
        table = self._table[list(sampled)]
        batch.last = make_batch(self._page_size, table, ends, [1] * len(last))
        batch.last.attn, batch.last.kv = self._of_groups(attention, None), batch.kv
        attention.plan(batch.last)
        logits = self.model.logits(self.model.forward(batch))
        self._advance(pieces)
        return logits

    @torch.inference_mode()
    def enter_watching(self, tokens: Sequence[int], watch: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the next tokens of the only row, and keep the hidden states of the layers ``watch``. Return what the
        model returns, and the states ``[layers, tokens, hidden_size]``."""
        count = len(tokens)
        batch = self._batch([0], [count], tokens)
        batch.watch = watch
        hidden = self.model.forward(batch)
        self._prefix[0] += count
        if not watch:
            return hidden, hidden.new_empty(0)
        shape = (count, len(watch) * self.model.info.hidden_size)
        assert batch.hidden is not None, f"batch.watch is {watch}: forward must set batch.hidden to {list(shape)}"
        assert batch.hidden.shape == shape, (
            f"batch.watch is {watch}: forward must set batch.hidden to {list(shape)}; it is {list(batch.hidden.shape)}"
        )
        return hidden, batch.hidden.unflatten(1, (len(watch), -1)).movedim(1, 0)

    def _batch(self, rows: Sequence[int], lens: Sequence[int], input_ids: Sequence[int]) -> Batch:
        """Return the batch in which ``lens`` tokens of ``rows`` enter, planned."""
        prefix = [self._prefix[row] for row in rows]
        batch = make_batch(self._page_size, self._table[list(rows)], prefix, lens, input_ids=input_ids)
        states = self._states.step(rows, prefix, lens) if self._states else None
        batch.attn, batch.kv = self._of_groups(self._attention, states), self._of_groups(self._pool, states)
        self._attention.plan(batch)
        return batch

    def _of_groups(self, paged: Any, states: Any) -> tuple[Any, ...]:
        """Return ``states`` at the place of the group of states, and ``paged`` at that of the other group."""
        return tuple(states if kind is CacheGroupKind.STATE else paged for kind in self._kinds)

    def _advance(self, pieces: Mapping[int, Sequence[int]]) -> None:
        for row, piece in pieces.items():
            self._prefix[row] += len(piece)
