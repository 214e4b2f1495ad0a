"""Build requests in the form of each API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.bench.client.readers import EventReader, NativeReader, OpenAIReader
from dovetail.bench.prompts import CallPrompt
from dovetail.bench.records import LoadCall, Workload
from dovetail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PostRequest:
    """Describe a POST request and the reader of its answer."""

    path: str
    body: dict[str, Any]
    reader: EventReader


class ClientApi(Protocol):
    """Build requests for calls in the form of one API."""

    name: str

    def request(self, call: LoadCall, prompt: CallPrompt) -> PostRequest:
        """Return the request for a call; its answer is streamed."""
        ...

    def check(self, workload: Workload) -> None:
        """Raise ``ConfigError`` for a workload that needs values that this API does not return."""
        ...


class OpenAIClientApi:
    """Call any server with OpenAI's API: chats through /v1/chat/completions, texts and token ids through
    /v1/completions."""

    name = "openai"

    def __init__(self, model: str) -> None:
        self._model = model

    def request(self, call: LoadCall, prompt: CallPrompt) -> PostRequest:
        """Return a request with only those fields that the call sets, because servers differ in the fields that they
        accept."""
        body: dict[str, Any] = {"model": self._model, "max_tokens": call.max_tokens, **_sampling(call)}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if call.json_schema is not None:
            schema = {"name": "answer", "strict": True, "schema": call.json_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if prompt.messages is None:
            body["prompt"] = prompt.text if prompt.token_ids is None else prompt.token_ids
            return PostRequest("/v1/completions", body, OpenAIReader())
        body["messages"] = prompt.messages
        if prompt.tools:
            body["tools"] = prompt.tools
        return PostRequest("/v1/chat/completions", body, OpenAIReader())

    def check(self, workload: Workload) -> None:
        """Raise ``ConfigError`` if the workload needs the token ids of outputs, which this API does not return."""
        if any(call.continues and call.form == "token_ids" for call in workload.calls):
            raise ConfigError(
                f"workload {workload.name!r} continues with the token ids of answers, which OpenAI's API does not return; use"
                " content: text, or --api native with a Dovetail server"
            )


class NativeClientApi:
    """Call a Dovetail server.

    Texts and token ids go through /generate, which returns token ids and counts at every step. Chats go through
    /v1/chat/completions, because the server applies their chat template.
    """

    name = "native"

    def __init__(self, model: str) -> None:
        self._chat = OpenAIClientApi(model)

    def request(self, call: LoadCall, prompt: CallPrompt) -> PostRequest:
        """Return a request in the form of SGLang's /generate."""
        if prompt.messages is not None:
            return self._chat.request(call, prompt)
        params: dict[str, Any] = {"max_new_tokens": call.max_tokens, **_sampling(call)}
        if call.json_schema is not None:
            params["json_schema"] = call.json_schema
        given = {"text": prompt.text} if prompt.token_ids is None else {"input_ids": prompt.token_ids}
        return PostRequest("/generate", {**given, "sampling_params": params, "stream": True}, NativeReader())

    def check(self, workload: Workload) -> None:
        """Accept every workload."""


def _sampling(call: LoadCall) -> dict[str, Any]:
    """Return the sampling fields that the call sets, under names that both APIs have."""
    sampling = call.sampling
    fields: dict[str, Any] = {"temperature": sampling.temperature}
    if sampling.top_p != 1.0:
        fields["top_p"] = sampling.top_p
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    if sampling.ignore_eos:
        fields["ignore_eos"] = True
    if sampling.stop:
        fields["stop"] = sampling.stop
    return fields
