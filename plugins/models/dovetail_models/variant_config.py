"""Define the config sections of the models in ``variant_specs``. They have no settings: a checkpoint's config.json
contains everything."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class GemmaConfig(PluginConfig):
    """Select the architecture of the first Gemma."""

    kind: Literal["gemma"] = "gemma"  # pyright: ignore[reportIncompatibleVariableOverride]


class Gemma2Config(PluginConfig):
    """Select the Gemma 2 architecture."""

    kind: Literal["gemma2"] = "gemma2"  # pyright: ignore[reportIncompatibleVariableOverride]


class Gemma3Config(PluginConfig):
    """Select the architecture of the text model of Gemma 3."""

    kind: Literal["gemma3"] = "gemma3"  # pyright: ignore[reportIncompatibleVariableOverride]


class Olmo2Config(PluginConfig):
    """Select the OLMo 2 architecture."""

    kind: Literal["olmo2"] = "olmo2"  # pyright: ignore[reportIncompatibleVariableOverride]


class Olmo3Config(PluginConfig):
    """Select the OLMo 3 architecture."""

    kind: Literal["olmo3"] = "olmo3"  # pyright: ignore[reportIncompatibleVariableOverride]


class GlmConfig(PluginConfig):
    """Select the architecture of GLM-4-9B."""

    kind: Literal["glm"] = "glm"  # pyright: ignore[reportIncompatibleVariableOverride]


class Glm4Config(PluginConfig):
    """Select the architecture of GLM-4-0414."""

    kind: Literal["glm4"] = "glm4"  # pyright: ignore[reportIncompatibleVariableOverride]


class CohereConfig(PluginConfig):
    """Select the architecture of Command R."""

    kind: Literal["cohere"] = "cohere"  # pyright: ignore[reportIncompatibleVariableOverride]


class Cohere2Config(PluginConfig):
    """Select the architecture of Command R7B and Command A."""

    kind: Literal["cohere2"] = "cohere2"  # pyright: ignore[reportIncompatibleVariableOverride]
