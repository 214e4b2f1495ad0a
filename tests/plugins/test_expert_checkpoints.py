"""Test that a checkpoint with experts of which a tensor is truncated, missing, or of another shape or dtype is refused by
the tensor's name before anything of it is read, in each layout that transformers and quantizers write.

.venv/bin/python -m pytest -q tests/plugins/test_expert_checkpoints.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dovetail import LLM
from dovetail.engine.build import as_module, build_model
from dovetail.engine.shards import DTYPES
from dovetail.engine.weights import load_weights
from dovetail.errors import WeightsError
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.quantization import QuantizationContext
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail.testing.ranks import thread_meshes
from dovetail_quantization.config import Fp8Config
from dovetail_quantization.fp8 import Fp8
from moe_suite import SMALL

CPU, NAMES = torch.device("cpu"), {dtype: name for name, dtype in DTYPES.items()}
ONE_BY_ONE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "each expert": ("qwen3_moe", ONE_BY_ONE),
    "each expert, w1 w2 w3": ("mixtral", {"num_local_experts": 4}),
    "fused": ("granitemoe", {"num_local_experts": 4}),
    "fused, transposed": ("llama4_text", {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 40}),
    "fused, transposed, interleaved, biases": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "shared expert, correction": (
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "each expert, FP8 blocks": ("qwen3_moe", ONE_BY_ONE | {"moe_intermediate_size": 64, "head_dim": 16}),
}  # fmt: skip
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Tensors]:
    """Return the config.json and the tensors of a model with one layer."""
    model_type, settings = LAYOUTS[request.param]
    built = transformers.AutoConfig.for_model(model_type, **SMALL | {"num_hidden_layers": 1} | settings)
    directory = tmp_path_factory.mktemp("layout")
    transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32).save_pretrained(directory)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    if request.param.endswith("FP8 blocks"):
        config["quantization_config"] = BLOCKS
        tensors = dict(with_scales(tensors))
    return config, tensors


def with_scales(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield codes and scales in place of the weights of linear layers and experts."""
    for name, tensor in tensors.items():
        if not re.search(r"_proj\.weight", name):
            yield name, tensor
            continue
        yield name, tensor.to(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", torch.ones(*(size // 16 for size in tensor.shape))


def write(directory: Path, config: dict[str, Any], tensors: Tensors, last: str, missing_bytes: int = 0) -> None:
    """Write a checkpoint whose file ends with tensor ``last``, without its last ``missing_bytes``."""
    (directory / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name in sorted(tensors, key=lambda name: name == last):
        own = tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [len(data), len(data) + len(own)],
        }
        data += own
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data
    (directory / "model.safetensors").write_bytes(whole[: len(whole) - missing_bytes])


def load(directory: Path, config: dict[str, Any], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Build this rank's model, load the checkpoint, and return the parameters. If that fails, check that nothing was
    written to them."""
    registry = installed()
    (component,) = registry.aliased(ComponentKind.MODEL, config["architectures"][0])
    info = load_attribute(component.spec.describe, component.label)(config)
    quantization = None
    if "quantization_config" in config:
        quantization = Fp8(Fp8Config(), QuantizationContext(config["quantization_config"], torch.float32, CPU))
    model_class = load_attribute(component.spec.target, component.label)
    model = build_model(model_class, info, CPU, torch.float32, mesh, quantization)
    parameters = dict(as_module(model).named_parameters())
    for parameter in parameters.values():
        parameter.view(torch.uint8).fill_(255)
    try:
        load_weights(model, directory)
    except WeightsError:
        assert all(bool((parameter.view(torch.uint8) == 255).all()) for parameter in parameters.values())
        raise
    return parameters


def kinds_of(tensors: Tensors) -> dict[str, str]:
    """Return one tensor of each kind that belongs to a layer of experts: of single experts, one of the last."""
    names = [name for name in tensors if re.search(r"expert|block_sparse_moe|router|mlp\.gate\.", name)]
    return {re.sub(r"experts\.\d+", "experts.N", name): name for name in sorted(names)}


def replaced(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, str], Tensors]:
    return lambda tensors, name: tensors | {name: change(tensors[name])}


FLAWS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "missing": lambda tensors, name: {other: tensor for other, tensor in tensors.items() if other != name},
    "one row more": replaced(lambda t: torch.cat((t, t[:1]))),
    "one column less": replaced(lambda t: t[..., :-1]),
    "transposed": replaced(lambda t: t.mT if t.ndim > 1 else t[None]),
    "flattened": replaced(lambda t: t.reshape(-1, 1)),
    "int16": replaced(lambda t: torch.zeros(t.shape, dtype=torch.int16)),
    "bool": replaced(lambda t: torch.zeros(t.shape, dtype=torch.bool)),
    "codes without scales, or floats in their place": replaced(
        lambda t: t.to(torch.bfloat16) if t.dtype is torch.float8_e4m3fn else t.to(torch.float8_e4m3fn)
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("rank", ["one rank", "tp", "ep"])
def test_each_flaw_of_each_tensor_is_refused_by_its_name(checkpoint, rank: str, tmp_path: Path) -> None:
    config, tensors = checkpoint
    mesh = SINGLE if rank == "one rank" else thread_meshes(2, "ep" if rank == "ep" else "tp")[1]
    kinds = kinds_of(tensors)
    assert len(kinds) >= 3
    write(tmp_path, config, tensors, "")
    assert not any((held.view(torch.uint8) == 255).all() for held in load(tmp_path, config, mesh).values())
    for name in kinds.values():
        square = tensors[name].ndim > 1 and tensors[name].shape[-1] == tensors[name].shape[-2]
        for flaw, change in FLAWS.items():
            if flaw == "transposed" and square:
                continue
            write(tmp_path, config, change(tensors, name), name)
            with pytest.raises(WeightsError, match=rf"{re.escape(name)}\b"):
                load(tmp_path, config, mesh)
        for missing_bytes in (1, tensors[name].nbytes):
            write(tmp_path, config, tensors, name, missing_bytes)
            with pytest.raises(WeightsError, match=rf"ends before the end of tensor {re.escape(name)}\)"):
                load(tmp_path, config, mesh)


def test_an_engine_does_not_start_with_such_a_checkpoint(checkpoint, tmp_path: Path) -> None:
    config, tensors = checkpoint
    if "quantization_config" in config:
        pytest.skip("FP8 needs a GPU")
    name = next(iter(kinds_of(tensors).values()))
    write(tmp_path, config, FLAWS["missing"](tensors, name), "")
    with pytest.raises(WeightsError, match=rf"lacks 1 tensors that the model needs: {re.escape(name)}"):
        LLM(str(tmp_path), device="cpu", grammar="none", attention="torch_native", memory={"num_pages": 20})
