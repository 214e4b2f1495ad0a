"""Run a server in this process for the suite of APIs: the real application, an engine that echoes the prompt, and a
client that may disconnect."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI

from dovetail.api.offload import Parts
from dovetail.api.responses import NDJSON, SSE
from dovetail.chat.parsing import OutputParsers
from dovetail.config import Config
from dovetail.config.checkpoint import locate
from dovetail.errors import DovetailError
from dovetail.interfaces.api import Api, ApiRequest
from dovetail.messages import Command, CommandReply, EngineStats, GenerateMsg, TokenOutput
from dovetail.server.app import build_app
from dovetail.server.metrics import Metrics
from dovetail.server.outputs import RequestOutputs, RequestTerms
from dovetail.server.service import Service
from dovetail.server.streams import OutputStream
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer
from dovetail.types import FinishKind, FinishReason, TokenLogprob

MOST_TOKENS = 12
"""Maximum number of tokens that the engine generates, unless the request requires more."""
STREAMS = (SSE, NDJSON)
_HIDDEN = 8


class EchoEngine:
    """Implement ``server.engines.EngineHandle`` by echoing the prompt, one token per step.

    If ``most_steps`` is set, the engine generates nothing after that number of steps, or fails with ``death`` if that is
    set too.
    """

    failure: str | None = None
    alive = True
    restarting = stalled = False
    pid: int | None = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._running: dict[OutputStream, asyncio.Task[None]] = {}
        model = {"vocab_size": tokenizer.vocab_size}
        self.info: dict[str, Any] = {
            "context_len": 2048,
            "resolved": {"model": model, "chosen": {}},
            "embedding": {"size": _HIDDEN, "pooling": "last"},
        }
        self.most_steps: int | None = None
        self.death: DovetailError | None = None

    @property
    def num_open(self) -> int:
        """Return the number of groups of requests that are not closed yet."""
        return len(self._running)

    async def start(self) -> dict[str, Any]:
        """Return the information about the engine."""
        return self.info

    async def stop(self) -> None:
        """Do nothing."""

    async def ended(self) -> None:
        """Never return, because the engine does not end."""
        await asyncio.Event().wait()

    async def end_if_hung(self, seconds: float) -> None:
        """Do nothing."""

    def check(self, tenant: str, count: int) -> None:
        """Accept every request."""

    def open(self, group: str, msgs: Sequence[GenerateMsg]) -> OutputStream:
        """Begin to echo the prompts."""
        stream = OutputStream(group, [msg.rid for msg in msgs], self._close, lambda rid: None)
        self._running[stream] = asyncio.create_task(self._echo(stream, msgs))
        return stream

    def abort(self, group: str) -> bool:
        """Return false: requests cannot be aborted by name."""
        return False

    def abort_all(self, message: str = "") -> None:
        """Do nothing."""

    async def stats(self) -> EngineStats:
        """Return statistics that are all zero."""
        return EngineStats("")

    async def command(self, msg: Command) -> CommandReply:
        """Report success."""
        return CommandReply("", True)

    async def flush_cache(self) -> CommandReply:
        """Report success."""
        return CommandReply("", True)

    def _close(self, stream: OutputStream) -> None:
        self._running.pop(stream).cancel()

    async def _echo(self, stream: OutputStream, msgs: Sequence[GenerateMsg]) -> None:
        outputs = {msg.rid: _EchoedOutput(self._tokenizer, msg) for msg in msgs}
        step = 0
        while stream.open:
            if step == self.most_steps:
                if self.death is not None:
                    stream.fail(self.death)
                    stream.wake()
                return
            for rid in list(stream.open):
                stream.put(outputs[rid].next())
            stream.wake()
            step += 1
            await asyncio.sleep(0)


class _EchoedOutput:
    """Generate one output."""

    def __init__(self, tokenizer: Tokenizer, msg: GenerateMsg) -> None:
        self._msg = msg
        self._detokenizer = IncrementalDetokenizer(tokenizer, msg.params.stop)
        self._num_sent = 0

    def next(self) -> TokenOutput:
        msg, params = self._msg, self._msg.params
        if params.max_new_tokens == 0:
            return self._computed()
        token = msg.input_ids[self._num_sent % len(msg.input_ids)]
        self._num_sent += 1
        self._detokenizer.push([token])
        finish = None
        if self._detokenizer.matched:
            finish = FinishReason(FinishKind.STOP, self._detokenizer.matched)
        elif self._num_sent >= min(params.max_new_tokens or MOST_TOKENS, max(MOST_TOKENS, params.min_new_tokens)):
            finish = FinishReason(FinishKind.LENGTH)
        logprobs = None if params.logprobs is None else [_logprob(token, params.logprobs)]
        first = self._num_sent == 1 and params.prompt_logprobs is not None
        prompt = [_logprob(token, params.prompt_logprobs or 0, i > 0) for i, token in enumerate(msg.input_ids)]
        return TokenOutput(
            msg.rid, [token], finish, len(msg.input_ids), self._num_sent, 0, logprobs, prompt if first else None
        )

    def _computed(self) -> TokenOutput:
        msg, pooling = self._msg, self._msg.params.pooling
        finish = FinishReason(FinishKind.LENGTH)
        if pooling is None:
            return TokenOutput(msg.rid, [], finish, len(msg.input_ids))
        vector = np.arange(1, 1 + (len(pooling.token_ids) or _HIDDEN), dtype="<f4") / -8
        return TokenOutput(msg.rid, [], finish, len(msg.input_ids), pooled=vector.tobytes())


def _logprob(token: int, top: int, known: bool = True) -> TokenLogprob:
    best = tuple((token + i, -0.5 - i) for i in range(top))
    return TokenLogprob(token, -0.5 if known else None, best if known else ())


class EchoService(Service):
    """Hold a server's state. If ``refusal`` is set, every request to the engine raises it."""

    refusal: BaseException | None = None

    def submitting(self, request: ApiRequest, terms: RequestTerms | None = None) -> Parts[RequestOutputs]:
        """See ``Service.submitting``. Raises ``refusal`` if it is set."""
        if self.refusal is not None:
            raise self.refusal
        return (yield from super().submitting(request, terms))


