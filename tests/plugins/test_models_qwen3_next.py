"""Test Qwen3-Next and Qwen3.5 against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_qwen3_next.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.memory.state_pool import bytes_per_slot
from dovetail.testing.model import Reference
from dovetail_models.qwen3_next_describe import describe_qwen3_5, describe_qwen3_5_moe, describe_qwen3_next
from moe_suite import SMALL, MoeSuite, randomise

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SHARED = {"shared_expert_intermediate_size": 24}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}


class TestQwen3Next(MoeSuite):
    name = model_type = "qwen3_next"
    configs: ClassVar = {
        "the last layer attends": EXPERTS | SHARED | DELTA | {"full_attention_interval": 2, "head_dim": 16},
        "the last layer has a state and no experts": EXPERTS
        | SHARED
        | DELTA
        | {
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention"],
            "head_dim": 16,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    }


class TestQwen35(MoeSuite):
    name, model_type = "qwen3_5", "qwen3_5_text"
    configs: ClassVar = {"dense": DELTA | {"full_attention_interval": 2, "head_dim": 16, "tie_word_embeddings": True}}


class TestQwen35WithImages(TestQwen35):
    """Test the text model within a checkpoint that also has a model for images."""

    ignores: ClassVar = (r"model\.visual\..+",)

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 32}
        built = transformers.Qwen3_5Config(
            text_config=SMALL | dict(config), vision_config={**vision, "patch_size": 2, "spatial_merge_size": 1}
        )
        model = transformers.Qwen3_5ForConditionalGeneration(built)
        randomise(model)
        model.save_pretrained(directory)

    def reference(self, directory: Path) -> Reference:
        model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(directory, attn_implementation="eager")

        @torch.no_grad()
        def logits(tokens: Any) -> torch.Tensor:
            return model.eval()(torch.tensor([tokens])).logits[0]

        return logits


class TestQwen35Moe(MoeSuite):
    name, model_type = "qwen3_5_moe", "qwen3_5_moe_text"
    configs: ClassVar = {"experts": EXPERTS | SHARED | DELTA | {"full_attention_interval": 2, "head_dim": 16}}


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_describe_fills_in_what_transformers_would() -> None:
    built: Any = transformers.Qwen3NextConfig()
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    info = describe_qwen3_next({key: getattr(built, key) for key in shape})
    own, rule = info.config, info.config.experts.routing
    assert (info.num_kv_heads, info.head_dim) == (built.num_key_value_heads, built.head_dim)
    assert info.context_len == built.max_position_embeddings
    assert own.rope.theta == built.rope_parameters["rope_theta"]
    assert own.rope.rotary_dim == built.head_dim * built.rope_parameters["partial_rotary_factor"]
    assert (rule.num_experts, rule.top_k, rule.renormalize) == (512, 10, True)
    assert (own.experts.size, own.experts.shared_size) == (512, 512)
    assert own.linear == tuple(kind == "linear_attention" for kind in built.layer_types)
    heads = own.delta
    assert (heads.key_heads, heads.value_heads) == (built.linear_num_key_heads, built.linear_num_value_heads)
    assert (heads.key_dim, heads.value_dim) == (built.linear_key_head_dim, built.linear_value_head_dim)
    assert own.conv_width == built.linear_conv_kernel_dim


def test_layers_that_attend_and_layers_with_states_are_two_groups() -> None:
    info = describe_qwen3_next(SHAPE)
    assert [(group.kind, group.num_layers) for group in info.cache_groups] == [
        (CacheGroupKind.FULL, 2),
        (CacheGroupKind.STATE, 6),
    ]
    assert ("linear_num_key_heads", 16) in info.split_sizes


def test_a_snapshot_of_the_published_model_has_75_million_bytes() -> None:
    info = describe_qwen3_next({**SHAPE, "hidden_size": 2048, "num_hidden_layers": 48})
    assert bytes_per_slot(info.cache_groups[1], torch.bfloat16) == 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert bytes_per_slot(info.cache_groups[1].share(4), torch.bfloat16) == 9 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 24}, "must be a multiple"),
        ({"layer_types": ["sliding_attention"] * 8}, "each one of linear_attention, full_attention"),
        ({"layer_types": ["full_attention"]}, "a list of 8 types"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"sliding_window": 8}, "sliding_window is 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_qwen3_next(SHAPE | change)


def test_settings_of_qwen3_5_are_those_of_its_text_model() -> None:
    built: Any = transformers.Qwen3_5TextConfig()
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    info = describe_qwen3_5({"text_config": {key: getattr(built, key) for key in shape}, "tie_word_embeddings": True})
    assert (info.num_kv_heads, info.head_dim) == (built.num_key_value_heads, built.head_dim)
    assert info.config.linear == tuple(kind == "linear_attention" for kind in built.layer_types)
    assert info.config.rope.rotary_dim == built.head_dim * built.rope_parameters["partial_rotary_factor"]
    assert info.config.tied
    assert info.config.multimodal
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "rope_theta": 1e7, "rope_type": "default"}
    for describe in (describe_qwen3_5, describe_qwen3_5_moe):
        assert describe(SHAPE | {"rope_parameters": sections}).config.rope.theta == 1e7
    with pytest.raises(ConfigError, match="text_config is 3"):
        describe_qwen3_5({"text_config": 3})
