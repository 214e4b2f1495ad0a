"""Write tool calls in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dovetail.interfaces.parsers import CallDelta


def call_json(call: CallDelta, whole: bool = False) -> dict[str, Any]:
    """Return a part of a tool call in a stream, or a ``whole`` tool call, which has no index."""
    function = {"name": call.name} if call.name is not None else {}
    head = {"id": call.id, "type": "function"} if call.id is not None else {}
    index = {} if whole else {"index": call.index}
    return {**index, **head, "function": {**function, "arguments": call.arguments}}


def whole_calls(deltas: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """Join ``deltas`` into complete calls, and return them."""
    calls: list[CallDelta] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(delta)
        else:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
    return [call_json(call, whole=True) for call in calls]
