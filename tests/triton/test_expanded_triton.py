"""Test attention of prompts over expanded latents, interpreted, against a reference in float64: ragged keys, and keys and
values of different sizes.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_expanded_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.testing.attention_reference import TOLERANCES, AttentionCase, AttentionStep
from dovetail_attention.triton import tiles
from dovetail_attention.triton.expanded import ExpandedPrompts

CPU = torch.device("cpu")
ROWS: dict[str, tuple[list[int], list[int]]] = {
    "whole prompts": ([0, 0, 0], [1, 37, 16]),
    "chunks after prefixes": ([70, 33, 0], [19, 1, 33]),
}


def expected(step: AttentionStep, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the causal attention of each row's queries, which are the last of its keys."""
    q, token, key, parts = step.q.double(), 0, 0, list[torch.Tensor]()
    for length, count in zip(step.lens, step.case.extend, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[token : token + count], k[key : key + length].double())
        later = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        weights = (scores * step.layer.scale).masked_fill(later, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[key : key + length].double()))
        token, key = token + count, key + length
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("rows", "processors", "dtype"),
    [
        ("whole prompts", 1, torch.float32),
        ("chunks after prefixes", 60, torch.float16),
        pytest.param("whole prompts", 60, torch.float16, marks=pytest.mark.full),
        pytest.param("chunks after prefixes", 1, torch.float32, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (48, 20)])
def test_prompts(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, value_dim: int, rows: str, processors: int, dtype: torch.dtype
) -> None:
    """Keys are cut where there are many processors, and the schedule of the first layer serves the second one."""
    monkeypatch.setattr(tiles, "choose_expanded", lambda *_, **__: tiles.AttentionTile(16, 16, 4, 1, 1))
    prefix, extend = ROWS[rows]
    case = AttentionCase(prefix, extend, num_extend=3, heads=2, kv_heads=2, head_dim=head_dim, dtype=dtype)
    step = AttentionStep(case, CPU)
    lens = torch.tensor([0, *step.lens], dtype=torch.int32)
    prompts = ExpandedPrompts(step.batch, lens.cumsum(0).int(), processors, large_memory=False)
    for seed in range(2):
        made = torch.Generator().manual_seed(seed)
        k = torch.randn(sum(step.lens), 2, head_dim, generator=made).to(dtype)
        v = torch.randn(sum(step.lens), 2, 8 + value_dim, generator=made).to(dtype)[
            ..., 8:
        ]  # a view, as models pass it
        out = prompts.forward(step.q, k, v, step.layer.scale)
        assert out.shape == (sum(extend), 2, value_dim)
        wanted = expected(step, k, v)
        assert ((out.double() - wanted).abs() / (1 + wanted.abs())).max() <= TOLERANCES[dtype]


def test_keys_of_other_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys before and after those of a row may be NaN."""
    monkeypatch.setattr(tiles, "choose_expanded", lambda *_, **__: tiles.AttentionTile(16, 16, 4, 1, 1))
    step = AttentionStep(AttentionCase([3, 7, 2], [5, 20, 4], num_extend=3, heads=2, kv_heads=2, head_dim=24), CPU)
    k, v = torch.randn(sum(step.lens), 2, 24), torch.randn(sum(step.lens), 2, 16)
    indptr = torch.tensor([0, *step.lens]).cumsum(0).int()
    outs = []
    for _ in range(2):
        outs.append(ExpandedPrompts(step.batch, indptr, 60, large_memory=False).forward(step.q, k, v, 0.3)[5:25])
        k[:8], k[35:], v[:8], v[35:] = (torch.nan,) * 4
    assert torch.equal(*outs)
