"""Test which decode steps over latents flash_attn_mla leaves to the kernels of triton, without either's kernels.

Run: python -m pytest tests/plugins/test_attention_flash_few.py
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail_attention.config import FlashAttnMLAConfig
from dovetail_attention.flash_attn import backend as flash
from dovetail_attention.flash_attn import latent
from dovetail_attention.flash_attn.latent import TRITON, FlashAttentionLatent
from dovetail_attention.flash_attn.providers import AttentionCall, OpenedProvider
from dovetail_attention.triton.backend import TritonAttention


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what is called, in place of FlashAttention's kernels and of the triton backend."""
    found: list[str] = []

    def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        found.append("flash")
        return call.q, call.q

    monkeypatch.setattr(flash, "open_first", lambda *_, **__: (OpenedProvider("none", attend), []))
    monkeypatch.setattr(flash, "open_schedule", lambda *_: None)
    monkeypatch.setattr(latent, "open_ragged", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    for name in ("plan", "plan_capture", "forward"):
        monkeypatch.setattr(TritonAttention, name, lambda *_, name=name: found.append(name))
    return found


@pytest.mark.parametrize(
    ("rows", "heads", "shared", "expected"),
    [(1, 16, False, TRITON), (8, 8, False, TRITON), (9, 16, False, 0), (1, 128, False, 0), (2, 16, True, 0)],
)
def test_steps_of_few_rows_and_heads(used: list[str], rows: int, heads: int, shared: bool, expected: int):
    """The steps before and after such a step have FlashAttention's kernels."""
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": 1, "head_dim": 576, "value_dim": 512}
    case = AttentionCase([40] * rows, [1] * rows, groups=[(rows, 32)] if shared else None, **sizes)
    step = AttentionStep(case, torch.device("cpu"))
    backend = FlashAttentionLatent(FlashAttnMLAConfig(), step.context())
    assert backend.variant(step.batch) == expected
    assert backend.has_variant(TRITON, rows) == (rows <= 8 and heads <= 16)
    step.batch.prefix_lens, lens = np.full(rows, (1 << 17) // rows), step.batch.prefix_lens
    assert backend.variant(step.batch) == 0
    step.batch.prefix_lens = lens
    step.batch.shared = None
    for variant in (0, expected, 0):
        step.batch.variant = variant
        for plan in ("plan", "plan_capture"):
            used.clear()
            getattr(backend, plan)(step.batch)
            backend.forward(step.q, step.layer, step.batch)
            assert used == ([plan, "forward"] if variant else ["flash"])
