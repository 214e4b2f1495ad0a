"""Test the expressions of ``quantization.ignore``: each must match a module of the model.

Run: python -m pytest tests/plugins/test_ignored_modules.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.engine.build import build_model
from dovetail.errors import ConfigError
from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.quantization import Quantization, QuantizationContext
from dovetail.testing.ranks import thread_meshes
from dovetail_models.moe import MoeModel
from dovetail_models.moe_describe import describe_mixtral
from dovetail_quantization.config import Fp8Config, Mxfp4Config
from dovetail_quantization.fp8 import Fp8
from dovetail_quantization.mxfp4 import Mxfp4

CPU = torch.device("cpu")
CONTEXT = QuantizationContext(None, torch.float32, CPU)
INFO = describe_mixtral(
    {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
)


def quantization(kind: str, *ignore: str) -> Quantization:
    return Fp8(Fp8Config(ignore=ignore), CONTEXT) if kind == "fp8" else Mxfp4(Mxfp4Config(ignore=ignore), CONTEXT)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_an_expression_that_matches_no_module_is_refused(kind: str) -> None:
    chosen = quantization(kind, r"model\.layers\.1\..*", "model.layers.0")
    with pytest.raises(ConfigError, match=r"quantization\.ignore has 'model\.layers\.0', .*such as 'model\."):
        build_model(MoeModel, INFO, CPU, torch.float32, SINGLE, chosen)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_an_expression_may_match_modules_of_another_rank(kind: str) -> None:
    """Each of two ranks has two of the four experts."""
    for mesh in thread_meshes(2, "ep"):
        chosen = quantization(
            kind, r".*\.1\.block_sparse_moe\.experts\.[01]\..*", r".*\.1\.block_sparse_moe\.experts\.[23]\..*"
        )
        build_model(MoeModel, INFO, CPU, torch.float32, mesh, chosen)
