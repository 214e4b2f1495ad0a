"""Define the supported request bodies of OpenAI's API, and the fields that Dovetail adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from dovetail.api.body import ApiModel, Ids, Int32, Rid, Rids, Texts, examples
from dovetail.api.placement import SessionFields
from dovetail.api.requests import request_names, sampling_params
from dovetail.api.truncation import TruncationFields
from dovetail.chat.requests import NamedTool, ToolSpec
from dovetail.errors import RequestError
from dovetail.sampling_params import SamplingParams
from dovetail_apis.adapters import AdapterNames
from dovetail_apis.fields import CHAT, COMPLETIONS
from dovetail_apis.openai.reasoning import ReasoningFields
from dovetail_apis.structured import StructuredFields

_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "include_stop": "include_stop_str_in_output",
    "token_ids_logprob": "logprob_token_ids",
    "thinking_budget": "thinking_token_budget",
}


class StreamOptions(ApiModel):
    """Configure what a stream contains in addition to its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Every chunk has the token counts of its choice.")
    include_obfuscation: bool | None = Field(None, description="Accepted, but has no effect: nothing is obfuscated.")


class OpenAIFields(StructuredFields, TruncationFields, SessionFields):
    """Describe the common fields of /v1/completions and /v1/chat/completions. None stands for the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int32 | None = None
    # beyond OpenAI's API
    min_tokens: Int32 | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    rid: Rid | Rids | None = Field(None, description="Id of the request for /abort_request; also the id of the answer.")
    request_id: Rid | None = None
    prompt_logprobs: int | None = Field(None, description="Return this number of log-probabilities for the prompt.")
    logprob_token_ids: list[int] | None = Field(None, description="Return the log-probabilities of these tokens.")
    thinking_token_budget: Int32 | None = Field(
        None, ge=-1, description="The largest number of tokens of the reasoning; -1: any."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None
    return_spec_tokens_details: bool | None = None
    lora_path: AdapterNames = None

    @property
    def include_usage(self) -> bool:
        """Return true if a stream ends with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return true if every chunk of a stream has token counts."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def names(self, count: int, prefix: str) -> tuple[str, list[str]]:
        """Return the id of the request, and those of its ``count`` prompts, which are empty if they have no ids of
        their own. ``prefix`` begins the id of a request that gives none. Raises ``RequestError``."""
        return request_names(self.rid if self.rid is not None else self.request_id, count, prefix)

    def session_of(self, count: int) -> str:
        """Return the session of a request with ``count`` outputs. ``session_id`` is a hint, which requests with several
        outputs may have too."""
        return self.session or (self.session_id or "" if count == 1 else "")

    def budget(self) -> int | None:
        """Return the largest number of tokens of the reasoning, or None."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        names: Mapping[str, str],
        defaults: Mapping[str, Any],
    ) -> SamplingParams:
        """Return the sampling parameters, with ``defaults`` for those that are not given. Raises a ``RequestError`` that
        uses this API's field names; ``names`` adds to them."""
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed; give stream: false", param="prompt_logprobs")
        if self.logprob_token_ids is not None and logprobs is None:
            raise RequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        wanted = [number for number in (prompt_logprobs, self.prompt_logprobs) if number is not None]
        given = {
            **self.sampling(),
            "max_new_tokens": max_tokens,
            "min_new_tokens": self.min_tokens,
            "include_stop": self.include_stop_str_in_output or self.no_stop_trim,
            "logprobs": logprobs,
            "prompt_logprobs": max(wanted, default=None),
            "token_ids_logprob": tuple(self.logprob_token_ids) if self.logprob_token_ids else None,
            "thinking_budget": self.budget(),
        }
        return sampling_params(given, {**_NAMES, **names}, defaults)


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
    suffix: str | None = Field(None, description="The text after the gap that the output fills.")
    add_special_tokens: bool | None = None

    ignored = COMPLETIONS.ignored
    refused = COMPLETIONS.refused
    reasons = COMPLETIONS.reasons


class ChatMessage(ApiModel):
    """Describe one message. Additional fields are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionRequest(OpenAIFields, ReasoningFields):
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
    documents: list[dict[str, Any]] | None = Field(None, description="The variable `documents` of the chat template.")

    tools: list[ToolSpec] | None = Field(None, max_length=256)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = Field(
        None, description="If false, the model's reasoning stays in `content`, with its markers."
    )
    stream_reasoning: bool | None = Field(None, description="If false, the reasoning is sent in one chunk.")
    include_reasoning: bool | None = Field(None, description="If false, the reasoning is not returned.")
    continue_final_message: bool | None = Field(None, description="The answer continues the last message.")
    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's turn; true by default.")
    echo: bool | None = Field(None, description="The last message precedes the answer, if it is the assistant's.")
    return_prompt_text: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None
    input_ids: Ids | None = Field(None, description="Token ids of the prompt, instead of the rendered conversation.")

    @property
    def budget_name(self) -> str:
        """Return the name of the field that limits the reasoning."""
        return "thinking_token_budget" if super().budget() is not None else self.reasoning_budget()[0]

    def budget(self) -> int | None:
        """Return the largest number of tokens of the reasoning, or None. Raises ``RequestError``."""
        own = super().budget()
        name, other = self.reasoning_budget()
        if own is not None and other is not None and own != other:
            raise RequestError(
                f"thinking_token_budget is {own}, and {name} limits the reasoning to {other} tokens; give one",
                param="thinking_token_budget",
            )
        return other if own is None else own

    ignored = CHAT.ignored
    refused = CHAT.refused
    reasons = CHAT.reasons
