"""Test for which models the memory of a step is measured over the first layers only.

.venv/bin/python -m pytest -q tests/core/test_representative_layers.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.engine.build import as_module, build_model
from dovetail.engine.dry_run import SIMILAR_LAYERS, representative_layers
from dovetail.layers.attention import SelfAttention
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama, describe_mistral

META = torch.device("meta")
SIZES = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "tie_word_embeddings": False,
}  # fmt: skip


def llama(layers: int) -> Any:
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
    return build_model(DenseModel, describe_llama(config), META, torch.bfloat16)


@pytest.mark.parametrize("layers", [2 * SIMILAR_LAYERS + 1, 32])
def test_equal_layers_are_measured_once(layers: int) -> None:
    assert representative_layers(llama(layers)) == 2 * SIMILAR_LAYERS


def test_few_layers_are_all_measured() -> None:
    assert representative_layers(llama(2 * SIMILAR_LAYERS)) is None


def attention_of(model: nn.Module) -> list[SelfAttention]:
    return [module for module in model.modules() if isinstance(module, SelfAttention)]


@pytest.mark.parametrize("place", [SIMILAR_LAYERS - 1, SIMILAR_LAYERS, 19])
@pytest.mark.parametrize("what", ["window", "scale", "size", "dtype", "module"])
def test_a_layer_of_another_kind_must_be_among_the_first(place: int, what: str) -> None:
    model = llama(20)
    layer = attention_of(model)[place]
    match what:
        case "window":
            windowed = SIZES | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
            info = describe_mistral(windowed | {"num_hidden_layers": 1})
            [other] = attention_of(as_module(build_model(DenseModel, info, META, torch.bfloat16)))
            layer.constants = other.constants
        case "scale":  # GPT-2 may scale by layer, and FlashInfer plans for each scale
            layer.constants = replace(layer.constants, scale=0.5)
        case "size":
            layer.out.weight = nn.Parameter(layer.out.weight[:8], requires_grad=False)
        case "dtype":
            layer.out.weight = nn.Parameter(layer.out.weight.to(torch.int8), requires_grad=False)
        case _:
            layer.more = nn.Identity()
    assert representative_layers(model) == (2 * SIMILAR_LAYERS if place < SIMILAR_LAYERS else None)


@pytest.mark.parametrize("count", [12, 20])
def test_another_stack_of_modules_is_not_taken_for_the_layers(count: int) -> None:
    """If it has as many entries as the model has layers, it is not known which of the two are the layers."""
    model = llama(20)
    model.tower = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
    assert representative_layers(model) == (None if count == 20 else 2 * SIMILAR_LAYERS)
