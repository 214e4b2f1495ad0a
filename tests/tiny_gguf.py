"""Write the embedded model as a GGUF file, as llama.cpp's converter would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dovetail.config.checkpoint import EMBEDDED
from gguf_files import Stored, plain, quantized_q8_0, write_gguf

TINY = EMBEDDED["tiny"]
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def metadata() -> dict[str, Any]:
    """Return the metadata of the embedded model."""
    config = json.loads((TINY / "config.json").read_text())
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    own = json.loads((TINY / "tokenizer_config.json").read_text())
    vocab = {**tokenizer["model"]["vocab"], **{one["content"]: one["id"] for one in tokenizer["added_tokens"]}}
    kinds = dict.fromkeys(vocab.values(), 1) | {
        one["id"]: 3 if one["special"] else 4 for one in tokenizer["added_tokens"]
    }
    return {
        "general.architecture": "llama",
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [kinds[index] for index in sorted(kinds)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.chat_template": own["chat_template"],
    }


def tensors(*, quantized: bool) -> dict[str, Stored]:
    """Return the tensors of the embedded model, matrices in blocks of type Q8_0 if they are ``quantized``."""
    config = json.loads((TINY / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, Stored] = {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        array = tensor.to(torch.float32).numpy()
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        if layer is None:
            theirs = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}.get(name)
        else:
            theirs = f"blk.{layer[1]}.{NAMES.get(layer[2])}" if int(layer[1]) < config["num_hidden_layers"] else None
            count = heads.get(layer[2].rpartition(".")[2])
            if count:
                array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if theirs is not None:
            found[f"{theirs}.weight"] = quantized_q8_0(array) if quantized and array.ndim > 1 else plain(array)
    return found


def write_tiny(file: Path, *, quantized: bool = False, **more: Any) -> Path:
    """Write the embedded model with further ``metadata``, and return the path."""
    return write_gguf(file, metadata() | more, tensors(quantized=quantized))
