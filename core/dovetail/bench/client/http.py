"""Calls over HTTP."""

from __future__ import annotations

import httpx
import msgspec

from dovetail.bench.answers import Answer, Clock
from dovetail.bench.client.apis import Api
from dovetail.bench.client.events import EventLines
from dovetail.bench.client.readers import Reader
from dovetail.bench.prompts import Prompt
from dovetail.bench.records import Call

_HEADERS = {"content-type": "application/json"}
_SHOWN = 300
_encode = msgspec.json.encode


def open_client(url: str, timeout: float, api_key: str | None = None) -> httpx.AsyncClient:
    """A client that has as many connections as calls in flight; none waits for another. ``timeout`` seconds without a byte
    fail a call."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=headers, trust_env=False)


class HttpSender:
    """Makes calls of a server through an API."""

    def __init__(self, client: httpx.AsyncClient, api: Api) -> None:
        self._client = client
        self._api = api

    async def __call__(self, call: Call, prompt: Prompt, clock: Clock) -> Answer:
        """Send a call now, and read its answer to the end."""
        request, answer = self._api.request(call, prompt), Answer(sent=clock())
        try:
            body = _encode(request.body)
            async with self._client.stream("POST", request.path, content=body, headers=_HEADERS) as response:
                if response.status_code == 200:
                    await _read(response, request.reader, clock, answer)
                else:
                    answer.error = _refusal(response.status_code, await response.aread())
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}".rstrip(": ")
        except msgspec.DecodeError as error:
            answer.error = f"the server sent what is no answer: {error}"
        answer.end = clock()
        return answer


async def _read(response: httpx.Response, reader: Reader, clock: Clock, answer: Answer) -> None:
    lines = EventLines()
    async for chunk in response.aiter_bytes():
        reader.take(lines.feed(chunk), clock(), answer)
    reader.finish(answer)
    if answer.error is None and answer.finish_reason is None:
        answer.error = "the stream ended before the answer did"


def _refusal(status: int, body: bytes) -> str:
    """The message of an error answer, without what differs from call to call at its end."""
    text = body.decode("utf-8", "replace")
    try:
        given = msgspec.json.decode(body)
        error = given.get("error", given.get("detail", text)) if isinstance(given, dict) else text
        text = str(error.get("message", text) if isinstance(error, dict) else error)
    except msgspec.DecodeError:
        pass
    return f"HTTP {status}: {text[:_SHOWN]}"
