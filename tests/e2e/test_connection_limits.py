"""Test what a connection may hold of the server: each test opens connections, sends what a hostile client would, and
checks which answers come, which connections are closed and what is buffered.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_connection_limits.py
"""

import contextlib
import gc
import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from fake_engine import run_fake_engine
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from conftest import config_with
from dovetail.server import connections
from dovetail.server.launch import running_server
from dovetail.server.protocol import MAX_PIPELINED, BoundedProtocol

LIMITS = {
    "connections": 12,
    "connections_per_address": 8,
    "header_kib": 8,
    "header_seconds": 1.5,
    "body_seconds": 1.5,
    "idle_seconds": 4,
}
HALF = b"GET /health HTTP/1.1\r\nhost: lo"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
SLOW = b'{"prompt": "one two", "max_tokens": 2000, "cache_salt": "slow", "stream": true}'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = config_with(limits=LIMITS, drain_seconds=1)
    with running_server(config, target=run_fake_engine) as url:
        yield url


def connect(url: str, address: str = "127.0.0.1") -> socket.socket:
    parts = httpx.URL(url)
    return socket.create_connection((parts.host, parts.port), timeout=20, source_address=(address, 0))


def post(path: str, body: bytes, more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def rest(connection: socket.socket) -> bytes:
    """Return everything up to the end of the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 20):
            data += more
    return data


def status_of(data: bytes) -> int:
    return int(data.split(b" ", 2)[1]) if data else 0


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert holds()


def cycles() -> int:
    """Return the number of requests that the server holds, which runs in this process."""
    gc.collect()
    return sum(isinstance(thing, RequestResponseCycle) for thing in gc.get_objects())


def open_protocols() -> list[BoundedProtocol]:
    gc.collect()
    return [p for p in gc.get_objects() if isinstance(p, BoundedProtocol) and not p.transport.is_closing()]


def test_pipelined_requests_are_bounded_and_then_answered(url: str):
    """Requests that wait behind a slow one are not all parsed: earlier, 25 MiB of them took 2 GB and were kept."""
    with connect(url) as connection:
        connection.sendall(post("/v1/completions", SLOW))
        connection.recv(100)  # it streams
        connection.settimeout(1)
        sent = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < 30 * 2**20:
                sent += connection.send(HEALTH * 2000)
        assert sent < 20 * 2**20  # what the system's buffers hold
        assert cycles() <= MAX_PIPELINED + 8
    eventually(lambda: cycles() <= 8)


def test_a_few_pipelined_requests_are_answered_in_order(url: str):
    with connect(url) as connection:
        last = b"GET /nothing HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        connection.sendall(HEALTH * 5 + post("/v1/completions", b'{"prompt": "one", "max_tokens": 1}') + last)
        answers = rest(connection).split(b"HTTP/1.1 ")[1:]
    assert [int(answer[:3]) for answer in answers] == [200] * 6 + [404]


def test_a_client_that_leaves_with_requests_in_the_pipeline_is_noticed(url: str):
    """Reading is paused then, so that the end of the connection is not read."""
    with connect(url) as connection:
        connection.sendall(post("/v1/completions", SLOW) + HEALTH * 3)
        connection.recv(100)
    eventually(lambda: httpx.get(f"{url}/server_info").json()["open_requests"] == 0)


def test_half_sent_headers_are_answered_with_408_and_leave_health_alone(url: str):
    held = [connect(url, f"127.0.0.{i}") for i in (2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4)]
    held += [connect(url, "127.0.0.5") for _ in range(30)]
    for connection in held:
        with contextlib.suppress(ConnectionError):
            connection.sendall(HALF)
    assert httpx.get(f"{url}/health").status_code == 200  # an older connection was closed for it
    statuses = {status_of(rest(connection)) for connection in held}
    assert statuses <= {503, 408, 0}
    assert statuses & {503}
    assert statuses & {408}
    for connection in held:
        connection.close()


def test_one_address_cannot_close_the_connections_of_another(url: str):
    with connect(url, "127.0.0.1") as patient:
        patient.sendall(HALF)
        held = [connect(url, "127.0.0.2") for _ in range(20)]
        patient.sendall(b"calhost\r\n\r\n")
        assert status_of(patient.recv(1000)) == 200
        for connection in held:
            connection.close()


def test_when_every_connection_streams_health_is_answered_and_others_get_503(url: str):
    held = [connect(url, "127.0.0.2") for _ in range(8)]
    try:
        for connection in held:
            connection.sendall(post("/v1/completions", SLOW))
            assert status_of(connection.recv(100)) == 200
        with connect(url, "127.0.0.2") as extra:
            extra.sendall(HEALTH)
            assert status_of(extra.recv(1000)) == 200
            extra.sendall(post("/v1/completions", b'{"prompt": "one", "max_tokens": 1}'))
            answer = rest(extra)
            assert status_of(answer) == 503
            assert b"retry-after" in answer
        body = {"prompt": "one", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200  # another address
    finally:
        for connection in held:
            connection.close()
    eventually(lambda: httpx.get(f"{url}/server_info").json()["open_requests"] == 0)
    shed = httpx.get(f"{url}/metrics").text
    assert 'dovetail_connections_shed_total{reason="too many connections"}' in shed


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing"])
def test_a_body_that_does_not_arrive_holds_no_connection(url: str, path: str):
    """Whether the request is waited for or was answered already, as without a key."""
    with connect(url) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n".encode())
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 20:
                connection.sendall(b" ")
                time.sleep(0.1)
        assert time.monotonic() - start < 15  # 100 s and more
        assert status_of(rest(connection)) in (0, 404, 408)


def test_an_answer_before_the_body_is_read_keeps_the_connection(url: str):
    with connect(url) as connection:
        whole = post("/nothing", b"x" * 1000)
        connection.sendall(whole[:-500])
        assert status_of(connection.recv(1000)) == 404
        connection.sendall(whole[-500:] + HEALTH)
        assert status_of(connection.recv(1000)) == 200


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_headers_that_are_too_large_are_answered_with_431(url: str, end: bytes):
    """Also if they are complete: they are read at once."""
    with connect(url) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * 10_000 + end)
        assert status_of(rest(connection)) == 431


def test_an_idle_connection_is_closed(url: str):
    with connect(url) as connection:
        connection.sendall(HEALTH)
        assert rest(connection).count(b"200 OK") == 1


def test_addresses_of_one_client_count_together():
    assert connections.place_of("2001:db8::1") == connections.place_of("2001:db8::ffff:2") == "2001:db8::/64"
    assert connections.place_of("::ffff:10.0.0.1") == connections.place_of("10.0.0.1") == "10.0.0.1"
    assert connections.place_of("2001:db8:0:1::1") != connections.place_of("2001:db8::1")


def test_every_connection_is_forgotten(url: str):
    eventually(lambda: len(open_protocols()) == 0)
