"""Convert the conversation of a chat, independently of its API, to the request for the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.api.placement import SessionFields
from dovetail.chat.requests import Arguments
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, ChatPlan, Prompt
from dovetail.interfaces.parsers import ToolRequest
from dovetail.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Hold what the chat template and the output reader need of one request.

    ``messages`` and ``tools`` have the form that chat templates expect. ``variables`` are further variables of the
    template. ``calls`` describes the tool calls that are allowed or required; None if there must be none. The answer
    continues ``opening``, which is the beginning of the assistant's turn. The turn is begun unless ``opened`` is False.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    calls: ToolRequest | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""
    opened: bool = True

    async def prompt(self, host: ApiHost) -> str:
        """Return the text of the prompt. Raises ``RequestError`` if the chat template refuses the conversation."""
        shown = self.tools if self.calls is not None else ()
        return await host.render_chat(self.messages, shown, self.variables, self.opened, self.opening)

    async def tokens(self, host: ApiHost) -> list[int]:
        """Return the token ids of the prompt. Raises ``RequestError``."""
        return await host.encode(await self.prompt(host), add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class RequestMetadata:
    """Hold the public id of a request, and its namespace, priority and session (see ``ApiRequest``)."""

    rid: str
    namespace: str = ""
    priority: int = 0
    session: str = ""

    @classmethod
    def of(cls, rid: str, body: SessionFields) -> RequestMetadata:
        """Build the metadata of a request with the public id ``rid`` from its body."""
        return cls(rid, body.namespace, body.priority or 0, body.session_name)


async def plan(
    host: ApiHost, chat_input: ChatInput, params: SamplingParams, metadata: RequestMetadata
) -> tuple[ApiRequest, ChatPlan]:
    """Return the request for the next turn, and the plan of how its output is read. Raises ``RequestError``."""
    text = await chat_input.prompt(host)
    how = host.plan_chat(params, text, chat_input.calls)
    prompt = Prompt(await host.encode(text, add_special_tokens=False), how.params)
    continues = bool(chat_input.opening)
    request = ApiRequest(
        metadata.rid, (prompt,), continues, metadata.namespace, metadata.priority, how.reader, session=metadata.session
    )
    return request, how


async def plan_within_context(
    host: ApiHost, chat_input: ChatInput, params: SamplingParams, metadata: RequestMetadata
) -> tuple[ApiRequest, ChatPlan]:
    """Do the same as ``plan``, but treat ``params.max_new_tokens`` as an upper bound: it is reduced to what fits into
    the context."""
    api_request, how = await plan(host, chat_input, params, metadata)
    (prompt,) = api_request.prompts
    return replace(api_request, prompts=(Prompt(prompt.ids, within_context(host, prompt.ids, prompt.params)),)), how


def within_context(host: ApiHost, ids: Sequence[int], params: SamplingParams) -> SamplingParams:
    """Return ``params`` with ``max_new_tokens`` reduced to what fits into the context after ``ids``."""
    most = params.max_new_tokens
    return replace(params, max_new_tokens=host.output_limit(ids, most)) if most else params


def turn_of(
    messages: Sequence[dict[str, Any]], continue_final: bool, add_generation_prompt: bool | None
) -> tuple[Sequence[dict[str, Any]], str, bool]:
    """Return the messages of a conversation, the text with which the assistant's turn begins, and whether the turn is
    opened, by the fields ``continue_final_message`` and ``add_generation_prompt``. Raises ``RequestError``."""
    if not continue_final:
        return messages, "", add_generation_prompt is not False
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be true: a message is continued, or a new "
            "one is begun",
            param="continue_final_message",
        )
    return *_without_final(messages), True


def _without_final(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the messages before the last one, and the text of the last one, which the answer continues. Raises
    ``RequestError`` if it cannot be continued."""
    *before, last = messages
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        raise RequestError(
            f"continue_final_message needs a last message with the role assistant and a text; it has the role "
            f"{last['role']}{' and tool_calls' if last.get('tool_calls') else ''}",
            param="continue_final_message",
        )
    return before, last["content"]


def thinking(on: bool, effort: str | None = None) -> dict[str, Any]:
    """Return the template variables that switch reasoning on or off: ``enable_thinking`` in most templates,
    ``thinking`` in others, and ``reasoning_effort`` if ``effort`` is given."""
    return {"enable_thinking": on, "thinking": on, **({"reasoning_effort": effort} if effort else {})}


def past_call(name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> dict[str, Any]:
    """Return a tool call of an earlier turn as chat templates expect it. Its JSON has the spaces that models are
    trained to write."""
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": Arguments(dict(arguments), text)}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": function}
