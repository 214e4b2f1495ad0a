"""List a small config of every architecture with experts, and of the dense ones beside Llama, Mistral and Qwen. The engine
tests share this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from engine_models import VOCAB

from moe_suite import SMALL, randomise

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 3.0,
}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}

WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": LOCAL,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
    "phimoe": LOCAL | {"attention_bias": True, "lm_head_bias": True},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4}
    | {"topk_group": 2, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    "granitemoe": LOCAL | MULTIPLIERS,
    "granitemoeshared": LOCAL | MULTIPLIERS | {"shared_intermediate_size": 12},
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20},
    "gpt_oss": LOCAL
    | {"sliding_window": 24, "swiglu_limit": 0.5}
    | {"rope_parameters": YARN | {"truncate": False, "original_max_position_embeddings": 64}},
    "llama4_text": {"num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
    | {"no_rope_layers": [1, 0], "floor_scale": 8, "attn_scale": 0.4, "attention_chunk_size": 256},
}
DENSE: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 24, "head_dim": 8},
    "gemma2": WINDOWS | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 10},
    "olmo2": {},
    "olmo3": WINDOWS,
    "glm": {},
    "glm4": {},
    "cohere": {"head_dim": 8, "logit_scale": 0.3},
    "cohere2": WINDOWS | {"head_dim": 8, "logit_scale": 0.3},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": MULTIPLIERS,
    "starcoder2": {"sliding_window": 24, "head_dim": 8},
    "gpt2": {},
    "gpt_neox": {"head_dim": 8, "rotary_pct": 0.5},
}
"""Settings by the ``model_type`` of transformers, beside those of ``SMALL``."""


def save(directory: Path, model_type: str) -> Path:
    """Write a checkpoint with random weights."""
    torch.manual_seed(0)
    settings = SMALL | {"vocab_size": VOCAB} | (WITH_EXPERTS | DENSE)[model_type]
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(directory)
    return directory
