"""Save random checkpoints of the drafters mtp and dflash, for any target, in their published layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Shapes = dict[str, tuple[int, ...]]
WIDE = 40
GLM_LAYERS = 2
GLM: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DEEPSEEK: dict[str, Any] = {key: value for key, value in GLM.items() if key not in ("head_dim", "attention_bias")} | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}
"""Settings of a small DeepSeek-V3. Without yarn's scale its attention would be another."""


def decoder(prefix: str, config: dict[str, Any], *, normed: bool) -> Shapes:
    """Return the shapes of a decoder layer's tensors."""
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: Shapes = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (WIDE, hidden),
        "mlp.up_proj": (WIDE, hidden),
        "mlp.down_proj": (hidden, WIDE),
    }
    if normed:
        shapes |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def filled(shapes: Shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) * 0.2 + ("norm" in name) for name, shape in shapes.items()}


def add_mtp(directory: Path, layers: int) -> None:
    """Add ``layers`` that predict further tokens, as DeepSeek-V3 stores them, to the checkpoint of a target."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    hidden, first = config["hidden_size"], config["num_hidden_layers"]
    shapes: Shapes = {}
    for index in range(first, first + layers):
        name = f"model.layers.{index}"
        shapes |= decoder(name, config, normed=False) | {
            f"{name}.enorm.weight": (hidden,),
            f"{name}.hnorm.weight": (hidden,),
            f"{name}.eh_proj.weight": (hidden, 2 * hidden),
            f"{name}.shared_head.norm.weight": (hidden,),
        }
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | filled(shapes), weights)
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": layers}))


def save_dflash(directory: Path, hidden: int, head_dim: int, mask: int) -> None:
    """Save a drafter of two layers for a target with hidden states of this size and at least two layers."""
    directory.mkdir()
    config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": hidden,
        "intermediate_size": WIDE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "block_size": 5,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": [0, 1]},
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes: Shapes = {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for layer in range(2):
        shapes |= decoder(f"layers.{layer}", config, normed=True)
    save_file(filled(shapes), directory / "model.safetensors")


def save_glm(directory: Path, **changes: Any) -> Any:
    """Save a model as GLM-4.5 is stored. See ``save_predicting``."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM  # tests on a GPU also run without transformers

    return save_predicting(directory, Glm4MoeForCausalLM, Glm4MoeConfig, GLM | changes)


def save_deepseek(directory: Path, **changes: Any) -> Any:
    """Save a model as DeepSeek-V3 is stored. See ``save_predicting``."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return save_predicting(directory, DeepseekV3ForCausalLM, DeepseekV3Config, DEEPSEEK | changes)


def save_glm_lite(directory: Path, **changes: Any) -> Any:
    """Save a model as GLM-4.7-Flash is stored. See ``save_predicting``."""
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM

    left_out = ("first_k_dense_replace", "rope_parameters")
    settings = {key: value for key, value in DEEPSEEK.items() if key not in left_out}
    return save_predicting(directory, Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, settings | changes)


def save_ernie(directory: Path, **changes: Any) -> Any:
    """Save a model as ERNIE 4.5 is stored, with a layer without experts that predicts a further token. Return a model that has this
    layer as its last one."""
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    left_out = (
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "first_k_dense_replace",
        "attention_bias",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
    )
    settings = {key: value for key, value in GLM.items() if key not in left_out} | changes
    settings |= {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1}
    config = Ernie4_5_MoeConfig(**settings, moe_layer_end_index=GLM_LAYERS - 1, num_hidden_layers=GLM_LAYERS + 1)
    torch.manual_seed(4)
    model = Ernie4_5_MoeForCausalLM(config).eval()
    _vary(model)
    model.save_pretrained(directory)
    layer, hidden = f"model.layers.{GLM_LAYERS}.", settings["hidden_size"]
    saved = load_file(directory / "model.safetensors")
    tensors = {name.replace(layer, "model.mtp_block.0."): tensor for name, tensor in saved.items()}
    for name in ("emb_norm", "hidden_norm"):
        tensors[f"model.mtp_{name}.0.weight"] = 1 + 0.3 * torch.randn(hidden)
    tensors["model.mtp_linear_proj.0.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    save_file(tensors, directory / "model.safetensors")
    file = directory / "config.json"
    declared = {"num_hidden_layers": GLM_LAYERS, "num_nextn_predict_layers": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | declared))
    return model


def save_qwen3_next(directory: Path, **changes: Any) -> Any:
    """Save a model as Qwen3-Next is stored, or with ``num_experts`` 0 as Qwen3.5. Return a model that has the layer that
    predicts a further token as its last one. All layers attend, unless ``layer_types`` are given."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig, Qwen3NextForCausalLM

    left_out = ("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group")
    settings = {key: value for key, value in GLM.items() if key not in (*left_out, "routed_scaling_factor")}
    types = changes.pop("layer_types", ["full_attention"] * GLM_LAYERS)
    settings |= {"num_experts": 6, "shared_expert_intermediate_size": 24, "attention_bias": False}
    settings |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    settings |= {"linear_value_head_dim": 12, "layer_types": [*types, "full_attention"], **changes}
    settings |= {"num_hidden_layers": GLM_LAYERS + 1}
    torch.manual_seed(4)
    if settings["num_experts"]:
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**settings)).eval()
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings)).eval()
    _vary(model)
    model.save_pretrained(directory)
    layer, hidden = f"model.layers.{GLM_LAYERS}.", settings["hidden_size"]
    saved = load_file(directory / "model.safetensors")
    tensors = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in saved.items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.3 * torch.randn(hidden)
    tensors["mtp.fc.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    save_file(tensors, directory / "model.safetensors")
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"num_hidden_layers": GLM_LAYERS, "layer_types": list(types)}
    file.write_text(json.dumps(config | ({} if settings["num_experts"] else {"mtp_num_hidden_layers": 1})))
    return model


def _vary(model: Any) -> None:
    """Change what all models have alike: norms are all 1 as they come, biases and corrections 0."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (tensor.ndim == 1 or name.endswith("correction_bias")) and "rotary" not in name:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            elif name.endswith("gate.weight"):
                tensor.copy_(torch.randn_like(tensor) * 0.5)


def save_predicting(directory: Path, model_class: Any, config_class: Any, settings: dict[str, Any]) -> Any:
    """Save a model with experts and one more layer, which predicts further tokens. Return a model that has this layer as
    its last one."""
    torch.manual_seed(4)
    model = model_class(config_class(**settings | {"num_hidden_layers": GLM_LAYERS + 1})).eval()
    _vary(model)
    model.save_pretrained(directory)
    tensors, layer, hidden = (
        load_file(directory / "model.safetensors"),
        f"model.layers.{GLM_LAYERS}",
        settings["hidden_size"],
    )
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{layer}.{name}.weight"] = 1 + 0.3 * torch.randn(hidden)
    tensors[f"{layer}.eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors")
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"num_hidden_layers": GLM_LAYERS, "num_nextn_predict_layers": 1}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = config["mlp_layer_types"][:GLM_LAYERS]
    file.write_text(json.dumps(config))
    return model
