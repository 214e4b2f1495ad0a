"""Write integer weights as AutoAWQ, AutoGPTQ, GPTQModel and compressed-tensors do, without the code under test. Numbers are
packed one by one, from the descriptions of these formats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

GROUP = 32
LEFT_OUT = "model.layers.1.mlp.down_proj"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each eight that AutoAWQ stores in bits 0 to 3, 4 to 7, and so on."""


def pack(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack unsigned numbers along the last dimension into int32, the first in the lowest bits."""
    each = 32 // bits
    numbers = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % each)))
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // each), dtype=np.uint32)
    for place, column in enumerate(order or range(each)):
        packed |= numbers[:, column::each].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32).copy())


class Rounded(NamedTuple):
    """Hold unsigned ``numbers [out, in]``, ``scales`` and ``zeros [out, groups]``, and the weight that they stand for."""

    numbers: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    exact: torch.Tensor


def rounded(
    weight: torch.Tensor, bits: int, group: int | None, *, symmetric: bool, group_of: torch.Tensor | None = None
) -> Rounded:
    """Round a weight, column by column, with scales in float16."""
    rows, columns = weight.shape
    size = group or columns
    owner = torch.arange(columns) // size if group_of is None else group_of
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    numbers, exact = np.zeros((rows, columns), np.uint8), torch.zeros(rows, columns)
    scales, zeros = torch.zeros(rows, columns // size), np.zeros((rows, columns // size), np.uint8)
    for index in range(columns // size):
        part = weight[:, owner == index]
        if symmetric:
            scale, zero = part.abs().amax(1) / (middle - 0.5), torch.full((rows,), float(middle))
        else:
            low, high = part.amin(1), part.amax(1)
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(1, most)
        scale = scale.half().float()
        own = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, most)
        numbers[:, owner == index] = own.numpy().astype(np.uint8)
        exact[:, owner == index] = (own - zero[:, None]) * scale[:, None]
        scales[:, index], zeros[:, index] = scale, zero.numpy().astype(np.uint8)
    return Rounded(numbers, scales, zeros, exact)


Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
Store = Callable[[str, torch.Tensor], Stored]


class Format(NamedTuple):
    """Hold a ``quantization_config``, and what writes a module's weight in this format."""

    config: dict[str, Any]
    store: Store


def awq() -> Format:
    """Return the format of AutoAWQ."""

    def store(module: str, weight: torch.Tensor) -> Stored:
        found = rounded(weight, 4, GROUP, symmetric=False)
        return {
            f"{module}.qweight": pack(found.numbers.T, 4, AWQ_ORDER),
            f"{module}.qzeros": pack(found.zeros.T, 4, AWQ_ORDER),
            f"{module}.scales": found.scales.T.half(),
        }, found.exact

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Format({**config, "modules_to_not_convert": ["lm_head", "router", LEFT_OUT]}, store)


def shuffled_groups(columns: int, seed: int = 5) -> torch.Tensor:
    """Return the group of each column, in an order as ``desc_act`` makes it: the same for modules with the same input."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed + columns))
    return torch.arange(columns)[order] // GROUP


def gptq(bits: int, *, symmetric: bool, ordered: bool = False, group: int | None = GROUP, v2: bool = False) -> Format:
    """Return a format of AutoGPTQ, or, with ``v2``, of GPTQModel."""

    def store(module: str, weight: torch.Tensor) -> Stored:
        columns = weight.shape[1]
        owner = shuffled_groups(columns) if ordered else torch.arange(columns) // (group or columns)
        found = rounded(weight, bits, group, symmetric=symmetric, group_of=owner)
        zeros = found.zeros if v2 else found.zeros - 1
        return {
            f"{module}.qweight": pack(found.numbers, bits).T.contiguous(),
            f"{module}.qzeros": pack(zeros.T, bits),
            f"{module}.scales": found.scales.T.half(),
            f"{module}.g_idx": owner.int(),
        }, found.exact

    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": ordered, "sym": symmetric}
    left_out = {"-:" + re.escape(name): {} for name in (LEFT_OUT, "body.router")}
    made = {**config, "checkpoint_format": "gptq_v2" if v2 else "gptq", "lm_head": False}
    return Format({**made, "dynamic": left_out, "true_sequential": True, "damp_percent": 0.1}, store)


def compressed(
    layout: str,
    bits: int,
    strategy: str,
    *,
    symmetric: bool = True,
    ordered: bool = False,
    inputs: Mapping[str, Any] | None = None,
) -> Format:
    """Return a format of compressed-tensors."""

    def store(module: str, weight: torch.Tensor) -> Stored:
        owner = shuffled_groups(weight.shape[1]) if ordered else None
        if strategy == "tensor":
            scale = (weight.abs().max() / (2 ** (bits - 1) - 0.5)).half().float()
            numbers = (weight / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 2 ** (bits - 1)
            found = Rounded(
                numbers.numpy().astype(np.uint8), scale.reshape(1), np.zeros(0), (numbers - 2 ** (bits - 1)) * scale
            )
        else:
            size = GROUP if strategy == "group" else None
            found = rounded(weight, bits, size, symmetric=symmetric, group_of=owner)
        stored = {f"{module}.weight_scale": found.scales.half()}
        middle = 2 ** (bits - 1)
        if layout == "pack-quantized":
            stored[f"{module}.weight_packed"] = pack(found.numbers, bits)
            stored[f"{module}.weight_shape"] = torch.tensor(weight.shape)
            if not symmetric:
                stored[f"{module}.weight_zero_point"] = pack(found.zeros.T, bits).T.contiguous()
        else:
            stored[f"{module}.weight"] = torch.from_numpy(found.numbers.astype(np.int16) - middle).to(torch.int8)
            if not symmetric:
                zeros = torch.from_numpy(found.zeros.astype(np.int16) - middle)
                stored[f"{module}.weight_zero_point"] = zeros.to(torch.int8)
        if owner is not None:
            stored[f"{module}.weight_g_idx"] = owner.int()
        if inputs is not None and not inputs["dynamic"]:
            stored[f"{module}.input_scale"] = torch.tensor([0.04])
        return stored, found.exact

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    weights |= {"group_size": GROUP if strategy == "group" else None, "actorder": "group" if ordered else None}
    activations = None if inputs is None else {"num_bits": 8, "type": "int", "symmetric": True, **inputs}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "body.router", rf"re:{re.escape(LEFT_OUT)}$", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }
    return Format(config, store)


FORMATS: dict[str, Format] = {
    "awq": awq(),
    "gptq, 4 bits": gptq(4, symmetric=True),
    "gptq, 8 bits, asymmetric": gptq(8, symmetric=False),
    "gptq, act-order": gptq(4, symmetric=False, ordered=True),
    "gptq, 8 bits, by row, v2": gptq(8, symmetric=True, group=None, v2=True),
    "gptq, asymmetric, v2": gptq(4, symmetric=False, v2=True),
    "packed, 4 bits, group": compressed("pack-quantized", 4, "group"),
    "packed, asymmetric": compressed("pack-quantized", 4, "group", symmetric=False),
    "packed, act-order": compressed("pack-quantized", 4, "group", ordered=True),
    "packed, 8 bits, channel": compressed("pack-quantized", 8, "channel"),
    "int8, tensor": compressed("int-quantized", 8, "tensor"),
    "int4, whole bytes, channel": compressed("int-quantized", 4, "channel"),
    "int8, group, asymmetric": compressed("int-quantized", 8, "group", symmetric=False),
}
"""Formats whose activations have 16 bits."""
INT8 = {
    "w8a8, dynamic": compressed("int-quantized", 8, "channel", inputs={"strategy": "token", "dynamic": True}),
    "w8a8, by tensor": compressed("int-quantized", 8, "tensor", inputs={"strategy": "token", "dynamic": True}),
    "w8a8, static": compressed("int-quantized", 8, "channel", inputs={"strategy": "tensor", "dynamic": False}),
}
"""Formats whose activations have 8 bits."""
