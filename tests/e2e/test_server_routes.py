"""Test the routes that clients of SGLang and vLLM, and operators, call besides the APIs.

.venv/bin/python -m pytest -q tests/e2e/test_server_routes.py
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import config_with
from dovetail.config import Config
from dovetail.server.launch import running_server

KEYS = """
tenants: {acme: {keys: ["sha256:%s"]}}
admins: {root: {keys: ["sha256:%s"]}}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a fake server whose model has several names."""
    from fake_engine import run_fake_engine

    folder = tmp_path_factory.mktemp("profiles")
    tree = config_with(profile_dir=str(folder), profile_seconds=5).model_dump()
    tree["metrics"] = {"expert_load": "experts"}
    tree["model"] = {
        "path": "tiny",
        "served_name": ("mine", "second"),
        "aliases": {"claude-*": "mine", "gpt-?": "second"},
    }
    with running_server(
        Config.model_validate({k: tree[k] for k in ("model", "server", "metrics", "threads")}), target=run_fake_engine
    ) as url:
        yield url


@pytest.fixture(scope="module")
def server(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


def completion(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "a b c", "max_tokens": 4, **more}


def test_every_name_and_alias_reaches_the_model(server: httpx.Client) -> None:
    for name in ("mine", "second", "default", "claude-opus-9", "gpt-5", ""):
        assert server.post("/v1/completions", json=completion(name)).status_code == 200, name
    for name in ("tiny", "my-claude-opus", "gpt-55"):
        answer = server.post("/v1/completions", json=completion(name))
        assert answer.status_code == 404, name
        message = f"the model '{name}' does not exist; this server serves 'mine', 'second', 'claude-*' (alias), 'gpt-?' (alias)"
        assert answer.json()["error"]["message"] == message
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["mine", "second"]
    assert server.get("/v1/models/second").json()["id"] == "second"
    for route in ("/api/tags", "/api/ps"):  # Ollama's, whose clients show these names and then send them
        names = [entry["model"] for entry in server.get(route).json()["models"]]
        assert names == ["mine:latest", "second:latest"]
        body = {"prompt": "a", "stream": False, "options": {"num_predict": 2}}
        assert all(server.post("/api/generate", json={"model": name, **body}).status_code == 200 for name in names)


def test_an_alias_needs_a_target_that_is_served() -> None:
    with pytest.raises(ValueError, match="allowed: tiny, default"):
        Config.model_validate({"model": {"path": "tiny", "aliases": {"x-*": "other"}}})


def test_the_load_of_experts_is_a_table_and_metrics(server: httpx.Client) -> None:
    """The fake engine's layers have two experts each."""
    first, second = server.get("/expert_load").json()["layers"]
    assert first == {"layer": 0, "balancedness": pytest.approx(2 / 3), "tokens": [3, 1]}
    assert second == {"layer": 2, "balancedness": 1.0, "tokens": [0, 0]}
    lines = server.get("/metrics").text.splitlines()
    assert 'dovetail_expert_tokens_total{expert="0",layer="0"} 3.0' in lines
    assert 'dovetail_expert_tokens_total{expert="1",layer="2"} 0.0' in lines
    assert 'dovetail_expert_balancedness{layer="2"} 1.0' in lines


def test_head_is_answered_where_get_is(server: httpx.Client) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    plain = [path for path, methods in paths.items() if "get" in methods and "{" not in path]
    assert len(plain) > 12
    for path in (*plain, "/v1/models/mine"):
        got, head = server.get(path), server.head(path)
        assert (head.status_code, head.content) == (got.status_code, b""), path
        assert head.headers["content-type"] == got.headers["content-type"], path


