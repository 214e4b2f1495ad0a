"""Test one server with two arms of the embedded model: which arm answers which request, what is counted, and stop and
promote while requests stream.

.venv/bin/python -m pytest -q tests/e2e/test_experiment_server.py
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from experiments import arms, eventually

from dovetail.errors import ConfigError
from dovetail.experiment.online.routing import pick
from dovetail.experiment.online.serving import prepare_experiment
from dovetail.registry.setup import setup
from dovetail.server.launch import running_server

EXPERIMENT = {"arms": {"uncached": {"cache": "none"}}, "split": {"base": 1, "uncached": 1}}
USERS = [f"u{i}" for i in range(12)]
ARM = {user: pick(f"user={user}", {"base": 1, "uncached": 1}) for user in USERS}
LONG = {"prompt": "once upon a time", "max_tokens": 600, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    config, registry = setup(
        arguments={
            "threads": 1,
            "server": {"port": 0, "log_level": "warning"},
            "grammar": {"isolation": "thread"},
            "experiment": EXPERIMENT,
        }
    )
    with (
        running_server(config, registry, prepare=prepare_experiment) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        yield client


def ask(client: httpx.Client, user: str, **more: Any) -> str:
    body = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "user": user, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_each_user_has_an_arm_and_the_arms_answer_alike(client: httpx.Client):
    assert set(ARM.values()) == {"base", "uncached"}
    before = {name: arm["requests"].get("served", 0) for name, arm in arms(client).items()}
    texts = {ask(client, user) for user in (*USERS, *USERS)}
    assert len(texts) == 1
    for name, arm in arms(client).items():
        own = 2 * sum(ARM[user] == name for user in USERS)
        assert arm["requests"]["served"] - before[name] == own
        assert arm["state"] == "running"
        assert arm["share"] == 0.5
        assert arm["open"] == 0
        assert arm["latency_ms"]["outputs"] == arm["requests"]["served"]


def test_every_arm_is_a_config_of_its_own(client: httpx.Client):
    info = client.get("/server_info").json()
    chosen = {name: arm["resolved"]["chosen"]["cache"]["name"] for name, arm in info["engine"]["arms"].items()}
    assert chosen == {"base": "radix", "uncached": "none"}
    assert info["config"]["experiment"]["split"] == EXPERIMENT["split"]
    before = {name: arm["pid"] for name, arm in arms(client).items()}
    assert len(set(before.values())) == 2
    assert info["engine_pid"] == before["base"]


def metric(text: str, name: str, **labels: str) -> float:
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    found = re.search(rf"^{name}{{{inside}}} (\S+)$", text, re.M)
    assert found, f"{name}{{{inside}}}"
    return float(found[1])


def test_metrics_by_arm_add_up_to_the_server_s(client: httpx.Client):
    for user in USERS:
        ask(client, user)
    text = client.get("/metrics").text
    for part in ("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_request_latency"):
        whole = float(re.findall(rf"^dovetail_{part}_seconds_count (\S+)$", text, re.M)[0])
        by_arm = [metric(text, f"dovetail_arm_{part}_seconds_count", arm=arm) for arm in EXPERIMENT["split"]]
        assert sum(by_arm) == whole > 0
        assert min(by_arm) > 0
    tokens = sum(metric(text, "dovetail_arm_tokens_total", arm=arm, kind="output") for arm in EXPERIMENT["split"])
    assert float(re.findall(r"^dovetail_generated_tokens_total (\S+)$", text, re.M)[0]) == tokens
    assert metric(text, "dovetail_arm_up", arm="uncached") == 1


def test_the_page_shows_the_arms_and_needs_nothing_from_outside(client: httpx.Client):
    answer = client.get("/experiment")
    assert answer.headers["content-type"].startswith("text/html")
    assert 'http-equiv="refresh"' in answer.text
    assert not re.search(r"""(src|href)\s*=|url\(|@import|<script""", answer.text)
    for word in ("base", "uncached", "running", "50 %", '{"cache": "none"}', "Not enough data yet"):
        assert word in answer.text


def test_aborts_and_refusals_are_counted(client: httpx.Client):
    user = next(user for user in USERS if ARM[user] == "base")
    before = arms(client)["base"]
    with client.stream("POST", "/v1/completions", json={**LONG, "user": user, "rid": "ends"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert client.post("/v1/completions", json={**LONG, "user": user, "rid": "ends"}).status_code == 400
        assert client.post("/abort_request", json={"rid": "ends"}).json() == {"aborted": True}
        assert '"finish_reason":"abort"' in "".join(lines)
    with client.stream("POST", "/v1/completions", json={**LONG, "user": user}) as stream:
        next(stream.iter_lines())
    eventually(lambda: arms(client)["base"]["open"] == 0)
    after = arms(client)["base"]
    assert after["outputs"]["abort"] == before["outputs"].get("abort", 0) + 1
    assert after["abandoned"] == before["abandoned"] + 1


@pytest.mark.parametrize("path", ["/experiment/stop", "/experiment/promote"])
def test_wrong_orders_are_refused(client: httpx.Client, path: str):
    answer = client.post(path, json={"arm": "absent"})
    assert (answer.status_code, "allowed: base, uncached" in answer.text) == (400, True)
    assert client.post(path, json={}).status_code == 400


def test_promote_then_stop_while_both_arms_stream(client: httpx.Client):
    """This is the last test of this server, which ends with one arm."""
    users = {arm: next(user for user in USERS if ARM[user] == arm) for arm in ("base", "uncached")}
    ends: dict[str, str] = {}

    def stream(arm: str) -> None:
        with client.stream("POST", "/v1/completions", json={**LONG, "user": users[arm]}) as answer:
            ends[arm] = "".join(answer.iter_lines())

    threads = [threading.Thread(target=stream, args=(arm,)) for arm in users]
    for thread in threads:
        thread.start()
    eventually(lambda: all(arm["open"] == 1 for arm in arms(client).values()))
    answer = client.post("/experiment/promote", json={"arm": "base"})
    assert answer.json()["shares"] == {"base": 1.0, "uncached": 0.0}
    assert client.post("/experiment/stop", json={"arm": "uncached"}).json()["stopping"] == "uncached"
    assert client.post("/experiment/stop", json={"arm": "uncached"}).status_code == 400
    before = arms(client)
    assert before["uncached"]["state"] == "stopping"
    ask(client, users["uncached"])
    assert arms(client)["base"]["requests"]["served"] == before["base"]["requests"]["served"] + 1
    for thread in threads:
        thread.join(60)
    assert all('"finish_reason":"length"' in end and end.endswith("data: [DONE]") for end in ends.values())
    eventually(lambda: arms(client)["uncached"]["state"] == "stopped")
    assert arms(client)["uncached"]["pid"] is None
    assert client.get("/health").text == "ok"
    assert "is the last running arm" in client.post("/experiment/stop", json={"arm": "base"}).text
    text = client.get("/metrics").text
    assert (metric(text, "dovetail_arm_up", arm="uncached"), metric(text, "dovetail_arm_share", arm="base")) == (0, 1)
    ask(client, users["uncached"])


def test_an_arm_that_cannot_be_resolved_stops_the_server_before_it_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dovetail.server.client.EngineClient.start", lambda self: pytest.fail("an engine was started"))
    experiment = {"arms": {"a": {"device": "cuda:77"}}, "split": {"base": 1, "a": 1}}
    config, registry = setup(arguments={"server": {"port": 0}, "experiment": experiment})
    with (
        pytest.raises(ConfigError, match=r"arm a: device is 'cuda:77'"),
        running_server(config, registry, prepare=prepare_experiment),
    ):
        pass
