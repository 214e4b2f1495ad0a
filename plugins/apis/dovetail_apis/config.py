"""Define the config sections of the APIs. Imports pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from dovetail.config.plugin import PluginConfig


class OpenAIConfig(PluginConfig):
    """Configure OpenAI's API: chat completions, completions and models."""

    kind: Literal["openai"] = "openai"  # pyright: ignore[reportIncompatibleVariableOverride]


class NativeConfig(PluginConfig):
    """Configure SGLang's native API."""

    kind: Literal["native"] = "native"  # pyright: ignore[reportIncompatibleVariableOverride]


class ResponsesConfig(PluginConfig):
    """Configure OpenAI's responses. Stored responses are kept in the server's memory; the bounds apply to each tenant
    separately."""

    kind: Literal["responses"] = "responses"  # pyright: ignore[reportIncompatibleVariableOverride]
    max_responses: int = Field(
        default=1000, ge=0, description="Maximum number of stored responses; the oldest is deleted first."
    )
    max_mib: float = Field(default=64.0, ge=0, description="Maximum memory for stored responses, in MiB.")
    max_age: float = Field(default=3600.0, gt=0, description="Time for which a response is stored, in seconds.")
    max_background: int = Field(default=64, ge=0, description="Maximum number of responses that run in the background.")


class AnthropicConfig(PluginConfig):
    """Configure Anthropic's API."""

    kind: Literal["anthropic"] = "anthropic"  # pyright: ignore[reportIncompatibleVariableOverride]


class OllamaConfig(PluginConfig):
    """Configure Ollama's API."""

    kind: Literal["ollama"] = "ollama"  # pyright: ignore[reportIncompatibleVariableOverride]


class EmbeddingsConfig(PluginConfig):
    """Configure OpenAI's embeddings."""

    kind: Literal["embeddings"] = "embeddings"  # pyright: ignore[reportIncompatibleVariableOverride]


class ScoreConfig(PluginConfig):
    """Configure how pairs of texts are scored: by the cosine of their embeddings, or, for a model that was trained to
    judge relevance, by its answer to a question."""

    kind: Literal["score"] = "score"  # pyright: ignore[reportIncompatibleVariableOverride]
    template: str | None = Field(
        default=None,
        description="The prompt that asks whether `{document}` answers `{query}`, with special tokens written out, up to the point where the model answers yes or no. Pairs are scored by the probability of yes. Without a template they are scored by embeddings.",
    )
    yes: str = Field(default="yes", description="The text of the answer yes; it must be a single token.")
    no: str = Field(default="no", description="The text of the answer no; it must be a single token.")

    @field_validator("template")
    @classmethod
    def _has_both(cls, template: str | None) -> str | None:
        missing = [name for name in ("{query}", "{document}") if template is not None and name not in template]
        if missing:
            raise ValueError(f"the template has no {' and no '.join(missing)}")
        return template


class TokenizeConfig(PluginConfig):
    """Configure the API of the served model's tokenizer."""

    kind: Literal["tokenize"] = "tokenize"  # pyright: ignore[reportIncompatibleVariableOverride]
