"""Test adapters (LoRA) with data-parallel attention (two ranks, gloo, on the CPU), mixed in one batch with each other and with none:
tokens and log-probabilities are those of checkpoints into which each adapter is merged.

.venv/bin/python -m pytest -q tests/e2e/test_data_attention_adapters.py
"""

import re
from dataclasses import replace

import engine_models as models
import numpy as np
import pytest
import torch
from engine_runs import check_idle
from safetensors.torch import load_file
from transformers import DeepseekV2Config, Qwen3MoeConfig, Qwen3NextConfig

from dovetail import LLM, SamplingParams
from dovetail.cli.explain_adapters import explain_adapters
from lora_adapters import merged_checkpoint, random_pair, table_tensors, write_tensors

GREEDY = SamplingParams(max_new_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
PROMPTS = [
    np.random.default_rng(seed).integers(5, 190, count).tolist() for seed, count in enumerate((9, 3, 14, 6, 4, 21))
]
PARAMS = [GREEDY, replace(GREEDY, prompt_logprobs=1)] * 3
SETTINGS = {"model": {"dtype": "float32"}, "grammar": "none", "memory": {"num_pages": 96, "page_size": 4}, "threads": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "hidden_size": 32, "tie_word_embeddings": False}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MODELS = {
    "qwen3": (Qwen3MoeConfig, {"num_experts": 4, "num_key_value_heads": 2}),
    "deepseek": (
        DeepseekV2Config,
        {
            **LATENT,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        {
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
ATTENTION = r"(self|linear)_attn\.(?!kv_b_proj|.*norm|conv)"
REST = r"mlp\.(?!gate\.|shared_expert_gate)|lm_head|embed_tokens"  # routers of DeepSeek compute in float32, without adapters
KINDS = {
    "attention": ATTENTION,
    "rest": REST,
    "all": f"{ATTENTION}|{REST}",
}
NAMES = ["attention", None, "all", "rest", "all", None]
SNAPSHOTS = {"memory": SETTINGS["memory"] | {"state_snapshot_tokens": 4}, "scheduler": {"chunk_size": 7}}
DRAFTS = {"speculative": "ngram", "scheduler": {"draft": "always"}}
ROUNDS = [  # indices of prompts: two ranks with adapters of their own; one rank without rows; one rank without adapters
    ([0, 1, 2, 3, 4, 5], NAMES),
    ([2], ["all"]),
    ([0, 1], ["attention", None]),
    ([5, 4], [None, "all"]),
    ([0, 1, 2, 3, 4, 5], NAMES),  # cached prefixes
    ([0, 1, 2, 3, 4, 5], [None] * 6),
]


def write(directory, weights, pattern, seed):
    """Write an adapter of the modules whose names match ``pattern``. Return what it adds to their weights."""
    random, tensors, deltas = torch.Generator().manual_seed(seed), {}, {}
    modules = [name.removesuffix(".weight") for name in weights if re.search(pattern, name) and name.endswith("weight")]
    for module in modules:
        shape = tuple(weights[f"{module}.weight"].shape)
        if module.endswith("embed_tokens"):
            own, deltas[module] = table_tensors(module, shape, 3, 1.0, random)
            tensors |= own
            continue
        a, b = random_pair(shape, 3, random)
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        deltas[module] = b.double() @ a.double()
    names = sorted({module.rpartition(".")[2] for module in modules})
    write_tensors(directory, tensors, r=3, lora_alpha=3, target_modules=names)
    return deltas


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """Return a directory with a model and its adapters, and what the checkpoints generate into which these are merged, by the name
    of the adapter."""
    directory, (config, sizes) = tmp_path_factory.mktemp(request.param), MODELS[request.param]
    model = models.save(directory / "model", config, **EXPERTS | sizes)
    weights, paths = load_file(model / "model.safetensors"), {None: model}
    for seed, (name, pattern) in enumerate(KINDS.items()):
        deltas = write(directory / name, weights, pattern, seed)
        paths[name] = merged_checkpoint(model, directory / f"{name}-merged", deltas)
    expected = {}
    for name, path in paths.items():
        with LLM(str(path), cache="none", **SETTINGS) as llm:
            expected[name] = llm.generate(PROMPTS, PARAMS)
    firsts = [np.array([one.logprobs[0].logprob for one in outputs]) for outputs in expected.values()]
    assert not any(np.abs(a - b).max() < 0.01 for i, a in enumerate(firsts) for b in firsts[:i]), (
        "otherwise these tests show nothing"
    )
    return directory, expected


def served(directory, **sections):
    load = {name: str(directory / name) for name in KINDS}
    return LLM(str(directory / "model"), cache="radix", **SETTINGS | sections, adapters={"enabled": True, "load": load})


def check_same(output, expected):
    assert output.token_ids == expected.token_ids
    pairs = [*zip(output.logprobs, expected.logprobs, strict=True)]
    pairs += [*zip((output.prompt_logprobs or [])[1:], (expected.prompt_logprobs or [])[1:], strict=True)]
    for own, theirs in pairs:
        np.testing.assert_allclose([p for _, p in own.top], [p for _, p in theirs.top], atol=1e-4)


@pytest.mark.parametrize(
    ("saved", "experts", "sections"),
    [
        ("deepseek", "ep", {"scheduler": {"chunk_size": 7}}),
        pytest.param("deepseek", "tp", DRAFTS, marks=pytest.mark.full),
        pytest.param("qwen3", "ep", {}, marks=pytest.mark.full),
        pytest.param("qwen3_next", "ep", SNAPSHOTS, marks=pytest.mark.full),
        pytest.param("qwen3", "tp", {"scheduler": {"chunk_size": 7, "overlap": False}}, marks=pytest.mark.full),
    ],
    indirect=["saved"],
)
def test_two_ranks_generate_what_merged_checkpoints_do(saved, experts, sections):
    """Chunks of prompts and decode rows of several requests are in one step, of which each rank attends in its own."""
    directory, expected = saved
    with served(directory, parallel={"tp": 2, "attention": "data", "experts": experts}, **sections) as llm:
        table = explain_adapters(llm.resolved)
        assert table is not None
        assert table["bytes"] == llm.loop.executor.call("adapters", ("describe",))[0][1]
        for indices, names in ROUNDS:
            outputs = llm.generate([PROMPTS[i] for i in indices], [PARAMS[i] for i in indices], adapter=names)
            for i, name, output in zip(indices, names, outputs, strict=True):
                check_same(output, expected[name][i])
        assert llm.loop.stats().cached_tokens > 0
        check_idle(llm)
