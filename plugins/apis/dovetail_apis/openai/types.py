"""Define the supported request bodies of OpenAI's API, and the fields that Dovetail adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from dovetail.api.body import ApiModel, CacheSalt, Ids, Int32, Rid, Session, Texts, examples
from dovetail.api.requests import CONSTRAINTS, sampling_params
from dovetail.api.sampling import SamplingFields
from dovetail.chat.requests import NamedTool, ToolSpec
from dovetail.sampling_params import SamplingParams

_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "include_stop": "include_stop_str_in_output",
}
_IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "prediction",
        "parallel_tool_calls",
    ]
)


class StreamOptions(ApiModel):
    """Configure what a stream contains in addition to its text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted, but has no effect: nothing is obfuscated.")


class OpenAIFields(SamplingFields):
    """Describe the common fields of /v1/completions and /v1/chat/completions. None stands for the default."""

    constraints = ("response_format", *CONSTRAINTS)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int32 | None = None
    response_format: dict[str, Any] | None = None
    # beyond OpenAI's API
    min_tokens: Int32 | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt = None
    session: Session = None
    rid: Rid | None = Field(None, description="Id of the request for /abort_request; also the id of the answer.")

    ignored = _IGNORED

    @property
    def include_usage(self) -> bool:
        """Return true if a stream ends with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None, names: Mapping[str, str]
    ) -> SamplingParams:
        """Return the sampling parameters. Raises a ``RequestError`` that uses this API's field names; ``names`` adds to
        them."""
        given = {
            **self.sampling(),
            "max_new_tokens": max_tokens,
            "min_new_tokens": self.min_tokens,
            "include_stop": self.include_stop_str_in_output,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }
        return sampling_params(given, {**_NAMES, **names})


class CompletionRequest(OpenAIFields):
    """Describe the body of POST /v1/completions."""

    model_config = examples(
        {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        {"prompt": ["One", "Two"], "max_tokens": 4, "echo": True, "logprobs": 1},
        {"prompt": "Once upon a time", "max_tokens": 8, "stream": True},
    )

    prompt: str | Texts | Ids | list[Ids]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = Field(
        None,
        ge=1,
        description="Number of outputs that are generated. The answer contains the `n` outputs whose tokens have the highest "
        "average log-probability.",
    )

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {"suffix": ("",)}


class ChatMessage(ApiModel):
    """Describe one message. Additional fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionRequest(OpenAIFields):
    """Describe the body of POST /v1/chat/completions."""

    model_config = examples(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_completion_tokens": 16,
            "temperature": 0,
        },
        {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "max_tokens": 4, "logprobs": True},
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True},
    )

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Additional variables for the chat template.")

    tools: list[ToolSpec] | None = Field(None, max_length=256)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = Field(
        None, description="If false, the model's reasoning stays in `content`, with its markers."
    )

    ignored = _IGNORED - {"parallel_tool_calls"}
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "functions": (),
        "function_call": ("none",),
        "audio": (),
        "modalities": (["text"],),
        "moderation": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
    }
