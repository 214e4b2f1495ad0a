"""Test the text model of Llama 4 against Hugging Face transformers.

Run: python -m pytest tests/plugins/test_models_llama4.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from dovetail.errors import ConfigError
from dovetail.testing.model import Reference
from dovetail_models.llama4_describe import describe_llama4
from moe_suite import SMALL, MoeSuite, randomise

TUNED = {
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0],
    "floor_scale": 8,
    "attn_scale": 0.4,
    "attention_chunk_size": 256,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
}


class TestLlama4(MoeSuite):
    name = "llama4"
    model_type = "llama4_text"
    configs: ClassVar = {
        "tuned": TUNED,
        "two experts, dense layer, one chunk": TUNED
        | {
            "num_experts_per_tok": 2,
            "moe_layers": [1],
            "no_rope_layers": [0, 1],
            "attn_temperature_tuning": False,
            "attention_chunk_size": 48,
            "use_qk_norm": False,
        },
        # without rotation, the bias of keys would change nothing
        "biases": TUNED | {"num_local_experts": 4, "no_rope_layers": [1, 1], "attention_bias": True},
    }


class TestLlama4WithinAModelForImages(MoeSuite):
    name = "llama4"
    ignores = (r"vision_model\..+", r"multi_modal_projector\..+")
    configs: ClassVar = {"tuned": TUNED}

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 8, "patch_size": 4, "vision_output_dim": 8}
        vision |= {"projector_input_dim": 8, "projector_output_dim": 8}
        built = transformers.Llama4Config(text_config=SMALL | dict(config), vision_config=vision)
        model = transformers.Llama4ForConditionalGeneration(built)
        randomise(model)
        model.save_pretrained(directory)

    def reference(self, directory: Path) -> Reference | None:
        model = transformers.Llama4ForConditionalGeneration.from_pretrained(directory, attn_implementation="eager")

        @torch.no_grad()
        def logits(tokens: Any) -> torch.Tensor:
            return model.eval()(torch.tensor([tokens])).logits[0]

        return logits


SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 100}


def test_describe_fills_in_what_transformers_would() -> None:
    built: Any = transformers.Llama4TextConfig()
    info = describe_llama4({key: getattr(built, key) for key in (*SHAPE,)})
    own, rule = info.config, info.config.experts.routing
    assert (info.num_kv_heads, info.head_dim) == (built.num_key_value_heads, built.head_dim)
    assert info.context_len == built.attention_chunk_size
    assert own.norm_eps == built.rms_norm_eps
    assert own.rope.theta == built.rope_parameters["rope_theta"]
    assert (rule.num_experts, rule.top_k) == (built.num_local_experts, built.num_experts_per_tok)
    assert (own.experts.size, own.experts.shared_size) == (built.intermediate_size, built.intermediate_size)
    assert [rope is not None for rope in own.layer_ropes] == [bool(one) for one in built.no_rope_layers]
    assert [index for index, sparse in enumerate(own.sparse) if sparse] == built.moe_layers
    assert (own.tuning, own.tuning_step) == (built.attn_scale, built.floor_scale)
    assert own.unweighted_norm is built.use_qk_norm


def test_the_context_is_one_chunk() -> None:
    """Layers with chunks see nothing of the chunks before; full layers are not limited."""
    config = {**SHAPE, "attention_chunk_size": 512, "max_position_embeddings": 2048}
    assert describe_llama4(config).context_len == 512
    assert describe_llama4({**config, "layer_types": ["full_attention"] * 4}).context_len == 2048
    assert describe_llama4({**config, "no_rope_layers": [0] * 4}).context_len == 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"no_rope_layers": [1, 2, 0, 1]}, "0 and 1"),
        ({"moe_layers": "all"}, "a list of indices"),
        ({"text_config": "large"}, "text_config is 'large'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "use_qk_norm"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    describe_llama4(SHAPE)
    with pytest.raises(ConfigError, match=message):
        describe_llama4(SHAPE | change)
