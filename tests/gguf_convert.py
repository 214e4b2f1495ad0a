"""Convert checkpoints of transformers to GGUF for tests: names from the package gguf, and what llama.cpp's converter does to
tensors, written here from its description."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from gguf_files import Stored, plain, write_gguf

KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}
PERMUTED = ("llama", "smollm3", "granite", "granitemoe")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)(\.weight)")


def metadata_of(config: Mapping[str, Any], architecture: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a file without a tokenizer. ``more`` are further keys of the architecture; None leaves one
    out."""
    found = {name: config[key] for key, name in KEYS.items() if config.get(key) is not None}
    rope = config.get("rope_parameters") or {}
    found["rope.freq_base"] = float(
        rope.get("rope_theta") or rope.get("full_attention", {}).get("rope_theta") or 10000.0
    )
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found |= {"attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head} | dict(more)
    own = {f"{architecture}.{key}": value for key, value in found.items() if value is not None}
    return {"general.architecture": architecture, **own}


def converted(directory: Path, architecture: str, more: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the metadata and the tensors of a checkpoint of transformers in ``directory``."""
    config = json.loads((directory / "config.json").read_text())
    arrays = load_file(directory / "model.safetensors")
    arrays = _stacked(arrays)
    by_name = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[architecture], config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        for theirs, part in _parts(name, array, architecture, config):
            stem, suffix = theirs, ""
            if theirs.endswith((".weight", ".bias")):
                stem, _, suffix = theirs.rpartition(".")
            found = names.get_name(stem)
            assert found is not None, theirs
            tensors[f"{found}.{suffix or 'weight'}"] = part
    return metadata_of(config, architecture, more), {name: plain(array) for name, array in tensors.items()}


def convert(directory: Path, architecture: str, more: Mapping[str, Any], file: Path) -> Path:
    """Write a checkpoint of transformers as a GGUF file in float32, and return its path."""
    return write_gguf(file, *converted(directory, architecture, more))


def _stacked(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with those of all experts of a layer in one."""
    made: dict[str, Any] = {}
    for name, array in arrays.items():
        expert = EXPERT.fullmatch(name)
        if expert is None:
            made[name] = array
        else:
            made.setdefault(f"{expert[1]}.{expert[3]}{expert[4]}", {})[int(expert[2])] = array
    return {
        name: np.stack([entry[index] for index in range(len(entry))]) if isinstance(entry, dict) else entry
        for name, entry in made.items()
    }


def _parts(name: str, array: np.ndarray, architecture: str, config: Mapping[str, Any]) -> list[tuple[str, np.ndarray]]:
    """Return what the converter makes of one tensor, by the names in the checkpoint that it looks up."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return [(name, array + 1)]
    if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return [(name, array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape))]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, array[0])]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("_bias", ".bias"), array)]
    if name.endswith("input_linear.weight"):  # granite
        gate, up = np.split(array, 2, axis=-2)
        stem = name.removesuffix("input_linear.weight")
        if array.ndim == 3:
            return [(f"{stem}experts.w1.weight", gate), (f"{stem}experts.w3.weight", up)]
        shared = stem.replace("shared_mlp", "mlp.shared_expert")
        return [(f"{shared}gate_proj.weight", gate), (f"{shared}up_proj.weight", up)]
    if name.endswith("output_linear.weight"):
        stem = name.removesuffix("output_linear.weight")
        own = (
            f"{stem}experts.w2.weight"
            if array.ndim == 3
            else f"{stem}down_proj.weight".replace("shared_mlp", "mlp.shared_expert")
        )
        return [(own, array)]
    if architecture == "gpt-oss" and ".experts." in name:
        stem = name.rpartition(".")[0]
        array, suffix = (array, ".bias") if name.endswith("_bias") else (array.swapaxes(1, 2), ".weight")
        if "down_proj" in name:
            return [(f"{stem}.down_proj{suffix}", array)]
        return [(f"{stem}.gate_proj{suffix}", array[:, 0::2]), (f"{stem}.up_proj{suffix}", array[:, 1::2])]
    if name.endswith("kv_b_proj.weight"):
        heads = config["num_attention_heads"]
        both = array.reshape(heads, -1, array.shape[1])
        keys, values = np.split(both, [config["qk_nope_head_dim"]], axis=1)
        return [(name.replace("kv_b", "k_b"), keys.swapaxes(1, 2)), (name.replace("kv_b", "v_b"), values)]
    return [(name, array)]
