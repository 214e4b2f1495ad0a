"""Test Gemma, Gemma 2 and Gemma 3 against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_gemma.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.testing.model import Reference
from dovetail_models.gemma_describe import describe_gemma, describe_gemma2, describe_gemma3
from hf_suite import SMALL, HuggingFaceSuite, check_watched_layers, random_parameters

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "query_pre_attn_scalar": 10, "sliding_window": 7}
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


class TestGemma(HuggingFaceSuite):
    name = model_type = "gemma"
    configs: ClassVar = {"plain": {"num_hidden_layers": 2, "num_key_value_heads": 1}}


class TestGemma2(HuggingFaceSuite):
    name = model_type = "gemma2"
    configs: ClassVar = {
        "caps": SHAPE | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        "no caps": SHAPE
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}
        | {"num_key_value_heads": 1, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": False},
    }


class TestGemma3(HuggingFaceSuite):
    name, model_type = "gemma3", "gemma3_text"
    configs: ClassVar = {
        "two rotations": SHAPE | TYPES | ROPES,
        "cap": SHAPE | {"final_logit_softcapping": 5.0, "tie_word_embeddings": False, "num_key_value_heads": 4},
    }


class TestGemma3WithImages(HuggingFaceSuite):
    """Test the text model within a checkpoint that also has a model for images."""

    name = "gemma3"
    configs: ClassVar = {"text": SHAPE | TYPES | ROPES}
    ignores: ClassVar = (r"(vision_tower|multi_modal_projector)\..+",)

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        built = transformers.Gemma3Config(
            text_config=SMALL | dict(config),
            vision_config={**vision, "image_size": 4, "patch_size": 2},
            mm_tokens_per_image=4,
            image_token_index=96,
        )
        model = transformers.Gemma3ForConditionalGeneration(built)
        random_parameters(model)
        model.save_pretrained(directory)

    def reference(self, directory: Path) -> Reference:
        model = transformers.Gemma3ForConditionalGeneration.from_pretrained(directory, attn_implementation="eager")

        @torch.no_grad()
        def logits(tokens: Any) -> torch.Tensor:
            return model.eval()(torch.tensor([tokens])).logits[0]

        return logits


@pytest.mark.parametrize("suite", [TestGemma2, TestGemma3])
def test_watched_layers_are_those_of_transformers(suite: type[HuggingFaceSuite], tmp_path: Path) -> None:
    check_watched_layers(suite(), tmp_path)


def test_absent_settings_are_those_of_transformers() -> None:
    for describe, built in (
        (describe_gemma, transformers.GemmaConfig()),
        (describe_gemma2, transformers.Gemma2Config()),
        (describe_gemma3, transformers.Gemma3TextConfig()),
    ):
        info = describe({})
        for key, value in (
            ("vocab_size", info.vocab_size),
            ("hidden_size", info.hidden_size),
            ("num_hidden_layers", info.num_layers),
            ("num_attention_heads", info.num_heads),
            ("num_key_value_heads", info.num_kv_heads),
            ("head_dim", info.head_dim),
            ("max_position_embeddings", info.context_len),
            ("intermediate_size", info.config.intermediate_size),
            ("rms_norm_eps", info.config.norm_eps),
            ("tie_word_embeddings", info.config.tied),
            ("attn_logit_softcapping", info.config.attention_cap),
            ("final_logit_softcapping", info.config.logit_cap),
        ):
            assert value == getattr(built, key, None), key
        kinds = getattr(built, "layer_types", None) or ["full_attention"] * info.num_layers
        windows = tuple(None if kind == "full_attention" else getattr(built, "sliding_window", None) for kind in kinds)
        assert info.config.windows == windows
        assert info.config.scale == getattr(built, "query_pre_attn_scalar", built.head_dim) ** -0.5
        assert (Feature.ATTN_SOFT_CAP in info.needs) == (getattr(built, "attn_logit_softcapping", None) is not None)


def test_gemma3_as_published_has_two_rotations_and_its_own_context() -> None:
    """The text settings of the 4B model leave out most keys, and have the format of transformers 4."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    info = describe_gemma3({"text_config": text, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"})
    assert (info.context_len, info.vocab_size, info.head_dim) == (131072, 262208, 256)
    assert (info.dtype, info.eos_token_ids) == ("bfloat16", (1, 106))
    ropes = info.config.layer_ropes
    assert [rope.theta for rope in ropes[:7]] == [1e4] * 5 + [1e6] + [1e4]
    assert {rope.theta: rope.factor for rope in ropes} == {1e4: 1.0, 1e6: 8.0}
    assert {rope.context_len for rope in ropes} == {131072}


@pytest.mark.parametrize(
    ("describe", "change", "message"),
    [
        (describe_gemma, {"hidden_act": "silu"}, "hidden_activation is 'silu'"),
        (describe_gemma, {"sliding_window": 8}, "sliding_window is 8"),
        (describe_gemma2, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'; implemented: gelu_pytorch_tanh"),
        (describe_gemma2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (describe_gemma2, {"layer_types": ["full_attention"]}, "a list of 26 types"),
        (describe_gemma2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (describe_gemma3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is set"),
        (describe_gemma3, {"text_config": [1]}, r"text_config is \[1\]"),
        (describe_gemma3, {"text_config": {"use_bidirectional_attention": True}}, "use_bidirectional_attention"),
        (describe_gemma3, {"rope_parameters": {"rope_type": "default"}}, "an entry for each"),
        (describe_gemma3, {"rope_parameters": {"other": {"rope_type": "default"}}}, r"rope_parameters has \['other'\]"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(describe: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe(change)


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 7,
        "sliding_window": 512,
        "dtype": "bfloat16",
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
    full, sliding = describe_gemma3(config).cache_groups
    assert full == CacheGroup(1, 2, 64)
    assert sliding == CacheGroup(6, 2, 64, CacheGroupKind.SLIDING, 512)
