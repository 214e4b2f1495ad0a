"""Define the settings and the parameters of the logits processors."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from dovetail.interfaces.logits import LogitsProcessorConfig, ProcessorParams


class NoRepeatNgramParams(ProcessorParams):
    """Hold the parameters of a request."""

    no_repeat_ngram_size: int = Field(ge=1, le=256, description="The length of sequences that do not occur twice.")


class NoRepeatNgramConfig(LogitsProcessorConfig):
    """Forbid tokens that would repeat a sequence of tokens of the prompt or the output."""

    params: ClassVar[type[ProcessorParams]] = NoRepeatNgramParams
    kind: Literal["no_repeat_ngram"] = "no_repeat_ngram"  # pyright: ignore[reportIncompatibleVariableOverride]
