"""Test Kimi Linear against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_kimi_linear.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroupKind
from dovetail_models.kimi_linear_describe import describe_kimi_linear
from moe_suite import SMALL, MoeSuite

SIZES: Mapping[str, Any] = {
    key: value for key, value in SMALL.items() if key not in ("head_dim", "initializer_range")
} | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "initializer_range": 0.1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}


class TestKimiLinear(MoeSuite):
    name = model_type = "kimi_linear"
    tolerance = 2e-4  # long recurrences add up more rounding
    small: ClassVar[Mapping[str, Any]] = SIZES
    configs: ClassVar = {"the last layer has a state": {}}


@pytest.mark.full
class TestKimiLinearVariants(TestKimiLinear):
    configs: ClassVar = {
        "the last layer attends, groups of experts, queries of low rank": {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense"],
            "num_local_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "q_lora_rank": 12,
            "linear_conv_kernel_dim": 3,
        },
    }


PUBLISHED = {
    "num_hidden_layers": 27,
    "hidden_size": 2304,
    "vocab_size": 163840,
    "head_dim": 72,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "use_grouped_topk": True,
    "torch_dtype": "bfloat16",
}


def test_published_settings() -> None:
    info = describe_kimi_linear(PUBLISHED)
    latent, state = info.cache_groups
    assert (latent.kind, latent.num_layers, latent.head_dim, latent.value_dim) == (CacheGroupKind.LATENT, 7, 576, 512)
    assert (state.kind, state.num_layers) == (CacheGroupKind.STATE, 20)
    assert [each.shape for each in state.states] == [(12288, 3), (32, 128, 128)]
    assert [index + 1 for index, kept in enumerate(info.config.states) if not kept] == [4, 8, 12, 16, 20, 24, 27]
    assert (info.context_len, info.config.dense_name, info.config.sparse.count(True)) == (1048576, "mlp", 26)
    assert info.config.experts.routing.num_experts == 256


def test_a_dense_layer_has_the_name_of_published_checkpoints(tmp_path: Path) -> None:
    """transformers reads ``mlp`` and writes ``block_sparse_moe``, also for layers without experts."""
    suite = TestKimiLinear()
    suite.write_checkpoint({}, tmp_path)
    before = suite.load(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    dense = "model.layers.0.block_sparse_moe."
    save_file({name.replace(dense, "model.layers.0.mlp."): each for name, each in tensors.items()}, file)
    config = suite.describe(tmp_path)
    assert config.config.dense_name == "block_sparse_moe"

    given = json.loads((tmp_path / "config.json").read_text())
    lists = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**given, "layer_types": None, "linear_attn_config": lists}))
    after = suite.load(tmp_path)
    tokens = list(range(20))
    assert torch.equal(suite.logits(before, tokens, 20), suite.logits(after, tokens, 20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"linear_attn_config": [1]}, "linear_attn_config is"),
        ({"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}}, "each layer from 1 to 27 once"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types is"),
        ({"num_experts_per_token": 300}, "300 of 256 experts"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_kimi_linear({**PUBLISHED, **change})
