"""Test data-parallel attention on two GPUs: in float32 and with captured steps, the tokens are those of one GPU, with few requests and
with more, of which ranks have different numbers, without and with adapters (LoRA), and with drafters of every kind: without a model,
DeepSeek's own layer for further tokens, and trees.

Run on a machine with two GPUs: python -m pytest tests/gpu/test_data_attention_gpu.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as heads
import mtp_dflash_checkpoints as checkpoints

from dovetail import LLM, SamplingParams
from lora_adapters import write_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
DEVICE = "cuda:0"
VOCAB, HIDDEN = 512, 256
GENERATED = 6
"""The number of tokens that the models generate: drafts of random weights are right now and then."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "moe_intermediate_size": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "q_lora_rank": None,
}
FEW: dict[str, Any] = {"max_running": 16, "chunk_size": 256}
ROUNDS = 2, 11
"""The numbers of requests. Each round is repeated: then graphs of its sizes are captured, prefixes are cached, and ngram drafts what it
has seen."""


def save_deepseek(directory: Path) -> None:
    """Save a model with latent attention, experts, and one layer that predicts further tokens."""
    checkpoints.save_deepseek(directory, **COMMON | LATENT)


def save_qwen3_next(directory: Path) -> None:
    """Save a model with gated delta nets, attention, experts, and one layer that predicts further tokens."""
    delta = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    types = ["linear_attention", "full_attention"]
    checkpoints.save_qwen3_next(directory, **COMMON, **delta, num_key_value_heads=2, head_dim=64, layer_types=types)


def save_qwen3(directory: Path) -> None:
    """Save a model with few heads of keys and values, experts, and an EAGLE-3 head."""
    torch.manual_seed(0)
    experts: dict[str, Any] = {"head_dim": 64, "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    settings: dict[str, Any] = COMMON | experts | ends
    config = Qwen3MoeConfig(**settings, num_hidden_layers=4, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "head_dim": 64}
    heads.save_eagle3(directory / "eagle3", **sizes, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    heads.draft_first_tokens(directory / "eagle3", GENERATED)


@dataclass(frozen=True)
class Model:
    """Hold a checkpoint, adapters for it, and what one GPU generates: of requests without adapters, and with them."""

    path: Path
    adapters: dict[str, str]
    plain: list[list[int]]
    adapted: list[list[int]]


def write_adapters(directory: Path) -> dict[str, str]:
    """Write two adapters: one of attention only, one of the layers between, experts included."""
    weights, adapters = load_file(directory / "model.safetensors"), {}
    patterns = {
        "attention": r"layers\.[01]\.self_attn\.(?!kv_b_proj|.*norm)",
        "between": r"layers\.[01]\.mlp\.(?!gate\.)",
    }
    for seed, (own, pattern) in enumerate(patterns.items()):
        names = [key for key in weights if re.search(pattern, key) and weights[key].ndim == 2]
        shapes = {key.removesuffix(".weight"): (weights[key].shape[0], weights[key].shape[1]) for key in names}
        write_adapter(directory / own, shapes, rank=8, seed=seed)
        adapters[own] = str(directory / own)
    return adapters


def generated(path: Path, adapters: dict[str, str], ranks: int, *, named: bool, **others: Any) -> list[list[list[int]]]:
    """Return the tokens of all rounds, without adapters and then, if ``named``, with one of ``adapters`` or none for each request."""
    sections: dict[str, Any] = {
        "grammar": "none",
        "memory": {"kv_gib": 0.5},
        "model": {"dtype": "float32"},
        "scheduler": FEW,
    }
    if ranks > 1:
        sections["parallel"] = {"tp": ranks, "attention": "data"}
    if named:
        sections["adapters"] = {"enabled": True, "load": adapters}
    llm = LLM(str(path), device=DEVICE, **sections | others)
    found: list[list[list[int]]] = []
    try:
        for with_adapters in (False, True)[: 1 + named]:
            rng, texts = np.random.default_rng(0), []
            for count in ROUNDS:
                prompts = [rng.integers(0, VOCAB, int(size)).tolist() for size in rng.integers(3, 120, count)]
                lengths = rng.integers(8, 24, count).tolist()
                params = [SamplingParams(max_new_tokens=n, temperature=0, ignore_eos=True) for n in lengths]
                names = [[None, *adapters][i] for i in rng.integers(0, 3, count)] if with_adapters else None
                for _ in range(2):
                    texts += [list(output.token_ids) for output in llm.generate(prompts, params, adapter=names)]
            found.append(texts)
        llm.loop.scheduler.check_integrity()
        assert llm.loop.stats().drafter_errors == 0
        assert "speculative" not in others or llm.loop.stats().accepted_tokens > 0
    finally:
        llm.close()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Return a function that returns a model."""
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            {"deepseek": save_deepseek, "qwen3": save_qwen3, "qwen3_next": save_qwen3_next}[name](path)
            weights = load_file(path / "model.safetensors")
            for head in [key for key in weights if key.endswith(("lm_head.weight", "shared_head.head.weight"))]:
                weights[head][GENERATED:] = 0
            save_file(weights, path / "model.safetensors")
            adapters = {} if name == "qwen3_next" else write_adapters(path)
            found = generated(path, adapters, 1, named=bool(adapters))
            made[name] = Model(path, adapters, found[0], found[-1])
        return made[name]

    return model


def check_same(found: list[list[int]], expected: list[list[int]]) -> None:
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    assert same >= 0.9 * len(expected), (
        f"{same} of {len(expected)} texts are the same: more than near ties of two tokens differ"
    )


CASES = {
    "deepseek, mtp": ("deepseek", {"kind": "mtp", "num_draft_tokens": 3}),
    "qwen3, trees": ("qwen3", {"kind": "eagle3_tree", "topk": 2, "depth": 3, "num_draft_tokens": 6}),
    "deepseek, ngram": ("deepseek", {"kind": "ngram"}),
    "qwen3_next, mtp": ("qwen3_next", {"kind": "mtp", "num_draft_tokens": 3}),
    "qwen3, chains": ("qwen3", {"kind": "eagle3"}),
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_change_no_tokens(models: Callable[[str], Model], case: str) -> None:
    """Verify steps and the passes of drafters are captured."""
    name, speculative = CASES[case]
    model = models(name)
    (found,) = generated(model.path, {}, 2, named=False, speculative=speculative, scheduler={**FEW, "draft": "always"})
    check_same(found, model.plain)


@pytest.mark.parametrize("name", ["deepseek", "qwen3"])
def test_tokens_and_adapters_are_those_of_one_device(models: Callable[[str], Model], name: str) -> None:
    model = models(name)
    plain, adapted = generated(model.path, model.adapters, 2, named=True)
    check_same(plain, model.plain)
    check_same(adapted, model.adapted)
    assert sum(a == b for a, b in zip(model.plain, model.adapted, strict=True)) < 0.7 * len(plain), (
        "otherwise this test shows nothing"
    )
