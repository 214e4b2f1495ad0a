"""Read the config.json of the speculators library (https://github.com/vllm-project/speculators).

The file has the settings of the drafter's layers in a section, and the other settings of the drafter outside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError

NO_PARAMETERS = ("d2t", "t2d", r"verifier_(norm|lm_head)\.weight")
"""Patterns of tensor names in drafters' checkpoints that are not parameters: maps between vocabularies, and parts of
the target that only training needs."""


def flattened(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a config.json of the speculators library as one mapping, or any other config.json unchanged.

    The mapping has the settings of ``transformer_layer_config``, overridden by the settings outside it that are not
    null.
    Raises ``ConfigError`` unless ``speculators_model_type`` is ``kind``.
    """
    given = config.get("speculators_model_type")
    if given is None:
        return config
    if given != kind:
        raise ConfigError(
            f"config.json of the drafter: speculators_model_type is {given!r}, but this drafter reads {kind!r}; for checkpoints of the "
            "speculators library, set speculative to the type that they were trained as, 'eagle3' or 'dflash'"
        )
    layers = config.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ConfigError(
            f"config.json of the drafter: transformer_layer_config is {layers!r}; needed: a mapping with the settings of its layers"
        )
    outer = {key: value for key, value in config.items() if value is not None and key != "transformer_layer_config"}
    return {**layers, **outer}
