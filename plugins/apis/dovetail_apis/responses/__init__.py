"""Serve OpenAI's /v1/responses: responses that can be stored, continued, or generated in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dovetail.api.body import parse, parse_query
from dovetail.api.offload import offloaded, request_scope
from dovetail.api.problems import NotFoundError, problem_of
from dovetail.api.requests import check_logprobs, new_id, prompt_in
from dovetail.api.responses import SSE, json_response, streamed, until_disconnect
from dovetail.chat.requests import plain_message, template_tools
from dovetail.errors import DovetailError, RequestError
from dovetail.interfaces.api import Api, ApiHost, ApiProblem, ApiRequest, Delta, Generation, Route
from dovetail_apis.chat_input import ChatInput, RequestMetadata, plan_within_context
from dovetail_apis.config import ResponsesConfig
from dovetail_apis.openai.format import error_json
from dovetail_apis.responses.builder import ResponseBuilder, event_bytes
from dovetail_apis.responses.items import ItemDict, chat_messages, read_items
from dovetail_apis.responses.paging import GetQuery, ItemsQuery, page_of
from dovetail_apis.responses.store import ResponseStore, StoredResponse
from dovetail_apis.responses.tools import read_tools, requested_calls
from dovetail_apis.responses.types import NAMES, ResponsesRequest

logger = logging.getLogger("dovetail.server")

_ANSWERS = ("application/json", SSE)


class Responses(Api):
    """Serve OpenAI's responses: https://platform.openai.com/docs/api-reference/responses"""

    claims = ("/v1/responses",)

    def __init__(self, config: ResponsesConfig) -> None:
        super().__init__(config)
        self._store = ResponseStore(config)

    def routes(self) -> Sequence[Route]:
        """Return the routes that create, fetch, cancel and delete responses, and list their input items."""
        return (
            Route(["POST"], "/v1/responses", self.create, ResponsesRequest, answers=_ANSWERS),
            Route(["GET"], "/v1/responses/{response_id}", self.get, query=GetQuery, answers=_ANSWERS),
            Route(["DELETE"], "/v1/responses/{response_id}", self.delete),
            Route(["POST"], "/v1/responses/{response_id}/cancel", self.cancel),
            Route(["GET"], "/v1/responses/{response_id}/input_items", self.input_items, query=ItemsQuery),
        )

    def error(self, problem: ApiProblem) -> object:
        """Return the error in the format of OpenAI's other APIs."""
        return error_json(problem)

    async def create(self, host: ApiHost, request: Request) -> Response:
        """Create a response, which is returned at once, as a stream, or generated in the background."""
        body = await parse(request, ResponsesRequest, host.max_body)
        body.check()
        host.check_model(body.model)
        items = [*self._earlier_items(host, body.previous_response_id), *read_items(body.input)]
        with prompt_in("input"):
            api_request = await _api_request(host, body, items)
            if body.background:  # no await from here until the response is counted
                self._store.check_capacity(host.owner)
            outputs = host.submit(api_request)
        record = StoredResponse(ResponseBuilder(host, body, outputs), items, bool(body.background and body.stream))
        if body.background:
            return self._in_background(host.owner, record, outputs)
        writer = ResponseWriter(record, outputs, self._store if body.stored else None, host.owner)
        if body.stream:
            return await streamed(request, outputs, writer)
        with outputs:
            await until_disconnect(request.receive, writer.run())
        return json_response(record.response)

    async def get(self, host: ApiHost, request: Request) -> Response:
        """Return a response, or stream the events of a response that was created in the background."""
        query = parse_query(request, GetQuery)
        record = self._record(host, request)
        if not query.stream:
            return json_response(record.response)
        if not record.logged:
            raise RequestError(
                f"{record.id} has no events; only responses created with background: true and stream: true have them",
                param="stream",
            )
        return _event_stream(record, query.starting_after + 1)

    async def cancel(self, host: ApiHost, request: Request) -> Response:
        """Cancel a response that runs in the background."""
        record = self._record(host, request)
        if record.task is None:
            raise RequestError(
                f"{record.id} was not created with background: true; other responses end when their client disconnects",
                param="response_id",
            )
        await record.cancel()
        return json_response(record.response)

    async def delete(self, host: ApiHost, request: Request) -> Response:
        """Delete a response, and end it if it is running."""
        record = self._store.remove(host.owner, request.path_params["response_id"])
        await record.cancel()
        return json_response({"id": record.id, "object": "response", "deleted": True})

    async def input_items(self, host: ApiHost, request: Request) -> Response:
        """List the input items of a response, including those of earlier turns."""
        query = parse_query(request, ItemsQuery)
        return json_response(page_of(self._record(host, request).given, query))

    def _record(self, host: ApiHost, request: Request) -> StoredResponse:
        return self._store.get(host.owner, request.path_params["response_id"])

    def _earlier_items(self, host: ApiHost, rid: str | None) -> list[ItemDict]:
        """Return the items of the conversation that is continued."""
        if rid is None:
            return []
        try:
            record = self._store.get(host.owner, rid)
        except NotFoundError as error:
            code = "previous_response_not_found"
            raise NotFoundError(str(error), param="previous_response_id", code=code) from None
        if record.running:
            raise RequestError(f"{rid} has not finished yet", param="previous_response_id")
        return record.conversation

    def _in_background(self, owner: str, record: StoredResponse, outputs: Generation) -> Response:
        writer = ResponseWriter(record, outputs, None, owner)
        writer.head()
        record.measure()  # a running response cannot be deleted, so its size counts from now on
        self._store.add(owner, record)
        record.task = asyncio.create_task(self._run(writer, owner))
        record.stop = outputs.close
        return _event_stream(record, 0) if record.logged else json_response(record.response)

    async def _run(self, writer: ResponseWriter, owner: str) -> None:
        try:
            await writer.run()
        except Exception as error:
            if not isinstance(error, DovetailError):
                logger.exception("%s failed", writer.record.id)
            writer.failed(problem_of(error))
        finally:
            self._store.shrink(owner)


