"""Define the config sections of the models in ``variant_specs``. They have no settings: a checkpoint's config.json
contains everything."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class Gemma2Config(PluginConfig):
    """Select the Gemma 2 architecture."""

    kind: Literal["gemma2"] = "gemma2"  # pyright: ignore[reportIncompatibleVariableOverride]


class Gemma3Config(PluginConfig):
    """Select the architecture of the text model of Gemma 3."""

    kind: Literal["gemma3"] = "gemma3"  # pyright: ignore[reportIncompatibleVariableOverride]
