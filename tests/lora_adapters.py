"""Write adapters (LoRA) for tests as PEFT does, and compute the weights that PEFT would merge them to. Nothing of Dovetail is
used."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FEED_FORWARD = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ALL = ATTENTION + FEED_FORWARD


def write_adapter(
    directory: Path,
    shapes: dict[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    size: float = 0.2,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> dict[str, torch.Tensor]:
    """Write an adapter of the modules ``shapes`` ([out, in] by name), and return what it adds to their weights. ``ranks`` and
    ``alphas`` are rank_pattern and alpha_pattern by the ends of names."""
    directory.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name, (outputs, inputs) in shapes.items():
        r = _of(ranks, name, rank)
        a = torch.randn(r, inputs, generator=random).to(dtype) / math.sqrt(inputs)
        b = torch.randn(outputs, r, generator=random).to(dtype) * size
        scale = _of(alphas, name, alpha) / (math.sqrt(r) if config.get("use_rslora") else r)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        deltas[name] = scale * b.double() @ a.double()
    save_file(tensors, directory / "adapter_model.safetensors")
    given = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {},
        "bias": "none",
        "task_type": "CAUSAL_LM",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(given))
    return deltas


def _of(values, name, default):
    return next((value for key, value in (values or {}).items() if name.endswith(key)), default)


def module_shapes(model: Path, modules=ALL) -> dict[str, tuple[int, int]]:
    """Return the shapes of the linear layers of a Llama checkpoint of one file, whose names end with one of ``modules``."""
    weights = load_file(model / "model.safetensors")
    count = json.loads((model / "config.json").read_text())[
        "num_hidden_layers"
    ]  # there may be one more, which predicts tokens
    names = (f"model.layers.{layer}.{module}" for layer in range(count) for module in modules)
    return {name: tuple(weights[f"{name}.weight"].shape) for name in names}


def merged_checkpoint(model: Path, directory: Path, deltas: dict[str, torch.Tensor]) -> Path:
    """Write a copy of the checkpoint ``model`` in float32, with ``deltas`` added to its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    weights = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    for name, delta in deltas.items():
        weights[f"{name}.weight"] += delta
    save_file({name: tensor.float() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory
