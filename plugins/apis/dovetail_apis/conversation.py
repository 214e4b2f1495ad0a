"""From a conversation, however its API writes it, to the request that the engine gets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dovetail.chat.requests import Arguments
from dovetail.interfaces.api import ApiHost, ApiRequest, ChatPlan, Prompt
from dovetail.interfaces.parsers import ToolRequest
from dovetail.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Conversation:
    """``messages`` and the ``tools`` shown are as chat templates expect them, ``variables`` further ones of the template.
    ``calls`` are those that are wanted. The answer continues ``opening``, which is the beginning of the assistant's turn."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    calls: ToolRequest | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""

    async def prompt(self, host: ApiHost) -> str:
        """What the model reads. Raises ``RequestError`` where its chat template refuses the conversation."""
        shown = self.tools if self.calls is not None else ()
        return await host.render_chat(self.messages, shown, self.variables) + self.opening

    async def tokens(self, host: ApiHost) -> list[int]:
        """The prompt's token ids. Raises ``RequestError``."""
        return await host.encode(await self.prompt(host), add_special_tokens=False)


class Addressed(Protocol):
    """The fields of a body that say where its request belongs."""

    @property
    def cache_salt(self) -> str | None:
        """Of its cached prefixes."""
        ...

    @property
    def priority(self) -> int | None:
        """Before others, or after them."""
        ...

    @property
    def session(self) -> str | None:
        """The conversation that it is a turn of."""
        ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a request has beside its conversation: its public id, and what ``ApiRequest`` says of the others."""

    rid: str
    namespace: str = ""
    priority: int = 0
    session: str = ""

    @classmethod
    def of(cls, rid: str, body: Addressed) -> Envelope:
        """Of a request with the public id ``rid``."""
        return cls(rid, body.cache_salt or "", body.priority or 0, body.session or "")


async def plan(
    host: ApiHost,
    conversation: Conversation,
    params: SamplingParams,
    envelope: Envelope,
    *,
    separate_reasoning: bool = True,
) -> tuple[ApiRequest, ChatPlan]:
    """The request for the next turn, and how its answer is read. Raises ``RequestError``."""
    text = await conversation.prompt(host)
    how = host.plan_chat(params, text, conversation.calls, separate_reasoning)
    prompt = Prompt(await host.encode(text, add_special_tokens=False), how.params)
    continues = bool(conversation.opening)
    request = ApiRequest(
        envelope.rid, (prompt,), continues, envelope.namespace, envelope.priority, how.reader, session=envelope.session
    )
    return request, how


async def ask(
    host: ApiHost, conversation: Conversation, params: SamplingParams, envelope: Envelope
) -> tuple[ApiRequest, ChatPlan]:
    """As ``plan``, where ``params.max_new_tokens`` is an upper bound: an output ends where the context does."""
    asked, how = await plan(host, conversation, params, envelope)
    (prompt,) = asked.prompts
    return replace(asked, prompts=(Prompt(prompt.ids, within_context(host, prompt.ids, prompt.params)),)), how


def within_context(host: ApiHost, ids: Sequence[int], params: SamplingParams) -> SamplingParams:
    """``params`` whose ``max_new_tokens`` the context has room for."""
    most = params.max_new_tokens
    return replace(params, max_new_tokens=host.output_limit(ids, most)) if most else params


def thinking(on: bool, effort: str | None = None) -> dict[str, Any]:
    """The template variables that switch reasoning on or off: ``enable_thinking`` in most templates, ``thinking`` in others;
    and ``reasoning_effort``."""
    return {"enable_thinking": on, "thinking": on, **({"reasoning_effort": effort} if effort else {})}


def past_call(name: str, arguments: Mapping[str, Any], call_id: str | None = None) -> dict[str, Any]:
    """A tool call of an earlier turn as chat templates expect it. Its text is spaced as models are taught to write it."""
    text = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": Arguments(dict(arguments), text)}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": function}
