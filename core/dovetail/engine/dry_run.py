"""A forward pass of the largest step there can be, over a pool of one page: what it allocates is what the pool must leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.graphs import NO_UPDATES
from dovetail.ops.sampling import Filters, sample
from dovetail.types import Batch

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.memory.pool import PagedKVPool


@torch.inference_mode()
def dry_run(model: ModelArchitecture, backend: AttentionBackend, pool: PagedKVPool, tokens: int, rows: int) -> None:
    """One prompt of ``tokens`` tokens and the sampling of ``rows`` rows with every filter. All of it reads and writes page 0
    of ``pool``, which ``backend`` was built for."""
    device = pool.device
    batch = Batch(
        reqs=[],
        num_extend=1,
        slots=np.zeros(1, np.int32),
        prefix_lens=np.zeros(1, np.int32),
        extend_lens=np.array([tokens], np.int32),
        samples=np.ones(1, np.bool_),
        page_updates=NO_UPDATES,
    )
    batch.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch.positions = torch.arange(tokens, device=device)
    batch.out_loc = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch.qo_indptr = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    batch.kv_lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    batch.page_table = torch.zeros(1, -(-tokens // pool.page_size), dtype=torch.int32, device=device)
    batch.attn, batch.kv = (backend,), (pool,)
    backend.plan(batch)
    hidden = model.forward(batch)
    logits = model.logits(hidden.new_zeros(rows, hidden.shape[1]))
    ones = torch.ones(rows, 1, device=device)
    filters = Filters(ones, ones.long() * 50, ones.double() * 0.9, ones.double() * 0.1)
    sample(logits, filters, ones[:, 0].double() * 0.5)
