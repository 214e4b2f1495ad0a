"""Describe the model from its config.json alone. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig, read_rope


@dataclass(frozen=True, slots=True)
class ExampleSizes:
    """Hold the sizes that ``ModelInfo`` does not have."""

    intermediate_size: int
    norm_eps: float
    tied: bool
    rope: RopeConfig


def describe(config: dict[str, Any]) -> ModelInfo:
    """Return the facts of a checkpoint. Raises ``ConfigError``."""
    try:
        layers, hidden, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        rope = read_rope(config, head_dim, config["max_position_embeddings"])
        eos = config.get("eos_token_id")
        return ModelInfo(
            architecture="ExampleForCausalLM",
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_len=rope.context_len,
            cache_groups=(CacheGroup(layers, kv_heads, head_dim),),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            offers=frozenset({Feature.MODEL_TENSOR_PARALLEL}),
            split_sizes=(("intermediate_size", config["intermediate_size"]),),
            config=ExampleSizes(
                config["intermediate_size"],
                config.get("rms_norm_eps", 1e-6),
                bool(config.get("tie_word_embeddings")),
                rope,
            ),
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}; ExampleForCausalLM needs it") from error
