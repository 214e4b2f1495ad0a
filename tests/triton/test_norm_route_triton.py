"""Test the kernel of norm, router and choice of experts, interpreted on the CPU, against the functions that it replaces.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_norm_route_triton.py
"""

from __future__ import annotations

import pytest
import torch

from dovetail.interfaces.expert_shapes import RoutingRule
from dovetail.ops.norm import add_rms_norm
from dovetail.ops.routing import route
from dovetail.ops.triton import norm_route

RULES = {
    "qwen3": RoutingRule(12, 3, renormalize=True),
    "gpt-oss": RoutingRule(8, 2, after_choice=True),
    "llama4": RoutingRule(16, 1, "sigmoid", after_choice=True),
    "olmoe": RoutingRule(16, 4, float32=True),
    "minimax": RoutingRule(9, 4, "sigmoid", renormalize=True, corrected=True, scale=2.5),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("hidden", [64, 72])
def test_one_token_equals_norm_product_and_choice(name: str, hidden: int) -> None:
    torch.manual_seed(0)
    rule = RULES[name]
    gate, weight = torch.randn(rule.num_experts, hidden).half(), torch.rand(hidden).half()
    gate[5] = gate[2]  # a tie
    bias = torch.randn(rule.num_experts).half() if name == "gpt-oss" else None
    correction = torch.randn(rule.num_experts) / 4 if rule.corrected else None
    assert norm_route.fits(gate, rule)
    for _ in range(3):
        x, residual = torch.randn(1, hidden).half(), torch.randn(1, hidden).half()
        given = x.clone(), residual.clone()
        normed, total, got = norm_route.norm_and_route(x, residual, weight, 1e-5, gate, bias, rule, correction)
        assert torch.equal(x, given[0])
        assert torch.equal(residual, given[1])
        assert torch.equal(total, x + residual)
        expected = add_rms_norm(x.clone(), residual, weight, 1e-5)
        torch.testing.assert_close(normed, expected, atol=2e-3, rtol=2e-3)
        logits = normed.double() @ gate.double().T
        logits = logits if bias is None else logits + bias.double()
        chosen = route(logits.float() if rule.float32 else logits.half(), rule, correction)
        assert torch.equal(got.ids, chosen.ids)
        torch.testing.assert_close(got.weights, chosen.weights, atol=1e-3, rtol=5e-3)


def test_rules_with_groups_have_kernels_of_their_own() -> None:
    gate = torch.zeros(8, 64)
    for rule in (RoutingRule(8, 2, groups=4, groups_kept=2), RoutingRule(8, 2, "sparsemixer")):
        assert not norm_route.fits(gate, rule)
