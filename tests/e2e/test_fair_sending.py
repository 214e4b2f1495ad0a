"""Test requests with more outputs than the engine takes of one client at a time: they are answered whole, end when they
are aborted, and leave the server to others.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_fair_sending.py
"""

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import httpx
import pytest
from fake_engine import run_fake_engine

from dovetail.config import Config
from dovetail.server.launch import running_server

PROXY = "127.0.0.3"
MANY = {"prompt": "one two", "max_tokens": 3, "n": 12}
SLOW = {"prompt": "one two", "max_tokens": 2000, "n": 12, "cache_salt": "slow", "rid": "many"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start a server that keeps four requests of a client in the engine and lets sixteen wait."""
    config = {
        "threads": 1,
        "server": {"port": 0, "log_level": "warning", "drain_seconds": 1, "trusted_proxies": [PROXY]},
        "scheduler": {"max_running": 2, "max_waiting": 16},
    }
    with running_server(Config.model_validate(config), target=run_fake_engine) as url:
        yield url


def client(url: str, address: str = "127.0.0.1") -> httpx.Client:
    return httpx.Client(base_url=url, timeout=30, transport=httpx.HTTPTransport(local_address=address))


def wait_for(url: str, field: str, wanted: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        info = httpx.get(f"{url}/server_info").json()
        found = info["open_requests"] if field == "open" else info["stats"][field]
        if found == wanted:
            return
        time.sleep(0.05)
    pytest.fail(f"{field} is {found}, not {wanted}")


def test_every_output_is_answered(url: str):
    with client(url) as one:
        choices = one.post("/v1/completions", json=MANY).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(12))
    assert len({choice["text"] for choice in choices}) == 1


def test_outputs_that_were_not_sent_yet_are_aborted_too(url: str):
    answers: list[httpx.Response] = []
    with client(url) as one, client(url) as two:
        thread = threading.Thread(target=lambda: answers.append(one.post("/v1/completions", json=SLOW)))
        thread.start()
        wait_for(url, "running", 4)
        assert two.post("/abort_request", json={"rid": "many"}).status_code == 200
        thread.join(20)
    assert len(answers[0].json()["choices"]) == 12
    wait_for(url, "running", 0)
    wait_for(url, "open", 0)


def test_a_client_that_leaves_takes_its_waiting_outputs_along(url: str):
    with client(url) as one, one.stream("POST", "/v1/completions", json=SLOW | {"stream": True}) as answer:
        arriving = answer.iter_bytes()  # if it is collected, the connection is closed
        next(arriving)
        wait_for(url, "running", 4)
    wait_for(url, "open", 0)
    wait_for(url, "running", 0)


def fill(greedy: httpx.Client) -> AbstractContextManager[httpx.Response]:
    return greedy.stream("POST", "/v1/completions", json=SLOW | {"stream": True})


def test_a_client_that_fills_the_queue_is_refused_and_another_is_not(url: str):
    with client(url) as greedy, client(url, "127.0.0.2") as other, fill(greedy) as answer:
        arriving = answer.iter_bytes()
        next(arriving)
        for named in ({}, {"x-forwarded-for": "198.51.100.1"}):  # a header makes no client another one
            refused = greedy.post("/v1/completions", json=MANY, headers=named)
            assert refused.status_code == 503
            assert "scheduler.max_waiting" in refused.text
        assert len(other.post("/v1/completions", json=MANY).json()["choices"]) == 12
    wait_for(url, "open", 0)


def test_clients_behind_a_trusted_proxy_are_distinguished_by_the_address_that_it_states(url: str):
    with client(url, PROXY) as greedy, client(url, PROXY) as other:
        greedy.headers["x-forwarded-for"] = "203.0.113.9, 198.51.100.1"  # the client itself has sent the first
        other.headers["x-forwarded-for"] = "198.51.100.2"
        with fill(greedy) as answer:
            arriving = answer.iter_bytes()
            next(arriving)
            same = {"x-forwarded-for": "203.0.113.10, 198.51.100.1"}
            assert greedy.post("/v1/completions", json=MANY, headers=same).status_code == 503
            assert len(other.post("/v1/completions", json=MANY).json()["choices"]) == 12
    wait_for(url, "open", 0)
