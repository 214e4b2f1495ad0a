"""Write small models with random weights for each kind of cache group (``soak.py``). They have the vocabulary and the
tokenizer of the embedded model, and heads, latents and states of the sizes that kernels are made for."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

import dovetail
from dovetail.engine.build import WeightFiller, build_model
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed

SOURCE = Path(dovetail.__file__).parent / "assets" / "tiny"
COMMON = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": None}
DEEPSEEK = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}


class Shape(NamedTuple):
    """Describe a model: the component, and the settings of config.json beside ``COMMON``. ``num_pages`` pages of 16 tokens are so few that
    requests are retracted, if the memory of a request ``grows`` with its length: that of windows and states does not."""

    component: str
    config: Mapping[str, Any]
    num_pages: int = 400
    grows: bool = True


SHAPES: Mapping[str, Shape] = {
    "sliding": Shape(
        "gemma3",
        {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 256}
        | {"layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]}
        | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "rope_local_base_freq": 10000.0},
        240,
    ),
    "windows": Shape(
        "mistral",
        {"architectures": ["MistralForCausalLM"], "num_hidden_layers": 4, "sliding_window": 256}, grows=False
    ),
    "latent": Shape(
        "deepseek_v3",
        {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 4, "num_key_value_heads": 4}
        | {"routed_scaling_factor": 1.0} | EXPERTS | LATENT | DEEPSEEK
    ),
    "state": Shape(
        "qwen3_next",
        {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4, "full_attention_interval": 2}
        | {"num_experts": 8, "shared_expert_intermediate_size": 128, "linear_value_head_dim": 128}
        | {"num_key_value_heads": 4, "head_dim": 256, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25} | EXPERTS | DELTA
    ),
    "states": Shape(
        "mamba2",
        {"architectures": ["Mamba2ForCausalLM"], "num_hidden_layers": 4, "num_heads": 8, "head_dim": 64, "expand": 2}
        | {"state_size": 128, "n_groups": 1, "chunk_size": 256, "conv_kernel": 4, "hidden_act": "silu"}
        | {"layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, 1e9], "residual_in_fp32": True},
        grows=False,
    ),
}  # fmt: skip
"""A model for each kind of cache group: ``sliding`` and ``state`` have a full group too, the others have one group."""


def write(name: str, directory: Path) -> Path:
    """Write a checkpoint of the model ``name`` with random weights, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SOURCE / file, directory)
    shape = SHAPES[name]
    config = COMMON | dict(shape.config)
    (directory / "config.json").write_text(json.dumps(config))
    component = installed().get(ComponentKind.MODEL, shape.component)
    assert component.spec.describe is not None, "every model spec has a description"
    describe, target = (
        load_attribute(own, component.label) for own in (component.spec.describe, component.spec.target)
    )
    filler = WeightFiller(build_model(target, describe(config), torch.device("cpu"), torch.float32))
    torch.manual_seed(0)
    tensors = {
        tensor: _random(tensor, filler.whole_shape(tensor)) for tensor in filler.targets if filler.targets[tensor]
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return weights that keep the size of what they multiply, and vectors near those of trained models."""
    if len(shape) == 1:
        return torch.randn(shape) * 0.1 + float("norm" in name)
    scale = 1.0 if "embed" in name else 1 / math.sqrt(shape[-1])
    return torch.randn(shape) * scale
