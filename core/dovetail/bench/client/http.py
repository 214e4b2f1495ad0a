"""Make calls over HTTP."""

from __future__ import annotations

import httpx
import msgspec

from dovetail.bench.answers import CallProgress, RunClock
from dovetail.bench.client.apis import ClientApi
from dovetail.bench.client.connections import ConnectionPool
from dovetail.bench.client.events import EventLines
from dovetail.bench.prompts import CallPrompt
from dovetail.bench.records import LoadCall

_SHOWN = 300
_encode = msgspec.json.encode


def open_client(url: str, timeout: float, api_key: str | None = None) -> httpx.AsyncClient:
    """Open a client for the requests that are not measured, which read what the server reports about itself and its
    counters."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(base_url=url, timeout=timeout, headers=headers, trust_env=False)


def pool_of(client: httpx.AsyncClient) -> ConnectionPool:
    """Return a pool of connections to the server of ``client``, with the same timeout and key."""
    key = client.headers.get("authorization")
    timeout = client.timeout.read
    assert timeout is not None, "open_client sets it"
    return ConnectionPool(str(client.base_url), timeout, {"authorization": key} if key else None)


class HttpSender:
    """Make calls to a server through an API."""

    def __init__(self, pool: ConnectionPool, api: ClientApi) -> None:
        self._pool = pool
        self._api = api

    async def __call__(self, call: LoadCall, prompt: CallPrompt, clock: RunClock) -> CallProgress:
        """Send a call now and read its answer to the end."""
        request, answer, lines = self._api.request(call, prompt), CallProgress(sent=clock()), EventLines()
        reader = request.reader

        def take(chunk: bytes) -> None:
            reader.take(lines.feed(chunk), clock(), answer)

        try:
            reply = await self._pool.post(request.path, _encode(request.body), take)
            if reply.status == 200:
                reader.finish(answer)
                if answer.error is None and answer.finish_reason is None:
                    answer.error = "the stream ended before the answer was complete"
            else:
                answer.error = _refusal(reply.status, reply.body)
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}".rstrip(": ")
        except msgspec.DecodeError as error:
            answer.error = f"the server sent an invalid answer: {error}"
        answer.end = clock()
        return answer


def _refusal(status: int, body: bytes) -> str:
    """Return the beginning of the message of an error answer. Failures are counted by this text, and the end of a long
    message often differs from call to call."""
    text = body.decode("utf-8", "replace")
    try:
        given = msgspec.json.decode(body)
        error = given.get("error", given.get("detail", text)) if isinstance(given, dict) else text
        text = str(error.get("message", text) if isinstance(error, dict) else error)
    except msgspec.DecodeError:
        pass
    return f"HTTP {status}: {text[:_SHOWN]}"
