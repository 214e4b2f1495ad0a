"""Provide the conformance suite of APIs."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest

from dovetail.api.problems import DrainingError
from dovetail.errors import (
    AuthenticationError,
    EngineDeadError,
    PermissionDeniedError,
    QueueFullError,
    RateLimitError,
    TimeLimitError,
)
from dovetail.interfaces.api import Api, ApiProblem, Route
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.api_server import EchoServer, SentResponse
from dovetail.testing.component import ComponentSuite


class Example(NamedTuple):
    """Describe an example request. ``streams`` is true if its answer is a stream, ``submits`` if it uses the engine,
    and ``answers`` are the media types that its route declares."""

    method: str
    path: str
    body: Mapping[str, Any]
    streams: bool
    submits: bool
    answers: Sequence[str] = ()

    async def send(self, server: EchoServer, body: object = None, **how: Any) -> SentResponse:
        """Send the request, with ``body`` instead of its own if given. Fail the test if the answer does not end."""
        try:
            return await server.request(self.method, self.path, self.body if body is None else body, **how)
        except TimeoutError as error:
            pytest.fail(str(error))


_UNKNOWN = "no_field_of_this_name"
_ODD: tuple[object, ...] = (None, True, -1, 2**70, 1.5, "", "\ud7ff", [], [[]], [None], {}, {"a": [1]}, "x" * 2000)
_MALFORMED = (b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe", b'{"a": NaN}', b'{"a":' * 5000)
_REFUSALS: Mapping[int, Sequence[Exception]] = {
    401: [AuthenticationError("the key is not known")],
    403: [PermissionDeniedError("not with this key")],
    429: [RateLimitError("too many requests", 7.0)],
    500: [RuntimeError("a secret of the server")],
    503: [QueueFullError("the queue is full"), DrainingError("it shuts down"), EngineDeadError("the engine is dead")],
    504: [TimeLimitError("it took too long")],
}
_ATTEMPTS = 10


class LoopWatch:
    """Measure for how long the event loop stands still inside an ``async with`` block. ``longest`` is the longest time
    in seconds between two turns of the loop."""

    longest = 0.0

    async def __aenter__(self) -> LoopWatch:
        self._last = time.perf_counter()
        self._beats = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._beats.cancel()
        self._note()

    async def _beat(self) -> None:
        while True:
            self._note()
            await asyncio.sleep(0)

    def _note(self) -> None:
        now = time.perf_counter()
        self.longest = max(self.longest, now - self._last)
        self._last = now


class ApiSuite(ComponentSuite):
    """Test that an API conforms to its interface. ``class TestMine(ApiSuite): name = "mine"`` is a whole test file.

    The schema of each body must have ``examples``: bodies that are answered with 200 by an engine that echoes the
    prompt. Override ``examples`` to provide others. The API runs in the server's own application, without a network.
    """

    kind: ClassVar[ComponentKind] = ComponentKind.API
    path_values: ClassVar[Mapping[str, str]] = {}
    """Values of the parameters of paths; the default is ``x``."""
    most_blocking_seconds: ClassVar[float] = 0.05
    """How long a handler may keep the event loop busy without a break."""

    def make(self) -> Api:
        """Return a new instance. Override it to test a class that no plugin registers."""
        return load_attribute(self.spec.target, self.component.label)(self.config())

    def examples(self, route: Route) -> Sequence[Mapping[str, Any]]:
        """Return example bodies for a route that has a body."""
        assert route.body is not None
        return route.body.model_json_schema().get("examples", ())

    def server(self) -> EchoServer:
        """Return a new server of this API."""
        return EchoServer(self.make())

    def test_routes_are_well_formed(self) -> None:
        """Check that methods and paths are valid and unique, that handlers have docstrings, that bodies have schemas,
        and that every route is below a claim if the API has its own error format."""
        api = self.make()
        seen: set[tuple[str, str]] = set()
        for route in api.routes():
            where = f"{'/'.join(route.methods)} {route.path}"
            assert re.fullmatch(r"(/[\w.{}:-]+)+", route.path), f"{route.path!r} is not a valid path"
            assert route.methods, f"{where} has no method"
            for method in route.methods:
                assert re.fullmatch("GET|HEAD|POST|PUT|PATCH|DELETE", method), (
                    f"{where}: {method!r} is not a valid method"
                )
                assert (method, route.path) not in seen, f"{where} is declared twice"
                seen.add((method, route.path))
            assert inspect.iscoroutinefunction(route.handler), f"the handler of {where} is not async"
            assert inspect.getdoc(route.handler), f"the handler of {where} has no docstring; /docs shows it"
            for schema in filter(None, (route.body, route.query)):
                assert schema.model_json_schema()["type"] == "object", (
                    f"the schema of what {where} accepts is not an object"
                )
        assert seen, "there is no route"
        if type(api).error is not Api.error:
            for _, path in seen:
                assert _claimed(api, path), (
                    f"errors at {path} do not have this API's format, because no claim is above it"
                )

    def test_examples_are_answered(self) -> None:
        """Check that each body has an example, that each example is answered with 200 and a declared media type, and
        that no request is left running."""
        for route in self.make().routes():
            assert route.body is None or self.examples(route), (
                f"the body of {route.path} has no examples: give its schema some (json_schema_extra), or override examples"
            )

        async def check(server: EchoServer, example: Example) -> None:
            answer = await example.send(server)
            shown = f"{example.path} answers {answer.status} to its example {example.body}: {answer.body[:500]!r}"
            assert answer.status == 200, shown
            assert answer.media_type in example.answers, f"{shown} ({answer.media_type})"
            if not answer.streamed:
                answer.json()
            await _check_idle(server, example.path)

        self._each(check)

    def test_malformed_bodies_are_refused(self) -> None:
        """Check that every body that is not a JSON object is answered with 400."""

        async def check(server: EchoServer, example: Example) -> None:
            for data in _MALFORMED:
                self._check_error(await example.send(server, data), 400, example.path, f"{data[:20]!r}")

        self._each(check)

    def test_unknown_fields_are_refused_by_name(self) -> None:
        """Check that an unknown field is refused with an error that names it."""

        async def check(server: EchoServer, example: Example) -> None:
            answer = await example.send(server, {**example.body, _UNKNOWN: 1})
            self._check_error(answer, 400, example.path, f"the field {_UNKNOWN}")
            assert _UNKNOWN.encode() in answer.body, f"{example.path} does not name the field that it refuses"

        self._each(check)

    def test_fields_may_hold_anything(self) -> None:
        """Check that odd values in the fields of an example are answered with 200 or a client error, never with 500."""

        async def check(server: EchoServer, example: Example) -> None:
            for name in example.body:
                for odd in _ODD:
                    answer = await example.send(server, {**example.body, name: odd})
                    if answer.status not in (200, 400, 404):
                        pytest.fail(f"{example.path} answers {answer.status} where {name} is {odd!r:.40}")

        self._each(check)

    def test_a_large_body_is_refused(self) -> None:
        """Check that a body larger than ``ApiHost.max_body`` is answered with 413."""

        async def check(server: EchoServer, example: Example) -> None:
            data = json.dumps(example.body).encode() + b" " * server.service.max_body
            self._check_error(await example.send(server, data), 413, example.path, "a body that is too large")

        self._each(check)

    def test_unknown_paths_and_methods_are_refused(self) -> None:
        """Check that unknown paths below the claims are answered with 404 and other methods with 405, both in this
        API's format."""

        async def check(server: EchoServer) -> None:
            api = self.make()
            for claim in api.claims:
                answer = await server.request("POST", f"{claim}/no/such/path")
                self._check_error(answer, 404, claim, "an unknown path")
            for path in {route.path for route in api.routes()}:
                self._check_error(await server.request("PATCH", self._filled(path)), 405, path, "an unknown method")

        asyncio.run(check(self.server()))

    def test_every_error_has_its_format(self) -> None:
        """Check that ``Api.error`` returns a JSON object with the message for each status that a server may answer
        with, with and without details."""
        api = self.make()
        details = {"code": "a_code", "param": "a_param", "retry_after": 3.0}
        for status in (400, 404, 405, 413, *_REFUSALS):
            for problem in (ApiProblem(status, "so it is"), ApiProblem(status, "so it is", **details)):
                shown = api.error(problem)
                assert isinstance(shown, dict), f"the error for {status} is not an object"
                assert "so it is" in json.dumps(shown), f"the error for {status} does not hold the message"

    def test_errors_of_the_server_pass(self) -> None:
        """Check that errors raised when a request is submitted to the engine have their own status and this API's
        format, with retry-after for 429 and 503, and that nothing of other exceptions is shown."""

        async def check(server: EchoServer, example: Example) -> None:
            for status, refusals in _REFUSALS.items() if example.submits else ():
                for refusal in refusals:
                    server.service.refusal = refusal
                    answer = await example.send(server)
                    self._check_error(answer, status, example.path, repr(refusal))
                    assert b"secret" not in answer.body, f"{example.path} shows {refusal!r} to its client"
                    if status in (429, 503):
                        wait = answer.headers.get("retry-after", "")
                        assert wait.isdigit(), f"{example.path} answers {status} without retry-after"

        self._each(check)

    def test_a_client_that_leaves_frees_its_request(self) -> None:
        """Check that the engine's request ends at once if the client disconnects before the first token or during a
        stream."""

        async def check(server: EchoServer, example: Example) -> None:
            for steps in (0, 2):
                server.engine.most_steps = steps
                leave = 1 if steps and example.streams else 0
                await example.send(server, leave_after=leave, seconds=3)
                await _check_idle(server, example.path)

        self._each(check)

    def test_streams_end(self) -> None:
        """Check that every event or line of a stream is complete and is JSON or an end marker, and that the stream is
        sent in several parts and is closed."""

        async def check(server: EchoServer, example: Example) -> None:
            if example.streams:
                answer = await example.send(server)
                assert answer.ended, f"the stream of {example.path} is not closed"
                assert len(answer.parts) > 2, f"the stream of {example.path} comes in {len(answer.parts)} parts"
                assert len(_events(answer, example.path)) > 2, f"the stream of {example.path} has too few events"

        self._each(check)

    def test_a_stream_reports_its_failure(self) -> None:
        """Check that a stream reports the death of the engine and ends, and that an answer that is not a stream has
        status 503."""

        async def check(server: EchoServer, example: Example) -> None:
            server.engine.death = EngineDeadError("the engine process has ended: it is lost")
            server.engine.most_steps = 2 if example.streams else 0
            answer = await example.send(server)
            if example.streams:
                assert answer.ended, f"the stream of {example.path} is not closed"
                reported = json.dumps(_events(answer, example.path))
                assert "it is lost" in reported, (
                    f"the stream of {example.path} does not report that the engine has died"
                )
            elif example.submits:
                self._check_error(answer, 503, example.path, "the engine's death")
            await _check_idle(server, example.path)

        self._each(check)

    def test_requests_run_at_the_same_time(self) -> None:
        """Check that a request that waits for its tokens does not delay other requests."""

        async def check(server: EchoServer, example: Example) -> None:
            server.engine.most_steps = 0
            waiting = asyncio.ensure_future(server.request(example.method, example.path, example.body))
            await asyncio.sleep(0.01)
            server.engine.most_steps = None
            try:
                await server.request(example.method, example.path, example.body, seconds=2)
            except TimeoutError:
                pytest.fail(f"{example.path} answers one request at a time")
            finally:
                waiting.cancel()
                await asyncio.wait((waiting,))

        self._each(check)

    def test_handlers_do_not_block_the_event_loop(self) -> None:
        """Check that no handler blocks the event loop, on which all requests of the server run, for longer than
        ``most_blocking_seconds``: by ``time.sleep``, a synchronous HTTP call or a long computation. A handler fails if
        it blocks in each of several attempts, because a busy machine delays some of them too."""

        async def check(server: EchoServer, method: str, path: str, body: object) -> None:
            blocked = float("inf")
            for _ in range(_ATTEMPTS):
                async with LoopWatch() as watch:
                    await server.request(method, path, body, seconds=60)
                blocked = min(blocked, watch.longest)
                if blocked <= self.most_blocking_seconds:
                    return
            pytest.fail(
                f"the handler of {method} {path} blocks the event loop for {1000 * blocked:.0f} ms; no "
                f"other request is served meanwhile. At most {1000 * self.most_blocking_seconds:.0f} ms are allowed: await what waits, and "
                "give a long computation to asyncio.to_thread"
            )

        async def run() -> None:
            server = self.server()
            for route in self.make().routes():
                for body in self.examples(route) if route.body else (None,):
                    for method in route.methods:
                        await check(server, method, self._filled(route.path), body)

        asyncio.run(run())

    def _each(self, check: Callable[[EchoServer, Example], Coroutine[Any, Any, None]]) -> None:
        """Run ``check`` on every example."""

        async def run() -> None:
            server = self.server()
            for example in await self._examples(server):
                server.reset()
                await check(server, example)

        asyncio.run(run())

    async def _examples(self, server: EchoServer) -> list[Example]:
        found: list[Example] = []
        for route in self.make().routes():
            for body in self.examples(route) if route.body else ():
                method, path = route.methods[0], self._filled(route.path)
                server.reset()
                answer = await server.request(method, path, body)
                server.service.refusal = QueueFullError("the test refuses every request")
                refused = await server.request(method, path, body)
                found.append(
                    Example(method, path, body, answer.streamed, refused.status != answer.status, route.answers)
                )
        return found

    def _filled(self, path: str) -> str:
        """Return ``path`` with values for its parameters."""
        return re.sub(r"\{(\w+)(:\w+)?\}", lambda found: self.path_values.get(found[1], "x"), path)

    def _check_error(self, answer: SentResponse, status: int, path: str, given: str) -> None:
        """Check that the answer has the status, and the fields that ``Api.error`` gives it."""
        assert answer.status == status, f"{path} answers {answer.status} to {given}; it should be {status}"
        assert answer.media_type == "application/json", f"the error {status} of {path} is {answer.media_type!r}"
        found, api = answer.json(), self.make()
        expected = api.error(ApiProblem(status, "")) if _claimed(api, path) else {"error": {"message": ""}}
        assert _shape(found) == _shape(expected), f"the error {status} of {path} is {found}"


def _claimed(api: Api, path: str) -> bool:
    return any(path == claim or path.startswith(claim + "/") for claim in api.claims)


def _shape(value: object) -> object:
    """Return the names of the fields of an object, recursively."""
    return {key: _shape(inner) for key, inner in value.items()} if isinstance(value, dict) else None


async def _check_idle(server: EchoServer, path: str) -> None:
    assert await server.is_idle(), f"{path} leaves a request behind that no client waits for"


def _events(answer: SentResponse, path: str) -> list[Any]:
    try:
        return answer.events()
    except ValueError as error:
        pytest.fail(f"the stream of {path} cannot be read: {error}")
