"""Test a server with keys: access to each route, limits, time, accounting, in each API's own format.

Run:

.venv/bin/python -m pytest -q tests/e2e/test_tenants_server.py
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from fake_engine import run_fake_engine

from conftest import config_with
from dovetail.config.tenants import key_digest
from dovetail.interfaces.api import ApiHost
from dovetail.server.launch import running_server
from dovetail.server.tenants.host import TenantHost
from dovetail.server.tenants.keys import new_key

PATIENCE = 20.0
LIMITS = {
    "free": {},
    "other": {},
    "revoked": {},
    "few": {"requests_per_minute": 2},
    "tokens": {"tokens_per_minute": 200},
    "debtor": {"tokens_per_minute": 200},
    "wide": {"max_concurrency": 3},
    "quick": {"max_seconds": 0.2},
    "small": {"max_body_mib": 0.001},
    "leaving": {"max_concurrency": 8},
    "wild": {"requests_per_minute": 5},
    "watching": {"requests_per_minute": 2},
}
KEYS = {name: new_key() for name in (*LIMITS, "ops")}
SLOW = {"prompt": "one two", "max_tokens": 2000, "cache_salt": "slow"}  # 20 ms a token: 40 s
PAGE = "https://chat.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
FORMATS = {  # a request of each API, and where its errors have their message
    "/v1/completions": ({"prompt": "one"}, lambda body: body["error"]["message"]),
    "/v1/chat/completions": (CHAT, lambda body: body["error"]["message"]),
    "/generate": ({"text": "one"}, lambda body: body["error"]["message"]),
    "/v1/responses": ({"input": "one"}, lambda body: body["error"]["message"]),
    "/v1/messages": ({"model": "tiny", "max_tokens": 2, **CHAT}, lambda body: body["error"]["message"]),
    "/api/chat": ({"model": "tiny", "stream": False, **CHAT}, lambda body: body["error"]),
}
OPEN = {"/health", "/ping"}
POSTS = {
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/start_profile",
    "/stop_profile",
    "/reset_prefix_cache",
}
READS = {"/server_info", "/get_server_info", "/load", "/get_load", "/is_paused", "/flush_cache", "/metrics"}
ADAPTERS = {f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")}
ADMINS = POSTS | READS | ADAPTERS | {"/expert_load"}  # which a model without experts refuses


def key_file() -> dict:
    tenants = {name: {"keys": [key_digest(KEYS[name].encode())], **limits} for name, limits in LIMITS.items()}
    return {
        "tenants": tenants,
        "admins": {"ops": {"keys": [{"hash": key_digest(KEYS["ops"].encode()), "label": "pager"}]}},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys.json").write_text(json.dumps(key_file()))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    server = {
        "keys": str(folder / "keys.json"),
        "usage_log": str(folder / "usage.jsonl"),
        "max_body_mib": 1,
        "cors_origins": [PAGE],
    }
    with running_server(config_with(drain_seconds=1, **server), target=run_fake_engine) as url:
        yield url


@pytest.fixture(scope="module")
def clients(url: str) -> Iterator[dict[str, httpx.Client]]:
    with contextlib.ExitStack() as stack:
        headers = {name: {"authorization": f"Bearer {key}"} for name, key in KEYS.items()} | {"": {}}
        yield {
            name: stack.enter_context(httpx.Client(base_url=url, headers=header, timeout=PATIENCE))
            for name, header in headers.items()
        }


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.01)


def metric(clients: dict[str, httpx.Client], name: str, tenant: str) -> dict[str, float]:
    """Return the values of a family's lines of one tenant, by their other labels."""
    text = clients["ops"].get("/metrics").text
    lines = re.findall(rf"^dovetail_tenant_{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    return {
        labels.replace(f'tenant="{tenant}"', "").strip(","): float(value)
        for labels, value in lines
        if f'tenant="{tenant}"' in labels
    }


def running(clients: dict[str, httpx.Client], tenant: str) -> float:
    return metric(clients, "outputs_running", tenant)[""]


# access to routes


