"""Define the config sections of the models. They have no settings: a checkpoint's config.json contains everything."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class LlamaConfig(PluginConfig):
    """Select the Llama architecture (Llama 2 and 3)."""

    kind: Literal["llama"] = "llama"  # pyright: ignore[reportIncompatibleVariableOverride]


class MistralConfig(PluginConfig):
    """Select the Mistral architecture."""

    kind: Literal["mistral"] = "mistral"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen2Config(PluginConfig):
    """Select the Qwen2 architecture (Qwen2 and Qwen2.5)."""

    kind: Literal["qwen2"] = "qwen2"  # pyright: ignore[reportIncompatibleVariableOverride]


class MimoConfig(PluginConfig):
    """Select the MiMo architecture."""

    kind: Literal["mimo"] = "mimo"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen3Config(PluginConfig):
    """Select the Qwen3 architecture (dense)."""

    kind: Literal["qwen3"] = "qwen3"  # pyright: ignore[reportIncompatibleVariableOverride]
