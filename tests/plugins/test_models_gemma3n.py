"""Test the text model of Gemma 3n against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_gemma3n.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.testing.model import Reference
from dovetail_models.gemma3n_describe import describe_gemma3n
from hf_suite import SMALL, HuggingFaceSuite

SMALL_3N: Mapping[str, Any] = SMALL | {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 10,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.3],
    "final_logit_softcapping": 5.0,
}
TWO_ROPES = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


class TestGemma3n(HuggingFaceSuite):
    name, model_type = "gemma3n", "gemma3n_text"
    small: ClassVar[Mapping[str, Any]] = SMALL_3N
    configs: ClassVar = {
        "keys of earlier layers": TWO_ROPES,
        "all layers have keys, biases": {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.5],
            "intermediate_size": [40, 80],
            "altup_active_idx": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
        },
    }


@pytest.mark.full
class TestGemma3nWithImages(HuggingFaceSuite):
    """Test the text model within a checkpoint that also has models for images and sound, with the keys and values of layers
    that do not use them."""

    name, model_type = "gemma3n", "gemma3n_text"
    small: ClassVar[Mapping[str, Any]] = SMALL_3N
    configs: ClassVar = {"text": {}}
    unread = ("model.vision_tower.x.weight", "model.embed_audio.x.weight")
    of_sharing = tuple(f"model.language_model.layers.3.self_attn.{part}.weight" for part in ("k_proj", "k_norm"))
    ignores: ClassVar = (*unread, *of_sharing)

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        inner = directory / "text"
        inner.mkdir()
        super().write_checkpoint(config, inner)
        tensors = load_file(inner / "model.safetensors")
        renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
        more = {name: torch.zeros(3) for name in (*self.unread, *self.of_sharing)}
        save_file(renamed | more, directory / "model.safetensors")
        outer = {"architectures": ["Gemma3nForConditionalGeneration"], "eos_token_id": [1, 2]}
        outer["text_config"] = json.loads((inner / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(outer))

    def reference(self, directory: Path) -> Reference | None:
        return super().reference(directory / "text")


def test_absent_settings_are_those_of_transformers() -> None:
    built: Any = transformers.Gemma3nTextConfig()
    info = describe_gemma3n({})
    own = info.config
    for key, value in (
        ("vocab_size", info.vocab_size),
        ("hidden_size", info.hidden_size),
        ("num_hidden_layers", info.num_layers),
        ("num_attention_heads", info.num_heads),
        ("num_key_value_heads", info.num_kv_heads),
        ("head_dim", info.head_dim),
        ("max_position_embeddings", info.context_len),
        ("intermediate_size", list(own.intermediate_sizes)),
        ("rms_norm_eps", own.norm_eps),
        ("tie_word_embeddings", own.tied),
        ("final_logit_softcapping", own.logit_cap),
        ("altup_num_inputs", own.streams),
        ("altup_active_idx", own.active),
        ("num_kv_shared_layers", own.shared),
        ("laurel_rank", own.laurel_rank),
        ("vocab_size_per_layer_input", own.layer_vocab),
        ("hidden_size_per_layer_input", own.layer_width),
        ("activation_sparsity_pattern", list(own.sparsity)),
        ("attention_bias", own.attention_bias),
    ):
        assert value == getattr(built, key), key
    kinds = ["full_attention" if window is None else "sliding_attention" for window in own.windows]
    assert kinds == built.layer_types
    thetas = {kind: built.rope_parameters[kind]["rope_theta"] for kind in built.layer_types}
    assert [rope.theta for rope in own.layer_ropes] == [thetas[kind] for kind in built.layer_types]


def test_layers_that_share_keys_need_no_memory() -> None:
    """Of 35 layers 20 have keys: 4 of these without a window. The others read those of layers 18 and 19."""
    info = describe_gemma3n({"dtype": "bfloat16"})
    full, sliding = info.cache_groups
    assert full == CacheGroup(4, 2, 256)
    assert sliding == CacheGroup(16, 2, 256, CacheGroupKind.SLIDING, 512)
    places = info.config.places
    assert set(places[20:]) == {places[18], places[19]} == {(1, 15), (0, 3)}
    assert places[20] == places[18]
    assert places[24] == places[19]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"altup_correct_scale": False}, "altup_correct_scale is False"),
        ({"altup_active_idx": 4}, "altup_active_idx is 4; allowed: 0 to altup_num_inputs - 1 = 3"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35"),
        ({"num_kv_shared_layers": 31}, "no layer of type full_attention"),
        ({"intermediate_size": [8]}, "intermediate_size has 1 entries"),
        ({"activation_sparsity_pattern": [1.0] * 35}, "activation_sparsity_pattern is"),
        ({"text_config": [1]}, r"text_config is \[1\]"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_gemma3n(change)
