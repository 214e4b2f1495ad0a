"""Test that each request that has ended is one line of the log, without its contents.

.venv/bin/python -m pytest -q tests/e2e/test_request_log.py
"""

import logging
import re
import time
from collections.abc import Iterator

import httpx
import pytest

from conftest import config_with
from dovetail.server.launch import running_server

LINE = re.compile(
    r"(?P<rid>\S+|'.*') tenant=(?P<tenant>\S+) route=(?P<route>\S+) prompt=(?P<prompt>\d+) cached=(?P<cached>\d+) "
    r"completion=(?P<completion>\d+) queue=(?P<queue>[\d.]+) ttft=(?P<ttft>[\d.]+|-) total=(?P<total>[\d.]+) "
    r"status=(?P<status>\d+) finish=(?P<finish>\S+)"
)
SECRET = "a very secret prompt"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from fake_engine import run_fake_engine

    with running_server(config_with(max_seconds=1.0), target=run_fake_engine) as url:
        yield url


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="dovetail.requests")
    return caplog


def one(log: pytest.LogCaptureFixture) -> dict[str, str]:
    """Wait for the only line and return its fields."""
    deadline = time.monotonic() + 10
    while not log.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = log.messages
    assert len(lines) == 1, lines
    assert SECRET not in lines[0]
    found = LINE.fullmatch(lines[0])
    assert found, lines[0]
    return found.groupdict()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line(url: str, log: pytest.LogCaptureFixture, stream: bool) -> None:
    body = {"prompt": SECRET, "max_tokens": 5, "rid": f"mine-{stream}", "stream": stream, "n": 2}
    started = time.monotonic()
    httpx.post(f"{url}/v1/completions", json=body)
    fields = one(log)
    seconds = time.monotonic() - started  # the line is written after the answer
    assert fields["rid"] == f"mine-{stream}"
    assert (fields["tenant"], fields["route"], fields["status"], fields["finish"]) == (
        "-",
        "/v1/completions",
        "200",
        "length",
    )
    assert (int(fields["prompt"]) > 0, fields["completion"]) == (True, "10")
    assert 0 <= float(fields["ttft"]) <= float(fields["total"]) <= seconds + 0.01


@pytest.mark.parametrize(
    ("extra", "status", "finish"),
    [
        ({"cache_salt": "status:400"}, "400", "RequestError"),
        ({"cache_salt": "status:503"}, "503", "QueueFullError"),
        ({"cache_salt": "slow", "max_tokens": 2000}, "504", "TimeLimitError"),
    ],
)
def test_a_failure_has_its_status(
    url: str, log: pytest.LogCaptureFixture, extra: dict, status: str, finish: str
) -> None:
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": SECRET, "max_tokens": 5, **extra}, timeout=20)
    fields = one(log)
    assert (str(answer.status_code), fields["status"], fields["finish"]) == (status, status, finish)


def test_a_client_that_leaves_is_logged_and_ids_cannot_forge_lines(url: str, log: pytest.LogCaptureFixture) -> None:
    body = {"prompt": SECRET, "max_tokens": 2000, "cache_salt": "slow", "stream": True, "rid": "x\n2026 forged line"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        next(response.iter_bytes())
    fields = one(log)
    assert (fields["status"], fields["finish"]) == ("499", "disconnect")
    assert fields["rid"] == "'x\\n2026 forged line'"


def test_probes_and_servers_without_a_log_write_nothing(url: str, log: pytest.LogCaptureFixture) -> None:
    from fake_engine import run_fake_engine

    assert httpx.get(f"{url}/health_generate").status_code == 200
    with running_server(config_with(log_requests=False), target=run_fake_engine) as silent:
        httpx.post(f"{silent}/v1/completions", json={"prompt": SECRET, "max_tokens": 5})
    assert log.messages == []
