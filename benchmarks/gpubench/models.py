"""Describe the models under test: directories with a config.json and without weights, which are filled with random
numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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

CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
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
"""The shapes of Llama-3.1-8B, Qwen3-0.6B and Qwen3-32B, one for trying the benchmark itself, and one for checking
attention."""

RANKS = {"8b-tp2": ("8b", 2), "32b-tp2": ("32b", 2)}
"""Map a model that is measured on several GPUs to its shape and the number of ranks."""

TITLES = {
    "8b": "Llama-3.1-8B shape",
    "0.6b": "Qwen3-0.6B shape",
    "8b-tp2": "Llama-3.1-8B shape, 2 GPUs",
    "32b-tp2": "Qwen3-32B shape, 2 GPUs",
    "tiny": "tiny shape",
}


def shape(name: str) -> dict[str, Any]:
    """Return the config.json of a model."""
    return CONFIGS[RANKS.get(name, (name, 1))[0]]


def write(name: str, work: Path) -> Path:
    """Write the directory of a model under ``work``, and return it."""
    path = work / "models" / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape(name), indent=1))
    return path


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
    hidden, heads, kv, dim = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * c["intermediate_size"]
    attention = 2 * tokens * tokens * heads * dim  # half of the square, two products
    return c["num_hidden_layers"] * (2 * tokens * layer + attention) + 2.0 * hidden * c["vocab_size"]