def test_every_route_there_is_needs_a_key(clients: dict[str, httpx.Client]):
    paths = clients[""].get("/openapi.json").json()["paths"]
    assert paths.keys() >= OPEN | ADMINS | FORMATS.keys() | {"/v1/models", "/health_generate", "/model_info"}
    for path, methods in paths.items():
        for method in methods:
            without = clients[""].request(method, path.replace("{", "").replace("}", ""))
            tenants = clients["free"].request(method, path.replace("{", "").replace("}", ""), content=b"{")
            assert without.status_code == (200 if path in OPEN else 401), (method, path, without.text)
            assert (tenants.status_code == 403) == (path in ADMINS), (method, path, tenants.text)
            if path not in OPEN:
                assert without.headers["www-authenticate"] == "Bearer"
                assert "API key" in without.text or method == "head"
    for path in READS:
        assert clients["ops"].get(path).status_code == 200


@pytest.mark.parametrize("path", FORMATS)
def test_the_key_may_be_in_either_header_and_nowhere_else(url: str, path: str):
    body, message = FORMATS[path]
    for headers in ({"authorization": f"Bearer {KEYS['free']}"}, {"x-api-key": KEYS["free"]}):
        assert httpx.post(url + path, json=body, headers=headers).status_code == 200
    for params, headers in (
        ({"api_key": KEYS["free"], "key": KEYS["free"]}, {}),
        ({}, {"cookie": f"authorization={KEYS['free']}"}),
        ({}, {"authorization": KEYS["free"]}),
        ({}, {"authorization": f"Bearer {KEYS['free']}x"}),
        ({}, {"authorization": "Bearer \u4f60\u597d".encode()}),
        ({}, {"authorization": f"Bearer {KEYS['free']}", "x-api-key": KEYS["other"]}),
    ):
        answer = httpx.post(url + path, json=body, params=params, headers=headers)
        assert answer.status_code == 401, headers
        assert "key" in message(answer.json())
        assert KEYS["free"] not in answer.text


def test_openais_client_has_its_own_errors_for_that(url: str):
    def ask(name: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS.get(name, name), max_retries=0)
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], n=1)

    ask("free")
    with pytest.raises(openai.AuthenticationError) as unknown:
        ask("unknown")
    assert unknown.value.code == "invalid_api_key"
    with contextlib.suppress(openai.RateLimitError):
        for _ in range(5):
            ask("wild")
    with pytest.raises(openai.RateLimitError) as limited:
        ask("wild")
    assert limited.value.code == "rate_limit_exceeded"
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 12


def test_anthropics_client_has_too(url: str):
    def ask(key: str) -> None:
        client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "hi"}])

    ask(KEYS["free"])
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        ask("unknown")
    assert unknown.value.body["error"]["type"] == "authentication_error"
    with contextlib.suppress(anthropic.RateLimitError):
        for _ in range(5):
            ask(KEYS["wild"])
    with pytest.raises(anthropic.RateLimitError) as limited:
        ask(KEYS["wild"])
    assert limited.value.body["error"]["type"] == "rate_limit_error"
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 12


def test_what_an_api_keeps_is_the_tenants_own(clients: dict[str, httpx.Client]):
    kept = clients["free"].post("/v1/responses", json={"input": "one"}).json()["id"]
    assert clients["free"].get(f"/v1/responses/{kept}").status_code == 200
    assert clients["other"].get(f"/v1/responses/{kept}").status_code == 404
    assert clients["other"].post("/v1/responses", json={"input": "b", "previous_response_id": kept}).status_code == 404
    assert clients["ops"].delete(f"/v1/responses/{kept}").status_code == 404


def test_a_tenants_view_has_all_that_a_host_has(clients: dict[str, httpx.Client]):
    assert not TenantHost.__abstractmethods__
    source = Path(TenantHost.__init__.__code__.co_filename).read_text()
    for name in ApiHost.__annotations__:
        assert f"self.{name} = " in source or isinstance(vars(TenantHost).get(name), property), name


# limits


@pytest.mark.parametrize("path", FORMATS)
def test_too_many_requests_are_answered_in_the_format_of_the_api(clients: dict[str, httpx.Client], path: str):
    body, message = FORMATS[path]
    answer = next(a for a in (clients["few"].post(path, json=body) for _ in range(3)) if a.status_code == 429)
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert "2 requests a minute" in message(answer.json())
    assert clients["few"].get("/v1/models").status_code == 200  # what costs nothing is not counted


