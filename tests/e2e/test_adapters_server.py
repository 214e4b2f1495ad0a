"""Test adapters (LoRA) of a server: every API selects them by name, they come and go while requests run, tenants have permission
for some of them, and an engine that is started again serves them.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_server.py
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dovetail.api.offload import INPUTS_OF_PART, Parts
from dovetail.config import Config
from dovetail.config.checkpoint import locate
from dovetail.config.tenants import key_digest
from dovetail.interfaces.api import AdapterCard, ApiRequest
from dovetail.server.launch import running_server
from dovetail.server.outputs import RequestOutputs, RequestTerms
from dovetail.server.service import Service
from dovetail.server.tenants.keys import new_key
from lora_adapters import ALL, module_shapes, write_adapter

PATIENCE = 60.0
PROMPT = "The capital of France is"
NAMES = ("alpha", "beta", "gamma")
KEYS = {name: new_key() for name in ("some", "all", "ops")}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(NAMES):
        write_adapter(directory / name, module_shapes(locate("tiny"), ALL), seed=seed)
    return directory


@pytest.fixture(scope="module")
def url(adapters: Path) -> Iterator[str]:
    keys = {
        "tenants": {
            "some": {"keys": [key_digest(KEYS["some"].encode())], "adapters": ["al*"]},
            "all": {"keys": [key_digest(KEYS["all"].encode())]},
        },
        "admins": {"ops": {"keys": [key_digest(KEYS["ops"].encode())]}},
    }
    (adapters / "keys.json").write_text(json.dumps(keys))
    tree = {
        "threads": 1,
        "memory": {"kv_gib": 0.05},
        "server": {"port": 0, "log_level": "error", "keys": str(adapters / "keys.json")},
        "supervision": {"backoff_seconds": 0.01},
        "adapters": {
            "enabled": True,
            "load": {name: str(adapters / name) for name in NAMES[:2]},
            "max_resident": 1,
        },
    }
    with running_server(Config.model_validate(tree)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE, headers=bearer("all")) as client:
        yield client


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def answered(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()


def completion(client: httpx.Client, model: str | None, **more: object) -> dict:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "model": model, **more}
    return answered(client.post("/v1/completions", json=body))


def text_of(client: httpx.Client, model: str | None) -> str:
    return completion(client, model)["choices"][0]["text"]


def load(
    client: httpx.Client, name: str, path: Path, route: str = "/load_lora_adapter", **more: object
) -> httpx.Response:
    return client.post(route, json={"lora_name": name, "lora_path": str(path), **more}, headers=bearer("ops"))


def unload(client: httpx.Client, name: str, route: str = "/unload_lora_adapter") -> httpx.Response:
    return client.post(route, json={"lora_name": name}, headers=bearer("ops"))


def test_models_lists_adapters_with_their_parent(client, adapters):
    cards = {card["id"]: card for card in answered(client.get("/v1/models"))["data"]}
    assert [*cards] == ["tiny", "alpha", "beta"]
    assert (cards["alpha"]["parent"], cards["alpha"]["root"]) == ("tiny", str(adapters / "alpha"))
    assert "parent" not in cards["tiny"]
    assert answered(client.get("/v1/models/beta"))["parent"] == "tiny"
    assert client.get("/v1/models/gamma").status_code == 404


def test_every_api_selects_an_adapter_by_its_name(client):
    plain, adapted = text_of(client, None), text_of(client, "alpha")
    assert plain != adapted
    answer = completion(client, "alpha")
    assert (answer["model"], completion(client, None)["model"]) == ("alpha", "tiny")
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"text": [PROMPT] * 3, "sampling_params": sampling, "lora_path": ["alpha", None, "beta"]}
    several = [one["text"] for one in answered(client.post("/generate", json=body))]
    assert several == [adapted, plain, text_of(client, "beta")]
    body = {"text": PROMPT, "sampling_params": sampling, "lora_name": "alpha"}
    assert answered(client.post("/generate", json=body))["text"] == adapted
    assert text_of(client, "tiny:alpha") == text_of(client, "default:alpha") == adapted
    answer = completion(client, None, prompt=[PROMPT] * 3, lora_path=["alpha", None, "tiny"])
    assert [choice["text"] for choice in answer["choices"]] == [adapted, plain, plain]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    named, by_path = (
        answered(client.post("/v1/chat/completions", json=chat | {field: "beta"}))["choices"][0]["message"]
        for field in ("model", "lora_path")
    )
    assert named == by_path
    vectors = [
        answered(client.post("/v1/embeddings", json={"input": PROMPT, **more}))["data"][0]["embedding"]
        for more in ({"model": "alpha"}, {"lora_path": ["alpha"]}, {})
    ]
    assert vectors[0] == vectors[1] != vectors[2]
    given = [
        answered(client.post("/v1/chat/completions", json={**chat, "model": "beta"})),
        answered(client.post("/v1/messages", json={**chat, "model": "beta"})),
        answered(client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 16, "model": "beta"})),
    ]
    assert [answer["model"] for answer in given] == ["beta"] * 3
    ollama = answered(client.post("/api/chat", json={"model": "beta", "stream": False, "messages": chat["messages"]}))
    assert ollama["model"] == "beta"


def test_unknown_adapters_are_refused(client):
    response = client.post("/v1/completions", json={"model": "missing", "prompt": "a"})
    assert response.status_code == 404
    assert "2 adapters (GET /v1/models)" in response.text
    for path, body in (
        ("/generate", {"text": "a", "lora_path": "missing"}),
        ("/v1/completions", {"prompt": "a", "lora_path": "missing"}),
        ("/v1/completions", {"prompt": "a", "model": "tiny:missing"}),
    ):
        response = client.post(path, json=body)
        assert response.status_code == 404
        if "lora_path" in body:
            assert "lora_path names the adapter 'missing', which does not exist; this server has 2" in response.text
        if path == "/v1/completions":
            assert response.json()["error"]["param"] == ("lora_path" if "lora_path" in body else "model")
    response = client.post("/generate", json={"text": ["a", "b"], "lora_path": ["alpha"]})
    assert (response.status_code, "1 entries for 2 prompts" in response.text) == (400, True)


ADAPTER_FIELDS = [
    ("/v1/completions", {"prompt": "a"}, "lora_path"),
    ("/v1/completions", {"prompt": "a"}, "model"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "lora_path"),
    ("/v1/embeddings", {"input": "a"}, "lora_path"),
    ("/encode", {"text": "a"}, "lora_path"),
    ("/generate", {"text": "a"}, "lora_path"),
    ("/generate", {"text": "a"}, "lora_name"),
    ("/generate", {"text": ["a", "b"]}, "lora_name"),
]


@pytest.mark.parametrize(("path", "body", "field"), ADAPTER_FIELDS)
@pytest.mark.parametrize("where", ["server", "engine"])
def test_errors_of_adapters_that_go_while_a_request_is_prepared_name_its_field(
    client, monkeypatch, path, body, field, where
):
    """The adapter is unloaded after the request was checked, or the engine does not know it and has no directory to read it from."""
    check = Service.check_adapter

    def check_and_unload(service: Service, name: str) -> None:
        monkeypatch.setitem(service.served_adapters.cards, name, AdapterCard(name, "", 0))
        check(service, name)
        if where == "server":
            monkeypatch.delitem(service.served_adapters.cards, name)

    monkeypatch.setattr(Service, "check_adapter", check_and_unload)
    response = client.post(path, json={**body, field: "going"})
    error = response.json()["error"]
    assert response.status_code == 400
    why = "which was unloaded; load it again" if where == "server" else "which the engine does not know; load it first"
    assert error["message"] == f"{field} names the adapter 'going', {why}"
    if path != "/generate":  # whose errors have no such field
        assert error["param"] == field


def test_an_adapter_that_goes_between_two_parts_of_a_large_request_is_not_sent_to_the_engine(client, monkeypatch):
    """The engine would read it again and keep it, although no request can name it."""
    submitting, parts = Service.submitting, [0]

    def and_unload(service: Service, request: ApiRequest, terms: RequestTerms | None = None) -> Parts[RequestOutputs]:
        work = submitting(service, request, terms)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value
            parts[0] += 1
            yield
            if parts[0] == 3:  # after two parts that check prompts, and the first part of messages
                monkeypatch.delitem(service.served_adapters.cards, "beta")

    monkeypatch.setattr(Service, "submitting", and_unload)
    body = {"prompt": ["a"] * (2 * INPUTS_OF_PART), "lora_path": ["beta"] + ["alpha"] * (2 * INPUTS_OF_PART - 1)}
    response = client.post("/v1/completions", json={**body, "max_tokens": 1})
    assert (response.status_code, parts) == (400, [4])
    assert "lora_path names the adapter 'beta', which was unloaded" in response.json()["error"]["message"]


def test_tenants_use_the_adapters_that_they_may(client):
    some = bearer("some")
    body = {"prompt": "a", "max_tokens": 1, "model": "alpha"}
    assert client.post("/v1/completions", json=body, headers=some).status_code == 200
    for path, refused in (
        ("/v1/completions", {**body, "model": "beta"}),
        ("/v1/completions", {**body, "model": "tiny:beta"}),
        ("/v1/completions", {**body, "model": None, "lora_path": ["beta"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "lora_path": "beta"}),
        ("/v1/embeddings", {"input": "a", "lora_path": "beta"}),
        ("/encode", {"text": "a", "lora_path": "beta"}),
        ("/generate", {"text": "a", "lora_path": "beta"}),
    ):
        response = client.post(path, json=refused, headers=some)
        assert (response.status_code, "does not permit the adapter" in response.text) == (403, True)
    names = [card["id"] for card in answered(client.get("/v1/models", headers=some))["data"]]
    assert names == ["tiny", "alpha"]
    assert client.get("/v1/models/beta", headers=some).status_code == 403
    for route in ("/load_lora_adapter", "/v1/load_lora_adapter", "/unload_lora_adapter", "/v1/unload_lora_adapter"):
        assert client.post(route, json={"lora_name": "x", "lora_path": "/x"}).status_code == 403, "admins only"


def test_adapters_are_loaded_and_unloaded_by_the_routes_of_both(client, adapters):
    loaded = answered(load(client, "new", adapters / "gamma"))
    assert loaded == {"success": True, "error_message": None, "loaded_adapters": loaded["loaded_adapters"]}
    assert loaded["loaded_adapters"]["new"] == str(adapters / "gamma")
    first = text_of(client, "new")
    refused = load(client, "new", adapters / "alpha", "/v1/load_lora_adapter")
    assert (refused.status_code, "is loaded already" in refused.text) == (400, True)
    inplace = load(client, "new", adapters / "alpha", "/v1/load_lora_adapter", load_inplace=True)
    assert inplace.text == "Success: LoRA adapter 'new' added successfully."
    assert text_of(client, "new") == text_of(client, "alpha") != first
    assert unload(client, "new", "/v1/unload_lora_adapter").text == "Success: LoRA adapter 'new' removed successfully."
    assert client.post("/v1/completions", json={"model": "new", "prompt": "a"}).status_code == 404
    assert unload(client, "new").status_code == 404
    for name, path, text in (
        ("tiny", adapters / "gamma", "no name of the model"),
        ("a@b", adapters / "gamma", "without @"),
        ("bad", adapters / "missing", "no adapter saved by PEFT"),
    ):
        response = load(client, name, path)
        assert (response.status_code, text in response.text) == (400, True), response.text


def test_no_request_is_lost_while_adapters_come_and_go(client, url, adapters):
    """Requests for adapters that take turns in one slot run while another adapter is loaded, replaced and unloaded."""
    expected = {name: text_of(client, name) for name in (None, "alpha", "beta")}
    answers: list[tuple[str | None, int, str]] = []

    def ask(names: list[str | None]) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE, headers=bearer("all")) as own:
            for name in names:
                body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "model": name}
                response = own.post("/v1/completions", json=body)
                text = response.json()["choices"][0]["text"] if response.status_code == 200 else response.text
                answers.append((name, response.status_code, text))

    threads = [threading.Thread(target=ask, args=([None, "alpha", "beta", "moving"] * 4,)) for _ in range(4)]
    answered(load(client, "moving", adapters / "gamma"))
    for thread in threads:
        thread.start()
    for path in ("alpha", "gamma", "beta"):
        answered(load(client, "moving", adapters / path, load_inplace=True))
    answered(unload(client, "moving"))
    for thread in threads:
        thread.join(PATIENCE)
    assert len(answers) == 64, "every request has an answer"
    for name, status, text in answers:
        if name == "moving":
            assert status == 200 or (status == 404 and "does not exist" in text) or "was unloaded" in text
        else:
            assert (status, text) == (200, expected[name])
    metrics = client.get("/metrics", headers=bearer("ops")).text
    assert "dovetail_adapters_known 2.0" in metrics
    assert "dovetail_adapters_resident 1.0" in metrics


def test_an_engine_that_is_started_again_serves_all_adapters(client, adapters):
    answered(load(client, "later", adapters / "gamma"))
    before = text_of(client, "later")
    os.kill(client.get("/server_info", headers=bearer("ops")).json()["engine_pid"], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while client.get("/health").status_code != 200 or "dovetail_engine_restarts_total 0" in restarts(client):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert text_of(client, "later") == before
    answered(unload(client, "later"))


def restarts(client: httpx.Client) -> str:
    return client.get("/metrics", headers=bearer("ops")).text


def test_a_server_without_adapters_refuses_to_load_one(tiny, adapters):
    response = tiny.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": str(adapters / "alpha")})
    assert (response.status_code, "adapters.enabled: true" in response.text) == (400, True)
