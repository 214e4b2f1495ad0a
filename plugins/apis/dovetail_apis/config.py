"""Settings of the APIs; pydantic only."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class OpenAIConfig(PluginConfig):
    """OpenAI's API."""

    kind: Literal["openai"] = "openai"  # pyright: ignore[reportIncompatibleVariableOverride]


class NativeConfig(PluginConfig):
    """SGLang's native API."""

    kind: Literal["native"] = "native"  # pyright: ignore[reportIncompatibleVariableOverride]


class AnthropicConfig(PluginConfig):
    """Anthropic's API."""

    kind: Literal["anthropic"] = "anthropic"  # pyright: ignore[reportIncompatibleVariableOverride]


class OllamaConfig(PluginConfig):
    """Ollama's API."""

    kind: Literal["ollama"] = "ollama"  # pyright: ignore[reportIncompatibleVariableOverride]
