"""Format the answers of /v1/chat/completions."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from dovetail.api.responses import SSE, event
from dovetail.chat.calls import call_json, whole_calls
from dovetail.interfaces.api import ApiHost, ApiProblem, ChatDelta, ChatPlan, Choice, Delta, Generation
from dovetail_apis.openai.format import (
    chat_logprobs,
    choice_usage,
    error_json,
    extensions,
    finish_name,
    prompt_logprobs_json,
    stop_fields,
    usage_json,
)
from dovetail_apis.openai.types import ChatCompletionRequest


class ChatFormat:
    """Format the answers to one chat request, whole or in chunks. ``text`` is the rendered conversation; ``echoed``
    precedes the content."""

    media_type = SSE

    def __init__(
        self,
        host: ApiHost,
        body: ChatCompletionRequest,
        outputs: Generation,
        plan: ChatPlan,
        text: str = "",
        echoed: str = "",
    ) -> None:
        self._outputs = outputs
        self._body = body
        self._plan = plan
        self._tokenizer = host.tokenizer
        self._text = text
        self._echoed = echoed
        self._logprobs = bool(body.logprobs)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._held: defaultdict[int, str] = defaultdict(str)  # reasoning of each choice that is sent when complete
        self._common = {"id": outputs.rid, "created": int(time.time()), "model": host.model_name}
        chunk = msgspec.json.encode({**self._common, "object": "chat.completion.chunk"})[:-1]
        self._before = b"data: " + chunk + b',"choices":[{"index":'
        self._after = b"}]" + (b',"usage":null' if body.include_usage else b"") + b"}\n\n"

    def whole(self, outputs: Generation) -> object:
        """Return the complete answer."""
        choices = [
            {
                "index": choice.index,
                "message": self._message(choice),
                "logprobs": self._logprobs_of(choice) if self._logprobs else None,
                "finish_reason": finish_name(choice.finish, choice.calls),
                **stop_fields(choice.finish, self._body.stop_token_ids),
                **self._ids_of(choice, choice.token_ids),
            }
            for choice in outputs.choices
        ]
        return {
            **self._common,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_json(outputs.usage, reasoning=True),
            **self._prompt_fields(),
            **self._prompt_logprobs(),
            **self._details(),
        }

    def head(self) -> bytes:
        """Return chunks with the role. ``content`` is null if there may be tool calls, since there may be no content
        then."""
        content = b"null" if self._plan.tools else b'""'
        role = b'{"role":"assistant","content":%b,"refusal":null,"reasoning_content":null}' % content
        data, fields = b"", self._prompt_fields()
        for choice in self._outputs.choices:
            data += self._chunk(choice, role, more=self._ids_of(choice, []), common=fields)
            if self._echoed:
                data += self._chunk(choice, msgspec.json.encode({"content": self._echoed, "reasoning_content": None}))
        return data

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the chunks of one step."""
        return b"".join(self._delta(delta) for delta in deltas)

    def tail(self) -> bytes:
        """Return the token counts and details, if the client requests them, and the end marker."""
        last = {"usage": usage_json(self._outputs.usage, reasoning=True)} if self._body.include_usage else {}
        last |= self._details()
        end = event(b"[DONE]")
        if not last:
            return end
        chunk = {**self._common, "object": "chat.completion.chunk", "choices": [], **last}
        return event(msgspec.json.encode(chunk)) + end

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the error as an event."""
        return event(msgspec.json.encode(error_json(problem)))

    def _message(self, choice: Choice) -> dict[str, Any]:
        reasoning = "".join(part.reasoning for part in choice.parts)
        content = self._echoed + "".join(part.content for part in choice.parts)
        calls = whole_calls([call for part in choice.parts for call in part.calls])
        return {
            "role": "assistant",
            "content": content or None if calls else content,
            "refusal": None,
            "reasoning_content": (reasoning or None) if self._body.include_reasoning is not False else None,
            **({"tool_calls": calls} if calls else {}),
        }

    def _logprobs_of(self, choice: Choice) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, choice.visible_logprobs, self._as_ids)

    def _ids_of(self, choice: Choice, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the token ids of a choice that the client requests."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["token_ids"] = token_ids
        if self._body.return_token_ids or self._body.return_prompt_token_ids:
            fields["prompt_token_ids"] = choice.prompt_ids
        return fields

    def _prompt_fields(self) -> dict[str, Any]:
        """Return what the client requests of the prompt, which all choices share."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._outputs.choices[0].prompt_ids
        if self._body.return_prompt_text:
            fields["prompt_text"] = self._text
        return fields

    def _prompt_logprobs(self) -> dict[str, Any]:
        top = self._body.prompt_logprobs
        if top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs_json(self._tokenizer, self._outputs.choices[0], top)}

    def _details(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self._body.return_input_ids_in_sglext:
            more["input_ids"] = self._outputs.choices[0].prompt_ids
        if self._body.return_output_ids_in_sglext:
            more["output_ids"] = [choice.token_ids for choice in self._outputs.choices]
        return extensions(self._body, self._outputs, more)

    def _delta(self, delta: Delta) -> bytes:
        choice, logprobs, more = delta.choice, b"null", {}
        if self._logprobs and delta.logprobs:
            logprobs = msgspec.json.encode(chat_logprobs(self._tokenizer, delta.logprobs, self._as_ids))
        fields = list(self._fields(choice.index, delta))
        if self._body.return_token_ids:
            more = {"token_ids": delta.token_ids}
        if not fields and (logprobs != b"null" or (more and delta.token_ids)):
            fields = [{"content": "", "reasoning_content": None}]
        data = b""
        for field in fields:  # the first chunk of a step has the logprobs and the ids of all its tokens
            data += self._chunk(choice, msgspec.json.encode(field), logprobs, more)
            logprobs, more = b"null", {}
        if delta.finish is not None:
            reason = msgspec.json.encode(finish_name(delta.finish, choice.calls))
            more = stop_fields(delta.finish, self._body.stop_token_ids)
            data += self._chunk(choice, b'{"reasoning_content":null}', finish=reason, more=more)
        return data

    def _fields(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the parsed text of a step as the fields of chunks."""
        parts = self._shown(index, delta) if self._body.stream_reasoning is False else delta.parts
        for part in parts:
            if part.reasoning and self._body.include_reasoning is not False:
                yield {"reasoning_content": part.reasoning}
            if part.content:
                yield {"content": part.content, "reasoning_content": None}
            if part.calls:
                yield {"tool_calls": [call_json(call) for call in part.calls], "reasoning_content": None}

    def _shown(self, index: int, delta: Delta) -> Iterator[ChatDelta]:
        """Yield the parts of a step. Reasoning is held back until something else follows it, or the output ends."""
        for part in delta.parts:
            self._held[index] += part.reasoning
            if part.content or part.calls:
                yield part._replace(reasoning=self._held.pop(index))
        if delta.finish is not None and self._held[index]:
            yield ChatDelta(self._held.pop(index))

    def _chunk(
        self,
        choice: Choice,
        delta: bytes,
        logprobs: bytes = b"null",
        more: dict[str, Any] | None = None,
        finish: bytes = b"null",
        common: dict[str, Any] | None = None,
    ) -> bytes:
        """Return a chunk with one choice. ``more`` are further fields of the choice, ``common`` of the chunk."""
        after = self._after
        if self._body.continuous_usage:
            after = b'}],"usage":%b}\n\n' % msgspec.json.encode(choice_usage(choice))
        if common:
            after = b"}]," + msgspec.json.encode(common)[1:-1] + after[2:]
        fields = b"," + msgspec.json.encode(more)[1:-1] if more else b""
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            self._before, choice.index, delta, logprobs, finish, fields, after
        )  # fmt: skip
