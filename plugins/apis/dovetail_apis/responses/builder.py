"""Build a response while its output grows: its output items, and the events that report them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dovetail.api.requests import new_id
from dovetail.interfaces.api import ApiHost, ApiProblem, ChatDelta, Delta, Generation
from dovetail.interfaces.parsers import CallDelta
from dovetail.types import FinishKind, FinishReason
from dovetail_apis.openai.format import chat_logprobs
from dovetail_apis.responses.items import ItemDict, output_text
from dovetail_apis.responses.types import ResponsesRequest

Event = dict[str, Any]
"""Type of one event of the stream; its ``type`` is its name."""


class ResponseBuilder:
    """Build one response. Each method that changes it returns the events that report the change, numbered from 0."""

    def __init__(self, host: ApiHost, body: ResponsesRequest, outputs: Generation) -> None:
        self.id = outputs.rid
        self._outputs = outputs
        self._tokenizer = host.tokenizer
        self._fields = _fields(host, body)
        self._with_logprobs = body.logprobs is not None
        self._with_reasoning = body.include_reasoning is not False
        self._logprobs: list[Any] = []
        self._status = "in_progress"
        self._error: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._items: list[ItemDict] = []
        self._sequence = 0

    @property
    def items(self) -> Sequence[ItemDict]:
        """Return the output items so far."""
        return self._items

    def response(self) -> dict[str, Any]:
        """Return the response in its present state."""
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            **self._fields,
            "status": self._status,
            "completed_at": self._completed_at,
            "error": self._error,
            "incomplete_details": incomplete,
            "output": self._items,
            "usage": None if self._status == "in_progress" else self._usage(),
        }

    def start(self) -> list[Event]:
        """Return the first events."""
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def take(self, deltas: Sequence[Delta]) -> list[Event]:
        """Add the output of engine steps, and return the events that report it."""
        events: list[Event] = []
        for delta in deltas:
            if self._with_logprobs:
                self._logprobs += chat_logprobs(self._tokenizer, delta.logprobs)["content"]
            for part in delta.parts:
                events += self._part(part)
        return events

    def end(self, finish: FinishReason) -> list[Event]:
        """End the response because its output has finished, and return the last events."""
        if finish.kind is FinishKind.ABORT:
            return self.fail(ApiProblem(500, f"the response was ended: {finish.message or 'aborted'}"))
        cut = finish.kind is FinishKind.LENGTH
        events = self._close("incomplete" if cut else "completed")
        return [*events, self._finish("incomplete" if cut else "completed")]

    def fail(self, problem: ApiProblem) -> list[Event]:
        """End the response with an error, and return the last events."""
        kind = "server_error" if problem.status >= 500 else "invalid_prompt"
        self._error = {"code": kind, "message": problem.message}
        return [*self._close("incomplete"), self._finish("failed")]

    def cancel(self) -> list[Event]:
        """End the response because its client has cancelled it, and return the last events. There is no event
        "cancelled", so the last one is "incomplete"."""
        return [*self._close("incomplete"), self._finish("cancelled", "incomplete")]

    def _finish(self, status: str, event: str | None = None) -> Event:
        self._status = status
        self._completed_at = int(time.time()) if status == "completed" else None
        return self._lifecycle(event or status)

    def _part(self, part: ChatDelta) -> list[Event]:
        events: list[Event] = []
        if part.reasoning and self._with_reasoning:
            events += self._text("reasoning", part.reasoning)
        elif part.reasoning:
            self._logprobs.clear()
        if part.content:
            events += self._text("message", part.content)
        for call in part.calls:
            events += self._call(call)
        return events

    def _text(self, kind: str, text: str) -> list[Event]:
        events = [] if self._growing(kind) else [*self._close("completed"), *self._open_text(kind)]
        part = self._items[-1]["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return [*events, self._content_event("reasoning_text.delta", delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        return [*events, self._content_event("output_text.delta", delta=text, logprobs=logprobs)]

    def _open_text(self, kind: str) -> list[Event]:
        part = output_text("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        head = (
            {"id": new_id("msg_"), "type": kind, "role": "assistant"}
            if kind == "message"
            else {"id": new_id("rs_"), "type": kind, "summary": []}
        )
        added = self._add({**head, "content": [], "status": "in_progress"})
        event = self._content_event("content_part.added", part=_copy(part))
        self._items[-1]["content"].append(part)
        return [added, event]

    def _call(self, call: CallDelta) -> list[Event]:
        events: list[Event] = []
        if call.id is not None:
            self._logprobs.clear()
            head = {"id": new_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
            events = [*self._close("completed"), self._add({**head, "arguments": "", "status": "in_progress"})]
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            events.append(self._item_event("function_call_arguments.delta", delta=call.arguments))
        return events

    def _growing(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"

    def _add(self, item: ItemDict) -> Event:
        self._items.append(item)
        return self._event("output_item.added", output_index=len(self._items) - 1, item=_copy(item))

    def _close(self, status: str) -> list[Event]:
        """End the last item if it is in progress, and return its last events."""
        if not (self._items and self._items[-1]["status"] == "in_progress"):
            return []
        item = self._items[-1]
        item["status"] = status
        events = self._done_call(item) if item["type"] == "function_call" else self._done_text(item)
        return [*events, self._event("output_item.done", output_index=len(self._items) - 1, item=_copy(item))]

    def _done_call(self, item: ItemDict) -> list[Event]:
        return [self._item_event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])]

    def _done_text(self, item: ItemDict) -> list[Event]:
        part = item["content"][0]
        if item["type"] == "message":
            done = self._content_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
        else:
            self._logprobs.clear()
            done = self._content_event("reasoning_text.done", text=part["text"])
        return [done, self._content_event("content_part.done", part=_copy(part))]

    def _usage(self) -> dict[str, Any]:
        usage = self._outputs.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _lifecycle(self, name: str) -> Event:
        return self._event(name, response=_copy(self.response()))

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _content_event(self, name: str, **fields: Any) -> Event:
        return self._item_event(name, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._sequence = self._sequence, self._sequence + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}


def event_bytes(events: Sequence[Event]) -> bytes:
    """Return the events as server-sent events with names."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )


def _copy(value: Any) -> Any:
    """Return a deep copy of dictionaries and lists, which does not change when the response grows."""
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _fields(host: ApiHost, body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields that the response repeats from its request, with the defaults that apply."""
    tools = [
        {"type": "function", "description": None, "parameters": None, "strict": None, **t} for t in body.tools or ()
    ]
    choice = body.tool_choice if isinstance(body.tool_choice, str | None) else body.tool_choice.model_dump()
    form = body.text.format.model_dump(by_alias=True) if body.text and body.text.format else {"type": "text"}
    params = body.params(host.sampling_defaults)
    return {
        "created_at": int(time.time()),
        "model": host.model_name,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": body.stored,
        "temperature": params.temperature,
        "text": {"format": form},
        "tool_choice": choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
