"""Save random checkpoints of drafters in their published layouts, and of small models, without their libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 199

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "torch_dtype": "float32",
}
EAGLE: dict[str, Any] = TARGET | {"num_hidden_layers": 1, "max_position_embeddings": 64, "bias": True}
EAGLE3: dict[str, Any] = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "draft_vocab_size": 61,
}

Tensors = dict[str, torch.Tensor]


class Random:
    """Return tensors that keep activations of a moderate size."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator) * scale * columns**-0.5

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self.generator)

    def layer(self, config: dict[str, Any], prefix: str, input_size: int | None = None) -> Tensors:
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        size = input_size or hidden
        return {
            f"{prefix}.self_attn.q_proj.weight": self.matrix(q, size, 2.0),
            f"{prefix}.self_attn.k_proj.weight": self.matrix(kv, size, 2.0),
            f"{prefix}.self_attn.v_proj.weight": self.matrix(kv, size),
            f"{prefix}.self_attn.o_proj.weight": self.matrix(hidden, q),
            f"{prefix}.mlp.gate_proj.weight": self.matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": self.matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": self.matrix(hidden, inner),
            f"{prefix}.post_attention_layernorm.weight": self.norm(hidden),
        }


def write(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def save_target(directory: Path, seed: int = 1, **overrides: Any) -> Path:
    """Save a Llama whose greedy texts vary."""
    config, random = TARGET | overrides, Random(seed)
    hidden = config["hidden_size"]
    tensors = {
        "model.embed_tokens.weight": random.matrix(config["vocab_size"], hidden, 4.0),
        "model.norm.weight": random.norm(hidden),
        "lm_head.weight": random.matrix(config["vocab_size"], hidden, 3.0),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        tensors |= random.layer(config, prefix)
        tensors[f"{prefix}.input_layernorm.weight"] = random.norm(hidden)
    return write(directory, config, tensors)


def save_eagle(directory: Path, seed: int = 2, bias: bool = True, **overrides: Any) -> Path:
    """Save an EAGLE-1 head as SafeAILab publishes it, with a separate embedding."""
    config, random = EAGLE | overrides, Random(seed)
    hidden = config["hidden_size"]
    tensors = random.layer(config, "layers.0") | {"fc.weight": random.matrix(hidden, 2 * hidden)}
    tensors["embed_tokens.weight"] = random.matrix(config["vocab_size"], hidden, 4.0)
    if bias:
        tensors["fc.bias"] = random.norm(hidden) - 1
    return write(directory, config, tensors)


def save_eagle3(directory: Path, seed: int = 3, layer: str = "midlayer", **overrides: Any) -> Path:
    """Save an EAGLE-3 head as SafeAILab publishes it, over a part of the vocabulary, with the target's embedding."""
    config, random = EAGLE3 | overrides, Random(seed)
    hidden, count, vocab = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    tensors = random.layer(config, layer, 2 * hidden)
    for name in ("input_layernorm", "hidden_norm"):
        tensors[f"{layer}.{name}.weight"] = random.norm(hidden)
    tensors["fc.weight"] = random.matrix(hidden, 3 * (config.get("target_hidden_size") or hidden))
    tensors["norm.weight"] = random.norm(hidden)
    tensors["lm_head.weight"] = random.matrix(count, hidden, 3.0)
    kept = torch.randperm(vocab, generator=random.generator)[:count].sort().values
    tensors["d2t"] = kept - torch.arange(count)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, value=True)
    if config.get("target_hidden_size"):
        tensors["embed_tokens.weight"] = random.matrix(vocab, hidden, 4.0)
    return write(directory, config, tensors)


def draft_first_tokens(directory: Path, count: int) -> None:
    """Change an EAGLE-3 head that was saved: it drafts the first tokens of the vocabulary, of which the first ``count`` vary most."""
    tensors = load_file(directory / "model.safetensors")
    tensors["d2t"].zero_()
    tensors["t2d"] = torch.arange(len(tensors["t2d"])) < len(tensors["d2t"])
    tensors["lm_head.weight"][count:] = 0
    save_file(tensors, directory / "model.safetensors")
