"""Test clients that leave, engines that die, and how a server ends. Nothing may hang.

.venv/bin/python -m pytest -q tests/e2e/test_server_life.py
"""

import asyncio
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import run_broken_engine, run_fake_engine, run_stuck_engine
from served import is_gone, killed_at_end

from dovetail.config import Config
from dovetail.errors import ConfigError, EngineDeadError, EngineError
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.server.client import EngineClient
from dovetail.server.launch import running_server
from dovetail.types import FinishKind

SLOW = {"prompt": "one two", "max_tokens": 2000, "cache_salt": "slow"}  # 20 ms a token: 40 s
UNHURRIED = {"backoff_seconds": 3600}
PATIENCE = 30.0  # of which a machine with other work to do may take most


def config_with(supervision: dict[str, object] | None = None, **server: object) -> Config:
    tree = {"server": {"port": 0, "log_level": "error", **server}, "supervision": supervision or {}}
    return Config.model_validate(tree)


def eventually(check: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.01)


def running(fake: httpx.Client) -> int:
    return fake.get("/server_info").json()["stats"]["running"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_client_that_leaves_frees_its_pages(fake: httpx.Client, path: str, stream: bool):
    body: dict = {"cache_salt": "slow", "stream": stream}
    body |= (
        {"messages": [{"role": "user", "content": "hi"}]}
        if "chat" in path
        else {"text" if path == "/generate" else "prompt": "one"}
    )
    body |= (
        {"sampling_params": {"max_new_tokens": 2000, "n": 3}} if path == "/generate" else {"max_tokens": 2000, "n": 3}
    )

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=fake.base_url, timeout=PATIENCE) as client:
            task = asyncio.ensure_future(client.post(path, json=body))
            while (await client.get("/server_info")).json()["stats"]["running"] != 3:
                await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(leave())
    eventually(lambda: running(fake) == 0)
    info = fake.get("/server_info").json()
    assert info["open_requests"] == info["stats"]["pages_used"] == 0


@pytest.mark.parametrize("everything", [False, True])
def test_aborted_requests_are_answered(fake: httpx.Client, everything: bool):
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(fake.post("/v1/completions", json=SLOW | {"rid": "me", "n": 2}))
    )
    thread.start()
    eventually(lambda: running(fake) == 2)
    assert fake.post("/abort_request", json={"rid": "not me"}).json() == {"aborted": False}
    body = {"abort_all": True} if everything else {"rid": "me"}
    assert fake.post("/abort_request", json=body).json() == {"aborted": "all" if everything else True}
    thread.join(PATIENCE)
    assert [choice["finish_reason"] for choice in answers[0].json()["choices"]] == ["abort", "abort"]
    assert fake.post("/abort_request", json={}).status_code == 400


def test_one_of_several_prompts_is_aborted_by_its_own_id(fake: httpx.Client):
    answers: list[httpx.Response] = []
    body = {"text": ["one", "one"], "rid": ["first", "second"], "cache_salt": "slow"}
    body |= {"sampling_params": {"max_new_tokens": 60}}
    thread = threading.Thread(target=lambda: answers.append(fake.post("/generate", json=body)))
    thread.start()
    eventually(lambda: running(fake) == 2)
    assert fake.post("/abort_request", json={"rid": "second"}).json() == {"aborted": True}
    eventually(lambda: running(fake) == 1)
    assert fake.post("/abort_request", json={"rid": "second"}).status_code == 200
    thread.join(PATIENCE)
    metas = [one["meta_info"] for one in answers[0].json()]
    assert [(meta["id"], meta["finish_reason"]["type"]) for meta in metas] == [("first", "length"), ("second", "abort")]


