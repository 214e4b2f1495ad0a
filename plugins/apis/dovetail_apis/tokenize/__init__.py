"""Serve /tokenize and /detokenize with the fields of both vLLM and SGLang."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dovetail.api.body import ApiModel, Ids, examples, parse
from dovetail.api.responses import json_response
from dovetail.chat.requests import NamedTool, ToolSpec, plain_message, read_tool_choice, template_tools
from dovetail.errors import ContextLengthError, RequestError
from dovetail.interfaces.api import Api, ApiHost, Route
from dovetail.token_checks import check_token_ids
from dovetail_apis.chat_input import ChatInput, turn_of
from dovetail_apis.openai.reasoning import ReasoningFields
from dovetail_apis.openai.types import ChatMessage


class TokenizeRequest(ReasoningFields):
    """Describe the body of POST /tokenize: one text, several texts, or a conversation."""

    model_config = examples(
        {"model": "tiny", "prompt": "The capital of France"}, {"messages": [{"role": "user", "content": "Hello"}]}
    )

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=4096)
    tools: list[ToolSpec] | None = Field(None, max_length=256)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool | None = Field(None, description="Begin the assistant's turn after `messages`: true.")
    continue_final_message: bool | None = Field(None, description="The last message is not ended.")
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = Field(
        None,
        description="Let the tokenizer add its special tokens. The default is true for `prompt` and false for `messages`.",
    )
    return_token_strs: bool = False

    ignored: ClassVar[frozenset[str]] = frozenset({"user"})
    refused: ClassVar = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }
    reasons: ClassVar = {
        "chat_template": "requests cannot contain templates; set model.chat_template in the config",
        "media_io_kwargs": "the served model reads and writes text only",
        "mm_processor_kwargs": "the served model reads and writes text only",
    }


class DetokenizeRequest(ApiModel):
    """Describe the body of POST /detokenize: one list of token ids, or several lists."""

    model_config = examples({"model": "tiny", "tokens": [5, 6, 7]})

    model: str | None = None
    tokens: Ids | list[Ids]
    skip_special_tokens: bool = Field(
        True, description="Leave special tokens out of `text`; `prompt` always contains them."
    )


Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


class Tokenize(Api):
    """Serve the tokenizer of the model."""

    def __init__(self, config: BaseModel) -> None:
        super().__init__(config)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def routes(self) -> Sequence[Route]:
        """Return the routes of both directions, each also below /v1."""
        return (
            *(Route(["POST"], path, self.tokenize, TokenizeRequest) for path in ("/tokenize", "/v1/tokenize")),
            *(Route(["POST"], path, self.detokenize, DetokenizeRequest) for path in ("/detokenize", "/v1/detokenize")),
        )

    async def tokenize(self, host: ApiHost, request: Request) -> Response:
        """Return the token ids of texts, or of a conversation as the model receives it."""
        body = await parse(request, TokenizeRequest, host.max_body)
        host.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give one of prompt and messages", param="prompt")
        rendered = "" if body.messages is None else await _rendered(host, body)
        return await self._in_turn(host, request, partial(_tokenized, rendered), body)

    async def detokenize(self, host: ApiHost, request: Request) -> Response:
        """Return the text of token ids."""
        body = await parse(request, DetokenizeRequest, host.max_body)
        host.check_model(body.model)
        return await self._in_turn(host, request, _detokenized, body)

    async def _in_turn(
        self, host: ApiHost, request: Request, work: Callable[[ApiHost, Body], dict[str, Any]], body: Body
    ) -> Response:
        """Run one request of a tenant at a time, because a text of megabytes occupies a thread for seconds and no token
        limit applies to it. Raises ``ClientDisconnect`` if the client has disconnected meanwhile."""
        async with self._locks[host.owner]:
            if await request.is_disconnected():
                raise ClientDisconnect
            return json_response(await asyncio.to_thread(work, host, body))


def _tokenized(rendered: str, host: ApiHost, body: TokenizeRequest) -> dict[str, Any]:
    given = body.prompt if body.prompt is not None else rendered
    special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    texts = [given] if isinstance(given, str) else given
    for text in texts:
        _check_length(host, text, "messages" if body.prompt is None else "prompt")
    found = [host.tokenizer.encode(text, special) for text in texts]
    names = [[_name(host, token) for token in ids] for ids in found] if body.return_token_strs else None
    single = isinstance(given, str)
    return {
        "tokens": found[0] if single else found,
        "count": len(found[0]) if single else [len(ids) for ids in found],
        "max_model_len": host.context_len,
        "token_strs": names and (names[0] if single else names),
    }


def _check_length(host: ApiHost, text: str, param: str) -> None:
    """Raise ``ContextLengthError`` for a text that is far longer than the context."""
    if host.tokenizer.surely_exceeds(text, host.context_len):
        raise ContextLengthError(
            f"a text has {len(text)} characters, which are far more than the context holds; the context holds "
            f"{host.context_len} tokens; tokenize the text in parts",
            param=param,
        )


async def _rendered(host: ApiHost, body: TokenizeRequest) -> str:
    messages = [plain_message(message.model_dump(), i) for i, message in enumerate(body.messages or ())]
    messages, opening, opened = turn_of(messages, bool(body.continue_final_message), body.add_generation_prompt)
    documents = {} if body.documents is None else {"documents": body.documents}
    variables = {**documents, **body.reasoning_variables(), **(body.chat_template_kwargs or {})}
    calls = read_tool_choice(body.tools or (), body.tool_choice, True)
    return await ChatInput(messages, template_tools(body.tools or ()), calls, variables, opening, opened).prompt(host)


def _name(host: ApiHost, token: int) -> str:
    return host.tokenizer.bytes_of(token).decode("utf-8", "replace")


def _detokenized(host: ApiHost, body: DetokenizeRequest) -> dict[str, Any]:
    given: Any = body.tokens
    single = not given or isinstance(given[0], int)
    lists: list[list[int]] = [given] if single else given
    for ids in lists:
        check_token_ids("tokens", ids, host.vocab_size)
    texts = [host.tokenizer.decode(ids, body.skip_special_tokens) for ids in lists]
    prompts = [host.tokenizer.decode(ids, skip_special_tokens=False) for ids in lists]
    return {"text": texts[0] if single else texts, "prompt": prompts[0] if single else prompts}
