"""Settings of the APIs; pydantic only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

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


class EmbeddingsConfig(PluginConfig):
    """OpenAI's embeddings."""

    kind: Literal["embeddings"] = "embeddings"  # pyright: ignore[reportIncompatibleVariableOverride]


class ScoreConfig(PluginConfig):
    """Scores of pairs of texts: the cosine of their embeddings, or, for a model that was trained to judge, what it says to a
    question."""

    kind: Literal["score"] = "score"  # pyright: ignore[reportIncompatibleVariableOverride]
    template: str | None = Field(
        default=None,
        description="The prompt that asks whether `{document}` answers `{query}`, special tokens spelled out, up to where the model says yes or no. Pairs are scored by the probability of yes; without it by embeddings.",
    )
    yes: str = Field(default="yes", description="The one token that says so.")
    no: str = Field(default="no", description="The one token that denies it.")

    @field_validator("template")
    @classmethod
    def _has_both(cls, template: str | None) -> str | None:
        missing = [place for place in ("{query}", "{document}") if template is not None and place not in template]
        if missing:
            raise ValueError(f"the template has no {' and no '.join(missing)}")
        return template


class TokenizeConfig(PluginConfig):
    """The tokenizer of the served model."""

    kind: Literal["tokenize"] = "tokenize"  # pyright: ignore[reportIncompatibleVariableOverride]