def test_the_limit_of_requests_holds_before_the_body_is_read(clients: dict[str, httpx.Client]):
    answers = [clients["few"].post("/generate", content=b"x" * 2_000_000) for _ in range(3)]
    assert answers[-1].status_code == 429
    assert metric(clients, "refused_total", "few")['limit="requests"'] >= 1


def test_a_get_that_generates_counts(clients: dict[str, httpx.Client]):
    assert [clients["watching"].get("/health_generate").status_code for _ in range(3)] == [200, 200, 429]
    assert clients["watching"].get("/v1/models").status_code == 200


def test_a_malformed_request_counts(clients: dict[str, httpx.Client]):
    statuses = [clients["wild"].post("/generate", content=b"{").status_code for _ in range(8)]
    assert statuses[-1] == 429
    assert set(statuses) <= {400, 429}


def test_outputs_at_a_time(clients: dict[str, httpx.Client]):
    wide = clients["wide"]
    with wide.stream("POST", "/v1/completions", json=SLOW | {"stream": True, "n": 2}) as first:
        lines = first.iter_lines()  # keep it: closing it would close the stream
        next(lines)
        assert running(clients, "wide") == 2
        refused = wide.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert wide.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert clients["other"].post("/v1/completions", json={"prompt": ["a", "b"]}).status_code == 200
    eventually(lambda: running(clients, "wide") == 0)  # the client has left
    assert wide.post("/v1/completions", json={"prompt": ["a", "b"], "n": 1}).status_code == 200
    never = wide.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    assert never.status_code == 400
    assert never.json()["error"]["code"] == "over_limit"


@pytest.mark.parametrize(
    "body", [{"prompt": "a", "cache_salt": "status:400"}, {"prompt": "a", "cache_salt": "status:503"}]
)
def test_what_the_engine_refuses_is_given_back_and_not_charged(clients: dict[str, httpx.Client], body: dict):
    for _ in range(5):
        assert clients["wide"].post("/v1/completions", json=body).status_code == int(body["cache_salt"][-3:])
    before = metric(clients, "prompt_tokens_total", "wide")
    assert running(clients, "wide") == 0
    clients["wide"].post("/v1/completions", json=body)
    assert metric(clients, "prompt_tokens_total", "wide") == before


def test_a_request_that_is_not_started_holds_nothing(clients: dict[str, httpx.Client]):
    for _ in range(5):
        assert clients["wide"].post("/v1/completions", json={"prompt": [10**9]}).status_code == 400
        assert clients["wide"].post("/generate", json={"text": "a", "rid": ""}).status_code == 400
    assert running(clients, "wide") == 0


def test_ids_of_requests_are_the_tenants_own(clients: dict[str, httpx.Client]):
    with clients["free"].stream("POST", "/v1/completions", json=SLOW | {"stream": True, "rid": "mine"}) as stream:
        lines = stream.iter_lines()
        assert '"mine"' in next(lines)
        for _ in range(3):
            assert clients["free"].post("/v1/completions", json={"prompt": "a", "rid": "mine"}).status_code == 400
            assert clients["wide"].post("/v1/completions", json={"prompt": "a", "rid": "mine"}).status_code == 200
        assert running(clients, "free") == 1
    eventually(lambda: running(clients, "free") == 0)


