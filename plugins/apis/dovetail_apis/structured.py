"""Declare vLLM's fields for constraints: ``structured_outputs`` and the older ``guided_*``."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from dovetail.api.body import ApiModel
from dovetail.api.requests import CONSTRAINTS, without_options
from dovetail.api.sampling import SamplingFields
from dovetail.errors import RequestError

_BACKENDS = {"auto": None, "guidance": "llguidance", "lm-format-enforcer": "lm_format_enforcer"}
"""Map vLLM's names of grammar backends to ours, where they differ."""


class StructuredOutputs(ApiModel):
    """Describe one constraint on the output. Exactly one field is given."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(None, description="Read as `ebnf` if it contains `::=`, otherwise as `lark`.")
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_options(cls, value: Any) -> Any:
        return without_options(value) if isinstance(value, dict) else value

    def given(self) -> dict[str, Any]:
        """Return the constraints by the names of their fields, without those that are not given."""
        fields = {**{name: getattr(self, name) for name in type(self).model_fields}, "json": self.json_}
        del fields["json_"]
        return {name: value for name, value in fields.items() if value not in (None, False)}


class StructuredFields(SamplingFields):
    """Add vLLM's constraints to those of ``SamplingFields``."""

    constraints: ClassVar[tuple[str, ...]] = (
        "response_format",
        *CONSTRAINTS,
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    )

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None

    def given_constraints(self) -> dict[str, Any]:
        """See ``SamplingFields.given_constraints``."""
        return {**super().given_constraints(), **structured(self.structured_outputs)}

    def chosen_backend(self) -> str | None:
        """See ``SamplingFields.chosen_backend``. What follows a colon are vLLM's options of a backend."""
        name = (self.guided_decoding_backend or "auto").partition(":")[0]
        named = _BACKENDS.get(name, name)
        if named is not None and self.grammar_backend not in (None, named):
            raise RequestError(
                f"grammar_backend is {self.grammar_backend!r:.80} and guided_decoding_backend is {name!r:.80}; give one "
                "of them",
                param="guided_decoding_backend",
            )
        return self.grammar_backend or named


def structured(outputs: StructuredOutputs | None) -> dict[str, Any]:
    """Return the constraint in ``structured_outputs``, for ``grammar_of``. Raises ``RequestError`` if there is none."""
    if outputs is None:
        return {}
    given = outputs.given()
    if not given:
        allowed = "json, regex, choice, grammar, json_object, structural_tag"
        raise RequestError(f"structured_outputs has no constraint; give one of {allowed}", param="structured_outputs")
    return {f"structured_outputs.{name}": value for name, value in given.items()}
