"""Test attention backends that attend over latents (MLA), and over the keys and values that latents are expanded to."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from dovetail.interfaces.expanded import ExpandedAttention
from dovetail.interfaces.features import Feature
from dovetail.memory.pool import pool_dtype
from dovetail.testing.attention_cases import DECODE, LATENT, SHARED_PREFIX, SHARED_STEPS, STEPS
from dovetail.testing.attention_checks import AttentionChecks
from dovetail.testing.attention_reference import TOLERANCES, AttentionCase, AttentionStep

EXPANDED = Feature.ATTN_EXPANDED

each_step = pytest.mark.parametrize("step", STEPS)
each_size = pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (576, 512)])


def over_latents(case: AttentionCase, head_dim: int = 576, value_dim: int = 512) -> AttentionCase:
    """Return ``case`` over a pool of latents."""
    return replace(case, head_dim=head_dim, value_dim=value_dim, heads=6, kv_heads=1, scale=0.1)


class LatentCases(AttentionChecks):
    """Compare steps over latents, as a part of ``AttentionSuite``."""

    @each_step
    @each_size
    def test_latents(self, step: str, head_dim: int, value_dim: int) -> None:
        """Values are the first numbers of the keys, which all query heads read; outputs have their size."""
        self.skip_size(head_dim)
        case, features = STEPS[step]
        self.check(over_latents(case, head_dim, value_dim), *features, LATENT)

    @each_step
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_latents_of_16_bits(self, step: str, dtype: torch.dtype) -> None:
        """Outputs over latents in every dtype are within ``TOLERANCES``, for the number of heads of DeepSeek-V2-Lite."""
        self.skip_dtype(dtype)
        case, features = STEPS[step]
        self.check(replace(over_latents(case), heads=16, dtype=dtype, page_size=16), *features, LATENT)

    @pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
    def test_latents_of_8_bits(self, kv_dtype: str) -> None:
        """Latents of 8 bits are exact in every dtype of queries."""
        self.skip_kv_dtype(kv_dtype)
        for step in ("extend after a prefix", "decode", "verify chains"):
            case, features = STEPS[step]
            case = replace(over_latents(case), kv_dtype=pool_dtype(kv_dtype), page_size=16)
            self.check(case, *features, LATENT)

    @pytest.mark.parametrize("step", SHARED_STEPS)
    def test_shared_prefixes_of_latents(self, step: str) -> None:
        """Latents that rows share may be read once for all of them."""
        self.check(over_latents(SHARED_STEPS[step]), DECODE, SHARED_PREFIX, LATENT)

    def test_long_rows_of_latents(self) -> None:
        """Rows long enough that every backend splits them."""
        prefix = [n * self.longest // 1900 for n in (1900, 3, 700, 0, 64, 1100, 255, 30)]
        self.check(over_latents(AttentionCase(prefix, [1] * len(prefix), page_size=16)), DECODE, LATENT)

    @pytest.mark.parametrize("step", ["extend", "extend after a prefix", "a long chunk"])
    @pytest.mark.parametrize(("head_dim", "value_dim"), [(24, 16), (192, 128)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @torch.inference_mode()
    def test_prompts_over_expanded_latents(self, step: str, head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
        """Each prompt attends causally over its own keys, and its queries are the last of them."""
        self.require(EXPANDED)
        self.skip_size(head_dim)
        self.skip_dtype(dtype)
        if step == "a long chunk":
            case = AttentionCase([self.longest // 2, 0], [self.longest // 3, 70], num_extend=2)
        else:
            case = STEPS[step][0]
        case = self.fit(replace(over_latents(case), dtype=dtype))
        backend = cast(ExpandedAttention, self.make(AttentionStep(case, self.find_device()).context()))
        made = AttentionStep(replace(case, head_dim=head_dim, value_dim=value_dim), self.find_device())
        keys, random = sum(made.lens), torch.Generator().manual_seed(1)
        wide = torch.randn(keys, case.heads, value_dim + head_dim, generator=random).to(made.device, made.case.dtype)
        v, k = wide.split((value_dim, head_dim), 2)  # views, as models pass them
        indptr = torch.tensor([0, *made.lens]).cumsum(0).to(made.device, torch.int32)
        backend.plan_expanded(made.batch, indptr)
        for _ in range(2):  # as in two layers
            out = backend.forward_expanded(made.q, k, v, made.layer, made.batch)
            assert out.shape == (*made.q.shape[:2], value_dim)
            assert out.dtype is made.q.dtype
            assert out.is_contiguous()
            expected = _causal(made, k.cpu().double(), v.cpu().double())
            worst = ((out.cpu().double() - expected).abs() / (1 + expected.abs())).max()
            assert worst <= TOLERANCES[made.case.dtype], f"difference of {worst:.2e} (1 + |value|)"

    def skip_size(self, head_dim: int) -> None:
        """Skip small heads, which only tests have, if the component has kernels for certain sizes only."""
        if self.constraints.latent_dims and head_dim < 64:
            pytest.skip(f"{self.name} serves certain latents only")
        if self.constraints.head_dims and head_dim < min(self.constraints.head_dims):
            pytest.skip(f"{self.name} has kernels for certain sizes only")


def _causal(made: AttentionStep, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the causal attention of each row's queries over its part of ``k`` and ``v``."""
    q, token, key, parts = made.q.cpu().double(), 0, 0, list[torch.Tensor]()
    for length, count in zip(made.lens, made.case.extend, strict=True):
        own = slice(key, key + length)
        scores = torch.einsum("qhd,khd->hqk", q[token : token + count], k[own]) * made.layer.scale
        later = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[own]))
        token, key = token + count, own.stop
    return torch.cat(parts)
