"""Run a model over KV pools, for the suite of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.engine.build import as_module
from dovetail.engine.grouped import backends_of, grouped_attention
from dovetail.engine.mesh import local_info
from dovetail.engine.own_rows import tokens_of
from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture
from dovetail.interfaces.store import KVStore
from dovetail.layers.own_rows import OwnRows
from dovetail.memory.pool import make_pool
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.eager import EagerAttention
from dovetail.testing.model_states import RowStates
from dovetail.types import Batch

MakeAttention = Callable[[ModelArchitecture, KVStore], AttentionBackend]


class ModelRows:
    """Run a model over its own pools, one for each cache group, with different pages in each. Tokens of rows enter in
    pieces of any size, and their logits are returned. Entries of the pools that were never written are NaN. The states
    of a group of states are kept here too. With data-parallel attention, row r belongs to rank r modulo the number of ranks,
    and ``enter`` runs a step of all ranks."""

    def __init__(
        self,
        model: ModelArchitecture,
        lens: Sequence[int],
        page_size: int = 4,
        mesh: Mesh = SINGLE,
        make_attention: MakeAttention = lambda model, pool: EagerAttention(pool),
    ) -> None:
        """Rows have up to ``lens`` tokens. ``model`` was built with ``mesh``."""
        self.model, self._mesh = model, mesh
        self._page_size = page_size
        parameter = next(as_module(model).parameters())
        self._device, num_pages = parameter.device, 1 + sum(-(-n // page_size) for n in lens)
        groups = local_info(model.info, mesh).cache_groups
        self._kinds = [group.kind for group in groups]
        self._states = RowStates(model, len(lens)) if CacheGroupKind.STATE in self._kinds else None
        paged = [group for group in groups if group.kind is not CacheGroupKind.STATE]
        self._kv = tuple(
            make_pool(group, num_pages, page_size, parameter.dtype, self._device)
            for group in paged or [CacheGroup(1, 1, 1)]  # of a model without attention nothing reads the pool
        )
        for pool in self._kv:
            pool.k.fill_(float("nan"))
            pool.v.fill_(float("nan"))
        self._attention = grouped_attention([make_attention(model, pool) for pool in self._kv])
        self._tables = [make_page_table(lens, page_size, num_pages, seed=group) for group in range(len(self._kv))]
        self._prefix = [0] * len(lens)

    def _batch(self, rows: Sequence[int], lens: Sequence[int], ids: Sequence[int]) -> Batch:
        """Return a batch in which the next ``lens`` tokens of ``rows`` enter. It is not planned."""
        prefix = [self._prefix[row] for row in rows]
        return self._batch_at(rows, prefix, lens, ids)

    def _batch_at(
        self, rows: Sequence[int], prefix: Sequence[int], lens: Sequence[int], ids: Sequence[int] | None
    ) -> Batch:
        table, *others = (table[list(rows)] for table in self._tables)
        states = self._states.step(rows, prefix, lens) if self._states else None
        return make_batch(
            self._page_size,
            table,
            prefix,
            lens,
            input_ids=ids,
            device=self._device,
            attn=self._of_groups(backends_of(self._attention), states),
            kv=self._of_groups(self._kv, states),
            other_tables=others,
        )

    def _of_groups(self, paged: Sequence[Any], states: Any) -> tuple[Any, ...]:
        """Return ``states`` at the place of the group of states, and ``paged`` at those of the other groups."""
        others = iter(paged)
        return tuple([states if kind is CacheGroupKind.STATE else next(others) for kind in self._kinds])

    @torch.inference_mode()
    def enter(self, pieces: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some rows in one batch. Return the logits ``[tokens, vocab_size]`` of each row."""
        rows = sorted(pieces, key=lambda row: -len(pieces[row]))  # extend rows first
        lens = [len(pieces[row]) for row in rows]
        batch = self._batch(rows, lens, [token for row in rows for token in pieces[row]])
        if self._mesh.attention == "data":
            batch.own = self._own_rows(batch, rows, pieces)
        else:
            self._attention.plan(batch)
        logits = self.model.logits(self.model.forward(batch)).split(lens)
        self._advance(pieces)
        return dict(zip(rows, logits, strict=True))

    def _own_rows(self, batch: Batch, rows: Sequence[int], pieces: Mapping[int, Sequence[int]]) -> OwnRows:
        """Return the rows of this rank among ``rows``, the rows of ``batch``, with planned attention."""
        tp, own = self._mesh.tp, None
        places = np.array([at for at, row in enumerate(rows) if row % tp.size == tp.rank], np.int64)
        if len(places):
            mine = [rows[at] for at in places.tolist()]
            own = self._batch(
                mine, [len(pieces[row]) for row in mine], [token for row in mine for token in pieces[row]]
            )
            self._attention.plan(own)
        tokens = torch.from_numpy(tokens_of(batch, places)).to(self._device)
        return OwnRows(own, tokens, tokens, tp)

    @torch.inference_mode()
    def enter_for(self, sampled: Sequence[int], pieces: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Compute ``enter`` for a model that offers model.last_rows, with only the rows ``sampled`` sampled. Return
        their last logits, ``[sampled rows, vocab_size]``."""
        rows = sorted(pieces)
        lens = [len(pieces[row]) for row in rows]
        batch = self._batch(rows, lens, [token for row in rows for token in pieces[row]])
        last = [rows.index(row) for row in sampled]
        ends = [self._prefix[row] + lens[at] - 1 for at, row in zip(last, sampled, strict=True)]
        batch.logit_rows = torch.tensor([sum(lens[: at + 1]) - 1 for at in last], dtype=torch.int64)
        batch.last = self._batch_at(sampled, ends, [1] * len(last), None)
        attention = grouped_attention([EagerAttention(pool) for pool in self._kv])
        batch.last.attn = self._of_groups(backends_of(attention), None)
        self._attention.plan(batch)
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
        self._attention.plan(batch)
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
