"""Describe the models under test: directories with a config.json and without weights, which are filled with random
numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}

_LAYERS_OF_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}

_GPT_OSS_PLAIN = [
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
]


def q4_k_m(layers: int) -> dict[str, Any]:
    """Return the ``quantization_config`` of a GGUF file of a Llama with the types of Q4_K_M: Q4_K, but Q6_K for the head, and for
    the values and the second projection of the MLP of half of the layers (the first, the last, and every third)."""
    types = {"model.embed_tokens.weight": "Q4_K", "lm_head.weight": "Q6_K"}
    modules = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
    for layer in range(layers):
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        for parent, name in ((parent, name) for parent, names in modules.items() for name in names):
            kind = "Q6_K" if more and name in ("v_proj", "down_proj") else "Q4_K"
            types[f"model.layers.{layer}.{parent}.{name}.weight"] = kind
    return {"quant_method": "gguf", "types": types}


CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA,
        **_LAYERS_OF_8B,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": _GPT_OSS_PLAIN},
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    },
    "mistral-7b-v0.1": {
        **_LLAMA,
        **_LAYERS_OF_8B,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "phi-3-mini": {
        **_LLAMA,
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    },
    "qwen3-next-12": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 12,
        "full_attention_interval": 4,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    },
    "tiny": {
        **_LLAMA,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "check": {
        **_LLAMA,
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}
"""The shapes of the models of TITLES, two whose layers all have windows (for ``shared_prefixes_gpu.py``), one for trying the benchmark
itself, and one for checking attention."""
CONFIGS["8b-half"] = {**CONFIGS["8b"], "num_hidden_layers": 16}
CONFIGS["8b-gguf-q4-k-m"] = {**CONFIGS["8b"], "quantization_config": q4_k_m(32)}


class Variant(NamedTuple):
    """Describe a model that is measured: its shape in CONFIGS, the number of ranks, settings of the config, and the kind of
    routing (a key of ``routing.KINDS``) that replaces the choices of its routers, which only workers of one rank can do."""

    shape: str
    ranks: int = 1
    settings: Mapping[str, Any] = MappingProxyType({})
    routing: str | None = None


VARIANTS = {
    "8b-tp2": Variant("8b", 2),
    "32b-tp2": Variant("32b", 2),
    "8b-fp8": Variant("8b", settings={"quantization": "fp8"}),
    "8b-gguf-q4-k-m": Variant("8b-gguf-q4-k-m"),
    "qwen3-30b-a3b": Variant("qwen3-30b-a3b"),
    "qwen3-30b-a3b-uniform": Variant("qwen3-30b-a3b", routing="uniform"),
    "qwen3-30b-a3b-tp2": Variant("qwen3-30b-a3b", 2, settings={"parallel.experts": "tp"}),
    "qwen3-30b-a3b-ep2": Variant("qwen3-30b-a3b", 2, settings={"parallel.experts": "ep"}),
    "gpt-oss-20b": Variant("gpt-oss-20b"),
    "gemma-3-4b": Variant("gemma-3-4b"),
    "deepseek-v2-lite": Variant("deepseek-v2-lite"),
    "deepseek-v2-lite-same": Variant("deepseek-v2-lite", routing="same"),
    "deepseek-v2-lite-tp2": Variant("deepseek-v2-lite", 2),
    "deepseek-v2-lite-dp2": Variant("deepseek-v2-lite", 2, settings={"parallel.attention": "data"}),
    "qwen3-next-12": Variant("qwen3-next-12"),
    "qwen3-next-12-bf16-states": Variant("qwen3-next-12", settings={"memory": {"state_dtype": "bfloat16"}}),
    "8b-int4": Variant("8b", settings={"quantization": {"kind": "integer", "bits": 4, "group_size": 128}}),
    "8b-half-32k": Variant("8b-half"),
    "8b-half-32k-fp8-kv": Variant("8b-half", settings={"memory": {"kv_dtype": "fp8_e4m3"}}),
}
"""Map the names of the models beside ``8b`` and ``0.6b``."""

TITLES = {
    "8b": "Llama-3.1-8B shape",
    "0.6b": "Qwen3-0.6B shape",
    "8b-tp2": "Llama-3.1-8B shape, 2 GPUs",
    "32b-tp2": "Qwen3-32B shape, 2 GPUs",
    "8b-fp8": "Llama-3.1-8B shape, FP8",
    "8b-gguf-q4-k-m": "Llama-3.1-8B shape, GGUF Q4_K_M",
    "qwen3-30b-a3b": "Qwen3-30B-A3B shape",
    "qwen3-30b-a3b-uniform": "Qwen3-30B-A3B shape, uniform routing",
    "qwen3-30b-a3b-tp2": "Qwen3-30B-A3B shape, 2 GPUs, experts divided",
    "qwen3-30b-a3b-ep2": "Qwen3-30B-A3B shape, 2 GPUs, whole experts",
    "gpt-oss-20b": "gpt-oss-20b shape, MXFP4",
    "gemma-3-4b": "Gemma-3-4B text shape",
    "deepseek-v2-lite": "DeepSeek-V2-Lite shape",
    "deepseek-v2-lite-same": "DeepSeek-V2-Lite shape, all tokens use the same experts",
    "deepseek-v2-lite-tp2": "DeepSeek-V2-Lite shape, 2 GPUs, attention divided by heads",
    "deepseek-v2-lite-dp2": "DeepSeek-V2-Lite shape, 2 GPUs, attention divided by requests",
    "qwen3-next-12": "Qwen3-Next shape, 12 of its 48 layers",
    "qwen3-next-12-bf16-states": "Qwen3-Next shape, 12 of its 48 layers, states in bfloat16",
    "8b-int4": "Llama-3.1-8B shape, INT4 in groups of 128",
    "8b-half-32k": "Llama-3.1-8B shape, 16 of its 32 layers",
    "8b-half-32k-fp8-kv": "Llama-3.1-8B shape, 16 of its 32 layers, FP8 KV cache",
    "tiny": "tiny shape",
}


def variant(name: str) -> Variant:
    """Return how a model is measured."""
    return VARIANTS.get(name, Variant(name))


def shape(name: str) -> dict[str, Any]:
    """Return the config.json of a model."""
    return CONFIGS[variant(name).shape]


def write(name: str, work: Path) -> Path:
    """Write the directory of a model under ``work``, and return it."""
    path = work / "models" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape(name), indent=1))
    return path


def settings(name: str, work: Path) -> dict[str, Any]:
    """Write the directory of a model under ``work``, and return the settings of its engine: random weights, ranks, and those of its variant."""
    chosen = variant(name)
    values = {"model.path": str(write(name, work)), "model.load_format": "dummy", "model.dtype": "bfloat16"}
    return {**values, **({"parallel.tp": chosen.ranks} if chosen.ranks > 1 else {}), **chosen.settings}


def write_tokenizer(name: str, work: Path) -> Path:
    """Write a directory with a tokenizer of made-up words, one for every id of a model.

    The server must write text, and with this tokenizer it writes about as much as with a real one.
    """
    path = work / "models" / f"{name}-tokenizer"
    path.mkdir(parents=True, exist_ok=True)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocab = {f"Ġ{i:x}": i for i in range(shape(name)["vocab_size"])}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    (path / "tokenizer.json").write_text(json.dumps(whole))
    return path


def multiplications(name: str, tokens: int) -> float:
    """Return the floating-point operations of one prompt of ``tokens`` tokens that needs only the last logits:
    matrices and causal attention."""
    c = shape(name)
    hidden, heads, count = c["hidden_size"], c["num_attention_heads"], c["num_hidden_layers"]
    projections, dims = _attention(c)
    attended = count // c.get("full_attention_interval", 1)
    size = c.get("moe_intermediate_size", c["intermediate_size"])
    inner = (c.get("num_experts_per_tok", 1) + c.get("n_shared_experts", 0)) * size
    inner += c.get("shared_expert_intermediate_size", 0)
    dense = c.get("first_k_dense_replace", 0)
    matrices = attended * projections + (count - attended) * _gated_delta(c)
    matrices += 3 * hidden * (dense * c["intermediate_size"] + (count - dense) * inner)
    window = min(tokens, c.get("sliding_window", tokens))
    full = tokens * tokens * heads * dims  # half of the square
    sliding = 2 * (tokens * window - window * window // 2) * heads * dims
    period = c.get("sliding_window_pattern", 2)
    slides = count - count // period if "sliding_window" in c else 0
    return 2.0 * tokens * matrices + (attended - slides) * full + slides * sliding + 2.0 * hidden * c["vocab_size"]


def _attention(c: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers in the projections of a layer's attention, and the sizes of a key and of a value together."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        dim, gates = c["head_dim"], heads if "full_attention_interval" in c else 0
        return hidden * dim * (2 * (heads + c["num_key_value_heads"]) + gates), 2 * dim
    assert c["q_lora_rank"] is None
    latent, rotated, value = c["kv_lora_rank"], c["qk_rope_head_dim"], c["v_head_dim"]
    key = c["qk_nope_head_dim"] + rotated
    expanded = latent * heads * (key - rotated + value)
    return hidden * (heads * (key + value) + latent + rotated) + expanded, key + value


def _gated_delta(c: Mapping[str, Any]) -> int:
    """Return the numbers in the projections of a layer with a gated delta net, 0 if the model has none. Its recurrence is not counted."""
    if "full_attention_interval" not in c:
        return 0
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    return c["hidden_size"] * (2 * keys + 3 * values + 2 * c["linear_num_value_heads"])
