"""Test that adapters which PEFT has made and saved compute here what PEFT computes, unmerged: log-probabilities of prompts.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_peft.py
"""

import engine_models as models
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)

from dovetail import LLM, SamplingParams

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {"model": {"dtype": "float32"}, "cache": "none", "grammar": "none", "memory": {"kv_gib": 0.02}}
PROMPTS = [np.random.default_rng(seed).integers(5, 190, count).tolist() for seed, count in enumerate((9, 3, 14, 6))]
EXPERTS = {"num_experts_per_tok": 2, "hidden_size": 32}
LOCAL = {**EXPERTS, "num_local_experts": 4, "intermediate_size": 24}
BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": ["v_proj"]}
QWEN = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
CASES = [
    (LlamaConfig, {}, {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "use_rslora": True}),
    (Qwen3MoeConfig, {**QWEN, "tie_word_embeddings": False}, {"target_modules": "all-linear"}),
    (LlamaConfig, {}, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    (Gemma2Config, {"head_dim": 16}, {"target_modules": ["embed_tokens", "lm_head"]}),
    (Qwen3MoeConfig, QWEN, {"target_parameters": ["mlp.experts.down_proj"], "target_modules": ["embed_tokens"]}),
    (Qwen3MoeConfig, {**QWEN, "hidden_size": 48}, BOTH),  # as many inputs as outputs of gate and up
    (MixtralConfig, LOCAL, BOTH),
    (GraniteMoeConfig, LOCAL, BOTH),
    (GptOssConfig, {**LOCAL, "layer_types": ["full_attention"] * 2}, BOTH),
    (GptOssConfig, {**LOCAL, "intermediate_size": 32, "layer_types": ["full_attention"] * 2}, BOTH),  # and of down
    (
        DeepseekV2Config,
        {
            **EXPERTS,
            **LATENT,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
        },
        {**BOTH, "target_modules": ["o_proj", "lm_head"]},
    ),
]


def randomised(model, adapter):
    """Return the model with an adapter whose matrices are all random, as after training."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, **adapter))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return adapted.eval()


@torch.no_grad()
def logprobs(model, prompt):
    return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


@pytest.mark.parametrize(
    ("config", "sizes", "adapter"),
    [pytest.param(*case, marks=[] if i < 2 else pytest.mark.full) for i, case in enumerate(CASES)],
    ids=[f"{case[0].__name__}-{i}" for i, case in enumerate(CASES)],
)
def test_adapters_compute_what_peft_computes(tmp_path, config, sizes, adapter):
    directory = models.save(tmp_path / "model", config, **sizes)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    plain = [logprobs(base, prompt) for prompt in PROMPTS]
    adapted = randomised(base, adapter)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = [logprobs(adapted, prompt) for prompt in PROMPTS]
    params = SamplingParams(max_new_tokens=1, temperature=0, prompt_logprobs=3)
    names = ["mine", "mine", None, "mine"]
    section = {"enabled": True, "load": {"mine": str(tmp_path / "adapter")}}
    with LLM(str(directory), **SETTINGS, adapters=section) as llm:
        outputs = llm.generate(PROMPTS, params, adapter=names)
    assert max((a - b).abs().max() for a, b in zip(expected, plain, strict=True)) > 0.05
    for i, (name, output) in enumerate(zip(names, outputs, strict=True)):
        reference = (plain if name is None else expected)[i]
        for place, entry in enumerate(output.prompt_logprobs[1:]):
            ids, values = zip(*entry.top, strict=True)
            np.testing.assert_allclose(values, reference[place, list(ids)], atol=2e-4)
