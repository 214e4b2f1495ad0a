"""Check that a model declares what its layers need of the backends of attention and of experts, and the states that they
keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from dovetail.errors import PluginLoadError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.attention import SelfAttention
from dovetail.layers.experts import Experts
from dovetail.layers.latent import LatentAttention
from dovetail.layers.states import StateLayer

_NEEDS = (
    ("window", "ATTN_SLIDING_WINDOW", Feature.ATTN_SLIDING_WINDOW),
    ("soft_cap", "ATTN_SOFT_CAP", Feature.ATTN_SOFT_CAP),
    ("sinks", "ATTN_SINKS", Feature.ATTN_SINKS),
)


def check_declared(model: nn.Module, info: ModelInfo, ranks: int) -> None:
    """Raise ``PluginLoadError`` if an ``AttentionLayer``, a layer of experts or one with a state of ``model``, the share of one
    of ``ranks`` ranks that divide its heads, needs a feature that ``info.needs`` does not name, if layers keep other states than ``info.cache_groups``
    says, if there are experts and ``info`` has no ``expert_sizes``, or if an attention layer of ``dovetail.layers`` has a place
    that its cache group does not have, or a window in a full group although other groups slide.

    The resolver chooses backends by ``info.needs``. A backend without the feature would ignore it, and every
    output would be wrong. Layers are found in the attributes of the model's modules, and in lists and tuples there.
    """
    _check_states(model, info, ranks)
    for name, module in model.named_modules():
        if isinstance(module, Experts) and (missing := module.shape.needs - info.needs):
            raise PluginLoadError(
                f"{type(model).__name__} ({info.architecture}) does not declare {', '.join(sorted(missing))}, which its layer of "
                f"experts {name} needs; add ExpertsShape.needs to the needs of the ModelInfo that its describe function returns"
            )
        if isinstance(module, Experts) and info.expert_sizes is None:
            routing, size = module.shape.routing, module.shape.size
            raise PluginLoadError(
                f"{type(model).__name__} ({info.architecture}) has a layer of experts {name}, and its ModelInfo has no expert_sizes, "
                "without which no backend of experts is chosen; set them to the names and values of the number of experts and of "
                f'the size of one, such as (("num_local_experts", {routing.num_experts}), ("intermediate_size", {size}))'
            )
        if isinstance(module, StateLayer) and (missing := module.needs - info.needs):
            raise PluginLoadError(
                f"{type(model).__name__} ({info.architecture}) does not declare {', '.join(sorted(missing))}, which its layer {name} "
                f"needs; add {type(module).__name__}.needs to the needs of the ModelInfo that its describe function returns"
            )
        if isinstance(module, SelfAttention | LatentAttention):
            _check_place(model, info, name, module)
        for attribute, layer in _layers(module):
            for field, constant, feature in _NEEDS:
                if getattr(layer, field) is not None and feature not in info.needs:
                    place = ".".join(filter(None, (name, attribute)))
                    raise PluginLoadError(
                        f"{type(model).__name__} ({info.architecture}) does not declare {feature}, which its layer {place} "
                        f"(layer_id {layer.layer_id}) needs for its {field}; add Feature.{constant} to the needs of the "
                        "ModelInfo that its describe function returns"
                    )


def _check_place(model: nn.Module, info: ModelInfo, name: str, layer: SelfAttention | LatentAttention) -> None:
    group, index = layer.group, layer.constants.layer_id
    sizes = [each.num_layers for each in info.cache_groups]
    if group >= len(sizes) or index >= sizes[group]:
        raise PluginLoadError(
            f"{type(model).__name__} ({info.architecture}): layer {name} is number {index} of cache group {group}, and the cache "
            f"groups of the ModelInfo have {sizes} layers. Numbers count from 0 within a group: layer_id of AttentionLayer is the "
            "number in group 0; call set_place(group, number) for a layer of another group"
        )
    kinds = [each.kind for each in info.cache_groups]
    window = layer.constants.window
    if window is not None and CacheGroupKind.SLIDING in kinds and kinds[group] is not CacheGroupKind.SLIDING:
        raise PluginLoadError(
            f"{type(model).__name__} ({info.architecture}): layer {name} has a window of {window} tokens, and its cache group "
            f"{group} is of kind {kinds[group]}; the kinds of all groups are {', '.join(kinds)}. If one group is of kind sliding, "
            "layers with a window must be in groups of that kind, because layers of the first group may read prefixes "
            "that rows share once: add a group for this window to the ModelInfo and call set_place(group, number)"
        )


def _check_states(model: nn.Module, info: ModelInfo, ranks: int) -> None:
    layers = sorted((each for each in model.modules() if isinstance(each, StateLayer)), key=lambda each: each.state_id)
    groups = [group.share(ranks) for group in info.cache_groups if group.kind is CacheGroupKind.STATE]
    declared = [group.states for group in groups for _ in range(group.num_layers)]
    kept = [layer.state_shapes for layer in layers]
    if [layer.state_id for layer in layers] != list(range(len(layers))) or not _equal(declared, kept):
        raise PluginLoadError(
            f"{type(model).__name__} ({info.architecture}) declares {len(declared)} layers with states "
            f"({_shapes(declared[:1])}), and its layers with the state ids {[layer.state_id for layer in layers]} keep "
            f"{_shapes(kept[:1])}; state ids must be 0, 1, ..., and the states those of CacheGroup.of_states in the ModelInfo that its "
            "describe function returns"
        )


def _equal(declared: Sequence[tuple[StateShape, ...]], kept: Sequence[tuple[StateShape, ...]]) -> bool:
    """Return True if the shapes are equal, and the same states have the model's dtype: ``memory.state_dtype`` decides that of the
    others. Layers need not say how ranks divide them."""

    def own(layers: Sequence[tuple[StateShape, ...]]) -> list[list[tuple[tuple[int, ...], bool]]]:
        return [[(state.shape, state.dtype is None) for state in layer] for layer in layers]

    return own(declared) == own(kept)


def _shapes(layers: Sequence[tuple[StateShape, ...]]) -> str:
    texts = (f"{list(state.shape)} {state.dtype or 'of the dtype of the model'}" for layer in layers for state in layer)
    return ", ".join(texts) or "none"


def _layers(module: nn.Module) -> Iterator[tuple[str, AttentionLayer]]:
    """Yield the attention layers in the attributes of ``module`` itself, with the names of the attributes."""
    for attribute, value in vars(module).items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, AttentionLayer):
                yield attribute, one
