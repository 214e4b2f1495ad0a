"""OpenAI's /v1/responses: answers that are kept, gone on from, or made in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dovetail.api.body import parse, parse_query
from dovetail.api.problems import NotFoundError, problem_of
from dovetail.api.requests import new_id
from dovetail.api.responses import SSE, json_response, streamed, until_disconnect
from dovetail.chat.requests import plain_message, shown_tools
from dovetail.errors import DovetailError, RequestError
from dovetail.interfaces.api import Api, ApiHost, ApiProblem, ApiRequest, Delta, Generation, Route
from dovetail_apis.config import ResponsesConfig
from dovetail_apis.conversation import Conversation, Envelope, ask
from dovetail_apis.openai.format import error_json
from dovetail_apis.responses.answer import Answer, event_bytes
from dovetail_apis.responses.items import ItemDict, chat_messages, read_items
from dovetail_apis.responses.paging import GetQuery, ItemsQuery, page_of
from dovetail_apis.responses.store import Record, Store
from dovetail_apis.responses.tools import read_tools, wanted
from dovetail_apis.responses.types import ResponsesRequest

logger = logging.getLogger("dovetail.server")

_ANSWERS = ("application/json", SSE)


class Responses(Api):
    """https://platform.openai.com/docs/api-reference/responses"""

    claims = ("/v1/responses",)

    def __init__(self, config: ResponsesConfig) -> None:
        super().__init__(config)
        self._store = Store(config)

    def routes(self) -> Sequence[Route]:
        """Make, fetch, cancel and delete responses; list what they were made from."""
        return (
            Route(["POST"], "/v1/responses", self.create, ResponsesRequest, answers=_ANSWERS),
            Route(["GET"], "/v1/responses/{response_id}", self.get, query=GetQuery, answers=_ANSWERS),
            Route(["DELETE"], "/v1/responses/{response_id}", self.delete),
            Route(["POST"], "/v1/responses/{response_id}/cancel", self.cancel),
            Route(["GET"], "/v1/responses/{response_id}/input_items", self.input_items, query=ItemsQuery),
        )

    def error(self, problem: ApiProblem) -> object:
        """As OpenAI's other APIs."""
        return error_json(problem)

    async def create(self, host: ApiHost, request: Request) -> Response:
        """Make a response: at once, as a stream, or in the background."""
        body = await parse(request, ResponsesRequest, host.max_body)
        body.check()
        host.check_model(body.model)
        items = [*self._before(host, body.previous_response_id), *read_items(body.input)]
        asked = await _asked(host, body, items)
        if body.background:  # nothing is waited for until it is counted
            self._store.check_room(host.owner)
        outputs = host.submit(asked)
        record = Record(Answer(host, body, outputs), items, bool(body.background and body.stream))
        if body.background:
            return self._in_background(host.owner, record, outputs)
        maker = Maker(record, outputs, self._store if body.stored else None, host.owner)
        if body.stream:
            return await streamed(request, outputs, maker)
        with outputs:
            await until_disconnect(request.receive, maker.make())
        return json_response(record.response)

    async def get(self, host: ApiHost, request: Request) -> Response:
        """A response as it is now, or the events of one that was made in the background as a stream."""
        query = parse_query(request, GetQuery)
        record = self._record(host, request)
        if not query.stream:
            return json_response(record.response)
        if not record.logged:
            raise RequestError(
                f"{record.id} has no events; only responses made with background: true and stream: true do",
                param="stream",
            )
        return _followed(record, query.starting_after + 1)

    async def cancel(self, host: ApiHost, request: Request) -> Response:
        """End a response that runs in the background."""
        record = self._record(host, request)
        if record.task is None:
            raise RequestError(
                f"{record.id} was not made with background: true; others end when their client leaves",
                param="response_id",
            )
        await record.cancel()
        return json_response(record.response)

    async def delete(self, host: ApiHost, request: Request) -> Response:
        """Forget a response, which ends if it runs."""
        record = self._store.remove(host.owner, request.path_params["response_id"])
        await record.cancel()
        return json_response({"id": record.id, "object": "response", "deleted": True})

    async def input_items(self, host: ApiHost, request: Request) -> Response:
        """What a response was made from, with the turns before it."""
        query = parse_query(request, ItemsQuery)
        return json_response(page_of(self._record(host, request).given, query))

    def _record(self, host: ApiHost, request: Request) -> Record:
        return self._store.get(host.owner, request.path_params["response_id"])

    def _before(self, host: ApiHost, rid: str | None) -> list[ItemDict]:
        """The conversation that is gone on with."""
        if rid is None:
            return []
        try:
            record = self._store.get(host.owner, rid)
        except NotFoundError as error:
            code = "previous_response_not_found"
            raise NotFoundError(str(error), param="previous_response_id", code=code) from None
        if record.running:
            raise RequestError(f"{rid} has not come to an end yet", param="previous_response_id")
        return record.conversation

    def _in_background(self, owner: str, record: Record, outputs: Generation) -> Response:
        maker = Maker(record, outputs, None, owner)
        maker.head()
        record.measure()  # what cannot be forgotten while it runs
        self._store.add(owner, record)
        record.task = asyncio.create_task(self._run(maker, owner))
        record.stop = outputs.close
        return _followed(record, 0) if record.logged else json_response(record.response)

    async def _run(self, maker: Maker, owner: str) -> None:
        try:
            await maker.make()
        except Exception as error:
            if not isinstance(error, DovetailError):
                logger.exception("%s failed", maker.record.id)
            maker.failed(problem_of(error))
        finally:
            self._store.shrink(owner)


