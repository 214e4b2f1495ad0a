"""Test data-parallel attention on two GPUs: in float32 and with captured decode steps, the tokens are those of ranks that divide
the heads, with few requests and with many, of which ranks have different numbers.

Run on a machine with two GPUs: python -m pytest tests/gpu/test_data_attention_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, Qwen3MoeConfig

from dovetail import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
VOCAB = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
}
MODELS: dict[str, Any] = {
    "deepseek": DeepseekV2Config(
        **COMMON | LATENT, num_key_value_heads=8, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1
    ),
    "qwen3": Qwen3MoeConfig(**COMMON | {"head_dim": 64}, num_key_value_heads=2, num_experts=8),
}


def generated(checkpoint: Path, attention: str, counts: list[int]) -> list[list[int]]:
    """Return the tokens of rounds of ``counts`` requests each. Later rounds find graphs of their sizes captured, and prefixes
    cached."""
    parallel = {"tp": 2, "attention": attention}
    model = {"dtype": "float32"}
    llm = LLM(str(checkpoint), device="cuda:0", parallel=parallel, model=model, grammar="none", memory={"kv_gib": 1})
    rng, found = np.random.default_rng(0), []
    try:
        for count in counts:
            prompts = [rng.integers(0, VOCAB, int(size)).tolist() for size in rng.integers(3, 300, count)]
            lengths = rng.integers(8, 48, count).tolist()
            params = [SamplingParams(max_new_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
            for _ in range(2):
                found += [list(output.token_ids) for output in llm.generate(prompts, params)]
        llm.loop.scheduler.check_integrity()
    finally:
        llm.close()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_devices_generate_what_ranks_of_heads_do(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path)
    counts = [1, 7, 40]
    data, heads = (generated(tmp_path, attention, counts) for attention in ("data", "heads"))
    same = sum(a == b for a, b in zip(data, heads, strict=True))
    assert same >= 0.9 * len(heads), (
        f"{same} of {len(heads)} texts are the same: more than near ties of two tokens differ"
    )
