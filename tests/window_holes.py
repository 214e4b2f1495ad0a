"""Compare attention over tables that have holes behind the window with attention over whole tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionContext
from dovetail.testing.attention_cases import STEPS
from dovetail.testing.attention_reference import AttentionStep

WINDOWED_STEPS = ("extend after a prefix", "decode", "mixed", "verify chains", "trees")


@torch.inference_mode()
def check_holes(make: Callable[[AttentionContext], AttentionBackend], name: str, window: int) -> None:
    """Check that the pages behind the windows of all tokens of a step, of which the table knows nothing any more and which
    others may have overwritten, influence no result. Holes are page 0, which holds zeros."""
    step = AttentionStep(replace(STEPS[name][0], window=window), torch.device("cpu"))
    size, batch = step.case.page_size, step.batch
    outputs = []
    for gone in (False, True):
        if gone:
            table = batch.page_table.numpy().copy()
            behind = [max(0, prefix - window + 1) // size for prefix in step.case.prefix]
            assert any(behind)
            left = np.concatenate([row[:count] for row, count in zip(table, behind, strict=True)])
            left = torch.from_numpy(left[left > 0]).long()
            for memory in (step.pool.k, step.pool.v):
                memory[:, left], memory[:, 0] = float("nan"), 0.0
            for row, count in enumerate(behind):
                batch.page_table[row, :count] = 0
        backend = make(step.context())
        backend.plan(batch)
        outputs.append(backend.forward(step.q, step.layer, batch))
    assert outputs[0].isfinite().all()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
