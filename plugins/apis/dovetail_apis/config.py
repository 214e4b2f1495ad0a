"""Settings of the APIs; pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class OpenAIConfig(PluginConfig):
    """OpenAI's API."""

    kind: Literal["openai"] = "openai"  # pyright: ignore[reportIncompatibleVariableOverride]


class NativeConfig(PluginConfig):
    """SGLang's native API."""

    kind: Literal["native"] = "native"  # pyright: ignore[reportIncompatibleVariableOverride]


class ResponsesConfig(PluginConfig):
    """OpenAI's responses. Those that are kept are in the server's memory; the bounds hold for each tenant."""

    kind: Literal["responses"] = "responses"  # pyright: ignore[reportIncompatibleVariableOverride]
    max_responses: int = Field(default=1000, ge=0, description="Responses that are kept; the oldest goes first.")
    max_mib: float = Field(default=64.0, ge=0, description="Memory for those that are kept, in MiB.")
    max_age: float = Field(default=3600.0, gt=0, description="Seconds for which a response is kept.")
    max_background: int = Field(default=64, ge=0, description="Responses that may run in the background.")


class AnthropicConfig(PluginConfig):
    """Anthropic's API."""

    kind: Literal["anthropic"] = "anthropic"  # pyright: ignore[reportIncompatibleVariableOverride]


class OllamaConfig(PluginConfig):
    """Ollama's API."""

    kind: Literal["ollama"] = "ollama"  # pyright: ignore[reportIncompatibleVariableOverride]