def test_tokens_are_reserved_and_given_back(clients: dict[str, httpx.Client]):
    def ask(tokens: int, **more: object) -> httpx.Response:
        return clients["tokens"].post("/v1/completions", json={"prompt": [5] * 10, "max_tokens": tokens, **more})

    assert ask(150, stop_token_ids=[5]).status_code == 200  # made one token of 150
    with clients["tokens"].stream("POST", "/v1/completions", json=SLOW | {"max_tokens": 100, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert ask(150).status_code == 429
        assert ask(20).status_code == 200
    eventually(lambda: running(clients, "tokens") == 0)
    assert ask(80).status_code == 200  # of 100 reserved tokens only those that were made are gone
    refused = ask(185)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 1
    assert ask(1, n=128).status_code == 429
    assert clients["tokens"].post("/v1/completions", json={"prompt": [5] * 200}).json()["error"]["code"] == "over_limit"


def test_tokens_that_no_client_reads_are_charged(clients: dict[str, httpx.Client], url: str):
    """A client requests a stream and reads none of it."""
    made = metric(clients, "generated_tokens_total", "debtor")[""]
    body = json.dumps({"prompt": [5] * 10, "max_tokens": 190, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS['debtor']}\r\n"

    async def leave() -> None:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        await asyncio.to_thread(eventually, lambda: running(clients, "debtor") == 0)
        writer.transport.abort()

    asyncio.run(leave())
    assert metric(clients, "generated_tokens_total", "debtor")[""] - made == 190


def test_bodies_have_a_limit_of_the_tenant(clients: dict[str, httpx.Client]):
    body = {"prompt": "word " * 500}
    assert clients["small"].post("/v1/completions", json=body).status_code == 413
    assert clients["free"].post("/v1/completions", json=body).status_code == 200


def test_a_request_that_runs_too_long_ends_with_an_error(clients: dict[str, httpx.Client]):
    quick = clients["quick"]
    whole = quick.post("/v1/completions", json=SLOW)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "time_limit_exceeded")
    assert whole.headers["x-should-retry"] == "false"  # the official clients wait for this time
    assert "0.2 s" in whole.json()["error"]["message"]
    with quick.stream("POST", "/v1/completions", json=SLOW | {"stream": True}) as stream:
        *chunks, last = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert chunks
    assert last["error"]["code"] == "time_limit_exceeded"
    assert running(clients, "quick") == 0
    assert quick.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    eventually(lambda: clients["ops"].get("/server_info").json()["stats"]["running"] == 0)


def test_an_admin_ends_the_requests_of_a_tenant(clients: dict[str, httpx.Client]):
    with clients["other"].stream("POST", "/v1/completions", json=SLOW | {"stream": True, "rid": "theirs"}) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert clients["ops"].post("/abort_request", json={"rid": "unknown"}).json() == {"aborted": False}
        assert clients["ops"].post("/abort_request", json={"rid": "theirs"}).json() == {"aborted": True}
        assert any('"finish_reason":"abort"' in line for line in lines)


def test_clients_of_all_apis_that_leave_give_everything_back(clients: dict[str, httpx.Client]):
    """They leave at any moment: before the body, while the request waits, before the first token, in the stream, at
    its end."""
    asked = [
        ("/v1/completions", SLOW),
        ("/generate", {"text": "one", "cache_salt": "slow", "sampling_params": {"max_new_tokens": 2000, "n": 2}}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 900, **CHAT}),
        ("/api/chat", {"model": "tiny", **CHAT}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 900}),
    ]

    async def leave(client: httpx.AsyncClient, i: int) -> str:
        path, body = asked[i % len(asked)]
        try:
            answer = await asyncio.wait_for(client.post(path, json=body | {"stream": i % 2 == 0}), 0.01 + 0.01 * i)
        except TimeoutError:
            return "left"
        return str(answer.status_code)

    async def all_of_them() -> set[str]:
        headers = {"x-api-key": KEYS["leaving"]}
        async with httpx.AsyncClient(base_url=clients[""].base_url, headers=headers, timeout=PATIENCE) as client:
            return set(await asyncio.gather(*(leave(client, i) for i in range(40))))

    assert "left" in asyncio.run(all_of_them())  # the number of refusals depends on the load of the machine
    eventually(lambda: running(clients, "leaving") == 0)
    eventually(lambda: clients["ops"].get("/server_info").json()["open_requests"] == 0)
    assert metric(clients, "requests_total", "leaving")[""] > 5
    assert clients["leaving"].post("/generate", json={"text": "a", "sampling_params": {"n": 8}}).status_code == 200


# accounting


