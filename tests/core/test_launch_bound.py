"""Test up to which number of tokens steps with prompts are captured in pieces, for the shapes of known models.

.venv/bin/python -m pytest -q tests/core/test_launch_bound.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail import LLM
from dovetail.engine.build import build_model
from dovetail.engine.needs import GraphNeeds, affordable_pieces
from dovetail.engine.pieces import launch_bound, step_seconds
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.interfaces.quantization import QuantizationContext
from dovetail.testing.ranks import thread_meshes
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama
from dovetail_models.fallback.describe import describe_transformers
from dovetail_models.moe import MoeModel
from dovetail_models.moe_describe import describe_mixtral, describe_qwen3_moe
from dovetail_quantization.config import Fp8Config, Mxfp4Config
from dovetail_quantization.fp8 import Fp8
from dovetail_quantization.mxfp4 import Mxfp4

META = torch.device("meta")


def llama(hidden, inner, layers):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 128,
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "tie_word_embeddings": False,
    }  # fmt: skip
    return describe_llama(config)


QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip


def qwen3_moe(**changes):
    """Return Qwen3-30B-A3B, or what has other sizes."""
    return describe_qwen3_moe(QWEN3_MOE | changes)


def mixtral():
    """Return Mixtral-8x7B, a token of which is multiplied by 12.6 billion weights besides the head."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return describe_mixtral(config)


def bound(kind, info, mesh=SINGLE, quantization=None):
    return launch_bound(step_seconds(build_model(kind, info, META, torch.bfloat16, mesh, quantization), mesh))


def fp8():
    return Fp8(Fp8Config(), QuantizationContext(None, torch.bfloat16, torch.device("cpu")))


@pytest.mark.parametrize(
    ("hidden", "inner", "layers", "tokens"), [(4096, 14336, 32, 384), (1024, 3072, 28, 2048), (8192, 28672, 80, 0)]
)
def test_prompts_are_captured_where_launching_takes_longer_than_computing(hidden, inner, layers, tokens):
    """The shapes are those of 8B, of 0.6B, and of 70B, where no step of a hundred tokens is that quick."""
    assert bound(DenseModel, llama(hidden, inner, layers)) == tokens


def test_models_whose_layers_take_longer_to_launch_are_captured_for_more_tokens():
    """Without the factor it is 481 before it is rounded down. Transformers' modules have one."""
    assert bound(DenseModel, replace(llama(4096, 14336, 32), launch_factor=2.0)) == 896
    config = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "vocab_size": 97, "hidden_size": 32}
    config |= {"intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    assert describe_transformers(config | {"head_dim": 16, "max_position_embeddings": 64}).launch_factor > 1.5


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_is_no_positive_number_is_refused(factor):
    with pytest.raises(ValueError, match=r"launch_factor of .* allowed: a number greater than 0"):
        replace(llama(4096, 14336, 32), launch_factor=factor)


class OnlyVocabulary(torch.nn.Module):
    """Have no weights besides those of the vocabulary."""

    def __init__(self, info):
        super().__init__()
        self.info, self.embedding = info, torch.nn.Embedding(info.vocab_size, 8, device=META)


def test_a_model_that_multiplies_with_nothing_is_launch_bound():
    model: Any = OnlyVocabulary(llama(4096, 14336, 32))
    assert launch_bound(step_seconds(model, SINGLE)) == 2048


def test_weights_of_one_byte_are_multiplied_at_twice_the_rate():
    """That of 8B in bfloat16 is 481 before it is rounded down; a quantized layer is launched in 6e-4 s instead of 3.5e-4."""
    assert bound(DenseModel, llama(4096, 14336, 32), quantization=fp8()) == 1536


def test_only_the_experts_of_a_token_count():
    assert bound(MoeModel, qwen3_moe()) == 2048
    every_expert = bound(MoeModel, qwen3_moe(num_experts_per_tok=128))
    assert every_expert == 256, "29.9 billion weights besides embedding and head: 288"
    half_of_the_layers = bound(MoeModel, qwen3_moe(num_experts_per_tok=128, mlp_only_layers=list(range(24))))
    assert half_of_the_layers == 384, "16.3 billion weights, and half of the layers are launched in 3.5e-4 s: 419"


@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_ranks_have_their_share_of_the_experts(experts):
    assert bound(MoeModel, mixtral()) == 384, "456 before it is rounded down"
    assert bound(MoeModel, mixtral(), thread_meshes(2, experts)[0]) == 896, "twice 456"


def test_codes_of_four_bits_are_multiplied_as_numbers_of_the_activations():
    quantization = Mxfp4(Mxfp4Config(), QuantizationContext(None, torch.bfloat16, torch.device("cpu")))
    assert bound(MoeModel, mixtral(), quantization=quantization) == 384, "432, of which the scales take a part"
    assert bound(MoeModel, mixtral(), quantization=fp8()) == 896, "twice 456"


def test_pieces_take_a_tenth_of_the_memory_that_weights_leave_free():
    """Sizes up to 2,048 keep the queries of 12,488 tokens, each with 48 layers of 32 heads of 128 numbers."""
    info, graphs = qwen3_moe(), GraphNeeds(0, 0, 2048, 2)
    least = 10 * 1.25 * 12488 * 48 * 32 * 128 * 2
    assert affordable_pieces(info, graphs, least + 1) == 2048
    assert affordable_pieces(info, graphs, least - 1e6) == 1792
    assert affordable_pieces(info, graphs, 11 << 30) == 448, "what 80 GB have left"
    assert affordable_pieces(info, graphs, 1e6) == affordable_pieces(info, replace(graphs, piece_tokens=0), least) == 0
    watching = replace(graphs, watched=3)
    assert affordable_pieces(info, watching, least + 1) == 1792
    assert affordable_pieces(info, watching, least * (1 + 3 * 2048 / (48 * 32 * 128)) + 1) == 2048


def test_a_backend_of_experts_that_cannot_be_captured_has_no_pieces(tmp_path):
    """The one for the CPU is not captured."""
    sizes = {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE | sizes))
    memory = {"num_pages": 8}
    for path, expected in ((str(tmp_path), 0), ("tiny", 2048)):
        with LLM(path, device="cpu", model={"load_format": "dummy"}, grammar="none", memory=memory) as llm:
            assert llm.loop.executor.rank.engine._piece_tokens == expected


def test_pieces_of_layers_with_states_keep_what_these_read() -> None:
    info, graphs = qwen3_moe(), GraphNeeds(0, 0, 2048, 2)
    states = CacheGroup.of_states(30, (StateShape((8192, 3)), StateShape((32, 128, 128), "float32")))
    more = replace(info, cache_groups=(*info.cache_groups, states))
    memory = 11 << 30
    assert 0 < affordable_pieces(more, graphs, memory) < affordable_pieces(info, graphs, memory)
