"""Test data-parallel attention on two GPUs: in float32 and with captured decode steps, the tokens are those of ranks that divide
the heads, with few requests and with many, of which ranks have different numbers, without and with adapters (LoRA) and drafts.

Run on a machine with two GPUs: python -m pytest tests/gpu/test_data_attention_gpu.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DeepseekV2Config, Qwen3MoeConfig

from dovetail import LLM, SamplingParams
from lora_adapters import write_adapter

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


def generated(
    checkpoint: Path, attention: str, counts: list[int], adapters: dict[str, str] | None = None, **others: Any
) -> list[list[int]]:
    """Return the tokens of rounds of ``counts`` requests each. Later rounds find graphs of their sizes captured, and prefixes
    cached. Requests have one of ``adapters``, or none."""
    parallel = {"tp": 2, "attention": attention}
    model = {"dtype": "float32"}
    sections: dict[str, Any] = {
        "parallel": parallel,
        "model": model,
        "grammar": "none",
        "memory": {"kv_gib": 1},
    } | others
    if adapters:
        sections["adapters"] = {"enabled": True, "load": adapters}
    llm = LLM(str(checkpoint), device="cuda:0", **sections)
    rng, found = np.random.default_rng(0), []
    try:
        for count in counts:
            prompts = [rng.integers(0, VOCAB, int(size)).tolist() for size in rng.integers(3, 300, count)]
            lengths = rng.integers(8, 48, count).tolist()
            params = [SamplingParams(max_new_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
            chosen = rng.integers(0, 3, count)
            names = [[None, *adapters][i] for i in chosen] if adapters else None
            for _ in range(2):
                found += [list(output.token_ids) for output in llm.generate(prompts, params, adapter=names)]
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


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_those_of_ranks_of_heads(name: str, tmp_path: Path) -> None:
    """One adapter is of attention only, the other one of the layers between, experts included."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path / "model")
    weights, adapters = load_file(tmp_path / "model" / "model.safetensors"), {}
    patterns = {"attention": r"self_attn\.(?!kv_b_proj|.*norm)", "between": r"mlp\.(?!gate\.)"}
    for seed, (own, pattern) in enumerate(patterns.items()):
        names = [key for key in weights if re.search(pattern, key)]
        shapes = {key.removesuffix(".weight"): (weights[key].shape[0], weights[key].shape[1]) for key in names}
        write_adapter(tmp_path / own, shapes, rank=8, seed=seed)
        adapters[own] = str(tmp_path / own)
    counts = [1, 7, 40]
    data, heads = (generated(tmp_path / "model", attention, counts, adapters) for attention in ("data", "heads"))
    plain = generated(tmp_path / "model", "heads", counts)
    same = sum(a == b for a, b in zip(data, heads, strict=True))
    assert same >= 0.9 * len(heads), (
        f"{same} of {len(heads)} texts are the same: more than near ties of two tokens differ"
    )
    assert sum(a == b for a, b in zip(plain, heads, strict=True)) < 0.6 * len(heads), (
        "otherwise this test shows nothing"
    )


@pytest.mark.parametrize("name", MODELS)
def test_drafts_change_no_tokens(name: str, tmp_path: Path) -> None:
    """Rounds are repeated, so that ngram drafts what it has seen. Verify steps are captured."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path)
    counts = [1, 7, 7, 20]
    drafts: dict[str, Any] = {"speculative": "ngram", "scheduler": {"draft": "always"}}
    data, heads = generated(tmp_path, "data", counts, **drafts), generated(tmp_path, "heads", counts)
    same = sum(a == b for a, b in zip(data, heads, strict=True))
    assert same >= 0.9 * len(heads), (
        f"{same} of {len(heads)} texts are the same: more than near ties of two tokens differ"
    )
