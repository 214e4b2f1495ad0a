"""Define the supported request bodies of Anthropic's API, and the fields that Dovetail adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from dovetail.api.body import ApiModel, Int32, examples
from dovetail.api.placement import SessionFields

_IGNORED = frozenset(
    [
        "metadata",
        "service_tier",
        "speed",
        "inference_geo",
        "cache_control",
        "user_profile_id",
        "workspace_id",
        "diagnostics",
    ]
)
_REFUSED: Mapping[str, tuple[object, ...]] = {"container": (), "mcp_servers": (), "context_management": ()}


class MessageParam(ApiModel):
    """Describe one turn, or a part of one: adjacent messages of the same role are joined."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]] = Field(description="A text, or blocks: text, tool_use, tool_result, thinking.")


class ToolParam(ApiModel):
    """Describe a function that the model may call."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    ignored = frozenset({"cache_control", "eager_input_streaming", "input_examples"})
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {"defer_loading": (False,), "allowed_callers": (["direct"],)}


class ToolChoice(ApiModel):
    """Describe which tool calls are allowed or required."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiModel):
    """Set whether the model reasons before it answers. ``adaptive`` is the same as ``enabled``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int32 | None = Field(
        None, ge=1, description="Accepted, but not enforced: only max_tokens bounds the reasoning."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` leaves the reasoning out. There are no summaries: `summarized` shows all of it."
    )


class JsonFormat(ApiModel):
    """Describe the JSON schema that the answer must satisfy."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    """Configure the answer: the reasoning effort and the format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Passed to the chat template as `reasoning_effort`."
    )
    format: JsonFormat | None = None


class CountRequest(ApiModel):
    """Describe the body of POST /v1/messages/count_tokens."""

    model_config = examples(
        {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "system": "Be brief."}
    )

    model: str
    messages: list[MessageParam] = Field(min_length=1, max_length=4096)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = Field(None, max_length=256, description="See `ToolParam`.")
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    ignored = _IGNORED
    refused = _REFUSED


class MessagesRequest(CountRequest, SessionFields):
    """Describe the body of POST /v1/messages."""

    model_config = examples(
        {
            "model": "tiny",
            "max_tokens": 16,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        },
        {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}], "stream": True},
    )

    max_tokens: Int32 = Field(ge=0, description="0 only computes and caches the prompt.")
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    # beyond Anthropic's API
    min_p: float | None = None
    seed: int | None = None


class TextBlock(ApiModel):
    """Describe a text of any role."""

    type: Literal["text"]
    text: str

    ignored = frozenset({"cache_control", "citations", "parsed_output"})


class ThinkingBlock(ApiModel):
    """Describe the model's reasoning of an earlier turn."""

    type: Literal["thinking"]
    thinking: str

    ignored = frozenset({"signature"})


class ToolUseBlock(ApiModel):
    """Describe a tool call that the model made in an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    ignored = frozenset({"cache_control", "caller", "toolset_name"})


class ToolResultBlock(ApiModel):
    """Describe the result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = Field(None, description="Passed to the chat template.")

    ignored = frozenset({"cache_control", "toolset_name"})


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
