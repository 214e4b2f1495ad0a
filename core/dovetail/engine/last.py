"""Reduce the last layer of a step with prompts to the rows that are sampled, which then form a decode batch.

The last layer must write K and V of every token. Otherwise, only its results for the last tokens of sampled rows are
used. A chunk that ends before its prompt does is not sampled at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.grouped import backends_of, set_views
from dovetail.ops.transfer import to_device
from dovetail.types import Batch

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionBackend

FEWER = 2
"""The last layer is narrowed only if less than one in ``FEWER`` tokens is sampled."""

SPARED = 16
"""The last layer is narrowed only if this spares at least ``SPARED`` tokens, because the host needs as much time to
plan a separate batch as the device needs for the last layer of a few tokens."""


def narrows(batch: Batch) -> bool:
    """Return True if the last layer may omit the tokens that are not sampled and this saves time. It may not omit them
    if verification, pooling or log-probabilities of prompts read every token."""
    return (
        batch.num_extend > 0
        and batch.drafts is None
        and _spares(batch.num_tokens, int(batch.samples.sum()))
        and all(
            req.params.prompt_logprobs is None and req.params.pooling is None for req in batch.reqs[: batch.num_extend]
        )
    )


def _spares(tokens: int, sampled: int) -> bool:
    return tokens > FEWER * sampled and tokens >= SPARED + sampled


def last_rows(batch: Batch, backend: AttentionBackend) -> Batch:
    """Return the sampled rows of a prepared batch as a decode batch, which is planned with ``backend``. The query of
    each row is its last token."""
    sampled = np.flatnonzero(batch.samples)
    count = len(sampled)
    last = Batch(
        reqs=(),
        num_extend=0,
        slots=batch.slots[sampled],
        prefix_lens=(batch.prefix_lens + batch.extend_lens - 1)[sampled],
        extend_lens=np.ones(count, np.int32),
        samples=np.ones(count, np.bool_),
        page_updates=NO_UPDATES,
    )
    device, tokens = batch.positions.device, batch.logit_rows
    assert tokens is not None
    last.kv_lens, last.page_table = batch.kv_lens, batch.page_table
    rows = to_device(sampled, device) if count < len(batch.slots) else None
    if rows is not None:
        last.kv_lens, last.page_table = last.kv_lens.index_select(0, rows), last.page_table.index_select(0, rows)
    last.input_ids, last.positions, last.out_loc = (
        x.index_select(0, tokens) for x in (batch.input_ids, batch.positions, batch.out_loc)
    )
    last.qo_indptr = torch.arange(count + 1, dtype=torch.int32, device=device)
    last.attn, last.kv = backends_of(backend), batch.kv
    if count:
        last.variant = backend.variant(last)
    if batch.views:
        tables = [v.page_table if rows is None else v.page_table.index_select(0, rows) for v in batch.views]
        locations = [v.out_loc.index_select(0, tokens) for v in batch.views]
        set_views(last, zip(tables, locations, strict=True))
    if count:
        backend.plan(last)
    return last
