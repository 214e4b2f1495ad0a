"""Drafts by a smaller model of the same vocabulary (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, 2302.01318)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.ops.transfer import to_device
from dovetail.types import Batch, DraftTree, IntArray, Req
from dovetail_speculative.checkpoints import find_checkpoint
from dovetail_speculative.config import DraftModelConfig
from dovetail_speculative.steps import ChainSteps, TextSteps, chains

Indices = np.ndarray[Any, np.dtype[np.intp]]
NOTHING: IntArray = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Cursor:
    """``[0, place)`` of a text have their KV in the draft cache, and behind them ``drafts`` do, as far as the text went on so."""

    place: int = 0
    drafts: IntArray = field(default_factory=lambda: NOTHING)

    def settle(self, req: Req) -> None:
        """Move on to where the text is no longer what was drafted."""
        said = req.token_ids[self.place : req.known_len]
        count = min(len(said), len(self.drafts))
        differs = np.flatnonzero(said[:count] != self.drafts[:count])
        self.place += int(differs[0]) if len(differs) else count
        self.drafts = NOTHING


@dataclass(slots=True)
class _Texts:
    """Rows that are drafted for: their requests' slots, how much of each text the model has read, and where it ends. All
    int32 ``[n]``. ``limits`` is how many drafts each may have."""

    rows: IntArray
    slots: IntArray
    starts: IntArray
    ends: IntArray
    limits: IntArray

    def __getitem__(self, chosen: Indices) -> _Texts:
        return _Texts(
            self.rows[chosen], self.slots[chosen], self.starts[chosen], self.ends[chosen], self.limits[chosen]
        )


class ModelDrafter(Drafter):
    """Reads of each text what is new when it is asked to draft, then says what it would say, greedily.

    It needs nothing of the target but its pages. Of a text whose beginning came from the prefix cache it reads the beginning
    too: who wrote these pages may not have drafted.
    """

    def __init__(self, config: DraftModelConfig, context: DrafterContext) -> None:
        """Raises ``ConfigError`` for a model of another vocabulary."""
        runtime = context.runtime
        assert runtime is not None, "drafters that run a model are built by an engine"
        directory = find_checkpoint(runtime, config)
        self._model = runtime.open(directory, config.load_format)
        info = self._model.info
        if info.vocab_size != context.vocab_size:
            raise ConfigError(
                f"speculative.path is {config.path!r}, a model of {info.vocab_size} tokens; the target has {context.vocab_size}: "
                "a draft model needs the vocabulary of its target"
            )
        self._cache = runtime.create_cache(info)
        self._device = context.device
        self._count, self._chunk = config.num_draft_tokens, config.chunk_size
        self._chain = ChainSteps(self._go_on, self._count, 1, runtime.dtype, context.device)
        sizes = 1, info.hidden_size
        self._said = TextSteps(self._forward, 1 + self._count, sizes, runtime.dtype, context.device)
        self._dtype = runtime.dtype
        self._cache.register(self._said)
        self._cache.register(self._chain)
        self._context_len = info.context_len
        self._cursors: dict[int, _Cursor] = {}  # by uid

    @property
    def max_draft_tokens(self) -> int:
        """``num_draft_tokens`` of the config."""
        return self._count

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree | None:
        """A chain for each decode row whose text the model has read, once it has read on by ``chunk_size`` tokens."""
        texts = self._texts(batch)
        if not len(texts.rows):
            return None
        ids, texts = self._read(batch, texts)
        if not len(texts.rows):
            return None
        drafts = self._write(ids, texts)
        for row, draft in drafts.items():
            self._cursors[batch.reqs[row].uid].drafts = draft[:-1]  # the last one was never read
        return chains(len(batch.reqs), drafts)

    def forget(self, req: Req) -> None:
        """Its pages are others' from now on."""
        self._cursors.pop(req.uid, None)

    def _texts(self, batch: Batch) -> _Texts:
        """Rows to draft for, those that wait for the most drafts first."""
        assert batch.draft_limits is not None, "pages were reserved for no drafts"
        rows = np.arange(batch.num_extend, len(batch.reqs), dtype=np.int32)
        ends = np.array([req.known_len for req in batch.reqs[batch.num_extend :]], np.int32)
        limits = np.minimum(np.minimum(batch.draft_limits[rows], self._count), self._context_len - ends + 1)
        rows, ends, limits = (array[limits > 0] for array in (rows, ends, limits))
        starts = np.zeros_like(ends)
        for i, row in enumerate(rows.tolist()):
            req = batch.reqs[row]
            cursor = self._cursors.setdefault(req.uid, _Cursor())
            cursor.settle(req)
            starts[i] = cursor.place
        return _Texts(rows, batch.slots[rows], starts, ends, limits.astype(np.int32))

    def _read(self, batch: Batch, texts: _Texts) -> tuple[torch.Tensor, _Texts]:
        """Read ``chunk_size`` tokens, where least is new first. Returns the first drafts int64 ``[n]`` of the ``n`` texts that
        are read to their ends, those with the largest limits first."""
        texts = texts[np.argsort(texts.ends - texts.starts, kind="stable")]
        new = texts.ends - texts.starts
        counts = np.clip(self._chunk - (np.cumsum(new) - new), 0, new).astype(np.int32)
        texts, counts = texts[np.flatnonzero(counts)], counts[counts > 0]
        done = np.flatnonzero(texts.starts + counts == texts.ends)
        done = done[np.argsort(-texts.limits[done], kind="stable")]
        outputs = self._outputs(batch, texts, counts, done)
        for row, place in zip(texts.rows.tolist(), (texts.starts + counts).tolist(), strict=True):
            self._cursors[batch.reqs[row].uid].place = place
        first = self._model.logits(outputs).argmax(-1) if len(done) else outputs.new_zeros(0, dtype=torch.int64)
        return first, texts[done]

    def _outputs(self, batch: Batch, texts: _Texts, counts: IntArray, done: Indices) -> torch.Tensor:
        """Read ``counts`` tokens of ``texts``. Returns hidden states ``[n, hidden_size]`` of the last ones of those ``done``."""
        spans = zip(texts.rows.tolist(), texts.starts.tolist(), counts.tolist(), strict=True)
        said = np.concatenate([batch.reqs[row].token_ids[start : start + count] for row, start, count in spans])
        few = int(counts.max()) <= self._said.widths[-1]
        arrays = [said, self._said.places(counts), done] if few else [said, (np.cumsum(counts) - 1)[done]]
        sent = to_device(np.concatenate(arrays).astype(np.int64), self._device)
        ids, where, *chosen = sent.split([len(array) for array in arrays])
        if few:
            rows = texts.slots, texts.starts, counts
            return self._said.take(self._cache, rows, where, ids, self._nothing(ids)).index_select(0, chosen[0])
        own = self._cache.batch(texts.slots, texts.starts, counts)
        return self._forward(own, ids, self._nothing(ids)).index_select(0, where)

    def _nothing(self, ids: torch.Tensor) -> torch.Tensor:
        """In a hidden state's stead: the model keeps all it needs in the draft cache."""
        return torch.zeros(len(ids), 1, dtype=self._dtype, device=self._device)

    def _forward(self, batch: Batch, ids: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        batch.input_ids = ids
        return self._model.forward(batch)

    def _write(self, ids: torch.Tensor, texts: _Texts) -> dict[int, IntArray]:
        """Drafts by row; ``ids`` are the first ones."""
        drafts = self._chain.draft(self._cache, texts.slots, texts.ends, texts.limits, ids, self._nothing(ids))
        return {row: drafts[i, : texts.limits[i]] for i, row in enumerate(texts.rows.tolist())}

    def _go_on(self, batch: Batch, ids: torch.Tensor, nothing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.logits(self._forward(batch, ids, nothing)).argmax(-1), nothing
