"""Test which adapters (LoRA) a server has after its engine process was started again: those that were loaded last under their
names, also if what the config names was replaced, unloaded or deleted.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_restart.py
"""

import os
import shutil
import signal
import time

import httpx

from dovetail.config import Config
from dovetail.config.checkpoint import locate
from dovetail.server.launch import running_server
from lora_adapters import ATTENTION, module_shapes, write_adapter

PATIENCE = 60.0


def text_of(client: httpx.Client, model: str) -> str:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "model": model, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def load(client: httpx.Client, name: str, path: object) -> None:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
    response = client.post("/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text


def end_engine(client: httpx.Client) -> None:
    os.kill(client.get("/server_info").json()["engine_pid"], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while client.get("/health").status_code != 200 or "engine_restarts_total 0" in client.get("/metrics").text:
        assert time.monotonic() < deadline, "the engine was not started again"
        time.sleep(0.05)


def test_an_engine_that_is_started_again_has_the_adapters_that_were_loaded_last(tmp_path):
    shapes = module_shapes(locate("tiny"), ATTENTION)
    write_adapter(tmp_path / "first", shapes, rank=20, seed=1)  # the largest rank, of an adapter that is deleted
    write_adapter(tmp_path / "second", shapes, rank=18, seed=2)
    write_adapter(tmp_path / "gone", shapes, seed=3)
    tree = {
        "threads": 1,
        "memory": {"kv_gib": 0.05},
        "server": {"port": 0, "log_level": "error"},
        "supervision": {"backoff_seconds": 0.01},
        "adapters": {
            "enabled": True,
            "load": {"café/sql": str(tmp_path / "first"), "gone": str(tmp_path / "gone")},
            "max_resident": 2,
        },
    }
    with running_server(Config.model_validate(tree)) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        first = text_of(client, "café/sql")
        load(client, "café/sql", tmp_path / "second")
        second = text_of(client, "café/sql")
        assert first != second
        assert client.get("/v1/models/café/sql").json()["root"] == str(tmp_path / "second")
        client.post("/unload_lora_adapter", json={"lora_name": "gone"})
        for name in ("first", "gone"):
            shutil.rmtree(tmp_path / name)
        end_engine(client)
        assert text_of(client, "café/sql") == second
        response = client.post("/v1/completions", json={"prompt": "a", "model": "gone"})
        assert response.status_code == 404


def test_loads_are_refused_and_unloads_are_carried_out_while_there_is_no_engine(tmp_path):
    write_adapter(tmp_path / "one", module_shapes(locate("tiny"), ATTENTION))
    tree = {
        "threads": 1,
        "memory": {"kv_gib": 0.05},
        "server": {"port": 0, "log_level": "error"},
        "supervision": {"backoff_seconds": 600},
        "adapters": {"enabled": True, "load": {"one": str(tmp_path / "one")}},
    }
    with running_server(Config.model_validate(tree)) as url, httpx.Client(base_url=url, timeout=PATIENCE) as client:
        os.kill(client.get("/server_info").json()["engine_pid"], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while client.get("/health").status_code == 200:
            assert time.monotonic() < deadline, "the server did not notice that the engine has ended"
        for route in ("/load_lora_adapter", "/v1/load_lora_adapter"):
            response = client.post(route, json={"lora_name": "two", "lora_path": str(tmp_path / "one")})
            assert response.status_code == 503
            assert "it is being started again, retry later" in response.json()["error"]["message"]
        for status in (200, 404):
            response = client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
            assert response.status_code == status
        error = response.json()["error"]
        assert (error["message"], error["param"]) == ("there is no adapter 'one'", "lora_name")
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny"]
