"""Check that a model declares what its layers need of the backends of attention and of experts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from dovetail.errors import PluginLoadError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.experts import Experts

_NEEDS = (
    ("window", "ATTN_SLIDING_WINDOW", Feature.ATTN_SLIDING_WINDOW),
    ("soft_cap", "ATTN_SOFT_CAP", Feature.ATTN_SOFT_CAP),
    ("sinks", "ATTN_SINKS", Feature.ATTN_SINKS),
)


def check_declared(model: nn.Module, info: ModelInfo) -> None:
    """Raise ``PluginLoadError`` if an ``AttentionLayer`` or a layer of experts of ``model`` needs a feature that
    ``info.needs`` does not name.

    The resolver chooses backends by ``info.needs``. A backend without the feature would ignore it, and every
    output would be wrong. Layers are found in the attributes of the model's modules, and in lists and tuples there.
    """
    for name, module in model.named_modules():
        if isinstance(module, Experts) and (missing := module.shape.needs - info.needs):
            raise PluginLoadError(
                f"{type(model).__name__} ({info.architecture}) does not declare {', '.join(sorted(missing))}, which its layer of "
                f"experts {name} needs; add ExpertsShape.needs to the needs of the ModelInfo that its describe function returns"
            )
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
