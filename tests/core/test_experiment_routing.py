"""Test which arm a key is routed to, and which key a request has.

.venv/bin/python -m pytest -q tests/core/test_experiment_routing.py
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from dovetail.experiment.online.routing import RememberRequest, pick, request_key, uniform

KEYS = [f"user={i}" for i in range(4000)]


def test_the_draw_is_the_same_in_every_process():
    script = "from dovetail.experiment.online.routing import pick; print([pick(f'k{i}', {'a': 1, 'b': 2}) for i in range(20)])"
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        for seed in ("1", "2")
    ]
    here = str([pick(f"k{i}", {"b": 2, "a": 1}) for i in range(20)])  # nor does their order count
    assert {run.stdout.strip() for run in runs} == {here}


def test_it_never_changes():
    """A release that moved users between arms would spoil every running experiment."""
    assert [pick(f"k{i}", {"a": 1, "b": 2}) for i in range(12)] == list("ababbbbbaaba")
    assert uniform("k") == pytest.approx(0.6731383, abs=1e-6)


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 90, "b": 9, "c": 1}, {"a": 0.3, "b": 0.7}])
def test_shares_are_as_the_weights(weights: dict[str, float]):
    drawn = Counter(pick(key, weights) for key in KEYS)
    for name, weight in weights.items():
        p = weight / sum(weights.values())
        assert abs(drawn[name] - p * len(KEYS)) < 4 * (len(KEYS) * p * (1 - p)) ** 0.5


def test_only_the_keys_of_an_arm_that_leaves_move():
    weights = {"a": 1.0, "b": 2.0, "c": 3.0}
    before = {key: pick(key, weights) for key in KEYS}
    after = {key: pick(key, weights | {"b": 0.0}) for key in KEYS}
    assert all(after[key] == before[key] for key in KEYS if before[key] != "b")
    assert {after[key] for key in KEYS} == {"a", "c"}


def key_of(source: str, body: bytes = b"", headers: dict[str, str] | None = None, client: Any = ("9.8.7.6", 1)) -> str:
    found: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        found.append(request_key(source))

    messages = [{"type": "http.request", "body": bytes([byte]), "more_body": True} for byte in body]
    messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None: ...

    pairs = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "headers": pairs, "client": client}
    asyncio.run(RememberRequest(app, source)(scope, receive, send))
    return found[0]


def test_the_key_of_a_request():
    assert key_of("user", b'{"prompt": "x", "user": "ann"}') == "user=ann"
    assert key_of("header:X-Session", headers={"x-session": "s1"}) == "header:X-Session=s1"
    assert key_of("address") == "address=9.8.7.6"
    assert key_of("address", client=None) == ""


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"user": 3}', b'{"user": null}', b'{"user": ""}', b"{}", b"\xff"])
def test_without_its_key_the_address_counts(body: bytes):
    assert key_of("user", body) == key_of("header:X-Session", body) == "address=9.8.7.6"


def test_outside_of_a_request_there_is_no_key():
    assert request_key("user") == ""


def test_long_keys_are_kept_short_and_apart():
    long = [key_of("header:x", headers={"x": "a" * 5000 + end}) for end in "bc"]
    assert len(set(long)) == 2
    assert max(map(len, long)) <= 128
