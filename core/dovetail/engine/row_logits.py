"""Compute logits of hidden states whose rows in the batch are known, because the head may have adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from dovetail.engine.adapters import EngineAdapters
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.types import Batch, IntArray


class RowLogits:
    """Compute the logits of ``model``, with ``adapters`` of its head if there are any."""

    def __init__(self, model: ModelArchitecture, adapters: EngineAdapters | None = None) -> None:
        self._model, self._adapters = model, adapters

    def of(self, batch: Batch, hidden: torch.Tensor, rows: IntArray | None = None) -> torch.Tensor:
        """Return the logits ``[n, vocab_size]`` of ``hidden [n, hidden_size]``, of which each belongs to one of ``rows`` of the batch (int
        ``[n]``), by default to those whose tokens are sampled or verified."""
        if self._adapters is None or batch.adapters is None:
            return self._model.logits(hidden)
        with self._adapters.sampled(batch, _sampled_rows(batch) if rows is None else rows):
            return self._model.logits(hidden)


def _sampled_rows(batch: Batch) -> IntArray:
    """Return the row of each of ``Batch.logit_rows``."""
    rows = np.arange(len(batch.slots), dtype=np.int32)
    if batch.logit_rows is None:
        return rows
    if batch.drafts is None:
        return rows[batch.samples]
    split = batch.num_extend
    return np.concatenate([rows[:split][batch.samples[:split]], np.repeat(rows[split:], batch.extend_lens[split:])])
