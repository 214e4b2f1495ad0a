"""Draft with a smaller model of the same vocabulary (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023,
2302.01318)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.ops.transfer import to_device
from dovetail.types import Batch, DepartedRequest, DraftTree, IntArray
from dovetail_speculative.checkpoints import find_checkpoint
from dovetail_speculative.config import DraftModelConfig
from dovetail_speculative.steps import ChainSteps, TextSteps, chains

Indices = np.ndarray[Any, np.dtype[np.intp]]
NO_DRAFTS: IntArray = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Cursor:
    """Describe what the draft cache holds of a request: the KV of its first ``place`` tokens, and of ``drafts`` after
    them.

    The KV of a draft is valid if the text continued with this draft and all drafts before it.
    """

    place: int = 0
    drafts: IntArray = field(default_factory=lambda: NO_DRAFTS)

    def advance(self, text: IntArray) -> None:
        """Move ``place`` to the first token of ``text`` that differs from the drafts, but not behind its last token, and drop
        the drafts. The last token is read again if its KV is there, because what the model predicts after it is not: drafts that
        no step has verified, because an interrupt came before, may be what follows."""
        new = text[self.place :]
        count = min(len(new), len(self.drafts))
        differs = np.flatnonzero(new[:count] != self.drafts[:count])
        self.place = min(self.place + (int(differs[0]) if len(differs) else count), len(text) - 1)
        self.drafts = NO_DRAFTS


@dataclass(slots=True)
class _Texts:
    """Describe rows that get drafts: their slots, how many tokens of each text the model has read, and the lengths of
    the texts.

    All arrays are int32 ``[n]``. ``limits`` are the largest numbers of drafts of the rows.
    """

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
    """Read the new tokens of each text when drafts are requested, and draft greedily what the model predicts.

    The drafter uses only the target's pages, not its hidden states. It also reads a beginning that came from the prefix
    cache, because the request that filled these pages may not have had drafts.
    """

    def __init__(self, config: DraftModelConfig, context: DrafterContext) -> None:
        """Load the model. Raises ``ConfigError`` if it has another vocabulary."""
        runtime = context.runtime
        assert runtime is not None, "drafters that run a model are built by an engine"
        directory = find_checkpoint(runtime, config)
        self._model = runtime.open(directory, config.load_format)
        info = self._model.info
        if info.vocab_size != context.vocab_size:
            raise ConfigError(
                f"speculative.path is {config.path!r}, a model of {info.vocab_size} tokens; the target has {context.vocab_size}. "
                "A draft model needs the vocabulary of its target"
            )
        self._cache = runtime.create_cache(info)
        self._device = context.device
        self._count, self._chunk = config.num_draft_tokens, config.chunk_size
        self._chain = ChainSteps(self._next, self._count, 1, runtime.dtype, context.device)
        sizes = 1, info.hidden_size
        self._reader = TextSteps(self._forward, 1 + self._count, sizes, runtime.dtype, context.device)
        self._dtype = runtime.dtype
        self._cache.register(self._reader)
        self._cache.register(self._chain)
        self._context_len = info.context_len
        self._cursors: dict[int, _Cursor] = {}  # by uid

    @property
    def max_draft_tokens(self) -> int:
        """Return ``num_draft_tokens`` of the config."""
        return self._count

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree | None:
        """Return a chain for each decode row whose text the model has read, after reading up to ``chunk_size`` more
        tokens."""
        texts = self._texts(batch)
        if not len(texts.rows):
            return None
        ids, texts = self._read(batch, texts)
        if not len(texts.rows):
            return None
        drafts = self._draft(ids, texts)
        for row, draft in drafts.items():
            self._cursors[batch.reqs[row].uid].drafts = draft[:-1]  # the model has not read the last draft
        return chains(len(batch.slots), drafts)

    def forget(self, request: DepartedRequest) -> None:
        """Drop the request's state, because its pages may now be used by other requests."""
        self._cursors.pop(request.uid, None)

    def _texts(self, batch: Batch) -> _Texts:
        """Return the rows that may get drafts."""
        assert batch.draft_limits is not None, "no pages were reserved for drafts"
        rows = np.arange(batch.num_extend, len(batch.slots), dtype=np.int32)
        ends = batch.prefix_lens[batch.num_extend :] + np.int32(1)
        limits = np.minimum(np.minimum(batch.draft_limits[rows], self._count), self._context_len - ends + 1)
        rows, ends, limits = (array[limits > 0] for array in (rows, ends, limits))
        starts = np.zeros_like(ends)
        for i, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            req = batch.reqs[row]
            cursor = self._cursors.setdefault(req.uid, _Cursor())
            cursor.advance(req.token_ids[:end])
            starts[i] = cursor.place
        return _Texts(rows, batch.slots[rows], starts, ends, limits.astype(np.int32))

    def _read(self, batch: Batch, texts: _Texts) -> tuple[torch.Tensor, _Texts]:
        """Read up to ``chunk_size`` tokens, of the texts with the fewest new tokens first.

        Returns the first drafts (int64 ``[n]``) of the ``n`` texts that are read to their ends, and these texts,
        ordered from the largest limit to the smallest.
        """
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
        """Read ``counts`` tokens of ``texts``. Returns the hidden states ``[n, hidden_size]`` of the last tokens of the
        texts ``done``."""
        spans = zip(texts.rows.tolist(), texts.starts.tolist(), counts.tolist(), strict=True)
        new = np.concatenate([batch.reqs[row].token_ids[start : start + count] for row, start, count in spans])
        few = int(counts.max()) <= self._reader.widths[-1]
        arrays = [new, self._reader.places(counts), done] if few else [new, (np.cumsum(counts) - 1)[done]]
        sent = to_device(np.concatenate(arrays).astype(np.int64), self._device)
        ids, where, *chosen = sent.split([len(array) for array in arrays])
        if few:
            rows = texts.slots, texts.starts, counts
            return self._reader.take(self._cache, rows, where, ids, self._no_hidden(ids)).index_select(0, chosen[0])
        own = self._cache.batch(texts.slots, texts.starts, counts)
        return self._forward(own, ids, self._no_hidden(ids)).index_select(0, where)

    def _no_hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a placeholder for hidden states, which this drafter does not need: all of its state is in the draft
        cache."""
        return torch.zeros(len(ids), 1, dtype=self._dtype, device=self._device)

    def _forward(self, batch: Batch, ids: torch.Tensor, no_hidden: torch.Tensor) -> torch.Tensor:
        batch.input_ids = ids
        return self._model.forward(batch)

    def _draft(self, ids: torch.Tensor, texts: _Texts) -> dict[int, IntArray]:
        """Return the drafts by row. ``ids`` are the first drafts."""
        drafts = self._chain.draft(self._cache, texts.slots, texts.ends, texts.limits, ids, self._no_hidden(ids))
        return {row: drafts[i, : texts.limits[i]] for i, row in enumerate(texts.rows.tolist())}

    def _next(self, batch: Batch, ids: torch.Tensor, no_hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._model.logits(self._forward(batch, ids, no_hidden)).argmax(-1), no_hidden
