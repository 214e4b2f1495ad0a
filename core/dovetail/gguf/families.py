"""List the architectures of GGUF files: which model of transformers each one is, where its settings come from, and what
its tensors are called in a checkpoint of transformers.

llama.cpp's names are in gguf-py (``constants.py``, ``tensor_mapping.py``), what its converter changes in
``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dovetail.gguf.changes import Change, ExpandKeyValue, Interleaved, Offset, PairedRows, Rows, Transposed, Unsqueezed


class Key(NamedTuple):
    """Read a setting from key ``name`` of the metadata, below the name of the architecture. Without the key it is
    ``default``; ``REQUIRED`` means that the file is refused."""

    name: str
    default: Any = None
    scale: float = 1.0


class Present(NamedTuple):
    """Set True if the file has a tensor of this name in layer 0 (or, without a layer, of this whole name)."""

    tensor: str


class REQUIRED:
    """Mark a key that must be there."""


class Joined(NamedTuple):
    """Make one tensor of several: ``parts`` are the names within a layer."""

    name: str
    parts: tuple[str, ...]
    change: Change


@dataclass(frozen=True)
class Family:
    """Describe one architecture. ``settings`` are those of config.json. ``names`` map the names of tensors within a layer,
    with or without their suffix, to those within a layer of the checkpoint; ``{}`` stands for the number of an expert, where one
    tensor holds all of them. ``changes`` are what undoes the converter's changes, by the names in the file. ``partial``: rope.dimension_count is the rotated
    part of a head. ``norm_offset`` is what the converter added to norms."""

    architecture: str
    model_type: str
    settings: Mapping[str, Any]
    names: Mapping[str, str]
    changes: Mapping[str, Change] = field(default_factory=dict)
    joined: tuple[Joined, ...] = ()
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layers: str = "model.layers"
    partial: bool = False
    norm_offset: float = 0.0


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

BASE: Mapping[str, Any] = {
    "max_position_embeddings": Key("context_length", REQUIRED),
    "hidden_size": Key("embedding_length", REQUIRED),
    "num_hidden_layers": Key("block_count", REQUIRED),
    "intermediate_size": Key("feed_forward_length"),
    "num_attention_heads": Key("attention.head_count", REQUIRED),
    "num_key_value_heads": Key("attention.head_count_kv"),
    "head_dim": Key("attention.key_length"),
    "rms_norm_eps": Key("attention.layer_norm_rms_epsilon", REQUIRED),
    "rope_theta": Key("rope.freq_base", 10000.0),
}
LAYER_NORM_BASE = {key: value for key, value in BASE.items() if key != "rms_norm_eps"}
BIASES = {"attention_bias": Present("attn_q.bias"), "mlp_bias": Present("ffn_up.bias")}

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
DENSE = {**ATTENTION, **NORMS, **MLP}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
PAIRS: Mapping[str, Change] = {
    "attn_q": PairedRows("attention.head_count"),
    "attn_k": PairedRows("attention.head_count_kv"),
}
"""The converter orders the rows of q and k so that pairs are rotated."""

LLAMA = Family("LlamaForCausalLM", "llama", {**BASE, **BIASES}, DENSE, PAIRS)
QWEN2 = Family("Qwen2ForCausalLM", "qwen2", BASE, DENSE)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", {**BASE, "attention_bias": BIASES["attention_bias"]}, {**DENSE, **QK_NORMS})

_MOE = {
    **BASE,
    "num_experts": Key("expert_count", REQUIRED),
    "num_experts_per_tok": Key("expert_used_count", REQUIRED),
    "moe_intermediate_size": Key("expert_feed_forward_length", REQUIRED),
}
_GEMMA = {
    **BASE,
    "head_dim": Key("attention.key_length", REQUIRED),
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": Key("attn_logit_softcapping"),
    "final_logit_softcapping": Key("final_logit_softcapping"),
    "sliding_window": Key("attention.sliding_window"),
}
_GEMMA_NAMES = {**ATTENTION, **SANDWICH, **MLP, **QK_NORMS}

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    {
        **BASE,
        "num_local_experts": Key("expert_count", REQUIRED),
        "num_experts_per_tok": Key("expert_used_count", REQUIRED),
    },
    {
        **ATTENTION,
        **NORMS,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    PAIRS,
)
OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    {**BASE, "attention_bias": BIASES["attention_bias"]},
    {**ATTENTION, **QK_NORMS, **MLP, **{name: SANDWICH[name] for name in ("post_attention_norm", "post_ffw_norm")}},
)
GRANITE = Family(
    "GraniteForCausalLM",
    "granite",
    {
        **BASE,
        **BIASES,
        "embedding_multiplier": Key("embedding_scale", 1.0),
        "attention_multiplier": Key("attention.scale", 1.0),
        "residual_multiplier": Key("residual_scale", 1.0),
        "logits_scaling": Key("logit_scale", 1.0),
    },
    DENSE,
    PAIRS,
)
GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    {
        **GRANITE.settings,
        "num_local_experts": Key("expert_count", REQUIRED),
        "num_experts_per_tok": Key("expert_used_count", REQUIRED),
    },
    {
        **ATTENTION,
        **NORMS,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        "ffn_down_exps": "block_sparse_moe.output_linear",
        "ffn_down_shexp": "shared_mlp.output_linear",
    },
    PAIRS,
    (
        Joined("block_sparse_moe.input_linear.weight", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), Rows(1)),
        Joined("shared_mlp.input_linear.weight", ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), Rows(0)),
    ),
)
DEEPSEEK2 = Family(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    {
        **{key: value for key, value in BASE.items() if key not in ("head_dim", "num_key_value_heads")},
        "q_lora_rank": Key("attention.q_lora_rank"),
        "kv_lora_rank": Key("attention.kv_lora_rank", REQUIRED),
        "qk_rope_head_dim": Key("rope.dimension_count", REQUIRED),
        "first_k_dense_replace": Key("leading_dense_block_count", 0),
        "moe_intermediate_size": Key("expert_feed_forward_length", REQUIRED),
        "n_routed_experts": Key("expert_count", REQUIRED),
        "n_shared_experts": Key("expert_shared_count", REQUIRED),
        "num_experts_per_tok": Key("expert_used_count", REQUIRED),
        "routed_scaling_factor": Key("expert_weights_scale", 1.0),
        "norm_topk_prob": Key("expert_weights_norm", False),
        "n_group": Key("expert_group_count", 1),
        "topk_group": Key("expert_group_used_count", 1),
    },
    {
        **NORMS,
        **MLP,
        **EXPERTS,
        **SHARED,
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_output": "self_attn.o_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    joined=(Joined("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), ExpandKeyValue()),),
)
GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    {
        **BASE,
        "intermediate_size": Key("expert_feed_forward_length", REQUIRED),
        "num_local_experts": Key("expert_count", REQUIRED),
        "num_experts_per_tok": Key("expert_used_count", REQUIRED),
        "sliding_window": Key("attention.sliding_window", 128),
        "attention_bias": True,
    },
    {
        **ATTENTION,
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
    {"ffn_down_exps.weight": Transposed()},
    (
        Joined(
            "mlp.experts.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), Interleaved(transposed=True)
        ),
        Joined("mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), Interleaved()),
    ),
)
GLM4 = Family(
    "Glm4ForCausalLM",
    "glm4",
    {**BASE, "attention_bias": BIASES["attention_bias"]},
    {
        **ATTENTION,
        **NORMS,
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    partial=True,
)
GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    {
        **{key: value for key, value in _MOE.items() if key != "num_experts"},
        "n_routed_experts": Key("expert_count", REQUIRED),
        "n_shared_experts": Key("expert_shared_count", 1),
        "first_k_dense_replace": Key("leading_dense_block_count", 1),
        "routed_scaling_factor": Key("expert_weights_scale", 1.0),
        "norm_topk_prob": Key("expert_weights_norm", True),
        "n_group": Key("expert_group_count", 1),
        "topk_group": Key("expert_group_used_count", 1),
        "attention_bias": BIASES["attention_bias"],
        "use_qk_norm": Present("attn_q_norm.weight"),
    },
    {
        **ATTENTION,
        **QK_NORMS,
        **MLP,
        **EXPERTS,
        **SHARED,
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    },
    partial=True,
)
COHERE = Family(
    "CohereForCausalLM",
    "cohere",
    {
        **LAYER_NORM_BASE,
        "layer_norm_eps": Key("attention.layer_norm_epsilon", REQUIRED),
        "logit_scale": Key("logit_scale", REQUIRED),
        "use_qk_norm": Present("attn_q_norm.weight"),
    },
    {**ATTENTION, **MLP, **QK_NORMS, "attn_norm": "input_layernorm"},
)

FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "smollm3": replace(LLAMA, architecture="SmolLM3ForCausalLM", model_type="smollm3"),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **_MOE,
            "shared_expert_intermediate_size": Key("expert_shared_feed_forward_length", REQUIRED),
            "norm_topk_prob": False,
            "qkv_bias": Present("attn_q.bias"),
        },
        {
            **DENSE,
            **EXPERTS,
            **{name: theirs.replace("shared_experts", "shared_expert") for name, theirs in SHARED.items()},
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        {"ffn_gate_inp_shexp": Unsqueezed()},
    ),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_MOE, "norm_topk_prob": True, "attention_bias": BIASES["attention_bias"]},
        {**DENSE, **QK_NORMS, **EXPERTS},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        "olmoe",
        {**{k: v for k, v in _MOE.items() if k != "moe_intermediate_size"}, "norm_topk_prob": False},
        {**ATTENTION, **NORMS, **QK_NORMS, **EXPERTS},
    ),
    "gemma": Family("GemmaForCausalLM", "gemma", {**_GEMMA, "sliding_window": None}, DENSE, norm_offset=1.0),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _GEMMA, _GEMMA_NAMES, norm_offset=1.0),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _GEMMA, _GEMMA_NAMES, norm_offset=1.0),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        {**BASE, "sliding_window": Key("attention.sliding_window")},
        {
            **NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        partial=True,
    ),
    "olmo2": OLMO2,
    "granite": GRANITE,
    "granitemoe": GRANITE_MOE,
    "deepseek2": DEEPSEEK2,
    "glm4": GLM4,
    "glm4moe": GLM4_MOE,
    "gpt-oss": GPT_OSS,
    "command-r": COHERE,
    "cohere2": replace(
        COHERE,
        architecture="Cohere2ForCausalLM",
        model_type="cohere2",
        settings={**COHERE.settings, "sliding_window": Key("attention.sliding_window", REQUIRED)},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {
            **LAYER_NORM_BASE,
            "norm_epsilon": Key("attention.layer_norm_epsilon", REQUIRED),
            "use_bias": Present("attn_q.bias"),
        },
        {**ATTENTION, **NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
}

VARIANTS: Mapping[str, tuple[tuple[str, Any, Family], ...]] = {
    "llama": (("expert_count", None, MIXTRAL),),
    "olmo2": (
        (
            "attention.sliding_window",
            None,
            replace(
                OLMO2,
                architecture="Olmo3ForCausalLM",
                model_type="olmo3",
                settings={**OLMO2.settings, "sliding_window": Key("attention.sliding_window", REQUIRED)},
            ),
        ),
    ),
    "deepseek2": (
        ("expert_gating_func", 2, replace(DEEPSEEK2, architecture="DeepseekV3ForCausalLM", model_type="deepseek_v3")),
    ),
    "granitemoe": (
        (
            "expert_shared_feed_forward_length",
            None,
            replace(
                GRANITE_MOE,
                architecture="GraniteMoeSharedForCausalLM",
                model_type="granitemoeshared",
                settings={
                    **GRANITE_MOE.settings,
                    "shared_intermediate_size": Key("expert_shared_feed_forward_length", REQUIRED),
                },
            ),
        ),
    ),
}
"""Families that a further key decides: it must be there and not 0, and equal the value if one is given."""

OFFSET = Offset(-1.0)
"""Undo what the converter adds to the norms of families with a ``norm_offset``."""
