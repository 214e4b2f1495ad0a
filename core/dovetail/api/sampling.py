"""Declare the sampling fields that the requests of OpenAI, vLLM and SGLang have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from dovetail.api.body import ApiModel, Int32
from dovetail.api.requests import CONSTRAINTS, grammar_of, stop_strings, token_biases

_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "ignore_eos", "skip_special_tokens", "speculative",
)  # fmt: skip


class SamplingFields(ApiModel):
    """Declare the fields that control sampling; None stands for the default. ``constraints`` are the fields that hold
    one constraint each."""

    constraints: ClassVar[tuple[str, ...]] = CONSTRAINTS

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = Field(None, description="The output ends where its text has a match.")
    stop_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = Field(None, description="Texts that the output must not contain.")
    allowed_token_ids: list[int] | None = Field(None, description="The only tokens that the output may have.")
    logits_processors: list[dict[str, Any]] | None = Field(
        None, description="Logits processors of this server: objects with a `name` and the processor's parameters."
    )
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: str | dict[str, Any] | None = None
    lark: str | None = None
    choice: list[str] | None = None
    structural_tag: str | dict[str, Any] | None = None
    grammar_backend: str | None = Field(None, description="The grammar backend that must enforce the constraint.")
    speculative: bool | None = Field(None, description="False: this request is decoded without draft tokens.")

    def given_constraints(self) -> dict[str, Any]:
        """Return the values of the fields that hold a constraint each, by name, for ``grammar_of``."""
        return {name: getattr(self, name) for name in self.constraints}

    def chosen_backend(self) -> str | None:
        """Return the grammar backend that must enforce the constraint, or None. Raises ``RequestError``."""
        return self.grammar_backend

    def sampling(self) -> dict[str, Any]:
        """Return these fields by the names of ``SamplingParams``, for ``sampling_params``. Raises ``RequestError``."""
        return {
            **{name: getattr(self, name) for name in _SAME},
            "logit_bias": token_biases(self.logit_bias),
            "stop": stop_strings(self.stop),
            "stop_regex": stop_strings(self.stop_regex),
            "logits_processors": self.logits_processors or None,
            "bad_words": stop_strings(self.bad_words),
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "grammar": grammar_of(self.given_constraints(), self.chosen_backend()),
        }
