"""Test how the load client reads correct and incorrect answers: hand-written streams, split at any position, and a
server that misbehaves.

Run: python -m pytest -q tests/core/test_bench_client.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from dovetail.bench.answers import CallProgress
from dovetail.bench.client.apis import NativeClientApi, OpenAIClientApi
from dovetail.bench.client.connections import ConnectionPool
from dovetail.bench.client.events import EventLines
from dovetail.bench.client.http import HttpSender, open_client, pool_of
from dovetail.bench.client.readers import NativeReader, OpenAIReader
from dovetail.bench.client.target import DovetailTarget, find_target
from dovetail.bench.prompts import CallPrompt, first_prompt
from dovetail.bench.records import CallSampling, LoadCall, Workload
from dovetail.errors import ConfigError, EngineError


def sse(*events):
    return b"".join(b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events)


def native(count, finish=None, **meta):
    info = {"prompt_tokens": 7, "completion_tokens": count, "cached_tokens": 4, "finish_reason": finish, **meta}
    return {"text": "x" * count, "output_ids": list(range(count)), "meta_info": info}


NATIVE = sse(native(1), native(2), native(5, {"type": "length"}, spec_accept_token_num=2, spec_verify_ct=1), b"[DONE]")
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 8},
    "speculation": {"drafted_tokens": 5, "accepted_tokens": 3, "verify_steps": 2, "acceptance_rate": 0.6},
}
CHAT = sse(
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm "}, "finish_reason": None}], "usage": None},
    {"choices": [{"index": 0, "delta": {"content": "é"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": USAGE},
    b"[DONE]",
)


def read(reader, data, cuts):
    """Feed the chunks to the reader; every chunk arrives one second after the previous one."""
    answer, lines = CallProgress(), EventLines()
    for now, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(data)], strict=True)):
        reader.take(lines.feed(data[start:end]), float(now), answer)
    reader.finish(answer)
    return answer


def test_native_answers_are_the_same_however_they_are_cut():
    for cuts in ([i] for i in range(len(NATIVE))):
        answer = read(NativeReader(), NATIVE, cuts)
        assert (answer.text, answer.output_ids, answer.output_tokens) == ("xxxxx", [0, 1, 2, 3, 4], 5)
        assert (answer.prompt_tokens, answer.cached_tokens, answer.finish_reason) == (7, 4, "length")
        assert (answer.drafted, answer.accepted, answer.verify_steps, answer.error) == (None, 2, 1, None)
        assert len(answer.token_times) == 5
    first_event = NATIVE.index(b"\n\n") + 2
    assert read(NativeReader(), NATIVE, [first_event]).token_times == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_chat_answers_are_the_same_however_they_are_cut():
    for cut in range(len(CHAT)):
        answer = read(OpenAIReader(), CHAT, [cut])
        assert (answer.text, answer.finish_reason, len(answer.token_times)) == ("hm éf{}", "tool_calls", 3)
        assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (9, 6, 8)
        assert (answer.drafted, answer.accepted, answer.verify_steps) == (5, 3, 2)


def test_lines_of_other_servers():
    lines = EventLines()
    text = b": ping\r\n\r\nevent: message\r\ndata:{}\r\n\r\ndata: [DONE]\r\n\r\n"
    assert lines.feed(text[:30]) + lines.feed(text[30:]) == [b"{}", b"[DONE]"]


def test_errors_within_a_stream():
    for reader, data in (
        (NativeReader(), sse(native(1), {"error": {"message": "lost"}})),
        (OpenAIReader(), sse({"error": {"message": "lost", "type": "server_error"}})),
        (OpenAIReader(), sse({"error": "lost"})),
    ):
        assert read(reader, data, []).error == "lost"
    aborted = sse(native(1, {"type": "abort", "message": "by the operator"}), b"[DONE]")
    assert read(NativeReader(), aborted, []).error == "abort: by the operator"
    chat = sse({"choices": [{"index": 0, "text": "a", "finish_reason": "abort"}]})
    assert read(OpenAIReader(), chat, []).error == "the answer ended with 'abort'"


def test_requests_say_what_the_call_says_and_no_more():
    plain = LoadCall(id="a", group="a", token_ids=(1, 2), max_tokens=5)
    request = NativeClientApi("m").request(plain, first_prompt(plain))
    params = {"max_new_tokens": 5, "temperature": 0.0}
    assert (request.path, request.body) == (
        "/generate",
        {"input_ids": (1, 2), "sampling_params": params, "stream": True},
    )
    sampling = CallSampling(temperature=0.5, top_p=0.9, top_k=3, seed=4, ignore_eos=True, stop=("x",))
    full = plain.model_copy(update={"sampling": sampling, "json_schema": {"type": "object"}})
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4, "ignore_eos": True, "stop": ("x",)}
    body = NativeClientApi("m").request(full, CallPrompt(text="t")).body
    assert body["text"] == "t"
    assert body["sampling_params"] == {**said, "max_new_tokens": 5, "json_schema": {"type": "object"}}
    request = OpenAIClientApi("m").request(full, CallPrompt(token_ids=(1, 2)))
    assert request.path == "/v1/completions"
    assert request.body.items() >= {**said, "model": "m", "max_tokens": 5, "prompt": (1, 2), "stream": True}.items()
    assert request.body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    messages, tools = ({"role": "user", "content": "hi"},), ({"type": "function"},)
    for api in (NativeClientApi("m"), OpenAIClientApi("m")):
        request = api.request(plain, CallPrompt(messages=messages, tools=tools))
        assert (request.path, request.body["messages"], request.body["tools"]) == (
            "/v1/chat/completions",
            messages,
            tools,
        )
        assert request.body["stream_options"] == {"include_usage": True}


def test_an_api_that_tells_no_token_ids_refuses_to_continue_them():
    first = LoadCall(id="a", group="a", token_ids=(1,))
    workload = Workload(
        name="w", calls=(first, LoadCall(id="b", group="a", token_ids=(2,), parent="a", continues=True))
    )
    NativeClientApi("m").check(workload)
    with pytest.raises(ConfigError, match="use content: text, or --api native"):
        OpenAIClientApi("m").check(workload)
    OpenAIClientApi("m").check(workload.model_copy(update={"calls": (first,)}))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@contextlib.asynccontextmanager
async def server(reply, linger=0.0):
    """Answer every connection with the same bytes, then close it. Yield the URL."""

    open_now = []

    async def answer(reader, writer):
        open_now.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
            await asyncio.sleep(linger)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await asyncio.gather(*open_now)


def error_of(reply, linger=0.0, timeout=5.0):
    async def ask():
        async with server(reply, linger) as url, open_client(url, timeout) as client:
            call = LoadCall(id="a", group="a", token_ids=(1,))
            return await HttpSender(pool_of(client), NativeClientApi("m"))(call, first_prompt(call), lambda: 3.0)

    answer = asyncio.run(ask())
    assert (answer.sent, answer.end) == (3.0, 3.0)
    return answer.error


def refusal(status, body):
    return f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def test_what_goes_wrong_is_said_in_the_server_s_words():
    assert error_of(HEAD + NATIVE) is None
    assert error_of(refusal(503, b'{"error": {"message": "too many wait"}}')) == "HTTP 503: too many wait"
    assert error_of(refusal(422, b'{"detail": "no such field"}')) == "HTTP 422: no such field"
    assert error_of(refusal(502, b"<html>bad gateway")) == "HTTP 502: <html>bad gateway"
    assert error_of(HEAD + sse(native(1))) == "the stream ended before the answer was complete"
    assert error_of(HEAD) == "the stream ended before the answer was complete"
    assert "sent an invalid answer" in error_of(HEAD + sse(b"{oops"))
    assert error_of(b"") == "ConnectionError: the server closed the connection: before it answered"
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + NATIVE
    assert error_of(cut) == "ConnectionError: the server closed the connection: before its answer was complete"
    assert "does not answer in HTTP" in error_of(b"SSH-2.0-x\r\n")
    assert error_of(HEAD + sse(native(1)), linger=1.0, timeout=0.1) == "TimeoutError: no byte arrived for 0.1 s"


def test_a_server_that_is_not_there():
    async def ask():
        async with open_client("http://127.0.0.1:9", 5.0) as client:
            call = LoadCall(id="a", group="a", text="x")
            answer = await HttpSender(pool_of(client), NativeClientApi("m"))(call, first_prompt(call), lambda: 0.0)
            with pytest.raises(ConfigError, match="is the server running"):
                await find_target(client, "native")
            return answer.error

    assert asyncio.run(ask()).startswith("ConnectionRefusedError: ")


def test_a_server_of_another_kind():
    async def ask(reply, **given):
        async with server(reply) as url, open_client(url, 5.0) as client:
            await find_target(client, **given)

    for reply, api, message in (
        (refusal(404, b"nothing"), "native", "answers GET /v1/models with 404: nothing"),
        (refusal(200, b"<html>"), "openai", "with invalid JSON"),
        (refusal(200, b'{"data": []}'), "openai", "lists no model; give --served-model"),
    ):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(ask(reply, api=api))
    with pytest.raises(ConfigError, match="use --api openai"):
        asyncio.run(ask(refusal(404, b"nothing"), api="native", model="m"))


@contextlib.asynccontextmanager
async def patient(per_connection):
    """Answer with as many bytes as the request names, in chunks, and close a connection without notice after
    ``per_connection`` answers. Yield the URL and the number of connections that were made."""
    made, open_now = [], []

    async def answer(reader, writer):
        made.append(writer)
        open_now.append(asyncio.current_task())
        for _ in range(per_connection):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split()[0])
            count = int(await reader.readexactly(size))
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(count):
                writer.write(b"1\r\nx\r\n")
                await asyncio.sleep(0.001)
            writer.write(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def guarded(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answer(reader, writer)
        writer.close()

    listening = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/base", made
    finally:
        listening.close()
        await asyncio.gather(*open_now)


async def ask(pool, count):
    got = []
    reply = await pool.post("/x", str(count).encode(), got.append)
    assert (reply.status, b"".join(got)) == (200, b"x" * count)


def test_connections_are_used_again():
    async def run():
        async with patient(1000) as (url, made):
            with contextlib.closing(ConnectionPool(url, 5.0)) as pool:
                for count in (3, 0, 7):
                    await ask(pool, count)
                assert len(made) == 1
                await asyncio.gather(*(ask(pool, count) for count in range(6)))
                assert len(made) == 6
                await asyncio.gather(*(ask(pool, count) for count in range(6)))
                assert len(made) == 6

    asyncio.run(run())


def test_a_connection_that_was_closed_at_rest_is_made_again():
    async def run():
        async with patient(2) as (url, made):
            with contextlib.closing(ConnectionPool(url, 5.0)) as pool:
                for count in range(7):
                    await ask(pool, count)
                assert len(made) == 4

    asyncio.run(run())


def test_what_the_reader_raises_ends_the_request():
    async def run():
        def refuse(chunk):
            raise KeyError("oh")

        async with patient(1000) as (url, made):
            with contextlib.closing(ConnectionPool(url, 5.0)) as pool:
                with pytest.raises(KeyError, match="oh"):
                    await pool.post("/x", b"3", refuse)
                await ask(pool, 2)
                assert len(made) == 2

    asyncio.run(run())


def test_other_tasks_are_not_held_up_by_a_request_that_is_given_up():
    async def run():
        async with patient(1000) as (url, _):
            with contextlib.closing(ConnectionPool(url, 5.0)) as pool:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(ask(pool, 2000), 0.05)
                await ask(pool, 2)

    asyncio.run(run())


def test_a_server_that_goes_away_tells_no_totals_and_is_named_where_it_is_needed():
    async def ask():
        async with open_client("http://127.0.0.1:9", 5.0) as client:
            target = DovetailTarget(client=client, api=NativeClientApi("m"), name="m", vocabulary=None)
            assert await target.counters() is None  # the measurements are kept
            with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9.* no longer answers"):
                await target.flush()

    asyncio.run(ask())
