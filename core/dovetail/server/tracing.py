"""Trace requests with OpenTelemetry and send the traces by OTLP over HTTP.

A request has one span. When it has ended, spans of the phases of its outputs are added (``request_spans``), made of times that
the server keeps anyway.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.errors import ConfigError
from dovetail.interfaces.api import ApiRequest
from dovetail.server.request_log import ROUTE
from dovetail.server.request_spans import (
    CLIENT_LEFT,
    failure_of,
    phases_of,
    request_attributes,
    response_attributes,
    with_timed_reader,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from dovetail.config.telemetry import TracingSection
    from dovetail.server.outputs import RequestOutputs

_EXPORT_SECONDS = 5.0
_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,256})?")
_MOST_STATE = 512
_trace: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


def current_trace() -> RequestTrace | None:
    """Return the trace of the request that the current task answers; None if it is not traced."""
    return _trace.get()


class Tracing:
    """Make traces of requests and export them in the background."""

    def __init__(self, section: TracingSection, version: str, exporter: SpanExporter | None = None) -> None:
        """``version`` is that of the server. ``exporter`` replaces the one that sends to ``section.url``. Raises ``ConfigError``
        if OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"tracing.endpoint is set, but OpenTelemetry is not installed ({error}); run pip install 'dovetail[otel]', or "
                "remove tracing.endpoint"
            ) from error
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(section.sample_ratio)),
            resource=Resource.create({"service.name": section.service_name, "service.version": version}),
            shutdown_on_exit=False,
        )
        exporter = exporter or OTLPSpanExporter(section.url, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dovetail", version)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Export what is left. Waits for the receiver, for some seconds at most."""
        self._provider.shutdown()

    @contextmanager
    def request(self, method: str, headers: Sequence[tuple[bytes, bytes]]) -> Iterator[RequestTrace | None]:
        """Trace the HTTP request that the block answers, as part of the trace that its ``headers`` name (W3C Trace Context).
        Yields None if it is not sampled."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(trace_headers(headers))
        span = self._tracer.start_span(method, context, SpanKind.SERVER, {"http.request.method": method})
        if not span.is_recording():
            yield None
            return
        trace = RequestTrace(span, self._tracer, method)
        token = _trace.set(trace)
        try:
            yield trace
        except Exception as error:  # answered with 500 outside of the middleware
            trace.fail(type(error).__name__, 500)
            raise
        finally:
            _trace.reset(token)
            trace.answered()


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    """Return the headers of W3C Trace Context. As it requires, they are ignored if there is not exactly one valid
    ``traceparent``, and a ``tracestate`` is left out if it is too long to be passed on."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1 or not _PARENT.fullmatch(parents[0]):
        return {}
    found = {"traceparent": [parents[0].decode("ascii")]}
    states = [value for name, value in headers if name == b"tracestate"]
    if 0 < sum(map(len, states)) <= _MOST_STATE:
        found["tracestate"] = [value.decode("latin-1") for value in states]
    return found


class RequestTraces:
    """Trace the POST requests of an application, as ASGI middleware."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._tracing.request(scope["method"], scope["headers"]) as trace:
            if trace is None:
                await self._app(scope, receive, send)
                return

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    trace.status = message["status"]
                await send(message)

            await self._app(scope, receive, noted)


class RequestTrace:
    """Trace one HTTP request. Its span ends once it is answered and its outputs are closed. ``status`` is that of the answer, 0
    before there is one. ``model`` is the name by which the request has named the served model, if it has."""

    def __init__(self, span: Span, tracer: Tracer, method: str) -> None:
        from opentelemetry.trace import set_span_in_context

        self.status = 0
        self.model: str | None = None
        self._span, self._tracer, self._method = span, tracer, method
        self._context = set_span_in_context(span)
        self._offset = time.time_ns() - time.perf_counter_ns()
        self._open = 1  # the answer, and groups of outputs that are not closed
        self._is_named = self._has_failed = False

    def timed(self, request: ApiRequest) -> ApiRequest:
        """Return ``request`` with readers that measure their time."""
        return with_timed_reader(request)

    def follow(self, request: ApiRequest, outputs: RequestOutputs, model: str, tenant: str) -> None:
        """Wait for the end of ``outputs``, which calls ``closed``. ``model`` is the name of the served model."""
        outputs.on_closed = lambda: self.closed(outputs)
        self._open += 1
        self._is_named = True
        attributes = request_attributes(request, model, tenant)
        if self.model is not None:
            attributes["gen_ai.request.model"] = self.model
        self._span.update_name(f"{attributes['gen_ai.operation.name']} {model}")
        self._span.set_attributes(attributes)

    def closed(self, outputs: RequestOutputs) -> None:
        """Add the spans of outputs that have just been closed, and end the request's span if it was answered."""
        for phase in phases_of(outputs):
            start, end = (int(seconds * 1e9) + self._offset for seconds in (phase.start, phase.end))
            span = self._tracer.start_span(phase.name, self._context, attributes=phase.attributes, start_time=start)
            span.end(max(start, end))
        self._span.set_attributes(response_attributes(outputs))
        failure = failure_of(outputs)
        if failure is not None:
            self.fail(*failure)
        self._end_one()

    def answered(self) -> None:
        """End the request's span, unless outputs are still open."""
        route = ROUTE.get()
        if route != "-":
            self._span.set_attribute("http.route", route)
            if not self._is_named:
                self._span.update_name(f"{self._method} {route}")
        if self.status:
            self._span.set_attribute("http.response.status_code", self.status)
        if self.status >= 400 and not self._has_failed:
            self.fail(str(self.status), self.status)
        self._end_one()

    def fail(self, kind: str, status: int) -> None:
        """Note that the request has failed. By the conventions for HTTP, what the client has caused (4xx) is no error."""
        from opentelemetry.trace import Status, StatusCode

        self._has_failed = True
        self._span.set_attribute("error.type", kind)
        if status >= 500 or status == CLIENT_LEFT:
            self._span.set_status(Status(StatusCode.ERROR, kind))

    def _end_one(self) -> None:
        self._open -= 1
        if not self._open:
            self._span.end()
