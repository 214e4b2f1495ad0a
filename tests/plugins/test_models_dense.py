"""Test the dense Llama family against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_dense.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from dovetail.engine.build import as_module
from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelArchitecture, ModelInfo
from dovetail.interfaces.store import KVStore
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail.testing.model import read_tensors
from dovetail_models.dense_describe import describe_llama, describe_mistral, describe_qwen2, describe_qwen3
from hf_suite import HuggingFaceSuite, rope

LLAMA3_ROPE = rope(
    "llama3",
    500.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)


class TestLlama(HuggingFaceSuite):
    name = model_type = "llama"
    configs: ClassVar = {
        "llama2": {"num_key_value_heads": 4},
        "llama3": LLAMA3_ROPE,
        "linear": rope("linear", factor=2.5),
        "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
        "biases": {"attention_bias": True, "mlp_bias": True},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
        "narrow heads": {"head_dim": 8},
        "wide heads": {"head_dim": 32},
        "eps": {"rms_norm_eps": 0.5},
    }


class TestMistral(HuggingFaceSuite):
    name = model_type = "mistral"
    configs: ClassVar = {
        "window": {"sliding_window": 6},
        "full": {"sliding_window": None},
        "wide heads": {"sliding_window": 9, "head_dim": 16, "tie_word_embeddings": True},
    }


class TestQwen2(HuggingFaceSuite):
    name = model_type = "qwen2"
    configs: ClassVar = {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "window from layer 1": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "window by type": {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "unused window": {"use_sliding_window": False, "sliding_window": 5},
        "yarn": rope("yarn", factor=2.0, original_max_position_embeddings=64, beta_fast=16.0, truncate=False),
    }


class TestQwen3(HuggingFaceSuite):
    name = model_type = "qwen3"
    configs: ClassVar = {
        "plain": {},
        "yarn": rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=32, attention_factor=1.3),
        "biases": {"attention_bias": True, "head_dim": 32},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
        "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    }


class TestOnTorchNative(HuggingFaceSuite):
    """Test the family's features together, on the attention that the CPU engine uses."""

    name = model_type = "qwen3"
    configs: ClassVar = {
        "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2, "attention_bias": True}
    }

    def make_attention(self, model: ModelArchitecture, pool: KVStore) -> AttentionBackend:
        registry = installed()
        component = registry.get(ComponentKind.ATTENTION, "torch_native")
        info = model.info
        dtype = next(as_module(model).parameters()).dtype
        context = AttentionContext(
            torch.device("cpu"), dtype, info.num_heads, info.num_kv_heads, info.head_dim, pool, 8, 128
        )
        config = registry.config_class(ComponentKind.ATTENTION, "torch_native")(kind="torch_native")
        return load_attribute(component.spec.target, component.label)(config, context)


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
Describe = Callable[[dict[str, Any]], ModelInfo]


