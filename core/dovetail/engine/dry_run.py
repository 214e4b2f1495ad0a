"""Run the largest possible step over a tiny pool, in order to measure the memory that a step allocates. The KV pool
must leave this memory free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.captures import NO_UPDATES
from dovetail.ops.sampling import Filters, sample
from dovetail.types import Batch

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.memory.pool import PagedKVPool


@torch.inference_mode()
def dry_run(model: ModelArchitecture, backend: AttentionBackend, pool: PagedKVPool, lens: list[int], rows: int) -> None:
    """Run prompts of ``lens`` tokens in one step, and sample ``rows`` rows with every filter. The step reads and writes
    only page 0 of ``pool``. ``backend`` must have been built for ``pool``."""
    device, count, tokens = pool.device, len(lens), sum(lens)
    nothing = np.zeros(count, np.int32)
    batch = Batch([], count, nothing, nothing, np.array(lens, np.int32), nothing == 0, NO_UPDATES)
    batch.input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch.positions = torch.cat([torch.arange(n, device=device) for n in lens])
    batch.out_loc = torch.zeros(tokens, dtype=torch.int64, device=device)
    batch.qo_indptr = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32, device=device)
    batch.kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    batch.page_table = torch.zeros(count, -(-max(lens) // pool.page_size), dtype=torch.int32, device=device)
    batch.attn, batch.kv = (backend,), (pool,)
    backend.plan(batch)
    hidden = model.forward(batch)
    logits = model.logits(hidden.new_zeros(rows, hidden.shape[1]))
    ones = torch.ones(rows, 1, device=device)
    filters = Filters(ones, ones.long() * 50, ones.double() * 0.9, ones.double() * 0.1)
    sample(logits, filters, ones[:, 0].double() * 0.5)
