"""Test what attention backends compute from the projection of a step with one token in each row."""

from __future__ import annotations

import pytest
import torch

from dovetail.interfaces.attention import AttentionBackend, AttentionLayer, ProjectedRows
from dovetail.testing.attention_cases import DECODE
from dovetail.testing.attention_checks import AttentionChecks
from dovetail.testing.attention_reference import TOLERANCES, AttentionCase, AttentionStep, poisoned_equal

EPS = 1e-6


class ProjectedCases(AttentionChecks):
    """Compare ``forward_projected`` with the single operations, as a part of ``AttentionSuite``."""

    @pytest.mark.parametrize("normed", [True, False])
    @pytest.mark.parametrize("prefixes", [(0,), (1,), (64,), (700,), (1900,), (700, 0, 65, 300)], ids=str)
    @torch.inference_mode()
    def test_projected_rows(self, prefixes: tuple[int, ...], normed: bool) -> None:
        """What is computed from the projection of one token of each row is what the single operations compute, and only their keys and
        values are written; a backend without kernels for that writes nothing."""
        self.require(DECODE)
        for dtype in self.allowed_dtypes():
            lens = [prefix * self.longest // 1900 for prefix in prefixes]
            case = AttentionCase(lens, [1] * len(lens), heads=8, page_size=16, dtype=dtype)
            step = AttentionStep(self.fit(case), self.find_device())
            rows, *expected = project(step, normed=normed)
            backend = self.make(step.context())
            self._compare_layers(backend, step, rows, expected, (step.layer,))
            if step.device.type == "cuda":  # see ``compare``
                self._compare_layers(backend, step, rows, expected, (step.other_layer, step.layer))

    def _compare_layers(
        self,
        backend: AttentionBackend,
        step: AttentionStep,
        rows: ProjectedRows,
        expected: list[torch.Tensor],
        layers: tuple[AttentionLayer, ...],
    ) -> None:
        """Compare the last of ``layers`` with the keys and the values that are ``expected``."""
        pool, qkv, out = step.pool, rows.qkv.clone(), None
        pool.k.flatten(1, 2)[:, rows.out_loc], pool.v.flatten(1, 2)[:, rows.out_loc] = torch.nan, torch.nan
        before = pool.k.clone(), pool.v.clone()
        backend.plan(step.batch)
        for layer in layers:
            out = backend.forward_projected(rows, layer, step.batch)
        for memory, old, own in zip((pool.k, pool.v), before, expected, strict=True):
            places, written = old.flatten(1, 2), memory.flatten(1, 2)[:, rows.out_loc]
            if out is not None:
                error = (written[step.layer.layer_id].cpu().double() - own).abs() / (1 + own.abs())
                assert bool((error <= TOLERANCES[step.case.dtype]).all()), (
                    "a token has another key or value in the pool"
                )
                for layer in layers:
                    places[layer.layer_id, rows.out_loc] = written[layer.layer_id]
            assert poisoned_equal(memory, old), "the pool was changed where no token of the step is"
        assert torch.equal(rows.qkv, qkv), "forward_projected changed the projection"
        if out is not None:
            self.compare_output(step, out)


def project(step: AttentionStep, *, normed: bool) -> tuple[ProjectedRows, torch.Tensor, torch.Tensor]:
    """Return a random projection of ``step``, which has one token in each row, and the keys and the values that it makes, float64 ``[rows,
    kv_heads, head_dim]``. The queries of ``step`` become those of the projection."""
    case, device, rows = step.case, step.device, len(step.lens)
    random = torch.Generator().manual_seed(case.seed + 1)
    counts, size = (case.heads, case.kv_heads, case.kv_heads), case.head_dim
    qkv = torch.randn(rows, sum(counts), size, generator=random).to(case.dtype)
    weights = [(1 + torch.randn(size, generator=random) / 4).to(case.dtype) for _ in range(2)]
    angles = torch.arange(max(step.lens))[:, None] * 1e4 ** (-torch.arange(size // 2) / (size // 2))
    table = torch.stack([angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], 1)], 1)
    *heads, v = qkv.double().split(counts, 1)
    if normed:
        scales = [torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) for x in heads]
        heads = [x * scale * weight.double() for x, scale, weight in zip(heads, scales, weights, strict=True)]
    cos, sin = table[torch.tensor(step.lens) - 1].double()[:, :, None].unbind(1)
    q, k = (x * cos + x.roll(size // 2, -1) * sin for x in heads)
    step.q = q.to(device, case.dtype)
    norm = (weights[0].to(device), weights[1].to(device), EPS) if normed else None
    return ProjectedRows(qkv.to(device), table.to(device), step.batch.positions, norm, step.batch.out_loc), k, v