def test_info_has_the_fields_of_sglang_and_vllm(server: httpx.Client) -> None:
    info = server.get("/get_model_info").json()
    assert info == server.get("/model_info").json()
    assert info["is_generation"] is True
    assert {"model_path", "tokenizer_path", "preferred_sampling_params", "weight_version", "architectures"} <= set(info)
    info = server.get("/get_server_info").json()
    assert info["internal_states"][0]["num_running_reqs"] == 0
    assert info["max_total_num_tokens"] == 64 * 16
    assert info["status"] == "ready"
    assert info["sampling_defaults"] == {}
    assert server.get("/ping").status_code == server.post("/ping").status_code == 200
    assert server.get("/version").json() == {"version": info["version"]}
    assert server.get("/load").json() == {"server_load": 0, "running": 0, "waiting": 0}
    assert server.get("/get_load").json() == [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    tokenizer = server.get("/tokenizer_info").json()
    assert tokenizer["chat_template"] == server.get("/model_info").json()["chat_template"]
    assert {"tokenizer_class", "eos_token"} <= set(tokenizer)


def test_a_pause_holds_requests_and_keeps_their_streams_open(server: httpx.Client, url: str) -> None:
    assert server.get("/is_paused").json() == {"is_paused": False}
    assert server.post("/pause_generation").status_code == 200
    try:
        assert server.get("/health").text == "paused"
        assert server.get("/health_generate").status_code == 503
        assert server.get("/get_server_info").json()["status"] == "paused"
        answers: dict[str, httpx.Response] = {}

        def ask(rid: str) -> None:
            body = completion("mine", rid=rid)
            answers[rid] = httpx.post(f"{url}/v1/completions", json=body, timeout=30)

        threads = [threading.Thread(target=ask, args=(rid,)) for rid in ("goes-on", "ends")]
        for thread in threads:
            thread.start()
        while server.get("/load").json()["server_load"] < 2:
            time.sleep(0.01)
        assert server.post("/abort_request", json={"rid": "ends"}).json() == {"aborted": True}
        threads[1].join(10)
        assert "ends" in answers
        assert "goes-on" not in answers
        assert server.get("/flush_cache").status_code == 400
        assert server.get("/flush_cache?timeout=0.2").status_code == 400
    finally:
        assert server.post("/continue_generation").status_code == 200
    threads[0].join(10)
    assert answers["goes-on"].json()["usage"]["completion_tokens"] == 4
    assert server.get("/health").text == "ok"


def test_a_pause_may_abort(server: httpx.Client, url: str) -> None:
    answers: list[dict[str, Any]] = []
    body = completion("mine", max_tokens=500, cache_salt="slow")
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/completions", json=body).json()))
    thread.start()
    while not server.get("/load").json()["running"]:
        time.sleep(0.01)
    assert server.post("/pause_generation", json={"mode": "abort"}).status_code == 200
    thread.join(10)
    server.post("/continue_generation")
    assert answers[0]["choices"][0]["finish_reason"] == "abort"
    refused = server.post("/pause_generation", json={"mode": "retract"})
    assert (refused.status_code, server.get("/is_paused").json()) == (400, {"is_paused": False})


def test_flush_cache_waits(server: httpx.Client, url: str) -> None:
    body = completion("mine", max_tokens=40, cache_salt="slow")
    thread = threading.Thread(target=lambda: httpx.post(f"{url}/v1/completions", json=body))
    thread.start()
    while not server.get("/load").json()["running"]:
        time.sleep(0.01)
    assert server.post("/flush_cache").status_code == 400
    assert server.post("/reset_prefix_cache").json() == {"success": False}
    assert server.post("/flush_cache?timeout=20").text == "the cache is empty"
    thread.join()
    assert server.get("/flush_cache?timeout=x").status_code == 400
    assert server.get("/flush_cache?tiemout=1").status_code == 400
    assert server.post("/reset_prefix_cache?reset_external=true&reset_running_requests=false").json() == {
        "success": True
    }
    refused = server.post("/reset_prefix_cache?reset_running_requests=true")
    assert (refused.status_code, "reset_running_requests" in refused.text) == (400, True)


def test_reasoning_and_calls_are_parsed(server: httpx.Client) -> None:
    text = "<think>2 + 3</think>\n5"
    parsed = server.post("/separate_reasoning", json={"text": text, "reasoning_parser": "deepseek-r1"}).json()
    assert parsed == {"reasoning_text": "2 + 3", "text": "5"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    text = 'Now. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    body = {"text": text, "tools": tools, "tool_call_parser": "qwen25"}
    parsed = server.post("/parse_function_call", json=body).json()
    (call,) = parsed["calls"]
    assert (call["tool_index"], call["name"], json.loads(call["parameters"])) == (0, "f", {"x": 1})
    assert parsed["normal_text"].strip() == "Now."
    for path, field in (("/separate_reasoning", "reasoning_parser"), ("/parse_function_call", "tool_call_parser")):
        refused = server.post(path, json={"text": "x", **({"tools": tools} if "call" in path else {}), field: "nope"})
        assert refused.status_code == 400
        assert "nope" in refused.text


def test_encode_returns_vectors_and_classify_refuses(server: httpx.Client) -> None:
    one = server.post("/encode", json={"text": "a text"}).json()
    assert one["meta_info"]["prompt_tokens"] > 0
    assert sum(x * x for x in one["embedding"]) == pytest.approx(1)
    several = server.post("/encode", json={"input_ids": [[5, 6], [7]]}).json()
    assert [entry["meta_info"]["prompt_tokens"] for entry in several] == [2, 1]
    assert server.post("/v1/classify", json={"input": "a text"}).status_code == 400
    refused = server.post("/classify", json={"model": "mine", "input": "a text"})
    assert refused.status_code == 400
    assert "classification head" in refused.text


def test_profiles_have_bounds(server: httpx.Client) -> None:
    started = server.post("/start_profile", json={"num_steps": 3, "activities": ["CPU"], "seconds": 1.0})
    assert started.json()["status"] == "ok"
    assert server.post("/stop_profile").json()["files"] == ["fake.json.gz"]
    for body in ({"seconds": 6.0}, {"output_dir": "/tmp"}, {"num_steps": 0}):
        answer = server.post("/start_profile", json=body)
        assert answer.status_code == 400, body
        assert "server.profile_" in answer.text or "num_steps" in body


def test_tenants_may_read_and_admins_may_act(tmp_path: Path) -> None:
    import hashlib

    from fake_engine import run_fake_engine

    tenant, admin = "t" * 24, "a" * 24
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS % tuple(hashlib.sha256(key.encode()).hexdigest() for key in (tenant, admin)))
    keys.chmod(0o600)
    with running_server(config_with(keys=str(keys)), target=run_fake_engine) as url, httpx.Client(base_url=url) as c:
        as_tenant, as_admin = ({"authorization": f"Bearer {key}"} for key in (tenant, admin))
        for path in ("/version", "/get_model_info", "/tokenizer_info"):
            assert (c.get(path).status_code, c.get(path, headers=as_tenant).status_code) == (401, 200), path
        for path in ("/get_server_info", "/load", "/get_load", "/is_paused", "/flush_cache"):
            assert c.get(path, headers=as_tenant).status_code == 403, path
            assert c.get(path, headers=as_admin).status_code == 200, path
            assert c.head(path).status_code == 401, path
        for path in ("/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"):
            assert c.post(path, headers=as_tenant).status_code == 403, path
        assert "profile_dir" in c.post("/start_profile", headers=as_admin).text
        assert c.get("/ping").status_code == 200
