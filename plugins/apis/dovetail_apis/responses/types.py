"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from dovetail.api.body import ApiModel, CacheSalt, Int32, Session, examples
from dovetail.api.requests import grammar_of, sampling_params
from dovetail.errors import RequestError
from dovetail.sampling_params import GrammarSpec, SamplingParams
from dovetail_apis.conversation import thinking

Include = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
"""What an answer may hold in addition. Reasoning is in the clear here, so that the second adds nothing."""


class FunctionTool(ApiModel):
    """A function that the model may call. ``strict`` calls are as ``parameters`` say; null leaves that to the model."""

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
    """``tool_choice`` where it is one function."""

    type: Literal["function"]
    name: str


class AllowedTools(ApiModel):
    """``tool_choice`` where it is some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1, max_length=256)


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools
"""Which calls are wanted; None is ``auto``."""


class TextFormat(ApiModel):
    """Text as it comes."""

    type: Literal["text"] = "text"


class JsonObjectFormat(ApiModel):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(ApiModel):
    """JSON as a schema says. It is enforced, whether ``strict`` or not."""

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(ApiModel):
    """What the text of the answer must be."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = Field(None, description="Not supported; medium is neutral.")

    def grammar(self) -> GrammarSpec | None:
        """The constraint that it stands for."""
        match self.format:
            case JsonSchemaFormat(schema_=schema):
                return grammar_of({"json_schema": schema})
            case JsonObjectFormat():
                return grammar_of({"response_format": {"type": "json_object"}})
        return None


class Reasoning(ApiModel):
    """Handed to the chat template as ``enable_thinking`` (any effort but ``none``) and ``reasoning_effort``."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = Field(None, description="The reasoning itself is told; there are no summaries.")
    generate_summary: Literal["auto"] | None = None


class StreamOptions(ApiModel):
    """What a stream says beside its events."""

    include_obfuscation: bool | None = Field(None, description="Accepted; nothing is obfuscated here.")


_ITEM = {
    "type": "object",
    "description": "A message (input_text, output_text or text), function_call, function_call_output or reasoning.",
}
Item = Annotated[dict[str, Any], WithJsonSchema(_ITEM)]
"""One of ``input``, which ``items.read_items`` validates."""
ToolObject = Annotated[dict[str, Any], WithJsonSchema(FunctionTool.model_json_schema())]
"""One of ``tools``, which ``tools.read_tools`` validates, so that those of other types are refused by name."""


class ResponsesRequest(ApiModel):
    """POST /v1/responses."""

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
    stream_options: StreamOptions | None = None
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
    max_tool_calls: Int32 | None = Field(None, description="Of hosted tools, of which there are none.")
    truncation: Literal["disabled"] | None = Field(None, description="An input that is too long is an error.")
    metadata: dict[str, Annotated[str, Field(max_length=512)]] | None = Field(None, max_length=16)
    user: str | None = Field(None, max_length=1024)
    # beyond OpenAI's API
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for the chat template.")
    priority: Int32 | None = None
    cache_salt: CacheSalt = None
    session: Session = None

    ignored = frozenset(
        ["prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier"]
    )
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "conversation": (),
        "prompt": (),
        "context_management": (),
        "moderation": (),
        "access_programs": (),
        "image": (),
    }

    @property
    def stored(self) -> bool:
        """True if the answer is kept."""
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens are told at each place; None: nothing."""
        asked = self.top_logprobs or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if asked else None

    def params(self) -> SamplingParams:
        """Raises ``RequestError``, with this API's field names."""
        given = {
            "max_new_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "logprobs": self.logprobs,
            "grammar": self.text and self.text.grammar(),
        }
        return sampling_params(given, {"max_new_tokens": "max_output_tokens", "logprobs": "top_logprobs"})

    def template_variables(self) -> dict[str, Any]:
        """What the chat template is told beside the conversation."""
        effort = self.reasoning and self.reasoning.effort
        asked = thinking(effort != "none", effort) if effort else {}
        return {**asked, **(self.chat_template_kwargs or {})}

    def check(self) -> None:
        """Raises ``RequestError`` for fields that do not go together."""
        if self.background and not self.stored:
            raise RequestError(
                "background: true needs store: true, since the answer is fetched later", param="background"
            )
