"""Answer conversations in ``dovetail chat`` with a model in this process or with the server at a URL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dovetail.errors import DovetailError, EngineError, RequestError
from dovetail.lang.backends.answers import error_text, lines_of, message_of, refusal
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import httpx

    from dovetail.llm import LLM

Message = Mapping[str, Any]
"""A message in OpenAI's form."""
Pieces = Generator[tuple[str, str], None, None]
"""Reasoning and content, either of which may be empty. Closing the generator stops the answer."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Describe how answers are generated. ``tools`` are in OpenAI's form."""

    params: SamplingParams
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(slots=True)
class ChatAnswer:
    """Hold one answer while it grows.

    ``prompt``, ``cached`` and ``output`` count tokens and are None while they are unknown. ``drafts`` holds the number
    of accepted draft tokens and the number of all draft tokens. ``begun``, ``first`` and ``last`` are seconds of the
    same clock.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    drafts: tuple[int, int] | None = None
    finish: str = "none"
    begun: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float | None = None

    def add(self, reasoning: str, content: str) -> tuple[str, str]:
        """Add a piece to the answer and return it."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.reasoning += reasoning
        self.content += content
        return reasoning, content

    @property
    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the conversation."""
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class ChatBackend(Protocol):
    """Answer conversations."""

    name: str

    def plain(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """Yield the text of an answer piece by piece."""
        ...

    def answer(self, messages: Sequence[Message], settings: ChatSettings, answer: ChatAnswer) -> Pieces:
        """Answer a conversation; ``answer`` grows with the pieces. Raises ``DovetailError``."""
        ...

    def resolved(self) -> Mapping[str, Any]:
        """Return the components that were chosen, in the form of ``Resolved.to_json``."""
        ...

    def close(self) -> None:
        """Release the resources."""
        ...


class LocalChatBackend:
    """Answer with a model in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.name = name
        self._llm = llm

    def plain(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """Yield everything that the model writes, including marks of reasoning."""
        return self._llm.stream_chat_text(messages, params)

    def answer(self, messages: Sequence[Message], settings: ChatSettings, answer: ChatAnswer) -> Pieces:
        """See ``ChatBackend.answer``."""
        stream = self._llm.chat_stream(messages, settings.params, tools=settings.tools or None)
        with contextlib.closing(stream):
            for delta in stream:
                yield answer.add(delta.reasoning, delta.content)
            output = stream.output
            answer.prompt, answer.cached = len(output.prompt_ids), output.cached_tokens
            answer.output, answer.calls = len(output.token_ids), output.tool_calls
            answer.drafts = (output.accepted, output.drafted) if output.drafted else None
            answer.finish = "tool_calls" if answer.calls else output.finish.kind.value if output.finish else "none"

    def resolved(self) -> Mapping[str, Any]:
        """See ``ChatBackend.resolved``."""
        return self._llm.resolved.to_json()

    def close(self) -> None:
        """Release the engine."""
        self._llm.close()


class RemoteChatBackend:
    """Answer with the server at ``url`` through its OpenAI API. Raises ``DovetailError`` if there is no such server."""

    def __init__(self, url: str, key: str | None) -> None:
        import httpx

        base = url.rstrip("/").removesuffix("/v1")  # as other clients are given it
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=10)
        try:
            self._client = httpx.Client(base_url=base, headers=headers, timeout=timeout, trust_env=False)
        except httpx.InvalidURL as error:
            raise RequestError(f"--url is {url!r}: {error}; give one such as http://127.0.0.1:30000") from error
        self.name = self._get("/v1/models")["data"][0]["id"]

    def plain(self, messages: Sequence[Message], params: SamplingParams) -> Iterator[str]:
        """Yield the content of an answer."""
        for _, content in self.answer(messages, ChatSettings(params), ChatAnswer()):
            yield content

    def answer(self, messages: Sequence[Message], settings: ChatSettings, answer: ChatAnswer) -> Pieces:
        """See ``ChatBackend.answer``."""
        body = {"model": self.name, "messages": messages, **_fields(settings)}
        with self._response("POST", "/v1/chat/completions", body) as response:
            for line in lines_of(response):
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield from _take(msgspec.json.decode(line[6:]), answer)
        raise EngineError("the connection ended before the answer was complete")

    def resolved(self) -> Mapping[str, Any]:
        """See ``ChatBackend.resolved``; a server with tenants requires an admin key."""
        return self._get("/server_info")["engine"]["resolved"]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _get(self, path: str) -> Any:
        with self._response("GET", path) as response:
            return msgspec.json.decode(response.read())

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: object = None) -> Iterator[httpx.Response]:
        """Yield the response of the server before its body is read. Raises ``DovetailError`` for a refusal or a
        failure in the meantime."""
        import httpx

        try:
            with self._client.stream(method, path, json=body) as response:
                if response.is_error:
                    raise _refused(response.status_code, error_text(response.read()))
                yield response
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise EngineError(f"{self._client.base_url} does not answer correctly: {error or repr(error)}") from error


_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
SAMPLING = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
"""The fields of ``SamplingParams`` that a conversation may set."""


def _fields(settings: ChatSettings) -> dict[str, Any]:
    """Return the settings in the form of OpenAI's API."""
    params = settings.params
    given = {_NAMES.get(name, name): getattr(params, name) for name in SAMPLING}
    schema = {}
    if params.grammar is not None:
        named = {"name": "answer", "schema": msgspec.json.decode(params.grammar.text)}
        schema = {"response_format": {"type": "json_schema", "json_schema": named}}
    tools = {"tools": settings.tools} if settings.tools else {}
    return {**given, **schema, **tools, "stream": True, "stream_options": {"include_usage": True}}


def _take(chunk: dict[str, Any], answer: ChatAnswer) -> Iterator[tuple[str, str]]:
    if "error" in chunk:
        raise EngineError(message_of(chunk))
    if usage := chunk.get("usage"):
        answer.prompt, answer.output = usage["prompt_tokens"], usage["completion_tokens"]
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if drafts := usage.get("speculation"):
            answer.drafts = drafts["accepted_tokens"], drafts["drafted_tokens"]
    for choice in chunk["choices"]:
        delta = choice["delta"]
        for call in delta.get("tool_calls") or ():
            _grow(answer.calls, call)
        answer.finish = choice["finish_reason"] or answer.finish
        yield answer.add(delta.get("reasoning_content") or "", delta.get("content") or "")


def _grow(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    if part["index"] == len(calls):
        calls.append(
            {"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}}
        )
    calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


def _refused(status: int, message: str) -> DovetailError:
    hint = "; give a key with --key or DOVETAIL_API_KEY" if status == 401 else ""
    return refusal(status, f"{message or 'the server refused the request'} (status {status}){hint}")
