"""Define the protocols of the clients in ``load_apis.py``.

A protocol has a streamed request that can be answered with one text only, and knows which parts of its stream are text,
what its end is, and what an error looks like.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

MAX_TOKENS = 160


class Protocol(ABC):
    """Describe one streaming endpoint."""

    name: ClassVar[str]
    path: ClassVar[str]
    headers: ClassVar[Mapping[str, str]] = {"content-type": "application/json"}

    @abstractmethod
    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a request that is answered with ``text``."""

    @abstractmethod
    def read(self, event: Any) -> tuple[str, bool]:
        """Return the text in an event of the stream, and whether the event is the last."""

    def pieces(self, lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, bool]]:
        """Yield the text of each event, and whether it is the last."""
        return self._events(lines)

    async def _events(self, lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, bool]]:
        async for line in lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield ("", True) if data == "[DONE]" else self._checked(json.loads(data))

    def _checked(self, event: Any) -> tuple[str, bool]:
        if self.is_error(event):
            raise ValueError(f"an error in the stream: {event}")
        return self.read(event)

    def written(self, whole: str) -> str:
        """Return the text that all events make up."""
        return whole

    def is_error(self, answer: Any) -> bool:
        """Return whether the answer is an error in this API's format."""
        return isinstance(answer, dict) and isinstance(answer.get("error"), dict) and bool(answer["error"]["message"])

    def nonsense(self, model: str) -> list[bytes | dict[str, Any]]:
        """Return requests that must be refused."""
        good = self.body(model, "a", "b")
        return [b"{", b"[]", b"", {**good, "no_such_field": 1}, {**good, "stream": "perhaps"}]


class Chat(Protocol):
    """Use OpenAI's chat completions."""

    name = "openai chat"
    path = "/v1/chat/completions"

    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a chat of one message, constrained to one choice."""
        messages = [{"role": "user", "content": prompt}]
        return {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "stream": True, "choice": [text]}

    def read(self, event: Any) -> tuple[str, bool]:
        """Return the content of the chunk's choices; ``[DONE]`` is the end."""
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"]), False


class Completion(Protocol):
    """Use OpenAI's completions."""

    name = "openai completions"
    path = "/v1/completions"

    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a completion, constrained to one choice."""
        return {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": True, "choice": [text]}

    def read(self, event: Any) -> tuple[str, bool]:
        """Return the text of the chunk's choices; ``[DONE]`` is the end."""
        return "".join(choice["text"] for choice in event["choices"]), False


class Responses(Protocol):
    """Use OpenAI's responses."""

    name = "openai responses"
    path = "/v1/responses"

    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a response that is not stored, constrained to a schema with one value."""
        form = {"type": "json_schema", "name": "answer", "schema": {"const": text}}
        return {"model": model, "input": prompt, "max_output_tokens": MAX_TOKENS, "stream": True, "store": False} | {
            "text": {"format": form}
        }

    def read(self, event: Any) -> tuple[str, bool]:
        """Return the delta of an event that has text; ``response.completed`` is the end."""
        delta = event["delta"] if event["type"] == "response.output_text.delta" else ""
        return delta, event["type"] == "response.completed"

    def written(self, whole: str) -> str:
        """Return the value in the JSON."""
        return json.loads(whole)

    def is_error(self, answer: Any) -> bool:
        """Return whether the answer is an object that is not an event and has an error."""
        return "type" not in answer and super().is_error(answer)


class Native(Protocol):
    """Use SGLang's native API, whose events repeat the whole text."""

    name = "native"
    path = "/generate"

    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a text to continue, constrained to one choice."""
        return {"text": prompt, "sampling_params": {"max_new_tokens": MAX_TOKENS, "choice": [text]}, "stream": True}

    async def _events(self, lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, bool]]:
        """Yield the text that each event adds; ``[DONE]`` is the end."""
        so_far = ""
        async for text, last in super()._events(lines):
            yield text[len(so_far) :], last
            so_far = text or so_far

    def read(self, event: Any) -> tuple[str, bool]:
        """Return the whole text so far."""
        return event["text"], False


class Anthropic(Protocol):
    """Use Anthropic's messages, with a tool that must be called with the text."""

    name = "anthropic"
    path = "/v1/messages"

    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a message that can be answered only with a call of one tool."""
        schema = {"type": "object", "properties": {"text": {"const": text}}, "required": ["text"]}
        return {
            "model": model,
            "max_tokens": MAX_TOKENS,
            "messages": [{"role": "user", "content": prompt}],
            "tools": [{"name": "say", "input_schema": {**schema, "additionalProperties": False}}],
            "tool_choice": {"type": "tool", "name": "say", "disable_parallel_tool_use": True},
            "stream": True,
        }

    def read(self, event: Any) -> tuple[str, bool]:
        """Return the part of the tool's input in an event that has one; ``message_stop`` is the end."""
        delta = event["delta"].get("partial_json", "") if event["type"] == "content_block_delta" else ""
        return delta, event["type"] == "message_stop"

    def written(self, whole: str) -> str:
        """Return the text in the tool's input."""
        return json.loads(whole)["text"]

    def is_error(self, answer: Any) -> bool:
        """Return whether the answer is an object of the type ``error``."""
        return answer.get("type") == "error" and super().is_error(answer)


class Ollama(Protocol):
    """Use Ollama's chat, with a line of JSON for each event."""

    name = "ollama chat"
    path = "/api/chat"

    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a chat of one message, constrained to a schema with one value. Streaming is the default."""
        messages = [{"role": "user", "content": prompt}]
        return {"model": model, "messages": messages, "format": {"const": text}, "options": {"num_predict": MAX_TOKENS}}

    async def _events(self, lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, bool]]:
        """Treat each line as an event; the last one has ``done``."""
        async for line in lines:
            yield self._checked(json.loads(line))

    def read(self, event: Any) -> tuple[str, bool]:
        """Return the content of the line's message."""
        return event["message"]["content"], event["done"]

    def written(self, whole: str) -> str:
        """Return the value in the JSON."""
        return json.loads(whole)

    def is_error(self, answer: Any) -> bool:
        """Return whether the answer is an error whose value is a text."""
        return isinstance(answer.get("error"), str)


class OllamaGenerate(Ollama):
    """Use Ollama's generate."""

    name = "ollama generate"
    path = "/api/generate"

    def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
        """Return a prompt to answer, constrained to a schema with one value."""
        return {"model": model, "prompt": prompt, "format": {"const": text}, "options": {"num_predict": MAX_TOKENS}}

    def read(self, event: Any) -> tuple[str, bool]:
        """Return the line's response."""
        return event["response"], event["done"]


PROTOCOLS: tuple[Protocol, ...] = (
    Chat(),
    Completion(),
    Responses(),
    Native(),
    Anthropic(),
    Ollama(),
    OllamaGenerate(),
)
