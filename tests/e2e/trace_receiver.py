"""Receive traces by OTLP over HTTP on the loopback interface, for tests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class TraceReceiver:
    """Hold the spans that have arrived. ``raw`` are all bytes, ``resources`` the attributes of the senders."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        self.paths: set[str] = set()
        self.resources: list[dict[str, Any]] = []

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.raw += body
        self.paths.add(path)
        for group in request.resource_spans:
            self.resources.append(values(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def trace(self, trace_id: str) -> dict[str, list[Span]]:
        """Wait for the root of a trace, and return its spans by their names; the root's is ``root``."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            spans = [span for span in self.spans if span.trace_id.hex() == trace_id]
            root = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
            if root:
                named: dict[str, list[Span]] = {"root": root}
                for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
                    if span is not root[0]:
                        named.setdefault(span.name, []).append(span)
                return named
            time.sleep(0.02)
        raise AssertionError(f"no span of trace {trace_id} has arrived; there are {self.spans}")


def values(owner: Any) -> dict[str, Any]:
    """Return the attributes of a span or resource."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {item.key: plain(item.value) for item in owner.attributes}


@contextmanager
def trace_receiver() -> Iterator[tuple[TraceReceiver, str]]:
    """Yield a receiver and its URL."""
    receiver = TraceReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
