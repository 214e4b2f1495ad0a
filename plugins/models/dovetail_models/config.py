"""Config sections of the models. They have no settings of their own yet: a checkpoint's config.json says everything."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class LlamaConfig(PluginConfig):
    """Llama 2 and 3."""

    kind: Literal["llama"] = "llama"  # pyright: ignore[reportIncompatibleVariableOverride]


class MistralConfig(PluginConfig):
    """Mistral."""

    kind: Literal["mistral"] = "mistral"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen2Config(PluginConfig):
    """Qwen2 and Qwen2.5."""

    kind: Literal["qwen2"] = "qwen2"  # pyright: ignore[reportIncompatibleVariableOverride]


class MimoConfig(PluginConfig):
    """MiMo."""

    kind: Literal["mimo"] = "mimo"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen3Config(PluginConfig):
    """Qwen3, dense."""

    kind: Literal["qwen3"] = "qwen3"  # pyright: ignore[reportIncompatibleVariableOverride]