@dataclass
class SentResponse:
    """Hold what an application has sent. ``ended`` is false if it has not sent the end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    ended: bool = False

    @property
    def body(self) -> bytes:
        """Return the whole body."""
        return b"".join(self.parts)

    @property
    def media_type(self) -> str:
        """Return the media type without parameters."""
        return self.headers.get("content-type", "").partition(";")[0]

    @property
    def streamed(self) -> bool:
        """Return true if the response is a stream."""
        return self.media_type in STREAMS

    def json(self) -> Any:
        """Return the body parsed as JSON. Raises ``ValueError``."""
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """Return the JSON of a stream's events or lines, without end markers. Raises ``ValueError`` if an event is
        incomplete or not JSON."""
        lines = self.media_type == NDJSON
        end = b"\n" if lines else b"\n\n"
        if not self.body.endswith(end):
            raise ValueError(f"the last event is incomplete: {self.body[-80:]!r}")
        data = [event if lines else _data(event) for event in self.body.split(end)]
        return [json.loads(one) for one in data if one.strip() not in (b"", b"[DONE]")]


def _data(event: bytes) -> bytes:
    return b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))


class EchoServer:
    """Run the application of one API. Its requests run in the caller's event loop. ``sampling_defaults`` are those of
    the model."""

    def __init__(self, api: Api, max_body_mib: float = 0.25, sampling_defaults: Mapping[str, Any] = {}) -> None:
        config = Config.model_validate({"server": {"max_body_mib": max_body_mib}})
        tokenizer = _tokenizer()
        self.engine = EchoEngine(tokenizer)
        self.engine.info["resolved"]["sampling_defaults"] = sampling_defaults
        self.service = EchoService(
            config, self.engine, tokenizer, Metrics({"version": "test"}), OutputParsers(tokenizer)
        )
        self.app: FastAPI = build_app(self.service, [api])

    def reset(self) -> None:
        """Refuse nothing, and let the engine generate whole outputs."""
        self.engine.most_steps = self.engine.death = self.service.refusal = None

    async def is_idle(self) -> bool:
        """Wait a short time for the engine to become idle. Return false if it still has requests."""
        for _ in range(100):
            if not self.engine.num_open:
                return True
            await asyncio.sleep(0)
        return False

    async def request(
        self, method: str, path: str, body: object = None, *, leave_after: int | None = None, seconds: float = 10.0
    ) -> SentResponse:
        """Send a request and return the answer.

        ``body`` is bytes, or a value that is sent as JSON. The client disconnects once it has received ``leave_after``
        parts of the answer's body. Raises ``TimeoutError`` if the answer has not ended after ``seconds`` seconds.
        """
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        answer, gone = SentResponse(), asyncio.Event()
        inbox = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop()
            if leave_after == 0:
                await _run_pending_tasks()
                gone.set()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            answer.ended = not message.get("more_body", False)
            if message.get("body"):
                answer.parts.append(message["body"])
            if answer.ended or (leave_after is not None and len(answer.parts) >= leave_after > 0):
                gone.set()
            await asyncio.sleep(0)

        try:
            async with asyncio.timeout(seconds):
                await self.app(_scope(method, path, len(data)), receive, send)
        except TimeoutError:
            raise TimeoutError(f"{method} {path} has not ended after {seconds:g} s") from None
        except Exception:
            if answer.status != 500:  # starlette answers 500, then raises the error again for the server's log
                raise
        return answer


async def _run_pending_tasks() -> None:
    """Let other tasks of the event loop run until they wait for something."""
    for _ in range(50):
        await asyncio.sleep(0)


def _scope(method: str, path: str, length: int) -> dict[str, Any]:
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }


@functools.cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(locate("tiny"))
