"""Write answers in Anthropic's format: content blocks, the events of a stream, token counts, errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
from pydantic_core import from_json

from dovetail.api.responses import SSE
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiProblem, ChatDelta, Choice, Delta, Generation, Usage
from dovetail.types import FinishKind
from dovetail_apis.anthropic.types import MessagesRequest

_SIGNATURE = "unsigned"
"""Signature of thinking blocks. Thinking is not signed here, but clients expect a signature."""

_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_json(problem: ApiProblem, request_id: str | None = None) -> dict[str, Any]:
    """Return an error. Errors of requests that never began have no id."""
    kind = _ERRORS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}, "request_id": request_id}


def usage_json(usage: Usage) -> dict[str, int]:
    """Return the token counts. Tokens that were read from the cache are not included in ``input_tokens``."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


class BlockDelta(NamedTuple):
    """Describe an addition to one content block. The first addition of a tool call has its ``id`` and ``name``."""

    kind: str
    text: str
    id: str | None = None
    name: str | None = None

    def opens(self, before: str | None) -> bool:
        """Return true if the addition begins a new block after a block of kind ``before`` (None: there is none)."""
        return self.id is not None or self.kind != before

    def block(self) -> dict[str, Any]:
        """Return the block that the addition begins, without content."""
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def delta(self) -> dict[str, str]:
        """Return the addition in Anthropic's format."""
        match self.kind:
            case "thinking":
                return {"type": "thinking_delta", "thinking": self.text}
            case "text":
                return {"type": "text_delta", "text": self.text}
        return {"type": "input_json_delta", "partial_json": self.text}


def _block_deltas(parts: Iterable[ChatDelta], hide_thinking: bool) -> Iterator[BlockDelta]:
    for part in parts:
        if part.reasoning:
            yield BlockDelta("thinking", "" if hide_thinking else part.reasoning)
        if part.content:
            yield BlockDelta("text", part.content)
        for call in part.calls:
            yield BlockDelta("tool_use", call.arguments, call.id, call.name)


class MessageFormat:
    """Format the answer to one request, whole or as events."""

    media_type = SSE

    def __init__(self, model: str, body: MessagesRequest, outputs: Generation) -> None:
        """Prepare the answer to ``body``. ``model`` is the model name in the answer."""
        self._outputs = outputs
        self._max_tokens = body.max_tokens
        self._hide_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._common = {"id": outputs.rid, "type": "message", "role": "assistant", "model": model}
        self._index = -1
        self._open: str | None = None

    def whole(self, outputs: Generation) -> object:
        """Return the complete answer. Raises ``RequestError`` if it was aborted."""
        (choice,) = outputs.choices
        reason, sequence = self._stop(choice)
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        return {**self._common, "content": self._content(choice), **stop, "usage": usage_json(outputs.usage)}

    def head(self) -> bytes:
        """Return the event that begins the message, without content."""
        stop = {"stop_reason": None, "stop_sequence": None}
        message = {**self._common, "content": [], **stop, "usage": usage_json(self._outputs.usage)}
        return _event("message_start", message=message)

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of what one step added to the content. Raises ``RequestError`` if the request was aborted."""
        data = b""
        for delta in deltas:
            _check_not_aborted(delta.choice)
            data += b"".join(self._events(piece) for piece in _block_deltas(delta.parts, self._hide_thinking))
        return data

    def tail(self) -> bytes:
        """Return the last events, with the stop reason and token counts."""
        reason, sequence = self._stop(self._outputs.choices[0])
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        usage = usage_json(self._outputs.usage)
        return self._closed() + _event("message_delta", delta=stop, usage=usage) + _event("message_stop")

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the error as an event."""
        return b"event: error\ndata: " + msgspec.json.encode(error_json(problem, self._outputs.rid)) + b"\n\n"

    def _events(self, piece: BlockDelta) -> bytes:
        data = b""
        if piece.opens(self._open):
            data += self._closed()
            self._index += 1
            self._open = piece.kind
            data += _event("content_block_start", index=self._index, content_block=piece.block())
            data += _event("ping") if self._index == 0 else b""
        return data + (_event("content_block_delta", index=self._index, delta=piece.delta()) if piece.text else b"")

    def _closed(self) -> bytes:
        """Return the events that end the open block, if there is one."""
        data = b""
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": _SIGNATURE}
            data += _event("content_block_delta", index=self._index, delta=signed)
        if self._open is not None:
            self._open = None
            data += _event("content_block_stop", index=self._index)
        return data

    def _content(self, choice: Choice) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        for piece in _block_deltas(choice.parts, self._hide_thinking):
            if piece.opens(blocks[-1]["type"] if blocks else None):
                blocks.append(piece.block())
                texts.append("")
            texts[-1] += piece.text
        return [_filled(block, text) for block, text in zip(blocks, texts, strict=True)]

    def _stop(self, choice: Choice) -> tuple[str, str | None]:
        """Return ``stop_reason`` and ``stop_sequence``."""
        _check_not_aborted(choice)
        assert choice.finish is not None
        if choice.finish.kind is FinishKind.LENGTH:
            full = len(choice.token_ids) < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens", None
        if isinstance(choice.finish.matched, str):
            return "stop_sequence", choice.finish.matched
        return "tool_use" if choice.calls else "end_turn", None


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the block with its text. Arguments that break off are reduced to their complete part."""
    match block["type"]:
        case "thinking":
            return {**block, "thinking": text, "signature": _SIGNATURE}
        case "text":
            return {**block, "text": text}
    return {**block, "input": _complete(text)}


def _complete(arguments: str) -> Any:
    """Return the complete part of the arguments. An output may end in the middle of the arguments, even in an escape
    (``\\ud83d``)."""
    for text in (arguments, arguments.rpartition("\\u")[0]):
        with suppress(ValueError):
            return from_json(text or "{}", allow_partial=True)
    return {}


def _check_not_aborted(choice: Choice) -> None:
    """Raise ``RequestError`` if the choice was aborted, because Anthropic's format has no stop reason for it."""
    if choice.finish is not None and choice.finish.kind is FinishKind.ABORT:
        raise RequestError(f"the request was aborted: {choice.finish.message}", code="aborted")


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
