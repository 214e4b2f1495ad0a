"""Define broken APIs: an API with one route, and variants with one fault each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from mutant import Mutant, Suite
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import ApiModel, examples, parse, validate
from dovetail.api.requests import new_id
from dovetail.api.responses import SSE, event, json_response, streamed, whole
from dovetail.interfaces.api import Api, ApiHost, ApiProblem, ApiRequest, Delta, Generation, Prompt, Route
from dovetail.sampling_params import SamplingParams
from dovetail.testing.api import ApiSuite


class Ask(ApiModel):
    """Describe the body."""

    model_config = examples({"text": "one two three"}, {"text": "one two three four five", "stream": True})

    text: str
    stream: bool = False


class Lines:
    media_type = SSE

    def head(self) -> bytes:
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join(event(msgspec.json.encode({"text": delta.text})) for delta in deltas)

    def tail(self) -> bytes:
        return event(b"[DONE]")

    def failed(self, problem: ApiProblem) -> bytes:
        return event(msgspec.json.encode({"wrong": problem.message}))


class Tiny(Api):
    claims = ("/tiny",)
    body: ClassVar[type[ApiModel]] = Ask
    lines: ClassVar[type[Lines]] = Lines

    def __init__(self) -> None:
        pass

    def routes(self) -> Sequence[Route]:
        return (Route(["POST"], "/tiny/say", self.say, self.body, answers=("application/json", SSE)),)

    def error(self, problem: ApiProblem) -> object:
        return {"wrong": problem.message}

    async def read(self, host: ApiHost, request: Request) -> Any:
        return await parse(request, self.body, host.max_body)

    async def submit(self, host: ApiHost, body: Any) -> Generation:
        ids = await host.encode(body.text, add_special_tokens=False)
        return host.submit(ApiRequest(new_id("t-"), (Prompt(ids, SamplingParams(max_new_tokens=8)),)))

    async def say(self, host: ApiHost, request: Request) -> Response:
        """Echo the text."""
        body = await self.read(host, request)
        outputs = await self.submit(host, body)
        if body.stream:
            return await streamed(request, outputs, self.lines())
        return await whole(request, outputs, lambda outputs: {"text": outputs.choices[0].text})


class SaysNothingOfARoute(Tiny):
    def routes(self) -> Sequence[Route]:
        async def say(host: ApiHost, request: Request) -> Response:
            return await self.say(host, request)

        return (Route(["POST"], "/tiny/say", say, Ask),)


class HasARouteTwice(Tiny):
    def routes(self) -> Sequence[Route]:
        return [*super().routes()] * 2


class ClaimsTooLittle(Tiny):
    claims = ("/tiny/other",)


class RefusesItsExample(Tiny):
    async def say(self, host: ApiHost, request: Request) -> Response:
        """Echo the text, except for one of the examples."""
        body = await self.read(host, request)
        assert not body.stream
        return await whole(request, await self.submit(host, body), lambda outputs: {"text": outputs.choices[0].text})


class StreamsUnannounced(Tiny):
    def routes(self) -> Sequence[Route]:
        return (Route(["POST"], "/tiny/say", self.say, Ask),)


class RunsOn(Tiny):
    async def say(self, host: ApiHost, request: Request) -> Response:
        """Submit a request that no client waits for."""
        answer = await super().say(host, request)
        await self.submit(host, Ask(text="for no client"))
        return answer


class ReadsJsonItself(Tiny):
    async def read(self, host: ApiHost, request: Request) -> Any:
        return validate(json.loads(await request.body()), Ask)


class Lax(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_extra=Ask.model_config.get("json_schema_extra"))

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, Any]] = {}
    text: str
    stream: bool = False


class TakesAnyField(Tiny):
    body = Lax  # type: ignore[assignment]


class Careless(Ask):
    text: Any  # type: ignore[assignment]


class TakesAnyText(Tiny):
    body = Careless


class ReadsItAll(Tiny):
    async def read(self, host: ApiHost, request: Request) -> Any:
        return await parse(request, Ask, 2**30)


class KnowsSomeErrors(Tiny):
    def error(self, problem: ApiProblem) -> object:
        return {"wrong": problem.message} if problem.code != "method_not_allowed" else {"error": problem.message}


class LosesTheMessage(Tiny):
    def error(self, problem: ApiProblem) -> object:
        return {"wrong": problem.code or "something"}


class AnswersErrorsItself(Tiny):
    async def submit(self, host: ApiHost, body: Any) -> Generation:
        try:
            return await super().submit(host, body)
        except Exception as error:
            raise ValueError("a secret of the server") from error


class WaitsForDisconnectedClient(Tiny):
    async def say(self, host: ApiHost, request: Request) -> Response:
        """Echo the text, whether or not the client is connected."""
        body = await self.read(host, request)
        with await self.submit(host, body) as outputs:
            await outputs.wait()
            return json_response({"text": outputs.choices[0].text})


class StreamsToDisconnectedClient(Tiny):
    async def say(self, host: ApiHost, request: Request) -> Response:
        """Stream the echo without watching for a disconnect."""
        body = await self.read(host, request)
        outputs = await self.submit(host, body)
        if not body.stream:
            return await whole(request, outputs, lambda outputs: {"text": outputs.choices[0].text})
        outputs.close = lambda: None
        return await streamed(request, outputs, self.lines())


class HalfEvents(Lines):
    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        return super().deltas(deltas)[:-1]


class BreaksEvents(Tiny):
    lines = HalfEvents


class SaysAllAtOnce(Tiny):
    async def say(self, host: ApiHost, request: Request) -> Response:
        """Send a whole answer as a stream."""
        body = await self.read(host, request)
        outputs = await self.submit(host, body)
        if not body.stream:
            return await whole(request, outputs, lambda outputs: {"text": outputs.choices[0].text})
        with outputs:
            await outputs.wait()
        answer = event(json.dumps({"text": outputs.choices[0].text}).encode())
        return Response(answer, media_type=SSE)


class Quiet(Lines):
    def failed(self, problem: ApiProblem) -> bytes:
        return self.tail()


class HidesFailures(Tiny):
    lines = Quiet


class OneAtATime(Tiny):
    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def say(self, host: ApiHost, request: Request) -> Response:
        """Echo the text of one request at a time."""
        async with self._lock:
            return await super().say(host, request)


class Sleeps(Tiny):
    async def say(self, host: ApiHost, request: Request) -> Response:
        """Echo the text after some time in which no other request is served."""
        time.sleep(0.08)
        return await super().say(host, request)


class ComputesInTheLoop(Tiny):
    async def say(self, host: ApiHost, request: Request) -> Response:
        """Echo the text after a long computation."""
        end = time.thread_time() + 0.08
        while time.thread_time() < end:
            sum(range(1000))
        return await super().say(host, request)


class SleepyLines(Lines):
    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        time.sleep(0.06)
        return super().deltas(deltas)


class SleepsInStreams(Tiny):
    lines = SleepyLines


class SleepsWhereItHasNoBody(Tiny):
    def routes(self) -> Sequence[Route]:
        return [*super().routes(), Route(["GET"], "/tiny/health", self.health)]

    async def health(self, host: ApiHost, request: Request) -> Response:
        """Answer slowly."""
        time.sleep(0.08)
        return json_response({})


def suite(api: type[Tiny]) -> Suite:
    class Suite(ApiSuite):
        name = "tiny"

        def make(self) -> Api:
            return api()

    return Suite


SOUND = suite(Tiny)


def _wrong(fault: str, api: type[Tiny], case: str, says: str = "") -> Mutant:
    return Mutant(fault, f"test_{case}", suite(api), SOUND, says=says)


MUTANTS = [
    _wrong("has a handler without a docstring", SaysNothingOfARoute, "routes_are_well_formed", "docstring"),
    _wrong("declares a route twice", HasARouteTwice, "routes_are_well_formed", "twice"),
    _wrong("has a route that no claim covers", ClaimsTooLittle, "routes_are_well_formed", "no claim is above it"),
    _wrong("fails for its own example", RefusesItsExample, "examples_are_answered", "answers 500"),
    _wrong("answers with a media type that it does not declare", StreamsUnannounced, "examples_are_answered", SSE),
    _wrong("leaves a request running", RunsOn, "examples_are_answered", "no client waits for"),
    _wrong("does not use the server's JSON parser", ReadsJsonItself, "malformed_bodies_are_refused", "answers 500"),
    _wrong("accepts unknown fields", TakesAnyField, "unknown_fields_are_refused_by_name"),
    _wrong("does not check the type of a field", TakesAnyText, "fields_may_hold_anything", "answers 500"),
    _wrong("reads bodies of any size", ReadsItAll, "a_large_body_is_refused", "should be 413"),
    _wrong("has another format for one error", KnowsSomeErrors, "unknown_paths_and_methods_are_refused"),
    _wrong("leaves out an error's message", LosesTheMessage, "every_error_has_its_format", "hold the message"),
    _wrong("turns all errors into 500", AnswersErrorsItself, "errors_of_the_server_pass", "answers 500"),
    _wrong(
        "waits for a client that has left",
        WaitsForDisconnectedClient,
        "a_client_that_leaves_frees_its_request",
        "not ended",
    ),
    _wrong(
        "never ends what it streams",
        StreamsToDisconnectedClient,
        "a_client_that_leaves_frees_its_request",
        "leaves a request",
    ),
    _wrong("writes incomplete events", BreaksEvents, "streams_end", "cannot be read"),
    _wrong("sends a stream in one part", SaysAllAtOnce, "streams_end", "parts"),
    _wrong("does not report that the engine died", HidesFailures, "a_stream_reports_its_failure", "has died"),
    _wrong("answers one request at a time", OneAtATime, "requests_run_at_the_same_time", "one request at a time"),
    *(
        _wrong(fault, api, "handlers_do_not_block_the_event_loop", "blocks the event loop")
        for fault, api in (
            ("sleeps in a handler", Sleeps),
            ("computes for long in the event loop", ComputesInTheLoop),
            ("sleeps while it streams", SleepsInStreams),
            ("sleeps in a handler without a body", SleepsWhereItHasNoBody),
        )
    ),
]
