"""Check that a model declares what its attention layers need of the attention backends."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dovetail.errors import PluginLoadError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo

_NEEDS = (
    ("window", "ATTN_SLIDING_WINDOW", Feature.ATTN_SLIDING_WINDOW),
    ("soft_cap", "ATTN_SOFT_CAP", Feature.ATTN_SOFT_CAP),
    ("sinks", "ATTN_SINKS", Feature.ATTN_SINKS),
)


def check_declared(model: nn.Module, info: ModelInfo) -> None:
    """Raise ``PluginLoadError`` if an ``AttentionLayer`` of ``model`` needs a feature that ``info.needs`` does not name.

    The resolver chooses attention backends by ``info.needs``. A backend without the feature would ignore it, and every
    output would be wrong. Layers are found in the attributes of the model's modules, and in lists and tuples there.
    """
    for name, module in model.named_modules():
        for attribute, layer in _layers(module):
            for field, constant, feature in _NEEDS:
                if getattr(layer, field) is not None and feature not in info.needs:
                    place = ".".join(filter(None, (name, attribute)))
                    raise PluginLoadError(
                        f"{type(model).__name__} ({info.architecture}) does not declare {feature}, which its layer {place} "
                        f"(layer_id {layer.layer_id}) needs for its {field}; add Feature.{constant} to the needs of the "
                        "ModelInfo that its describe function returns"
                    )


def _layers(module: nn.Module) -> Iterator[tuple[str, AttentionLayer]]:
    """Yield the attention layers in the attributes of ``module`` itself, with the names of the attributes."""
    for attribute, value in vars(module).items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, AttentionLayer):
                yield attribute, one
