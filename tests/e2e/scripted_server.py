"""Serve the pages of the package beside an API whose answers a test writes. This is a test double of the server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dovetail.server.pages.routes import FOLDER, HEADERS, PAGES

TYPES = {"html": "text/html; charset=utf-8", "css": "text/css", "svg": "image/svg+xml"}
USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
WAIT = 60.0


class ScriptedServer(ThreadingHTTPServer):
    """Answer each chat with the first of ``answers``. An answer is a list of deltas; an ``Event`` in it is awaited, "cut" breaks
    the connection, a ``dict`` with ``error`` is an event, and a pair of status and body is a refusal."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reset()

    def reset(self) -> None:
        """Serve one model, and forget answers and requests."""
        self.models: list[dict[str, Any]] = [{"id": "scripted"}]
        self.answers: list[Any] = []
        self.bodies: list[dict[str, Any]] = []

    def answer(self, *parts: Any) -> None:
        """Set the next answer. A text is a delta of content."""
        self.answers.append([{"content": part} if isinstance(part, str) and part != "cut" else part for part in parts])


class _Handler(BaseHTTPRequestHandler):
    server: Any

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._send(200, json.dumps({"data": self.server.models}).encode(), "application/json")
        name = PAGES.get(self.path)
        if name is None:
            return self._send(404, b"no such page", "text/plain")
        kind = TYPES.get(name.rpartition(".")[2], "text/javascript")
        return self._send(200, (FOLDER / name).read_bytes(), kind, HEADERS)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        answer = self.server.answers.pop(0) if self.server.answers else [{"content": "ok"}]
        if isinstance(answer, tuple):
            return self._send(answer[0], json.dumps(answer[1]).encode(), "application/json")
        self._head(200, "text/event-stream", {})
        with suppress(ConnectionError):  # the page has stopped reading
            self._stream(answer)

    def _stream(self, answer: list[Any]) -> None:
        for part in answer:
            if isinstance(part, threading.Event):
                while not part.wait(0.05):
                    self._write(": alive\n\n")
            elif part == "cut":
                return self.wfile.flush()
            elif "error" in part:
                return self._event(part)
            else:
                self._event({"choices": [{"index": 0, "delta": part, "finish_reason": None}]})
        finish = "tool_calls" if any(isinstance(part, dict) and "tool_calls" in part for part in answer) else "stop"
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        self._event({"choices": [], "usage": USAGE})
        return self._write("data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(data)}\n\n")

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _head(self, status: int, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-type": kind, "connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self._head(status, kind, {**(headers or {}), "content-length": str(len(body))})
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """Run a server in a thread."""
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(WAIT)
