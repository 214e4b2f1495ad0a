"""The config.json that the speculators library writes (https://github.com/vllm-project/speculators): settings of the layers in a
section of their own, those of the drafter beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError

NO_PARAMETERS = ("d2t", "t2d", r"verifier_(norm|lm_head)\.weight")
"""Patterns of names in drafters' checkpoints: maps between vocabularies, and parts of the target that training alone needs."""


def flattened(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Such a config.json as one mapping: ``transformer_layer_config``, and over it what stands beside it and is not null. Any other is
    returned as it is. ``kind`` is the ``speculators_model_type`` that is read. Raises ``ConfigError`` for another one."""
    given = config.get("speculators_model_type")
    if given is None:
        return config
    if given != kind:
        raise ConfigError(
            f"config.json of the drafter: speculators_model_type is {given!r}; read here: {kind!r}; speculative can be 'eagle3' "
            "or 'dflash' for checkpoints of the speculators library, the one that they were trained as"
        )
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ConfigError(
            f"config.json of the drafter: transformer_layer_config is {layers!r}; needed: a mapping with the settings of its layers"
        )
    beside = {key: value for key, value in config.items() if value is not None and key != "transformer_layer_config"}
    return {**layers, **beside}
