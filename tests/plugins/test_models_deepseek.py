"""Test models with latent attention against Hugging Face transformers: DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash.

Run: python -m pytest tests/plugins/test_models_deepseek.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from dovetail.cli import main
from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.memory.pool import bytes_per_page
from dovetail_models.deepseek_describe import describe_deepseek_v2, describe_deepseek_v3, describe_glm4_moe_lite
from moe_suite import SMALL, MoeSuite

LATENT = {key: value for key, value in SMALL.items() if key != "head_dim"} | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Settings of small models. The sizes of the parts of a head all differ."""


def yarn(**settings: Any) -> dict[str, Any]:
    stretched = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": stretched | settings}


class TestDeepseekV2(MoeSuite):
    name = model_type = "deepseek_v2"
    small = LATENT
    configs: ClassVar = {
        "lite": {"q_lora_rank": None, "n_shared_experts": 2, **yarn(mscale=0.707, mscale_all_dim=0.707)},
        "groups": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2,
        },
    }


class TestDeepseekV3(MoeSuite):
    name = model_type = "deepseek_v3"
    small = LATENT
    configs: ClassVar = {
        "groups": {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            **yarn(mscale=1.0, mscale_all_dim=1.0),
        },
        "kimi": {"q_lora_rank": None, "n_shared_experts": 2, **yarn(mscale=1.0, mscale_all_dim=0.5)},
        "halves": {
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-3,
            "num_hidden_layers": 2,
            **yarn(beta_fast=4, attention_factor=1.3),
        },
    }


class TestGlm4MoeLite(MoeSuite):
    name = model_type = "glm4_moe_lite"
    small: ClassVar = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}
    configs: ClassVar = {
        "dense between": {"mlp_layer_types": ["sparse", "dense", "sparse"], "rms_norm_eps": 1e-3, "v_head_dim": 14},
    }


SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
Describe = Callable[[dict[str, Any]], ModelInfo]


@pytest.mark.parametrize(
    ("describe", "built"),
    [
        (describe_deepseek_v2, transformers.DeepseekV2Config(num_experts_per_tok=6)),
        (describe_deepseek_v3, transformers.DeepseekV3Config()),
        (describe_glm4_moe_lite, transformers.Glm4MoeLiteConfig()),
    ],
)
def test_describe_fills_in_what_transformers_would(describe: Describe, built: Any) -> None:
    shape = (*SHAPE, "num_experts_per_tok")
    info = describe({key: getattr(built, key) for key in shape})
    own, rule = info.config, info.config.experts.routing
    for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        assert getattr(own.latent, key) == getattr(built, key)
    assert own.latent.scale == (built.qk_nope_head_dim + built.qk_rope_head_dim) ** -0.5
    assert (info.context_len, own.norm_eps) == (built.max_position_embeddings, built.rms_norm_eps)
    assert own.rope.theta == built.rope_parameters["rope_theta"]
    assert (rule.num_experts, rule.top_k) == (built.n_routed_experts, built.num_experts_per_tok)
    assert (rule.groups, rule.groups_kept) == (built.n_group or 1, built.topk_group or 1)
    assert (rule.scale, rule.renormalize) == (built.routed_scaling_factor, built.norm_topk_prob)
    assert own.experts.size == built.moe_intermediate_size
    assert own.experts.shared_size == built.moe_intermediate_size * built.n_shared_experts
    dense = getattr(built, "first_k_dense_replace", 1)
    assert own.sparse == (False,) * dense + (True,) * (info.num_layers - dense)


def test_rope_of_transformers_4_is_that_of_transformers_5() -> None:
    """Published checkpoints have ``rope_scaling``, with ``type``, and no ``head_dim``."""
    settings = yarn(mscale=0.707, mscale_all_dim=0.707)["rope_parameters"]
    old = {key: value for key, value in settings.items() if key not in ("rope_theta", "rope_type")} | {"type": "yarn"}
    old_config = SHAPE | {"rope_theta": settings["rope_theta"], "rope_scaling": old}
    assert describe_deepseek_v3(old_config).config == describe_deepseek_v3(SHAPE | {"rope_parameters": settings}).config


def test_a_token_takes_one_latent_in_each_layer() -> None:
    """All heads share it, and values are a part of keys, which is stored once."""
    info = describe_deepseek_v2(SHAPE | {"num_hidden_layers": 27, "num_experts_per_tok": 6})
    (group,) = info.cache_groups
    assert group == CacheGroup(27, 1, 576, CacheGroupKind.LATENT, value_dim=512)
    assert bytes_per_page(group, 16, torch.bfloat16) == 16 * 31104


@pytest.mark.parametrize(("tp", "shown"), [(1, "31,104 bytes per token"), (2, "31,104 bytes per token and rank")])
def test_explain_states_the_bytes_of_a_token(
    tp: int, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 27, "num_experts_per_tok": 6}
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | config | {"dtype": "bfloat16"}))
    words = ["explain", str(tmp_path), "--assume", "sm90", "--set", "grammar=none", "--set", f"parallel.tp={tp}"]
    with pytest.raises(SystemExit, match="0"):
        main(words)
    assert f"KV bfloat16 ({shown})" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--json"])
    groups = json.loads(capsys.readouterr().out)["cache_groups"]
    assert groups == [{"kind": "latent", "layers": 27, "bytes_per_token": 31104}]


def test_no_shared_experts() -> None:
    assert describe_deepseek_v3(SHAPE | {"n_shared_experts": None}).config.experts.shared_size == 0
    assert describe_deepseek_v3(SHAPE | {"n_shared_experts": 0}).config.experts.shared_size == 0


def test_layers_that_predict_further_tokens_are_offered() -> None:
    for describe in (describe_deepseek_v3, describe_glm4_moe_lite):
        assert Feature.MODEL_MTP_HEAD in describe(SHAPE | {"num_nextn_predict_layers": 1}).offers
        assert Feature.MODEL_MTP_HEAD not in describe(SHAPE).offers


@pytest.mark.parametrize(
    ("describe", "change", "message"),
    [
        (describe_deepseek_v2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        (describe_deepseek_v2, {"norm_topk_prob": True}, "norm_topk_prob is True"),
        (describe_deepseek_v2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'.*group_limited_greedy"),
        (describe_deepseek_v2, {"topk_method": "group_limited_greedy"}, "no n_group"),
        (describe_deepseek_v2, {"rope_interleave": False}, "rope_interleave is False"),
        (describe_deepseek_v2, {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        (describe_deepseek_v2, {"mlp_bias": True}, "mlp_bias is True"),
        (describe_deepseek_v3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (describe_deepseek_v3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (describe_deepseek_v3, {"n_group": 3}, "n_group"),
        (describe_deepseek_v3, {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        (describe_deepseek_v3, {"sliding_window": 8}, "sliding_window is 8"),
        (describe_deepseek_v3, {"attention_bias": True, "q_lora_rank": None}, "q_lora_rank is null"),
        (describe_deepseek_v3, {"qk_rope_head_dim": 7}, "even"),
        (describe_glm4_moe_lite, {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        (describe_glm4_moe_lite, {"mlp_layer_types": ["dense"] * 3 + ["mixed"]}, "mlp_layer_types"),
        (describe_glm4_moe_lite, {"mlp_layer_types": ["dense"] * 3 + [["sparse"]]}, "mlp_layer_types"),
        (describe_deepseek_v3, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; allowed"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(describe: Describe, change: dict[str, Any], message: str) -> None:
    config = SHAPE | {"num_experts_per_tok": 2}
    describe(config)
    with pytest.raises(ConfigError, match=message):
        describe(config | change)
