"""Write weights as checkpoints of bitsandbytes store them, from the description of the format and without the code that reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524,
       0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip
_HALF = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]
MAPS = {"nf4": torch.tensor(NF4), "fp4": torch.tensor([*_HALF, *(-value for value in _HALF)]) / 12}


def config(kind: str, *, double: bool = False, **more: Any) -> dict[str, Any]:
    """Return the ``quantization_config`` that transformers writes."""
    eight = kind == "int8"
    return {
        "quant_method": "bitsandbytes", "_load_in_4bit": not eight, "_load_in_8bit": eight, "load_in_4bit": not eight, "load_in_8bit": eight,
        "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "fp4" if eight else kind,
        "bnb_4bit_use_double_quant": double, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0, **more,
    }  # fmt: skip


def store(
    given: dict[str, Any], module: str, weight: torch.Tensor, block: int = 64
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors with which a checkpoint with this config stores a weight, and the weight that they stand for."""
    if given["load_in_8bit"]:
        scale = weight.abs().amax(1)
        codes = (weight / scale[:, None] * 127).round().to(torch.int8)
        stored = {"weight": codes, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {f"{module}.{name}": tensor for name, tensor in stored.items()}, codes * (scale[:, None] / 127)
    kind = given["bnb_4bit_quant_type"]
    blocks = weight.reshape(-1, block)
    scale = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    stored: dict[str, torch.Tensor] = {"absmax": scale}
    if given["bnb_4bit_use_double_quant"]:
        offset = scale.mean()
        rest = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 256)).view(-1, 256)
        nested, numbers = rest.abs().amax(1), torch.linspace(-1, 1, 256) ** 3  # finer near 0
        codes = (rest / nested[:, None]).flatten()[: len(scale), None].sub(numbers).abs().argmin(1)
        scale = numbers[codes] * nested.repeat_interleave(256)[: len(codes)] + offset
        stored = {"absmax": codes.to(torch.uint8), "nested_absmax": nested, "nested_quant_map": numbers}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    numbers = MAPS[kind]
    codes = (blocks / scale[:, None])[..., None].sub(numbers).abs().argmin(-1)
    exact = (numbers[codes] * scale[:, None]).view(weight.shape)
    high, low = codes.flatten().view(-1, 2).unbind(1)
    stored |= {
        "quant_map": numbers.clone(),
        f"quant_state.bitsandbytes__{kind}": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    packed = (high * 16 + low).to(torch.uint8)[:, None]
    return {f"{module}.weight": packed, **{f"{module}.weight.{name}": tensor for name, tensor in stored.items()}}, exact


def quantize_directory(directory: Path, given: dict[str, Any]) -> Path:
    """Quantize the projections of a checkpoint in place, and return a directory with the weights for which they stand."""
    exact = directory.with_name(f"{directory.name}-exact")
    shutil.copytree(directory, exact)
    tensors = load_file(exact / "model.safetensors")
    stored = dict(tensors)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        del stored[key]
        made, tensors[key] = store(given, key.removesuffix(".weight"), tensors[key])
        stored |= made
    save_file(tensors, exact / "model.safetensors")
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
    text = json.loads((directory / "config.json").read_text()) | {"quantization_config": given}
    (directory / "config.json").write_text(json.dumps(text))
    return exact