def test_describe_fills_in_what_transformers_would() -> None:
    for describe, built in (
        (describe_llama, transformers.LlamaConfig()),
        (describe_mistral, transformers.MistralConfig()),
        (describe_qwen2, transformers.Qwen2Config()),
        (describe_qwen3, transformers.Qwen3Config()),
    ):
        shape = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        info = describe({key: getattr(built, key) for key in shape})
        assert info.num_kv_heads == built.num_key_value_heads
        assert info.head_dim == getattr(built, "head_dim", built.hidden_size // built.num_attention_heads)
        assert info.context_len == built.max_position_embeddings
        assert info.config.norm_eps == built.rms_norm_eps
        assert info.config.rope.theta == built.rope_parameters["rope_theta"]
        assert info.config.windows == (getattr(built, "sliding_window", None),) * info.num_layers


def test_both_generations_of_rope_settings_mean_the_same() -> None:
    old = {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    new = {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }
    shape = {**LLAMA, "max_position_embeddings": 131072}
    assert describe_llama(shape | old) == describe_llama(shape | new)
    assert describe_llama(shape | old).config.rope.theta == 500000.0
    assert describe_llama(shape | old).context_len == 131072


@pytest.mark.parametrize(
    ("settings", "context_len"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "default"}, 4096),
    ],
)
def test_context_follows_rope_scaling(settings: dict[str, Any], context_len: int) -> None:
    info = describe_llama({**LLAMA, "max_position_embeddings": 4096, "rope_scaling": settings})
    assert info.context_len == context_len


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {
        "default": rope("default", 1e6),
        "linear": rope("linear", factor=3.0),
        "llama3": LLAMA3_ROPE,
        "yarn": rope("yarn", 1e6, factor=8.0, original_max_position_embeddings=4096, mscale=1.1, mscale_all_dim=0.7),
    }[kind]
    built = transformers.LlamaConfig(**LLAMA, head_dim=64, **settings)
    found = describe_llama({**LLAMA, "head_dim": 64, **settings}).config.rope
    ours = torch.from_numpy(found.inverse_frequencies())
    if kind == "default":
        theirs, factor = 1e6 ** -(torch.arange(0, 64, 2) / 64), 1.0
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[kind](built, torch.device("cpu"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert found.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("describe", "change", "message"),
    [
        (describe_llama, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            describe_llama,
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "dynamic.*default, linear, llama3, yarn",
        ),
        (describe_llama, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (describe_llama, {"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        (describe_llama, {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        (describe_llama, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one set of settings"),
        (describe_llama, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (describe_llama, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (describe_llama, {"sliding_window": 4096}, "sliding_window is 4096"),
        (describe_llama, {"num_local_experts": 8}, "num_local_experts is 8"),
        (describe_llama, {"head_dim": 15}, "head_dim is 15"),
        (describe_llama, {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        (describe_llama, {"hidden_size": None}, "no hidden_size"),
        (describe_llama, {"hidden_size": "64"}, "hidden_size is '64'"),
        (describe_llama, {"hidden_size": 66}, "hidden_size is 66"),
        (describe_llama, {"dtype": "float8_e4m3fn"}, "float8"),
        (describe_llama, {"eos_token_id": "</s>"}, "eos_token_id"),
        (describe_llama, {"attention_bias": "yes"}, "attention_bias is 'yes'"),
        (describe_mistral, {"attention_bias": True}, "attention_bias is True"),
        (describe_mistral, {"layer_types": ["sliding_attention"]}, "layer_types"),
        (describe_qwen2, {"attention_bias": True}, "attention_bias is True"),
        (describe_qwen2, {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window"),
        (describe_qwen3, {"layer_types": ["full_attention"]}, "a list of 2 types"),
        (describe_qwen3, {"layer_types": ["full_attention", "mamba"]}, "mamba"),
        (describe_qwen3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(describe: Describe, change: dict[str, Any], message: str) -> None:
    shape = {**LLAMA, "num_key_value_heads": 2}
    describe(shape)
    with pytest.raises(ConfigError, match=message):
        describe(shape | change)


def test_windows_are_needed_only_where_they_cut() -> None:
    narrow = describe_mistral({**LLAMA, "num_key_value_heads": 2, "sliding_window": 64})
    assert narrow.needs == {Feature.ATTN_SLIDING_WINDOW}
    wide = describe_mistral({**LLAMA, "num_key_value_heads": 2, "sliding_window": 64, "max_position_embeddings": 64})
    assert wide.needs == frozenset()
    assert wide.config.windows == (None, None)


@pytest.mark.parametrize(("given", "ids"), [(None, ()), (2, (2,)), ([2, 7], (2, 7))])
def test_eos_may_be_none_one_or_many(given: object, ids: tuple[int, ...]) -> None:
    assert describe_llama({**LLAMA, "eos_token_id": given}).eos_token_ids == ids


def test_a_tied_head_may_be_saved_and_an_untied_one_must(tmp_path: Path) -> None:
    suite = TestLlama()
    suite.write_checkpoint({"tie_word_embeddings": True}, tmp_path)
    tensors = read_tensors(tmp_path)
    suite.load(tmp_path, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(WeightsError, match=r"lm_head\.weight"):
        suite.load(tmp_path, tensors)


def test_describing_imports_no_torch() -> None:
    code = (
        "import sys, dovetail_models.plugin, dovetail_models.config, dovetail_models.dense_describe as d; "
        f"d.describe_llama({LLAMA!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
