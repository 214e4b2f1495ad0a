"""Read the scales of keys and values from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from dovetail.config.kv_scales import KV_SCALE
from dovetail.engine.build import as_module
from dovetail.engine.shards import stored_tensors
from dovetail.engine.weights import checkpoint_files
from dovetail.errors import ConfigError
from dovetail.layers.attention import SelfAttention

if TYPE_CHECKING:
    import torch

    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.interfaces.store import KVStore
    from dovetail.registry.resolver import Resolved

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def load_kv_scales(stores: Sequence[KVStore], model: ModelArchitecture, resolved: Resolved, mesh: Mesh) -> None:
    """Give the ``stores`` of all cache groups the scales of the checkpoint, this rank's share of them. With dummy weights
    the scales stay 1. Raises ``ConfigError`` if a layer has none."""
    directory = resolved.model_dir
    if resolved.config.model.load_format == "dummy":
        return
    found = _read(directory)
    for name, layer in as_module(model).named_modules():
        number = _LAYER.search(f"{name}.")
        if not isinstance(layer, SelfAttention) or number is None:
            continue
        own = int(number[1])
        missing = [f"{part}_scale" for part in "kv" if (own, part) not in found]
        if missing:
            raise ConfigError(
                f"store keeps keys and values with the checkpoint's scales, and {directory} has no {' and no '.join(missing)} of layer "
                f"{own}; allowed: a checkpoint that has both for every layer, or store: {{kind: scaled, scales: token_head}}"
            )
        store = stores[layer.group]
        k_scale, v_scale = (_share(found[own, part], store, mesh) for part in "kv")
        store.load_scales(layer.constants.layer_id, k_scale, v_scale)


def _read(directory: Path) -> dict[tuple[int, str], torch.Tensor]:
    """Return the scales of a checkpoint by the number of the layer and ``k`` or ``v``."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for file in checkpoint_files(directory):
        names = [match for tensor in stored_tensors(file) if (match := KV_SCALE.fullmatch(tensor.name))]
        if names:
            with safe_open(file, framework="pt") as opened:
                for match in names:
                    found[int(match[1]), match[2]] = opened.get_tensor(match[0]).float().flatten()
    return found


def _share(scale: torch.Tensor, store: KVStore, mesh: Mesh) -> torch.Tensor:
    """Return this rank's share of the scales of all heads; one scale for all heads as it is."""
    if len(scale) <= 1:
        return scale
    start, size = mesh.tp.share(len(scale))
    return scale[start : start + size].to(store.device)
