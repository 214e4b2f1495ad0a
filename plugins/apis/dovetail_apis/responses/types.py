"""Define the body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from dovetail.api.body import ApiModel, Int32, Rid, examples
from dovetail.api.placement import SessionFields
from dovetail.api.requests import grammar_of, sampling_params, stop_strings, token_biases
from dovetail.errors import RequestError
from dovetail.sampling_params import GrammarSpec, SamplingParams
from dovetail_apis.chat_input import thinking
from dovetail_apis.fields import RESPONSES
from dovetail_apis.structured import StructuredOutputs, structured

Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""Additional contents of an answer. Reasoning is not encrypted here, so ``reasoning.encrypted_content`` adds nothing.
"""


class FunctionTool(ApiModel):
    """Describe a function that the model may call. If ``strict`` is true, calls are forced to satisfy ``parameters``; null
    leaves this to the model."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "async": (False,),
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "output_schema": (),
    }


class FunctionChoice(ApiModel):
    """Describe a ``tool_choice`` that is one function."""

    type: Literal["function"]
    name: str


class AllowedTools(ApiModel):
    """Describe a ``tool_choice`` that is a subset of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1, max_length=256)


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools
"""Type of ``tool_choice``, which determines the tool calls that are allowed or required; None stands for ``auto``."""


class TextFormat(ApiModel):
    """Describe text without a constraint."""

    type: Literal["text"] = "text"


class JsonObjectFormat(ApiModel):
    """Describe text that is a JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(ApiModel):
    """Describe text that is JSON under a schema. The schema is always enforced, regardless of ``strict``."""

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(ApiModel):
    """Configure the format of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = Field(
        None, description="Not supported: only the default `medium` is allowed."
    )

    def grammar(self) -> GrammarSpec | None:
        """Return the constraint of the format, or None."""
        match self.format:
            case JsonSchemaFormat(schema_=schema):
                found = grammar_of({"json_schema": schema})
            case JsonObjectFormat():
                found = grammar_of({"response_format": {"type": "json_object"}})
            case _:
                return None
        return found and replace(found, param="text")


class Reasoning(ApiModel):
    """Configure reasoning. The chat template receives it as ``enable_thinking`` (true for every effort except ``none``)
    and ``reasoning_effort``."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"] | None = None
    summary: Literal["auto"] | None = Field(
        None, description="The reasoning itself is returned; there are no summaries."
    )
    generate_summary: Literal["auto"] | None = None


class ResponsesStreamOptions(ApiModel):
    """Configure what a stream contains in addition to its events."""

    include_obfuscation: bool | None = Field(None, description="Accepted, but has no effect: nothing is obfuscated.")


_ITEM = {
    "type": "object",
    "description": "A message (input_text, output_text or text), function_call, function_call_output or reasoning.",
}
Item = Annotated[dict[str, Any], WithJsonSchema(_ITEM)]
"""Type of one item of ``input``, which ``items.read_items`` validates."""
ToolObject = Annotated[dict[str, Any], WithJsonSchema(FunctionTool.model_json_schema())]
"""Type of one of ``tools``. ``tools.read_tools`` validates them, so that tools of other types are refused by name."""


_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    "ignore_eos", "skip_special_tokens",
)  # fmt: skip
NAMES = {
    "max_new_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "include_stop": "include_stop_str_in_output",
}
"""Map the fields of ``SamplingParams`` to those of this API."""


class ResponsesRequest(SessionFields):
    """Describe the body of POST /v1/responses."""

    model_config = examples(
        {"model": "tiny", "input": "What is the capital of France?", "max_output_tokens": 16, "temperature": 0},
        {"input": [{"role": "user", "content": "Hello"}], "instructions": "Be brief.", "store": False},
        {"input": "Hello", "max_output_tokens": 8, "stream": True},
    )

    model: str | None = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    include: list[Include] | None = None
    max_output_tokens: Int32 | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[ToolObject] | None = Field(None, max_length=256)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int32 | None = Field(
        None, description="Accepted, but has no effect: it limits hosted tools, which this server does not have."
    )
    truncation: Literal["disabled"] | None = Field(
        None, description="Only `disabled`: an input that is too long is an error."
    )
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    user: str | None = Field(None, max_length=1024)
    # beyond OpenAI's API
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Additional variables for the chat template.")

    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: bool | None = Field(None, description="If false, the answer has no item with the reasoning.")
    structured_outputs: StructuredOutputs | None = None
    request_id: Rid | None = Field(None, description="The id of the response.")

    ignored = RESPONSES.ignored
    refused = RESPONSES.refused
    reasons = RESPONSES.reasons

    @property
    def stored(self) -> bool:
        """Return true if the response is stored."""
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """Return the number of likeliest tokens that are reported at each position, or None if no log-probabilities are
        requested."""
        requested = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if requested else None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters, with ``defaults`` for those that are not given. Raises a ``RequestError`` that
        uses this API's field names."""
        given = {
            **{name: getattr(self, name) for name in _SAMPLING},
            "max_new_tokens": self.max_output_tokens,
            "logprobs": self.logprobs,
            "logit_bias": token_biases(self.logit_bias),
            "stop": stop_strings(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
            "include_stop": self.include_stop_str_in_output,
            "grammar": self._grammar(),
        }
        return sampling_params(given, NAMES, defaults)

    def _grammar(self) -> GrammarSpec | None:
        format_ = self.text and self.text.grammar()
        given = grammar_of(structured(self.structured_outputs))
        if format_ and given:
            raise RequestError(
                "text.format and structured_outputs cannot be combined; give one", param="structured_outputs"
            )
        return format_ or given

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        effort = self.reasoning and self.reasoning.effort
        variables = thinking(effort != "none", effort) if effort else {}
        return {**variables, **(self.chat_template_kwargs or {})}

    def check(self) -> None:
        """Raise ``RequestError`` for fields that cannot be combined."""
        if self.background and not self.stored:
            raise RequestError(
                "background: true needs store: true, because the response is fetched later", param="background"
            )
