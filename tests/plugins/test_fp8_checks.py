"""Test what FP8 checkpoints are refused for while their tensors are read.

.venv/bin/python -m pytest -q tests/plugins/test_fp8_checks.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.errors import WeightsError
from dovetail.layers.base import prepare_layers
from dovetail_quantization.config import Fp8Config

sys.path.insert(0, str(Path(__file__).parent))

from test_fp8 import load, write_quantized


@pytest.mark.parametrize(
    ("suffix", "value", "message"),
    [
        ("weight_scale", float("nan"), "has FP8 scales that are not finite"),
        ("weight_scale", float("inf"), "has FP8 scales that are not finite"),
        ("input_scale", float("nan"), "has FP8 scales that are not finite"),
        ("input_scale", 0.0, "has FP8 scales that are not finite numbers above 0"),
    ],
)
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, suffix: str, value: float, message: str) -> None:
    write_quantized(tmp_path, "fp8 by tensor, static")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.down_proj.{suffix}"
    tensors[name] = torch.tensor(value)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"tensor {re.escape(name)} {message}"):
        load(tmp_path, Fp8Config())


@pytest.mark.parametrize("code", [127, 255])
@pytest.mark.parametrize("name", ["fp8 by block", "fp8 by tensor, static"])
def test_codes_that_are_no_numbers_are_refused(tmp_path: Path, name: str, code: int) -> None:
    write_quantized(tmp_path, name)
    tensors, bad = load_file(tmp_path / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    tensors[bad].view(torch.uint8)[-1, -1] = code
    assert tensors[bad].float().isnan().sum() == 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"tensor {re.escape(bad)} has FP8 codes that are NaN"):
        load(tmp_path, Fp8Config())


@pytest.mark.parametrize("name", ["fp8 by block", "fp8 by tensor, static"])
def test_layers_are_prepared_before_their_memory_is_filled(tmp_path: Path, name: str) -> None:
    """Kernels are chosen for a model without weights: what its memory happens to hold is no reason to refuse it."""
    write_quantized(tmp_path, name)
    model = load(tmp_path, Fp8Config())
    for parameter in model.parameters():
        parameter.view(torch.uint8).fill_(255)
    prepare_layers(model)
    assert "fp8" in model.get_submodule("layers.0.mlp.down").product.describe
