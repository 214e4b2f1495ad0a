"""Run a model over a KV pool, for the suite of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.cache import KVPool
from dovetail.interfaces.model import ModelArchitecture
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.eager import EagerAttention


class ModelRows:
    """Run a model over its own pool. Tokens of rows enter in pieces of any size, and their logits are returned."""

    def __init__(
        self, model: ModelArchitecture, attention: AttentionBackend, pool: KVPool, lens: Sequence[int]
    ) -> None:
        self.model = model
        self._attn, self._kv = (attention,), (pool,)
        self._pool = pool
        self._page_size = pool.page_size
        self._table = make_page_table(lens, pool.page_size, pool.num_pages)
        self._prefix = [0] * len(lens)

    @torch.inference_mode()
    def enter(self, pieces: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some rows in one batch. Return the logits ``[tokens, vocab_size]`` of each row."""
        rows = sorted(pieces, key=lambda row: -len(pieces[row]))  # extend rows first
        lens = [len(pieces[row]) for row in rows]
        batch = make_batch(
            self._page_size,
            self._table[rows],
            [self._prefix[row] for row in rows],
            lens,
            input_ids=[token for row in rows for token in pieces[row]],
            attn=self._attn,
            kv=self._kv,
        )
        self._attn[0].plan(batch)
        logits = self.model.logits(self.model.forward(batch)).split(lens)
        self._advance(pieces)
        return dict(zip(rows, logits, strict=True))

    @torch.inference_mode()
    def enter_for(self, sampled: Sequence[int], pieces: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Compute ``enter`` for a model that offers model.last_rows, with only the rows ``sampled`` sampled. Return
        their last logits, ``[sampled rows, vocab_size]``."""
        rows = sorted(pieces)
        lens = [len(pieces[row]) for row in rows]
        prefix = [self._prefix[row] for row in rows]
        ids = [token for row in rows for token in pieces[row]]
        table, size = self._table[rows], self._page_size
        batch = make_batch(size, table, prefix, lens, input_ids=ids, attn=self._attn, kv=self._kv)
        last = [rows.index(row) for row in sampled]
        batch.logit_rows = torch.tensor([sum(lens[: row + 1]) - 1 for row in last], dtype=torch.int64)
        ends = [prefix[row] + lens[row] - 1 for row in last]
        attention = EagerAttention(self._pool)
        batch.last = make_batch(size, table[last], ends, [1] * len(last), attn=(attention,), kv=self._kv)
        self._attn[0].plan(batch)
        attention.plan(batch.last)
        logits = self.model.logits(self.model.forward(batch))
        self._advance(pieces)
        return logits

    @torch.inference_mode()
    def enter_watching(self, tokens: Sequence[int], watch: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the next tokens of the only row, and keep the hidden states of the layers ``watch``. Return what the
        model returns, and the states ``[layers, tokens, hidden_size]``."""
        prefix, count = self._prefix[0], len(tokens)
        batch = make_batch(
            self._page_size, self._table, [prefix], [count], input_ids=tokens, attn=self._attn, kv=self._kv
        )
        batch.watch = watch
        self._attn[0].plan(batch)
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

    def _advance(self, pieces: Mapping[int, Sequence[int]]) -> None:
        for row, piece in pieces.items():
            self._prefix[row] += len(piece)