class ResponseWriter:
    """Generate one response and format its events (a ``Formatter``). A finished response is added to ``store``, if
    there is one."""

    media_type = SSE

    def __init__(self, record: StoredResponse, outputs: Generation, store: ResponseStore | None, owner: str) -> None:
        self.record = record
        self._outputs = outputs
        self._store = store
        self._owner = owner

    async def run(self) -> None:
        """Generate the response from the first token to the last, whether or not a client follows its events."""
        with self._outputs:
            async for deltas in self._outputs:
                self.deltas(deltas)
        self.tail()

    def head(self) -> bytes:
        """Return the events that begin the response."""
        return self._emit(self.record.builder.start())

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of what one engine step added."""
        return self._emit(self.record.builder.take(deltas))

    def tail(self) -> bytes:
        """Return the events that end the response. The client has abandoned an output without a finish reason."""
        finish, builder = self._outputs.choices[0].finish, self.record.builder
        return self._finished(self._emit(builder.cancel() if finish is None else builder.end(finish)))

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the events that end the response with an error."""
        return self._finished(self._emit(self.record.builder.fail(problem)))

    def _emit(self, events: Sequence[dict[str, Any]]) -> bytes:
        self.record.log(events)
        return event_bytes(events)

    def _finished(self, data: bytes) -> bytes:
        self.record.finish()
        if self._store is not None:
            self._store.add(self._owner, self.record)
        return data


def _event_stream(record: StoredResponse, start: int) -> Response:
    """Return a stream of the events of a response. The response runs whether or not a client reads the stream."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(record.follow(start), headers=headers, media_type=SSE)


def _messages(body: ResponsesRequest, items: Sequence[ItemDict]) -> list[dict[str, Any]]:
    return [plain_message(message, i) for i, message in enumerate(chat_messages(body.instructions, items))]


async def _api_request(host: ApiHost, body: ResponsesRequest, items: Sequence[ItemDict]) -> ApiRequest:
    """Return the internal request, which is a chat."""
    messages = await offloaded(request_scope().large, _messages, body, items)
    tools = read_tools(body.tools or ())
    calls = requested_calls(tools, body.tool_choice, body.parallel_tool_calls is not False)
    chat_input = ChatInput(messages, template_tools(tools), calls, body.template_variables())
    metadata = RequestMetadata.of(body.request_id or new_id("resp_"), body)
    params = body.params(host.sampling_defaults)
    check_logprobs(host, params, NAMES)
    return (await plan_within_context(host, chat_input, params, metadata))[0]
