"""Test attention backends over stores whose keys and values have scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.interfaces.features import Feature
from dovetail.memory.pool import pool_dtype
from dovetail.testing.attention_cases import DECODE, EXTEND, LATENT, SHARED_PREFIX, SHARED_STEPS, STEPS
from dovetail.testing.attention_checks import AttentionChecks
from dovetail.testing.attention_reference import AttentionCase

SCALES = Feature.ATTN_SCALES

each_scale = pytest.mark.parametrize("scales", ["token_head", "head"])
each_step = pytest.mark.parametrize(
    ("step", "scales"), [*((step, "token_head") for step in STEPS), ("decode", "head"), ("mixed", "head")]
)


def over_scales(case: AttentionCase, scales: str) -> AttentionCase:
    """Return ``case`` over a store of 8 bits with scales for each token and head, or for each head."""
    return replace(case, kv_dtype=pool_dtype("fp8_e4m3"), scales=scales, page_size=16)


class ScaleCases(AttentionChecks):
    """Compare steps over scaled keys and values, as a part of ``AttentionSuite``."""

    @each_step
    def test_scales(self, step: str, scales: str) -> None:
        """Keys and values are multiplied by their scales, which differ between tokens, heads, keys and values."""
        self.skip_kv_dtype("fp8_e4m3")
        case, features = STEPS[step]
        self.check(replace(over_scales(case, scales), heads=8), *features, SCALES)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @each_scale
    def test_scales_in_16_bits(self, scales: str, dtype: torch.dtype) -> None:
        """In 16 bits numbers far from 1 are multiplied without overflow, and without becoming 0."""
        self.skip_dtype(dtype)
        self.skip_kv_dtype("fp8_e4m3")
        for step, value_scale in (("decode", 2.0**-8), ("mixed", 1.0)):
            case, features = STEPS[step]
            self.check(replace(over_scales(case, scales), dtype=dtype, value_scale=value_scale), *features, SCALES)

    @pytest.mark.parametrize("step", STEPS)
    def test_scales_of_latents(self, step: str) -> None:
        """A latent has one scale, as a key and as a value."""
        self.skip_kv_dtype("fp8_e4m3")
        case, features = STEPS[step]
        sizes = {"heads": 6, "kv_heads": 1, "head_dim": 24, "value_dim": 16, "scale": 0.1}
        self.check(replace(over_scales(case, "token_head"), **sizes), *features, LATENT, SCALES)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_scales_of_latents_in_16_bits(self, dtype: torch.dtype) -> None:
        """Latents of 512 and 64 numbers that are far from 1."""
        self.skip_dtype(dtype)
        self.skip_kv_dtype("fp8_e4m3")
        sizes = {"heads": 16, "kv_heads": 1, "head_dim": 576, "value_dim": 512}
        for step, key_scale in (("decode", 2.0**-6), ("extend after a prefix", 2.0**-1)):
            case, features = STEPS[step]
            case = replace(over_scales(case, "token_head"), dtype=dtype, key_scale=key_scale, **sizes)
            self.check(case, *features, LATENT, SCALES)

    @each_scale
    def test_long_rows_of_scales(self, scales: str) -> None:
        """Rows long enough that every backend splits or groups them."""
        self.skip_kv_dtype("fp8_e4m3")
        prefix, longer, extend = (
            [n * self.longest // 1900 for n in lens]
            for lens in ([1900, 3, 700, 0, 64, 1100, 255, 30], [900, 0, 130], [230, 300, 70])
        )
        case = over_scales(AttentionCase(prefix, [1] * len(prefix), heads=8), scales)
        self.check(case, DECODE, SCALES)
        self.check(replace(case, prefix=longer, extend=extend, num_extend=3), EXTEND, SCALES)

    @pytest.mark.parametrize("step", SHARED_STEPS)
    def test_shared_prefixes_with_scales(self, step: str) -> None:
        """Shared keys and own keys both have scales."""
        self.skip_kv_dtype("fp8_e4m3")
        self.check(over_scales(SHARED_STEPS[step], "token_head"), DECODE, SHARED_PREFIX, SCALES)

    @each_scale
    def test_windows_caps_and_sinks_with_scales(self, scales: str) -> None:
        """Scales are applied before the cap; sinks have none."""
        self.skip_kv_dtype("fp8_e4m3")
        for step in ("decode", "mixed"):
            case, features = STEPS[step]
            case = replace(over_scales(case, scales), window=9, soft_cap=2.0, sinks=True, scale=0.5)
            others = Feature.ATTN_SLIDING_WINDOW, Feature.ATTN_SOFT_CAP, Feature.ATTN_SINKS
            self.check(case, *features, *others, SCALES)
