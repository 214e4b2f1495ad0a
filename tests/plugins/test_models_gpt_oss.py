"""Test gpt-oss against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_gpt_oss.py
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import transformers

from dovetail.engine.build import as_module
from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelArchitecture
from dovetail.interfaces.store import KVStore
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail_models.gpt_oss_describe import describe_gpt_oss
from moe_suite import MoeSuite

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
ALTERNATING = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 7,
    "swiglu_limit": 0.5,
    "rope_parameters": YARN,
}


class TestGptOss(MoeSuite):
    """The limit of the activation is low enough to matter."""

    name = model_type = "gpt_oss"
    configs: ClassVar = {
        "alternating": ALTERNATING,
        "one kv head, other types": {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 9,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    }


class TestOnTorchNative(MoeSuite):
    """Sinks and windows on the attention that the CPU engine uses."""

    name = model_type = "gpt_oss"
    configs: ClassVar = {"alternating": ALTERNATING}

    def make_attention(self, model: ModelArchitecture, pool: KVStore) -> AttentionBackend:
        registry = installed()
        component = registry.get(ComponentKind.ATTENTION, "torch_native")
        info, parameter = model.info, next(as_module(model).parameters())
        context = AttentionContext(
            parameter.device, parameter.dtype, info.num_heads, info.num_kv_heads, info.head_dim, pool, 8, 256
        )
        config = registry.config_class(ComponentKind.ATTENTION, "torch_native")(kind="torch_native")
        return load_attribute(component.spec.target, component.label)(config, context)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 100,
}


def test_describe_fills_in_what_transformers_would() -> None:
    built: Any = transformers.GptOssConfig()
    shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    info = describe_gpt_oss({key: getattr(built, key) for key in shape})
    experts, rope = info.config.experts, info.config.rope
    assert (info.num_kv_heads, info.head_dim) == (built.num_key_value_heads, built.head_dim)
    assert info.context_len == built.max_position_embeddings
    assert info.config.norm_eps == built.rms_norm_eps
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert (experts.routing.num_experts, experts.routing.top_k) == (built.num_local_experts, built.num_experts_per_tok)
    assert (experts.activation.alpha, experts.activation.limit) == (built.swiglu_alpha, built.swiglu_limit)
    assert [window is not None for window in info.config.windows] == [
        kind == "sliding_attention" for kind in built.layer_types
    ]
    of_experts = {Feature.EXPERTS_BIAS, Feature.EXPERTS_SWIGLU}
    assert info.needs == {Feature.ATTN_SINKS, Feature.ATTN_SLIDING_WINDOW} | of_experts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"swiglu_limit": -1}, "swiglu_limit is -1"),
        ({"num_experts_per_tok": 200}, "200 of 128"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    describe_gpt_oss(SHAPE)
    with pytest.raises(ConfigError, match=message):
        describe_gpt_oss(SHAPE | change)
