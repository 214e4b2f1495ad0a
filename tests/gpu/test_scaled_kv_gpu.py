"""Test keys and values in FP8 with scales on a GPU: the conformance suite of the stores, and an engine whose graphs read and
write scales.

.venv/bin/python -m pytest -q tests/gpu/test_scaled_kv_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.testing.store import KVStoreSuite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs compute capability 8.9",
    ),
]
PROMPTS = ["The capital of France is", "Monday Tuesday Wednesday Monday Tuesday Wednesday Monday"]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0)


class TestScaled(KVStoreSuite):
    name = "scaled"
    device = "cuda"


class TestPaged(KVStoreSuite):
    name = "paged"
    device = "cuda"


def tokens(**sections: object) -> list[list[int]]:
    llm = LLM("tiny", device="cuda", memory={"kv_dtype": "fp8_e4m3", "num_pages": 200}, **sections)  # type: ignore[arg-type]
    try:
        return [output.token_ids for _ in range(2) for output in llm.generate(PROMPTS, GREEDY)]
    finally:
        llm.close()


def test_graphs_and_backends_agree() -> None:
    """Captured steps give the tokens of steps that are launched kernel by kernel, and those of plain torch."""
    eager = {"graphs": {"decode": False, "piecewise_tokens": 0}}
    captured = tokens(store="scaled", attention="triton", graphs={"capture": "start"})
    assert captured == tokens(store="scaled", attention="triton", **eager)
    assert captured == tokens(store="scaled", attention="torch_native", **eager)
    drafted = tokens(store="scaled", attention="triton", speculative="ngram", scheduler={"draft": "always"})
    assert captured == drafted