@pytest.fixture
def own() -> Iterator[httpx.Client]:
    """Start a server that the test may break, and whose engine is not started again while the test runs."""
    with (
        running_server(config_with(UNHURRIED), target=run_fake_engine) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        yield client


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_when_the_engine_dies_every_request_is_answered(own: httpx.Client, how: str):
    answers: list[httpx.Response] = []
    bodies = [SLOW, SLOW | {"stream": True}]
    threads = [
        threading.Thread(target=lambda b=body: answers.append(own.post("/v1/completions", json=b))) for body in bodies
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: running(own) == 2)
    if how == "kill":
        os.kill(own.get("/server_info").json()["engine_pid"], signal.SIGKILL)
    else:
        own.post("/v1/completions", json={"prompt": "x", "cache_salt": how})
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(answer.status_code for answer in answers) == [200, 503]  # the stream had begun
    assert all("the engine process has ended" in answer.text for answer in answers)
    if how == "raise":
        assert all("scripted failure" in answer.text for answer in answers)
    for method, path in [
        ("GET", "/health"),
        ("GET", "/health_generate"),
        ("POST", "/v1/completions"),
        ("POST", "/flush_cache"),
    ]:
        answer = own.request(method, path, json={"prompt": "x"} if method == "POST" else None)
        assert answer.status_code == 503, path
        assert answer.json()["error"]["message"]
    assert own.get("/server_info").json()["status"] == "restarting"
    assert own.get("/metrics").status_code == own.get("/v1/models").status_code == 200


def test_an_engine_that_fails_ends_though_its_loop_cannot_be_closed():
    with (
        running_server(config_with(UNHURRIED), target=run_stuck_engine) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        pid = client.get("/server_info").json()["engine_pid"]
        answer = client.post("/v1/completions", json={"prompt": "x", "cache_salt": "raise"})
        assert (answer.status_code, "scripted failure" in answer.text) == (503, True)
        eventually(lambda: is_gone(pid))
        for path in ("/health", "/health_generate"):
            answer = client.get(path)
            assert (answer.status_code, "scripted failure" in answer.text) == (503, True)


def test_the_client_knows_the_status_of_an_engine_that_was_killed():
    async def main() -> None:
        client = EngineClient(config_with(), run_fake_engine)
        await client.start()
        assert client.pid
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="status -9"):
            await client.stats()
        assert client.failure == "it ended with status -9"
        await client.stop()

    asyncio.run(main())


def test_an_engine_that_cannot_start_says_why():
    with pytest.raises(EngineError, match="no such device"), running_server(config_with(), target=run_broken_engine):
        pass


def test_a_port_in_use(own: httpx.Client):
    config = config_with(port=own.base_url.port)
    with (
        pytest.raises(ConfigError, match=r"server\.port.*in use.*choose another"),
        running_server(config, target=run_fake_engine),
    ):
        pass


SERVE = """
import sys; sys.path.insert(0, {here!r})
from fake_engine import run_fake_engine
from dovetail.config import Config
from dovetail.server.launch import serve
import logging; logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
if __name__ == "__main__":
    serve(Config.model_validate({{"server": {{"port": 0, "drain_seconds": {drain}}}}}), target=run_fake_engine)
"""


def start(tmp_path: Path, drain: float) -> tuple[subprocess.Popen[str], str]:
    """Start a server in a separate process, and return its URL."""
    file = tmp_path / "serve.py"
    file.write_text(SERVE.format(here=str(Path(__file__).parent), drain=drain))
    process = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    line = process.stdout.readline()
    assert "ready in" in line
    return process, line.split(" on ")[1].split(",")[0]


def post_in_thread(url: str, body: dict, answers: list[httpx.Response]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=30)))
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals):
    process, url = start(tmp_path, drain=20)
    with killed_at_end(process), httpx.Client(base_url=url, timeout=PATIENCE) as client:
        answers: list[httpx.Response] = []
        thread = post_in_thread(url, SLOW | {"max_tokens": 120}, answers)  # 2.4 s, in which it must be seen to drain
        eventually(lambda: running(client) == 1)
        pid = client.get("/server_info").json()["engine_pid"]
        process.send_signal(number)
        eventually(lambda: client.get("/health").status_code == 503)
        refused = client.post("/v1/completions", json={"prompt": "late"})
        assert (refused.status_code, "shutting down" in refused.text) == (503, True)
        thread.join(PATIENCE)
        assert answers[0].json()["usage"]["completion_tokens"] == 120
        assert process.wait(PATIENCE) == 0
        assert is_gone(pid)


def test_what_outlasts_the_drain_is_aborted(tmp_path: Path):
    process, url = start(tmp_path, drain=0.3)
    with killed_at_end(process), httpx.Client(base_url=url, timeout=PATIENCE) as client:
        answers: list[httpx.Response] = []
        thread = post_in_thread(url, SLOW, answers)
        eventually(lambda: running(client) == 1)
        process.terminate()
        thread.join(PATIENCE)
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
        assert process.wait(PATIENCE) == 0


