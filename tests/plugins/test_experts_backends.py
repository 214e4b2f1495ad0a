"""Test the backends of experts of this repository with their conformance suite, and where they are chosen.

.venv/bin/python -m pytest -q tests/plugins/test_experts_backends.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.expert_shapes import ExpertWeights, RoutingRule
from dovetail.interfaces.experts import ExpertsContext
from dovetail.layers.experts import Router
from dovetail.layers.linear import make_batch_invariant
from dovetail.ops.experts import GroupedProduct
from dovetail.registry import stages
from dovetail.registry.machine import Machine
from dovetail.registry.resolver import resolve
from dovetail.registry.setup import setup
from dovetail.testing.experts import ExpertsSuite
from dovetail_experts.backends import TritonExperts
from dovetail_experts.config import TritonExpertsConfig

QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True, "torch_dtype": "bfloat16",
    "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip
FEW_CHOICES = ("attention=triton", "grammar=none", "policy=fcfs", "cache=radix", "executor=local")


class TestTorchNative(ExpertsSuite):
    name = "torch_native"


class TestTriton(ExpertsSuite):
    name = "triton"


def chosen(folder: Path, machine: str, *sets: str, **changes: object) -> str | None:
    """Return the backend that is chosen for a model like Qwen3-MoE, with ``changes`` of its config.json."""
    (folder / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    config, registry = setup((), [f"model.path={folder}", *sets])
    found = resolve(config, registry, Machine.assume(machine))
    return None if found.experts is None else found.experts.name


def test_each_device_has_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "unmet", lambda requirement: iter(()))
    assert chosen(tmp_path, "cpu") == "torch_native"
    assert chosen(tmp_path, "sm90") == "triton"
    assert chosen(tmp_path, "sm90", "quantization=fp8") == "triton"
    assert chosen(tmp_path, "cpu", mlp_only_layers=[0, 1]) is None
    with pytest.raises(ResolutionError, match="allows device cuda"):
        chosen(tmp_path, "cpu", "experts=triton")
    with pytest.raises(
        ConfigError, match=r"experts is triton, and Qwen3MoeForCausalLM has no use for backends of experts"
    ):
        chosen(tmp_path, "sm90", "experts=triton", mlp_only_layers=[0, 1])
    with pytest.raises(ConfigError, match="TritonExperts computes on cuda, and the device is cpu"):
        TritonExperts(TritonExpertsConfig(), ExpertsContext(torch.device("cpu"), torch.float32))


def test_layers_share_memory_for_dequantized_weights_with_those_of_their_model_only() -> None:
    weights, context = (
        ExpertWeights(torch.ones(2, 8, 4), torch.ones(2, 4, 4)),
        ExpertsContext(torch.device("cuda"), torch.float32),
    )
    first, second = (TritonExperts(TritonExpertsConfig(), context) for _ in range(2))
    one, other = first.product(weights), first.product(weights)
    of_another_model = second.product(weights)
    assert isinstance(one, GroupedProduct)
    assert isinstance(other, GroupedProduct)
    assert isinstance(of_another_model, GroupedProduct)
    assert one._scratch is other._scratch is not None
    assert of_another_model._scratch not in (one._scratch, None)


def test_models_whose_routers_compute_in_float32_are_not_batch_invariant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "unmet", lambda requirement: iter(()))
    assert chosen(tmp_path, "sm90", "batch_invariant=true") == "triton"
    glm = {
        "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    assert chosen(tmp_path, "sm90", **glm) == "triton"
    with pytest.raises(ResolutionError, match=r"batch_invariant needs model\.batch_invariant"):
        chosen(tmp_path, "sm90", "batch_invariant=true", *FEW_CHOICES, **glm)
    with pytest.raises(ConfigError, match="gate computes in float32"):
        make_batch_invariant(Router(16, RoutingRule(8, 2, float32=True)))
