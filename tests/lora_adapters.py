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


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor], **config: object) -> None:
    """Write an adapter with given ``tensors``, whose names lack the prefix of PEFT's models."""
    directory.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", "peft_version": "0.21.2", **config}
    (directory / "adapter_config.json").write_text(json.dumps(given))


def random_pair(
    shape: tuple[int, int], rank: int, random: torch.Generator, size: float = 0.3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random matrices ``[rank, in]`` and ``[out, rank]`` for a weight of ``shape`` [out, in]."""
    a = torch.randn(rank, shape[1], generator=random) / math.sqrt(shape[1])
    return a, torch.randn(shape[0], rank, generator=random) * size


def table_tensors(
    module: str, shape: tuple[int, int], rank: int, scale: float, random: torch.Generator
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors that PEFT writes for the embedding ``module`` of ``shape`` [vocabulary, hidden], and what they add to it."""
    a, b = random_pair(shape[::-1], rank, random, size=2.0)
    return {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}, scale * (b.double() @ a.double()).T


def stacked_tensors(
    module: str,
    shape: tuple[int, int, int],
    rank: int,
    scale: float,
    random: torch.Generator,
    *,
    exchanged: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors that PEFT writes for a parameter of experts of ``shape`` [experts, out, in], and what they add to it.
    ``exchanged``: as PEFT before 0.20 writes them for parameters in this order."""
    experts, outputs, inputs = shape
    first, second = (outputs, inputs) if exchanged else (inputs, outputs)
    a, b = random_pair((second, first), rank * experts, random)
    of_expert = torch.einsum(
        "ore,eri->eoi", b.double().view(second, rank, experts), a.double().view(experts, rank, first)
    )
    names = {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return names, scale * (of_expert.mT if exchanged else of_expert)
