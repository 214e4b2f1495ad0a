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


class DFlashConfig(PluginConfig):
    """Draft a block of tokens in one pass of a small model over hidden states of the target."""

    kind: Literal["dflash"] = "dflash"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = Field(
        default="auto",
        description="The drafter's checkpoint: a directory in the layout of https://github.com/z-lab/dflash, or a hub name. `auto`: the folder `dflash` of the target's checkpoint.",
    )
    load_format: Literal["safetensors", "dummy"] = Field(
        default="safetensors", description="`dummy`: random weights, to measure speed."
    )
    num_draft_tokens: int | None = Field(
        default=None, ge=1, description="The most tokens that are drafted at once. Null: a block of the drafter's."
    )
