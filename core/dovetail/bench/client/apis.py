"""Requests in each API's own form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.bench.client.readers import EventReader, NativeReader, OpenAIReader
from dovetail.bench.prompts import CallPrompt
from dovetail.bench.records import LoadCall, Workload
from dovetail.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PostRequest:
    """A POST, and what reads its answer."""

    path: str
    body: dict[str, Any]
    reader: EventReader


class ClientApi(Protocol):
    """How calls are made."""

    name: str

    def request(self, call: LoadCall, prompt: CallPrompt) -> PostRequest:
        """The request for a call; its answer is streamed."""
        ...

    def check(self, workload: Workload) -> None:
        """Raises ``ConfigError`` for a workload that needs more than this API tells."""
        ...


class OpenAIClientApi:
    """Any server with OpenAI's API: chats through /v1/chat/completions, texts and token ids through /v1/completions."""

    name = "openai"

    def __init__(self, model: str) -> None:
        self._model = model

    def request(self, call: LoadCall, prompt: CallPrompt) -> PostRequest:
        """Only what the call sets is fields, as servers differ in the fields that they take."""
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
        """The token ids of outputs are not told."""
        if any(call.continues and call.form == "token_ids" for call in workload.calls):
            raise ConfigError(
                f"workload {workload.name!r} continues with the token ids of answers, which OpenAI's API does not tell; "
                "use content: text, or --api native with a Dovetail server"
            )


class NativeClientApi:
    """A Dovetail server: texts and token ids through /generate, which tells token ids and counts at every step; chats through
    /v1/chat/completions, as their template is the server's."""

    name = "native"

    def __init__(self, model: str) -> None:
        self._chat = OpenAIClientApi(model)

    def request(self, call: LoadCall, prompt: CallPrompt) -> PostRequest:
        """As SGLang's /generate."""
        if prompt.messages is not None:
            return self._chat.request(call, prompt)
        params: dict[str, Any] = {"max_new_tokens": call.max_tokens, **_sampling(call)}
        if call.json_schema is not None:
            params["json_schema"] = call.json_schema
        given = {"text": prompt.text} if prompt.token_ids is None else {"input_ids": prompt.token_ids}
        return PostRequest("/generate", {**given, "sampling_params": params, "stream": True}, NativeReader())

    def check(self, workload: Workload) -> None:
        """Everything can be asked."""


def _sampling(call: LoadCall) -> dict[str, Any]:
    """What the call sets, by names that both APIs have."""
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