def framed(body: bytes, chat: str = "") -> bytes:
    head = f"POST /v1/{chat}completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_connections_that_are_reset_leave_no_traceback(own: httpx.Client, caplog: pytest.LogCaptureFixture):
    """They are reset at any moment: while a body arrives, while an answer is written, between two pipelined requests."""
    prompts = (
        {"prompt": "one two " * 20_000, "max_tokens": 2},
        {"prompt": "one", "max_tokens": 500},
        SLOW | {"stream": True},
    )
    requests = [2 * framed(json.dumps(prompt).encode()) for prompt in prompts]

    def reset_some(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(6):
            request = draw.choice(requests)
            with socket.create_connection((own.base_url.host, own.base_url.port)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(request[: draw.choice([len(request), draw.randrange(len(request))])])
                time.sleep(draw.choice([0, 0.001, 0.02, 0.1]))

    threads = [threading.Thread(target=reset_some, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    eventually(lambda: own.get("/server_info").json()["open_requests"] == 0)
    assert "handler is closed" not in caplog.text
    assert "Traceback" not in caplog.text


def test_the_engine_ends_with_its_parent(tmp_path: Path):
    process, url = start(tmp_path, drain=20)
    with killed_at_end(process):
        pid = httpx.get(f"{url}/server_info", timeout=PATIENCE).json()["engine_pid"]
        process.kill()
        process.wait(PATIENCE)
        eventually(lambda: is_gone(pid))


def test_the_client_by_itself():
    async def main() -> None:
        client = EngineClient(config_with(), run_fake_engine)
        with pytest.raises(EngineDeadError, match="not been started"):
            await client.stats()
        info = await client.start()
        assert info["context_len"] == 2048
        params = SamplingParams(max_new_tokens=5)
        with client.open("a", [GenerateMsg("a", [5, 6], params, 0)]) as stream:
            outputs = [out async for batch in stream for out in batch]
        assert [token for out in outputs for token in out.token_ids] == [5, 6, 5, 6, 5]
        assert outputs[-1].finish
        assert outputs[-1].finish.kind is FinishKind.LENGTH
        with client.open("b", [GenerateMsg("b", [5], SamplingParams(max_new_tokens=100_000), 0, "slow")]) as early:
            await anext(early)
            assert (await client.stats()).running == 1
        assert (await client.stats()).running == client.num_open == 0
        assert (await client.flush_cache()).ok
        await client.stop()
        assert not client.alive
        with pytest.raises(EngineDeadError, match="stopped"):
            await client.stats()

    asyncio.run(main())


ENDLESS = """{% if messages[0].content == "loop" %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{% else %}{{ messages[0].content }}{% endif %}"""


def test_an_endless_chat_template_delays_no_other_client_and_ends_with_the_server(tmp_path: Path):
    (tmp_path / "template.jinja").write_text(ENDLESS)
    tree = {"model": {"chat_template": str(tmp_path / "template.jinja")}, "server": {"port": 0, "log_level": "error"}}
    tree["server"]["limits"] = {"template_seconds": 1}
    tree["server"]["drain_seconds"] = 0.1
    elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")  # another tenant
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    with (
        running_server(Config.model_validate(tree), target=run_fake_engine) as url,
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
        httpx.Client(base_url=url, timeout=PATIENCE, transport=elsewhere) as other,
    ):
        for one in (client, other):
            assert one.post("/v1/chat/completions", json=hi).status_code == 200
        found: list[httpx.Response] = []
        body = {"messages": [{"role": "user", "content": "loop"}]}
        thread = threading.Thread(
            target=lambda: found.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60))
        )
        thread.start()
        chats = 0
        while thread.is_alive():
            assert client.get("/health").status_code == 200
            assert other.post("/v1/chat/completions", json=hi).status_code == 200
            chats += thread.is_alive()
        assert chats > 1
        assert (found[0].status_code, "did not end within 1 s" in found[0].text) == (400, True)
        assert client.post("/tokenize", json=body).status_code == 400
        body["messages"][0]["content"] = "hi"
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        connection = socket.create_connection((client.base_url.host, client.base_url.port))
        connection.sendall(
            framed(json.dumps(body | {"messages": [{"role": "user", "content": "loop"}]}).encode(), "chat/")
        )
        assert client.get("/health").status_code == client.get("/health").status_code == 200
    with connection:
        connection.settimeout(PATIENCE)
        assert connection.recv(1000).startswith(b"HTTP/1.1 503")


def test_a_chat_template_that_cannot_be_compiled_is_an_error_of_the_start(tmp_path: Path):
    (tmp_path / "template.jinja").write_text("{{ messages | no_such_filter }}")
    tree = {"model": {"chat_template": str(tmp_path / "template.jinja")}, "server": {"port": 0}}
    with (
        pytest.raises(ConfigError, match="line 1: No filter named 'no_such_filter'"),
        running_server(Config.model_validate(tree), target=run_fake_engine),
    ):
        pass
