"""Make layers of experts with random MXFP4 weights on the CPU, and the same weights in float64."""

from __future__ import annotations

import dataclasses

import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, SwiGLU
from dovetail.ops.mxfp4 import dequantize

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}
"""The errors of the kernels, relative to results or to 1."""


def weights_of(
    experts: int, hidden: int, size: int, dtype: torch.dtype, *, bias: bool, **more: object
) -> ExpertWeights:
    def codes(out: int, columns: int) -> torch.Tensor:
        return torch.randint(256, (experts, out, columns // 2), dtype=torch.uint8)

    def scale(out: int, columns: int) -> torch.Tensor:
        return torch.randint(121, 126, (experts, columns // 32, out), dtype=torch.uint8)

    return ExpertWeights(
        gate_up=codes(2 * size, hidden),
        down=codes(hidden, size),
        activation=SwiGLU(1.702, 0.8, 1.0) if bias else SILU,
        gate_up_bias=torch.randn(experts, 2 * size).to(dtype) if bias else None,
        down_bias=torch.randn(experts, hidden).to(dtype) if bias else None,
        format="mxfp4",
        gate_up_scale=scale(2 * size, hidden),
        down_scale=scale(hidden, size),
        **{"whole": experts, **more},  # pyright: ignore[reportArgumentType]
    )


def double(weights: ExpertWeights) -> ExpertWeights:
    assert weights.gate_up_scale is not None
    assert weights.down_scale is not None
    biases = {
        name: bias.double() for name in ("gate_up_bias", "down_bias") if (bias := getattr(weights, name)) is not None
    }
    return dataclasses.replace(
        weights,
        gate_up=dequantize(weights.gate_up, weights.gate_up_scale, torch.float32).double(),
        down=dequantize(weights.down, weights.down_scale, torch.float32).double(),
        gate_up_scale=None,
        down_scale=None,
        format="plain",
        **biases,
    )


def choose(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(top_k, 1).indices.int()
