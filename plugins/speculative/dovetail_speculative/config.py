"""Config sections of the drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dovetail.config.plugin import PluginConfig


class NgramConfig(PluginConfig):
    """Draft what followed the last occurrence of the request's latest tokens."""

    kind: Literal["ngram"] = "ngram"  # pyright: ignore[reportIncompatibleVariableOverride]
    num_draft_tokens: int = Field(default=4, ge=1, le=64, description="The most tokens that are drafted at once.")
    min_ngram: int = Field(default=2, ge=1, description="Tokens that must have occurred before for a draft.")
    max_ngram: int = Field(default=4, ge=1, le=16, description="More tokens than this are not compared.")
    memory: int = Field(
        default=16384,
        ge=1,
        description="Occurrences are remembered for at least this many of the request's latest tokens, and for at most twice as many.",
    )

    @model_validator(mode="after")
    def _check_range(self) -> NgramConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram}; allowed: 1 up to max_ngram, {self.max_ngram}")
        return self
