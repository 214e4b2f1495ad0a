"""Read the config.json of EAGLE checkpoints, in the layouts of https://github.com/SafeAILab/EAGLE (which SGLang and
vLLM read too) and of the speculators library. Optional parts (biases, norms of heads, an own embedding) are recognised
by the names of tensors.

The layers of the target that EAGLE-3 reads are numbered in two ways. In this module, and in ``DraftRuntime.watch``, i
means the residual stream that enters layer i. This is also the meaning in the default, (2, n // 2, n - 3) of n layers,
and in ``eagle_aux_hidden_state_layer_ids`` at the top of config.json (vLLM). In the section ``eagle_config`` (SGLang),
i means the output of layer i, which enters layer i + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope
from dovetail_speculative.checkpoints import check_heads

if TYPE_CHECKING:
    from dovetail.interfaces.speculative import DrafterContext

Size = Field(ge=1)
_Config = TypeVar("_Config", bound="EagleConfigJson")


class EagleConfigJson(BaseModel):
    """Validate the keys of an EAGLE-1 or EAGLE-2 head's config.json that are used. Literal types list what is
    implemented."""

    model_config = ConfigDict(frozen=True)

    vocab_size: int = Size
    hidden_size: int = Size
    intermediate_size: int = Size
    num_attention_heads: int = Size
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    num_hidden_layers: Literal[1] = 1
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    hidden_act: Literal["silu", "swish"] = "silu"
    mlp_bias: Literal[False] | None = None
    quantization_config: dict[str, Any] | None = None
    sliding_window: None = None


class AuxLayers(BaseModel):
    """Validate the section ``eagle_config``."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    use_aux_hidden_state: Literal[True] = True


class Eagle3ConfigJson(EagleConfigJson):
    """Validate the keys of an EAGLE-3 head's config.json. Without ``draft_vocab_size`` the head drafts every token of
    the target."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: Literal[False] | None = None
    eagle_config: AuxLayers | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Describe what a head needs in addition to ``ModelInfo``.

    ``names`` are the tensors of its checkpoint; there are none for random weights. ``target_size`` is the size of a
    hidden state of the target.
    """

    names: frozenset[str]
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    target_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False


def parse(config: Mapping[str, Any], schema: type[_Config]) -> _Config:
    """Return config.json as ``schema``. Raises ``ConfigError`` that names the keys that are missing or not
    implemented."""
    try:
        return schema.model_validate(config)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            + ("" if fault["type"] == "missing" else f" (it is {fault['input']!r})")
            for fault in error.errors()
        )
        raise ConfigError(
            f"config.json of the drafter: {faults}; check that this is the checkpoint of such a head"
        ) from error


def describe(
    head: EagleConfigJson, config: Mapping[str, Any], names: frozenset[str], context: DrafterContext
) -> ModelInfo:
    """Return the facts of a head, whose ``config`` is a ``HeadShape``. Raises ``ConfigError`` if it does not fit the
    target.

    The longest context is the target's, because rotary positions continue beyond the positions that a head was trained
    for.
    """
    assert context.runtime is not None
    heads = head.num_attention_heads
    kv_heads, head_dim = head.num_key_value_heads or heads, head.head_dim or head.hidden_size // heads
    check_heads(heads, kv_heads)
    if head.vocab_size != context.vocab_size:
        raise ConfigError(
            f"config.json of the drafter: vocab_size is {head.vocab_size}; the target's is {context.vocab_size}. A head works "
            "only with the target that it was trained for"
        )
    norms = (head.norm_before_residual, head.norm_before_fc) if isinstance(head, Eagle3ConfigJson) else ()
    rope = replace(read_rope(config, head_dim, head.max_position_embeddings), context_len=context.max_context)
    return ModelInfo(
        architecture=str((config.get("architectures") or ["EAGLE"])[0]),
        vocab_size=head.vocab_size,
        hidden_size=head.hidden_size,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_len=context.max_context,
        cache_groups=(CacheGroup(1, kv_heads, head_dim),),
        offers=frozenset({Feature.MODEL_TENSOR_PARALLEL}),
        split_sizes=(("intermediate_size", head.intermediate_size),),
        quantization=head.quantization_config,
        config=HeadShape(
            names, head.intermediate_size, head.rms_norm_eps, rope, context.runtime.target.info.hidden_size, *norms
        ),
    )


def aux_layers(head: Eagle3ConfigJson, num_layers: int) -> tuple[int, ...]:
    """Return the layers of a target of ``num_layers`` layers whose entering residual streams the head reads, in order.

    Raises ``ConfigError`` unless they are three layers of the target in rising order.
    """
    section = head.eagle_config
    given = section.eagle_aux_hidden_state_layer_ids if section is not None else None
    layers = tuple(i + 1 for i in given) if given else head.eagle_aux_hidden_state_layer_ids
    if not layers:
        layers = (2, num_layers // 2, num_layers - 3)
    if len(layers) != 3 or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[2] < num_layers:
        raise ConfigError(
            f"the drafter reads the residual streams that enter layers {list(layers)} of a target of {num_layers}; needed: three, "
            f"rising, below {num_layers}. They are set in config.json of the drafter: eagle_config.eagle_aux_hidden_state_layer_ids "
            "lists the layers whose outputs they are (one less); the default is 1, n / 2 - 1, n - 4 of n"
        )
    return layers
