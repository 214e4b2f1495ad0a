"""Test the walk through draft trees against the one in torch, which is tested against plain Python.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_walk_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.engine.verify import Accepted, accept
from dovetail.ops.triton.verify import walk


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("seed", range(20))
def test_walk_equals_accept(seed: int, tree: bool) -> None:
    rng = np.random.default_rng(seed)
    rows, k, tokens = int(rng.integers(1, 6)), int(rng.integers(1, 12)), int(rng.integers(1, 4))
    lens = rng.integers(0, k + 1, rows)
    indptr = np.append(0, np.cumsum(1 + lens)).astype(np.int32)
    sampled = rng.integers(0, tokens, indptr[-1])
    ids = rng.integers(0, tokens, (rows, k)).astype(np.int32)
    parents = np.stack([[rng.integers(-1, j) if j else -1 for j in range(k)] for _ in range(rows)]).astype(np.int32)
    ids[np.arange(k) >= lens[:, None]] = sampled[0]  # what lies behind a row's drafts must not be taken
    given = (
        torch.from_numpy(sampled),
        *map(torch.from_numpy, (indptr, ids)),
        torch.from_numpy(parents) if tree else None,
    )
    expected = accept(*given)

    padded = [
        torch.nn.functional.pad(x, (0, 0, 0, 2)) if x is not None else None for x in given[2:]
    ]  # two rows without tokens
    ends = torch.cat([given[1], given[1][-1:].expand(2)])
    out, on_host = torch.full((2, rows + 2, 2 * k + 3), -1)
    slots, last_token = torch.from_numpy(rng.permutation(20)[: rows + 2]), torch.full((20,), -1)
    walk(given[0], ends, *padded, out, on_host=on_host, keep=(slots, last_token))
    for ours, theirs in zip(Accepted.of(out[:rows]), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(out, on_host)
    assert last_token[slots].tolist() == [*expected.tokens[:, -1].tolist(), -1, -1]