class Maker:
    """Grows one response, and says so as a stream does: a ``Formatter``. In the end it is kept, where there is a ``store``."""

    media_type = SSE

    def __init__(self, record: Record, outputs: Generation, store: Store | None, owner: str) -> None:
        self.record = record
        self._outputs = outputs
        self._store = store
        self._owner = owner

    async def make(self) -> None:
        """From the first token to the last, whoever follows."""
        with self._outputs:
            async for deltas in self._outputs:
                self.deltas(deltas)
        self.tail()

    def head(self) -> bytes:
        """That it has begun."""
        return self._tell(self.record.answer.start())

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """What one engine step added."""
        return self._tell(self.record.answer.take(deltas))

    def tail(self) -> bytes:
        """How it has ended. An output without an end was given up by its client."""
        finish, answer = self._outputs.choices[0].finish, self.record.answer
        return self._settled(self._tell(answer.cancel() if finish is None else answer.end(finish)))

    def failed(self, problem: ApiProblem) -> bytes:
        """What went wrong."""
        return self._settled(self._tell(self.record.answer.fail(problem)))

    def _tell(self, events: Sequence[dict[str, Any]]) -> bytes:
        self.record.log(events)
        return event_bytes(events)

    def _settled(self, data: bytes) -> bytes:
        self.record.settle()
        if self._store is not None:
            self._store.add(self._owner, self.record)
        return data


def _followed(record: Record, start: int) -> Response:
    """A stream of the events of a response that runs whether or not anybody follows."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(record.follow(start), headers=headers, media_type=SSE)


async def _asked(host: ApiHost, body: ResponsesRequest, items: Sequence[ItemDict]) -> ApiRequest:
    """The internal request: a chat."""
    messages = [plain_message(message, i) for i, message in enumerate(chat_messages(body.instructions, items))]
    tools = read_tools(body.tools or ())
    calls = wanted(tools, body.tool_choice, body.parallel_tool_calls is not False)
    conversation = Conversation(messages, shown_tools(tools), calls, body.template_variables())
    envelope = Envelope.of(new_id("resp_"), body)
    return (await ask(host, conversation, body.params(), envelope))[0]
