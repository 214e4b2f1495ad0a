"""Test models of experts from GGUF files whose experts stay in blocks, against the same files dequantized while loading, on one rank
and on two, and what is refused. Experts alone are tested by the suite in ``test_gguf_quantization.py``.

Run: python -m pytest tests/plugins/test_gguf_experts.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_blocks import random_blocks

from dovetail.config.checkpoint import locate
from dovetail.engine.build import as_module, build_model
from dovetail.engine.weights import load_weights
from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.quantization import QuantizationContext
from dovetail.layers.experts import layers_of_experts
from dovetail.ops.expert_formats import dequantized
from dovetail.registry.targets import load_attribute
from dovetail.testing.ranks import thread_meshes
from dovetail_quantization.config import GgufConfig
from dovetail_quantization.gguf import Gguf
from dovetail_quantization.gguf_formats import describe, expert_format, expert_types

pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'dovetail[test]')")
from tests.plugins.test_gguf_families import CASES, _architecture, _models, write_checkpoint

from gguf_convert import converted
from gguf_files import Stored, write_gguf

STACK = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")
WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
FILES: dict[str, tuple[str, str]] = {
    "qwen3moe": ("Q4_0", "Q5_1"),
    "granitemoe": ("Q8_0", "IQ4_NL"),
    "gpt-oss": ("MXFP4", "MXFP4"),
    "mixtral": ("MXFP4", "Q4_1"),
}
"""The cases of ``test_gguf_families`` that are stored with blocks, and the types of gate and up, and of down."""


def write(
    case: str, directory: Path, up: str | None = None, wide: Mapping[str, Any] = WIDE, more_down: int = 0
) -> tuple[Any, Path]:
    """Write a file whose experts are random blocks, and return the suite of its model and the directory that presents it. ``more_down`` are
    experts beyond those of the model."""
    architecture, model_type, config, more = CASES[case]
    sizes = {key: value for key, value in wide.items() if key in config or key in ("hidden_size", "intermediate_size")}
    if "expert_feed_forward_length" in more:
        more = {**more, "expert_feed_forward_length": wide["intermediate_size"]}
    theirs = directory / "theirs"
    suite: Any = write_checkpoint(model_type, {**config, **sizes}, theirs)
    metadata, tensors = converted(theirs, architecture, more)
    for name in list(tensors):
        if found := STACK.fullmatch(name):
            kind = (
                FILES[case][1] if found[1] == "down" else (up or FILES[case][0]) if found[1] == "up" else FILES[case][0]
            )
            shape = (tensors[name].shape[0] + more_down * (found[1] == "down"), *tensors[name].shape[1:])
            blocks = random_blocks(kind, shape[0] * shape[1], shape[2], 0.01)
            tensors[name] = Stored(kind, shape, blocks.numpy().tobytes())
    folder = locate(str(write_gguf(directory / "model.gguf", metadata, tensors)))
    suite.name = next(name for name, spec in _models().items() if _architecture(folder) in spec)
    return suite, folder


def stored_types(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def load(suite: Any, folder: Path, mesh: Mesh = SINGLE, *, kept: bool = True) -> Any:
    info = suite.describe(folder)
    context = QuantizationContext(stored_types(folder), torch.float32, torch.device("cpu"))
    quantization = Gguf(GgufConfig(), context) if kept else None
    target = load_attribute(suite.spec.target, suite.component.label)
    model = build_model(target, info, torch.device("cpu"), torch.float32, mesh, quantization)
    load_weights(model, folder, shown=False)
    return model


def weights(model: Any) -> list[ExpertWeights]:
    return [dequantized(layer.weights, torch.float32) for layer in layers_of_experts(as_module(model))]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)


@pytest.mark.parametrize("case", FILES)
def test_experts_in_blocks_are_those_of_the_dequantized_file(case: str, tmp_path: Path) -> None:
    suite, folder = write(case, tmp_path)
    exact, model = load(suite, folder, kept=False), load(suite, folder)
    stored = stored_types(folder)
    layers = layers_of_experts(as_module(model))
    assert layers
    assert {layer.weights.format for layer in layers} == {expert_format(stored, GgufConfig())}
    assert {layer.weights.format for layer in layers_of_experts(as_module(exact))} == {"plain"}
    for got, expected in zip(weights(model), weights(exact), strict=True):
        torch.testing.assert_close(got.gate_up, expected.gate_up, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got.down, expected.down, rtol=1e-6, atol=1e-7)
    tokens = [int(token) for token in torch.randint(3, 97, (24,))]
    got, expected = suite.logits(model, tokens, 24), suite.logits(exact, tokens, 24)
    error = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # up to 0.025 was seen; random weights depend on the processor, because torch draws them by other instructions
    assert error < 0.04, "inputs of 8 bits differ by more than that"


@pytest.mark.parametrize("experts", ["tp", "ep"])
@pytest.mark.parametrize("case", FILES)
def test_two_ranks_divide_blocks(case: str, experts: Any, tmp_path: Path) -> None:
    suite, folder = write(case, tmp_path)
    whole = weights(load(suite, folder))
    for rank, mesh in enumerate(thread_meshes(2, experts)):
        for got, expected in zip(weights(load(suite, folder, mesh)), whole, strict=True):
            gate, up = expected.gate_up.chunk(2, 1)
            down = expected.down
            if experts == "ep":
                half = slice(rank * len(gate) // 2, (rank + 1) * len(gate) // 2)
                gate, up, down = gate[half], up[half], down[half]
            else:
                half = slice(rank * gate.shape[1] // 2, (rank + 1) * gate.shape[1] // 2)
                gate, up, down = gate[:, half], up[:, half], down[:, :, half]
            assert got.gate_up.equal(torch.cat((gate, up), 1))
            assert got.down.equal(down)


def test_what_cannot_be_kept_in_blocks_is_refused_by_name(tmp_path: Path) -> None:
    _, folder = write("qwen3moe", tmp_path, up="Q4_1")
    stored = stored_types(folder)
    reason = describe(stored, GgufConfig())
    assert reason is not None
    assert "experts of model.layers.0.mlp have the types Q4_0 and Q4_1" in reason
    assert "quantization: none" in reason
    types = {"layers.0.mlp.experts.*.gate_proj.weight": "Q4_0", "layers.0.mlp.experts.*.up_proj.weight": "Q4_0"}
    partly = {"types": types | {"layers.0.mlp.experts.*.down_proj.weight": "F16"}}
    with pytest.raises(ConfigError, match=r"some experts of layers\.0\.mlp are stored as numbers"):
        expert_types(partly)


def test_ranks_that_cut_a_block_are_refused_by_name(tmp_path: Path) -> None:
    suite, folder = write("qwen3moe", tmp_path, wide=WIDE | {"moe_intermediate_size": 32})
    load(suite, folder)
    with pytest.raises(
        ConfigError,
        match=r"experts of model\.layers\.0\.mlp have type Q5_1.*16 columns on this rank.*parallel\.experts: ep",
    ):
        load(suite, folder, thread_meshes(2, "tp")[0])
    load(suite, folder, thread_meshes(2, "ep")[0])


def test_tensors_with_more_experts_than_the_model_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ffn_down_exps\.weight has shape \[\d+, .*expert_count is \d+"):
        write("granitemoe", tmp_path, more_down=1)
