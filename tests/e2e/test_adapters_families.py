"""Test adapters (LoRA) of all linear layers of models with fused, transposed and reordered weights, with latent attention, states
and experts, against checkpoints into which they are merged.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_families.py
"""

import engine_models as models
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, Glm4Config, GPT2Config, Phi3Config, Qwen3NextConfig

from dovetail import LLM, SamplingParams
from dovetail.errors import RequestError
from lora_adapters import write_adapter

PARAMS = SamplingParams(max_new_tokens=4, temperature=0, logprobs=3, ignore_eos=True)
PROMPTS = [np.random.default_rng(seed).integers(5, 90, count).tolist() for seed, count in enumerate((7, 3, 12))]
SETTINGS = {"model": {"dtype": "float32"}, "cache": "none", "grammar": "none", "memory": {"kv_gib": 0.02}}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES = [
    (Phi3Config, {}, {"qkv_proj", "gate_up_proj"}, set()),
    (GPT2Config, {}, {"c_attn", "c_proj", "c_fc"}, set()),
    (Glm4Config, {}, {"gate_up_proj", "k_proj"}, set()),
    (
        DeepseekV2Config,
        {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
        {"kv_a_proj_with_mqa", "q_b_proj", "o_proj"},
        {"kv_b_proj"},
    ),
    (
        Qwen3NextConfig,
        {**STATES, **EXPERTS, "num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 32},
        {"in_proj_qkvz", "in_proj_ba", "q_proj", "out_proj", "shared_expert_gate"},
        {"gate_proj"},
    ),
]


def merged(model, directory, deltas):
    directory.mkdir()
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = load_file(model / "model.safetensors")
    for name, delta in deltas.items():
        weight = weights[f"{name}.weight"]
        transposed = name.rpartition(".")[2].startswith("c_")  # GPT-2 stores [in, out]
        weights[f"{name}.weight"] = (weight.double() + (delta.T if transposed else delta)).float().contiguous()
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("config", "settings", "adapted", "refused"),
    [pytest.param(*family, marks=[] if i < 2 else pytest.mark.full) for i, family in enumerate(FAMILIES)],
    ids=[family[0].__name__ for family in FAMILIES],
)
def test_adapters_of_all_linear_layers_equal_merged_checkpoints(tmp_path, config, settings, adapted, refused):
    model = models.save(tmp_path / "model", config, **settings)
    stored = load_file(model / "model.safetensors")
    with LLM(str(model), **SETTINGS, adapters={"enabled": True}) as llm:
        adapters = llm.loop.executor.rank.engine.adapters
        shapes = {}
        for module in adapters.modules:
            rows, columns = stored[f"{module}.weight"].shape
            shapes[module] = (columns, rows) if config is GPT2Config else (rows, columns)
        names = {module.rpartition(".")[2] for module in shapes}
        assert adapted <= names
        deltas = write_adapter(tmp_path / "adapter", shapes, rank=4, size=0.3)
        llm.load_adapter("mine", tmp_path / "adapter")
        outputs, plain = llm.generate(PROMPTS, PARAMS, adapter="mine"), llm.generate(PROMPTS, PARAMS)
        for module in (m for m in stored if m.split(".")[-2] in refused and m.removesuffix(".weight") not in shapes):
            write_adapter(tmp_path / "other", {module.removesuffix(".weight"): tuple(stored[module].shape)})
            with pytest.raises(
                RequestError, match=r"adapters of it are not implemented|slots have no memory for these"
            ):
                llm.load_adapter("other", tmp_path / "other")
    with LLM(str(merged(model, tmp_path / "merged", deltas)), **SETTINGS) as llm:
        references = llm.generate(PROMPTS, PARAMS)
    for output, reference, without in zip(outputs, references, plain, strict=True):
        assert output.token_ids == reference.token_ids
        values = [[p for _, p in one.logprobs[0].top] for one in (output, reference, without)]
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)
        assert not np.allclose(values[0], values[2], atol=1e-3)
