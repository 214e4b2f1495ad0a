"""Describe Mamba-2 from config.json alone, and what hybrid models share that have its mixers. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import SSD_NEEDS, StateShape
from dovetail.interfaces.model import ModelInfo
from dovetail_models.describe import OFFERS, DecoderConfig, HeadSizes, make_info, refuse_activation
from dovetail_models.settings import read_flag, read_float, read_int, refuse_unread

ARCHITECTURE = "Mamba2ForCausalLM"
_NO_LIMIT = 1 << 20
STATE_OFFERS = OFFERS - {Feature.MODEL_BATCH_INVARIANT}
"""What a ``DecoderModel`` with states offers. The bits of a recurrence depend on how a prompt is divided into chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """Hold the sizes and variants of a Mamba-2 mixer: the fields of ``layers.mamba.Mamba2Shape`` without the hidden size."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    limits: tuple[float, float]

    @property
    def split(self) -> tuple[str, int]:
        """Return name and value of what ranks must divide."""
        return "the number of heads of Mamba-2", self.num_heads

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Return the states of a layer: the last inputs of the convolution, and the state of the recurrence."""
        heads, shared = (self.num_heads, self.head_dim), (self.num_groups, 2 * self.state_size)
        return (
            conv_state(self.conv_width, heads, shared),
            StateShape((self.num_heads, self.head_dim, self.state_size), "float32", ((self.num_heads, 1),)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Settings(DecoderConfig):
    """Hold what ``Mamba2Model`` needs in addition to ``ModelInfo``."""

    mixer: Mamba2Sizes


def conv_state(width: int, *parts: tuple[int, int]) -> StateShape:
    """Return the state of a convolution over ``width`` tokens, whose channels are ``parts`` of ``StateShape``."""
    return StateShape((sum(number * size for number, size in parts), width - 1), None, parts)


def hybrid_info(
    info: ModelInfo,
    keeps: Sequence[bool],
    split: tuple[str, int],
    states: tuple[StateShape, ...],
    needs: frozenset[Feature] = SSD_NEEDS,
) -> ModelInfo:
    """Return ``info`` with the cache groups of a model whose layers keep ``states`` where ``keeps`` says so, and otherwise
    keys and values. ``split`` are name and value of a number of its mixers that ranks must divide. ``needs`` are
    the features of a backend that its layers with a state need."""
    count = sum(keeps)
    groups = [replace(info.cache_groups[0], num_layers=len(keeps) - count)] if count < len(keeps) else []
    return replace(
        info,
        cache_groups=(*groups, *([CacheGroup.of_states(count, states)] if count else [])),
        split_sizes=(*info.split_sizes, split),
        needs=info.needs | (needs if count else frozenset()),
        offers=info.offers - {Feature.MODEL_BATCH_INVARIANT},
    )


_STATE_NAMES = {"mamba": True, "linear_attention": True, "conv": True, "attention": False, "full_attention": False}


def read_state_layers(config: Mapping[str, Any], key: str = "layer_types") -> tuple[bool, ...]:
    """Return which layers keep states, by a list of names in the format of transformers 4 or 5; without a list, all of them
    do. Raises ``ConfigError``."""
    layers = read_int(config, "num_hidden_layers")
    names = config.get(key)
    if names is None:
        return (True,) * layers
    if not isinstance(names, list) or len(names) != layers or not set(map(str, names)) <= set(_STATE_NAMES):
        raise ConfigError(f"config.json: {key} is {names!r}; needed: a list of {layers} of {', '.join(_STATE_NAMES)}")
    return tuple(_STATE_NAMES[name] for name in names)


def read_mamba_sizes(config: Mapping[str, Any], *, inner: int | None = None, groups: int = 1) -> Mamba2Sizes:
    """Return the sizes by the keys ``mamba_...`` of hybrid models. ``inner`` is the number of channels of all heads, by
    default ``mamba_expand`` times the hidden size; ``groups`` is the default of ``mamba_n_groups``. Raises ``ConfigError``."""
    heads = read_int(config, "mamba_n_heads", 128)
    inner = inner or read_int(config, "mamba_expand", 2) * read_int(config, "hidden_size")
    given = config.get("mamba_d_head")
    head_dim = inner // heads if given in (None, "auto") else read_int(config, "mamba_d_head")
    if heads * head_dim != inner:
        raise ConfigError(
            f"config.json: mamba_n_heads and mamba_d_head are {heads} and {given}, and all heads have {inner} channels; the "
            "product must be equal"
        )
    number = read_int(config, "mamba_n_groups", groups)
    check_groups(heads, number, "mamba_n_groups")
    bias = read_flag(config, "mamba_proj_bias")
    return Mamba2Sizes(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=number,
        state_size=read_int(config, "mamba_d_state", 256),
        conv_width=read_int(config, "mamba_d_conv", 4, minimum=2),
        conv_bias=read_flag(config, "mamba_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        limits=read_limits(config),
    )


def read_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the smallest and the largest step size. Raises ``ConfigError``."""
    given = config.get("time_step_limit")
    if given is None:
        return 0.0, float("inf")
    numbers = [_number(each) for each in given] if isinstance(given, list | tuple) else []
    if len(numbers) != 2 or None in numbers:
        raise ConfigError(f"config.json: time_step_limit is {given!r}; needed: a list of two numbers")
    low, high = numbers
    assert low is not None
    assert high is not None
    if not 0 <= low <= high:
        raise ConfigError(
            f"config.json: time_step_limit is {given!r}; needed: numbers from 0 on, the smaller one first"
        )
    return low, high


def _number(value: Any) -> float | None:
    """Return a number of a limit. transformers writes infinity as ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        value = value.get("__float__")
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def check_inner_size(config: Mapping[str, Any], expand: str, heads: int, head_dim: int, names: str) -> None:
    """Raise ``ConfigError`` unless the heads fill the inner size, which is ``expand`` times the hidden size."""
    factor, hidden = read_int(config, expand, 2), read_int(config, "hidden_size")
    if factor * hidden != heads * head_dim:
        raise ConfigError(
            f"config.json: {expand} * hidden_size is {factor * hidden}, and {names} are {heads} and {head_dim}; their "
            "products must be equal"
        )


def check_groups(heads: int, groups: int, name: str) -> None:
    """Raise ``ConfigError`` unless the groups divide the heads."""
    if heads % groups:
        raise ConfigError(f"config.json: {name} is {groups}, and there are {heads} heads; needed: a divisor")


def describe_mamba2(config: dict[str, Any]) -> ModelInfo:
    """Describe a checkpoint of Mamba-2. Raises ``ConfigError``."""
    refuse_unread(config, {"use_bias"}, ARCHITECTURE)
    refuse_activation(config)
    heads, head_dim = read_int(config, "num_heads", 128), read_int(config, "head_dim", 64)
    groups, bias = read_int(config, "n_groups", 8), read_flag(config, "use_bias")
    check_inner_size(config, "expand", heads, head_dim, "num_heads and head_dim")
    check_groups(heads, groups, "n_groups")
    mixer = Mamba2Sizes(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=read_int(config, "state_size", 128),
        conv_width=read_int(config, "conv_kernel", 4, minimum=2),
        conv_bias=read_flag(config, "use_conv_bias", default=True),
        in_bias=bias,
        out_bias=bias,
        limits=read_limits(config),
    )
    layers = read_int(config, "num_hidden_layers")
    own = Mamba2Settings(
        intermediate_size=heads * head_dim,
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        rope=None,
        windows=(None,) * layers,
        tied=read_flag(config, "tie_word_embeddings"),
        mixer=mixer,
    )
    sizes = HeadSizes(heads, groups, head_dim)
    info = make_info(config, ARCHITECTURE, sizes, _NO_LIMIT, own, offers=STATE_OFFERS)
    return replace(info, cache_groups=(CacheGroup.of_states(layers, mixer.states),), needs=info.needs | SSD_NEEDS)
