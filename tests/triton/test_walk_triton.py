"""The walk through draft trees against the one in torch, which is tested against plain Python.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_walk_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.engine.verify import accept
from dovetail.ops.triton.verify import walk


@pytest.mark.parametrize("seed", range(20))
def test_walk_equals_accept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, k, tokens = int(rng.integers(1, 6)), int(rng.integers(1, 12)), int(rng.integers(1, 4))
    lens = rng.integers(0, k + 1, rows)
    gaps = rng.integers(0, 3, rows)  # rows of logits that belong to others
    starts = np.cumsum(gaps + 1 + lens) - 1 - lens
    sampled = rng.integers(0, tokens, starts[-1] + 1 + k)
    ids = rng.integers(0, tokens, (rows, k))
    parents = np.stack([[rng.integers(-1, j) if j else -1 for j in range(k)] for _ in range(rows)])
    ids[np.arange(k) >= lens[:, None]] = sampled[0]  # what lies behind a row's drafts must not be taken
    tensors = [torch.from_numpy(a.astype(np.int64)) for a in (sampled, starts, ids, parents, lens)]
    expected = accept(*tensors)
    for ours, theirs in zip(walk(*tensors), expected, strict=True):
        assert torch.equal(ours, theirs)
