"""Test arms that die, shadows, and the end of a server, with engines that repeat the prompt (``fake_engine``).

.venv/bin/python -m pytest -q tests/e2e/test_experiment_life.py
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from experiments import arms, eventually
from fake_engine import run_broken_engine, run_fake_engine

from dovetail.config import Config
from dovetail.errors import EngineError
from dovetail.experiment.online.routing import pick
from dovetail.experiment.online.serving import prepare_experiment
from dovetail.registry.setup import setup
from dovetail.server.engine_process import Endpoints, EngineTarget
from dovetail.server.launch import running_server

SLOW = {"prompt": "one two", "max_tokens": 2000, "cache_salt": "slow"}  # 20 ms a token
HALF = {"base": 1, "b": 1}
USER = {arm: next(u for u in map(str, range(99)) if pick(f"user={u}", HALF) == arm) for arm in HALF}


def run_first_alone(config: Config, endpoints: Endpoints) -> None:
    """Run a process that starts with the settings of the base alone."""
    (run_broken_engine if config.threads == 7 else run_fake_engine)(config, endpoints)


@contextmanager
def server(
    monkeypatch: pytest.MonkeyPatch,
    target: EngineTarget = run_fake_engine,
    supervision: dict[str, Any] | None = None,
    **experiment: Any,
) -> Iterator[httpx.Client]:
    monkeypatch.setattr(
        "dovetail.experiment.online.serving.check_arms", lambda arms: None
    )  # the resolved components are not those that run
    arguments = {
        "server": {
            "port": 0,
            "log_level": "error",
            "drain_seconds": 1,
        },
        "supervision": supervision or {"backoff_seconds": 3600},
        "experiment": {"arms": {"b": {"threads": 7}}, **experiment},
    }
    config, registry = setup(arguments=arguments)
    with (
        running_server(config, registry, target=target, prepare=prepare_experiment) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def post(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "one two", "max_tokens": 4, **body})


def test_an_arm_that_dies_leaves_its_share_to_the_others_until_none_is_left(monkeypatch: pytest.MonkeyPatch):
    with server(monkeypatch, split=HALF) as client:
        answers: dict[str, httpx.Response] = {}
        threads = [
            threading.Thread(
                target=lambda a=arm: answers.update({a: post(client, **SLOW | {"max_tokens": 150}, user=USER[a])})
            )
            for arm in HALF
        ]
        for thread in threads:
            thread.start()
        eventually(lambda: all(arm["open"] == 1 for arm in arms(client).values()))
        os.kill(arms(client)["b"]["pid"], signal.SIGKILL)
        for thread in threads:
            thread.join(30)
        assert {arm: answer.status_code for arm, answer in answers.items()} == {"base": 200, "b": 503}
        assert "the engine process has ended" in answers["b"].text
        now = arms(client)
        assert (now["b"]["state"], now["b"]["share"], now["base"]["share"]) == ("restarting", 0, 1)
        assert now["b"]["errors"] == {"503": 1}
        health = client.get("/health")
        assert health.status_code == 200
        assert (
            health.text
            == "ok, but an arm has ended (arm b: it ended with status -9); the other arms serve its requests"
        )
        assert "Its process has ended: it ended with status -9" in client.get("/experiment").text
        assert client.get("/metrics").status_code == 200
        assert client.post("/flush_cache").status_code == 200
        assert all(post(client, user=user).status_code == 200 for user in USER.values())
        assert client.post("/experiment/promote", json={"arm": "b"}).status_code == 400
        os.kill(now["base"]["pid"], signal.SIGKILL)
        eventually(lambda: client.get("/health").status_code == 503)
        answer = post(client, user=USER["base"])
        assert (answer.status_code, "arm base: it ended" in answer.text) == (503, True)
        assert client.get("/server_info").json()["status"] == "restarting"
        assert client.get("/experiment").status_code == client.get("/metrics").status_code == 200


def test_an_arm_that_dies_is_started_again_and_gets_its_share_back(monkeypatch: pytest.MonkeyPatch):
    with server(monkeypatch, supervision={"backoff_seconds": 0.2}, split=HALF) as client:
        first = arms(client)["b"]["pid"]
        os.kill(first, signal.SIGKILL)
        eventually(lambda: arms(client)["b"]["state"] == "restarting")
        assert post(client, user=USER["b"]).status_code == 200
        eventually(lambda: arms(client)["b"]["state"] == "running")
        assert (arms(client)["b"]["share"], client.get("/health").text) == (0.5, "ok")
        assert arms(client)["b"]["pid"] != first
        assert "dovetail_engine_restarts_total 1.0" in client.get("/metrics").text


def test_a_promoted_arm_that_dies_is_not_the_end(monkeypatch: pytest.MonkeyPatch):
    with server(monkeypatch, split={"base": 1, "b": 0}) as client:
        assert client.post("/experiment/promote", json={"arm": "b"}).status_code == 200
        assert post(client, cache_salt="exit").status_code == 503
        assert post(client).status_code == 200
        assert arms(client)["base"]["share"] == 1


def shadow_of(client: httpx.Client) -> dict[str, Any]:
    return client.get("/experiment.json").json()["shadow"]


def test_a_shadow_answers_too_and_no_client_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    shadow = {"arm": "b", "percent": 100, "tokens_per_minute": 200, "keep_texts": True}
    with server(monkeypatch, shadow=shadow) as client:
        text = post(client, rid="r1").json()["choices"][0]["text"]
        eventually(lambda: shadow_of(client)["outcomes"].get("equal") == 1)
        (one,) = shadow_of(client)["compared"]
        assert (one["rid"], one["divergence"], one["primary"]) == ("r1", None, one["shadow"])
        assert one["primary"]["text"] == text
        now = arms(client)
        assert (now["base"]["requests"], now["b"]["requests"]) == ({"served": 1}, {"shadow": 1})
        assert (now["base"]["share"], now["b"]["share"]) == (1, 0)
        assert "equal <b>1</b>" in client.get("/experiment").text
        assert 'dovetail_shadow_outcomes_total{outcome="equal"} 1.0' in client.get("/metrics").text

        body = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 25, "stop": ["two"], "rid": "r2"}
        chat = client.post("/v1/chat/completions", json=body)  # the server finds the stop string, not the engine
        assert chat.json()["choices"][0]["finish_reason"] == "stop"
        eventually(lambda: shadow_of(client)["outcomes"].get("equal") == 2)
        assert shadow_of(client)["compared"][0]["rid"] == "r2"
        assert shadow_of(client)["compared"][0]["primary"]["tokens"] < 25

        assert post(client, **SLOW | {"max_tokens": 60}).status_code == 200  # 1.2 s, and as long again for the shadow
        assert client.get("/server_info").json()["open_requests"] == 0
        assert arms(client)["b"]["open"] == 1
        assert post(client, max_tokens=300).status_code == 200  # more than a minute's budget
        assert shadow_of(client)["outcomes"]["dropped_budget"] == 1
        eventually(lambda: shadow_of(client)["outcomes"]["equal"] == 3)
        client.post("/experiment/promote", json={"arm": "b"})
        assert post(client).status_code == 200
        assert arms(client)["b"]["requests"]["served"] == 1
        assert shadow_of(client)["outcomes"]["sent"] == 3


def test_a_shadow_that_dies_disturbs_no_request(monkeypatch: pytest.MonkeyPatch):
    with server(monkeypatch, shadow={"arm": "b", "percent": 100, "tokens_per_minute": 10_000}) as client:
        os.kill(arms(client)["b"]["pid"], signal.SIGKILL)
        eventually(lambda: arms(client)["b"]["state"] == "restarting")
        assert post(client).status_code == 200
        assert shadow_of(client)["outcomes"] == {"dropped_arm": 1}
        assert "arm b" in client.get("/health").text


def test_a_server_that_cannot_start_an_arm_says_which_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch):
    before = set(multiprocessing.active_children())  # other tests share a server for the whole run
    with (
        pytest.raises(EngineError, match=r"arm b: the engine did not start: .*no such device"),
        server(monkeypatch, target=run_first_alone, split=HALF),
    ):
        pass
    assert set(multiprocessing.active_children()) <= before