def test_usage_is_counted_and_logged_without_texts(clients: dict[str, httpx.Client], folder: Path):
    before = metric(clients, "generated_tokens_total", "other")[""]
    body = {"prompt": ["alpha bravo", "charlie"], "max_tokens": 3, "rid": "counted", "ignore_eos": True}
    usage = clients["other"].post("/v1/completions", json=body).json()["usage"]
    assert metric(clients, "generated_tokens_total", "other")[""] - before == usage["completion_tokens"] == 6
    text = (folder / "usage.jsonl").read_text()
    line = next(json.loads(line) for line in text.splitlines() if '"counted"' in line)
    assert line["tenant"] == "other"
    assert line["key"] == key_digest(KEYS["other"].encode())[7:15]
    assert (line["path"], line["outputs"], line["finish"]) == ("/v1/completions", 2, ["length", "length"])
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], 6)
    assert "alpha" not in text
    assert not any(key in text for key in KEYS.values())
    assert '"error":"TimeLimitError"' in text
    assert '"error":"ClientDisconnect"' in text


def test_prompts_of_refused_requests_are_not_counted(clients: dict[str, httpx.Client], folder: Path):
    body = {"prompt": "alpha bravo", "cache_salt": "status:400", "rid": "refused-one"}
    before = metric(clients, "prompt_tokens_total", "other")[""]
    assert clients["other"].post("/v1/completions", json=body).status_code == 400
    lines = (folder / "usage.jsonl").read_text().splitlines()
    line = next(json.loads(line) for line in lines if '"refused-one"' in line)
    assert (line["prompt_tokens"], line["completion_tokens"], line["error"]) == (0, 0, "RequestError")
    assert metric(clients, "prompt_tokens_total", "other")[""] == before


def test_a_full_disk_is_reported_and_fails_no_request(folder: Path):
    server = {"keys": str(folder / "keys.json"), "usage_log": "/dev/full"}
    headers = {"authorization": f"Bearer {KEYS['ops']}"}
    with (
        running_server(config_with(**server), target=run_fake_engine) as url,
        httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client,
    ):
        assert client.get("/health").text == "ok"
        for _ in range(2):
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        health = client.get("/health")
        assert (health.status_code, "/dev/full cannot be written: No space left" in health.text) == (200, True)
        assert "dovetail_usage_log_lost_lines_total 2.0" in client.get("/metrics").text


def test_metrics_have_one_label_for_each_name_in_the_file(clients: dict[str, httpx.Client]):
    before = re.search(r"^dovetail_unauthenticated_requests_total (\S+)", clients["ops"].get("/metrics").text, re.M)
    for i in range(5):
        assert httpx.get(f"{clients[''].base_url}/v1/models", headers={"x-api-key": f"guess-{i}"}).status_code == 401
    text = clients["ops"].get("/metrics").text
    after = re.search(r"^dovetail_unauthenticated_requests_total (\S+)", text, re.M)
    assert float(after[1]) - float(before[1]) == 5
    assert set(re.findall(r'tenant="([^"]*)"', text)) == KEYS.keys()


def test_a_revoked_key_is_refused_and_its_request_goes_on(clients: dict[str, httpx.Client], folder: Path):
    with clients["revoked"].stream(
        "POST", "/v1/completions", json=SLOW | {"stream": True, "max_tokens": 150}
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        changed = key_file()
        changed["tenants"]["revoked"]["keys"] = []
        (folder / "keys.json").write_text(json.dumps(changed))
        eventually(lambda: clients["revoked"].get("/v1/models").status_code == 401)
        assert clients["other"].get("/v1/models").status_code == 200
        assert list(lines)[-2] == "data: [DONE]"


# pages of other origins


def test_pages_of_origins_that_are_named_may_call(url: str):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-api-key"}
    with httpx.Client(base_url=url, headers={"origin": PAGE, "x-api-key": KEYS["free"]}) as page:
        preflight = page.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "x-api-key" in preflight.headers["access-control-allow-headers"]
        answer = page.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        unknown = page.post("/v1/completions", json={"prompt": "a"}, headers={"x-api-key": "unknown"})
        assert (unknown.status_code, unknown.headers["access-control-allow-origin"]) == (401, PAGE)
        other = page.post("/v1/completions", json={"prompt": "a"}, headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
