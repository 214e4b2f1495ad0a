"""Describe decoder-only models from config.json: what the families share. Does not import torch.

The description of a family is beside its model, in the file whose name ends in ``_describe``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_models.settings import read_dtype, read_eos, read_int

Windows = tuple[int | None, ...]
"""Hold the sliding window of each layer, or None."""

OFFERS = frozenset(
    {
        Feature.MODEL_LAST_ROWS,
        Feature.MODEL_HIDDEN_STATES,
        Feature.MODEL_EMBED,
        Feature.MODEL_BATCH_INVARIANT,
        Feature.MODEL_TENSOR_PARALLEL,
    }
)
"""What a ``DecoderModel`` offers whose layers follow the protocol, unless its own parts prevent it."""


_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Hold what ``DecoderModel`` needs in addition to ``ModelInfo``; families add fields.

    ``rope`` is None in models without rotary positions. ``layer_ropes`` holds the rotary settings of each layer, or
    None for a layer without them, if they differ. ``tied``: the head has the weight of the embedding. ``head_bias``: the
    head has a bias of its own. ``predict_layers`` is the number of layers of the checkpoint that
    predict further tokens, for drafters; they are not part of the model.
    """

    intermediate_size: int
    norm_eps: float
    rope: RopeConfig | None
    windows: Windows
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    tied: bool = False
    head_bias: bool = False
    predict_layers: int = 0


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Hold the numbers of heads and their size."""

    heads: int
    kv_heads: int
    head_dim: int


def make_info(
    config: Mapping[str, Any],
    architecture: str,
    sizes: HeadSizes,
    context_len: int,
    own: DecoderConfig,
    *,
    needs: frozenset[Feature] = frozenset(),
    offers: frozenset[Feature] = OFFERS,
) -> ModelInfo:
    """Return the ``ModelInfo`` of a decoder-only model. Its cache groups (see ``group_layers``), the need for windows and
    the offer of layers that predict further tokens follow from ``own``; ``needs`` are further ones. Raises ``ConfigError``.
    """
    layers = read_int(config, "num_hidden_layers")
    if any(window is not None for window in own.windows):
        needs |= {Feature.ATTN_SLIDING_WINDOW}
    if own.predict_layers:
        offers |= {Feature.MODEL_MTP_HEAD}
    return ModelInfo(
        architecture=architecture,
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=read_int(config, "hidden_size"),
        num_layers=layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        context_len=context_len,
        cache_groups=cache_groups(own.windows, sizes),
        eos_token_ids=read_eos(config),
        dtype=read_dtype(config),
        needs=needs,
        offers=offers,
        split_sizes=(("intermediate_size", own.intermediate_size),),
        config=own,
    )


def cache_groups(windows: Windows, sizes: HeadSizes) -> tuple[CacheGroup, ...]:
    """Return the cache groups of layers with these windows: one for the layers without a window, which comes first, and
    one for each window."""
    counts = Counter(windows)
    return tuple(
        CacheGroup(
            counts[window],
            sizes.kv_heads,
            sizes.head_dim,
            CacheGroupKind.FULL if window is None else CacheGroupKind.SLIDING,
            window,
        )
        for window in _in_order(windows)
    )


class LayerPlace(NamedTuple):
    """Hold the index of a layer's cache group, and the layer's index in that group."""

    group: int
    layer_id: int


def group_layers(windows: Windows) -> tuple[LayerPlace, ...]:
    """Return where each layer keeps its keys and values: the groups are those of ``cache_groups``."""
    order = _in_order(windows)
    return tuple(LayerPlace(order.index(window), windows[:at].count(window)) for at, window in enumerate(windows))


def _in_order(windows: Windows) -> list[int | None]:
    """Return the windows of the cache groups. None is first, then the windows in the order of their layers."""
    return sorted(dict.fromkeys(windows), key=lambda window: window is not None)


def read_heads(
    config: Mapping[str, Any], *, default_kv_heads: int | None = None, default_head_dim: int | None = None
) -> HeadSizes:
    """Return the numbers of heads and their size. The defaults are those of absent keys; None means as many KV heads as
    heads, and a head_dim of hidden size / heads. Raises ``ConfigError``."""
    hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    default = default_kv_heads if "num_key_value_heads" not in config else None
    kv_heads = read_int(config, "num_key_value_heads", default or heads)
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads is {heads}, num_key_value_heads {kv_heads}; the first must be a multiple "
            "of the second"
        )
    default = default_head_dim if "head_dim" not in config else None
    if default is None and config.get("head_dim") is None and hidden % heads:
        raise ConfigError(
            f"config.json: hidden_size is {hidden}, num_attention_heads {heads}, and there is no head_dim; needed: a "
            "multiple, or head_dim"
        )
    return HeadSizes(heads, kv_heads, read_int(config, "head_dim", default or hidden // heads))


def cut_windows(windows: Windows, context_len: int) -> Windows:
    """Return ``windows`` without those that no request of ``context_len`` tokens can exceed."""
    return tuple(window if window is not None and window < context_len else None for window in windows)


def read_layer_types(
    config: Mapping[str, Any], layers: int, known: Mapping[str, int | None], hint: str = ""
) -> Windows:
    """Return the window of each layer by ``layer_types``, a list of names; ``known`` maps the allowed names to windows.
    Raises ``ConfigError``, with ``hint`` about the names."""
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"config.json: layer_types is {types!r}; needed: a list of {layers} types")
    unknown = sorted({str(kind) for kind in types} - set(known))
    if unknown:
        raise ConfigError(f"config.json: layer_types has {unknown}; implemented: {hint or ', '.join(known)}")
    return tuple(known[kind] for kind in types)


def layer_pattern(config: Mapping[str, Any], layers: int, *, every: int) -> list[Any]:
    """Return ``layer_types``. If it is absent, one layer of ``every`` has full attention, the last one of each group,
    and the others a window."""
    if config.get("layer_types") is not None:
        return config["layer_types"]
    return ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]


def read_ropes_by_type(
    config: Mapping[str, Any], head_dim: int, max_positions: int, *, theta: float, sliding_theta: float
) -> dict[str, RopeConfig]:
    """Return the rotary settings of the layers of type ``full_attention`` and ``sliding_attention``.

    In the format of transformers 5, ``rope_parameters`` has an entry for each type. In that of transformers 4,
    ``rope_theta`` and ``rope_scaling`` belong to full attention only. ``theta`` and ``sliding_theta`` are defaults.
    Raises ``ConfigError``.
    """
    given = config.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or not all(isinstance(value, Mapping | None) for value in given.values()):
        raise ConfigError(f"config.json: rope_parameters is {given!r}; needed: an entry for each of {_LAYER_TYPES}")
    if set(given) - set(_LAYER_TYPES):
        raise ConfigError(f"config.json: rope_parameters has {sorted(given)}; implemented: {_LAYER_TYPES}")
    if given and config.get("rope_scaling"):
        raise ConfigError(
            "config.json has both rope_parameters by type of layer and rope_scaling; allowed: one of them. Set the settings of "
            "full_attention in rope_parameters"
        )
    full = given.get("full_attention") or config.get("rope_scaling") or {}
    full = {"rope_theta": config.get("rope_theta") or theta, **full}
    sliding = {"rope_theta": sliding_theta, **(given.get("sliding_attention") or {})}
    plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    return {
        kind: read_rope({**plain, "rope_parameters": part}, head_dim, max_positions)
        for kind, part in zip(_LAYER_TYPES, (full, sliding), strict=True)
    }


def refuse_activation(config: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if the MLP has another activation than SiLU."""
    name = config.get("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {name!r}; implemented: silu")
