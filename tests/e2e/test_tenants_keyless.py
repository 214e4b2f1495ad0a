"""Test a server without keys: which names and origins it answers, and settings with which no server starts.

.venv/bin/python -m pytest -q tests/e2e/test_tenants_keyless.py
"""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
from fake_engine import run_fake_engine
from starlette.requests import Request

from conftest import config_with
from dovetail.errors import ConfigError, PermissionDeniedError
from dovetail.server.launch import running_server, warn_of_any_proxy
from dovetail.server.service import Service
from dovetail.server.tenants.access import AccessControl

PAGE = "https://chat.example"


def test_without_keys_pages_of_other_origins_may_not_call(fake: httpx.Client):
    def ask(origin: str, path: str = "/generate") -> int:
        return fake.post(
            path, content=b'{"text":"a"}', headers={"origin": origin, "content-type": "text/plain"}
        ).status_code

    assert ask("https://evil.example") == ask("null") == ask("https://evil.example", "/flush_cache") == 403
    assert ask("http://[") == 403
    assert ask(str(fake.base_url).rstrip("/")) == 200
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = fake.options("/generate", headers=preflight)
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("proxy", "warned"), [("0.0.0.0/0", True), ("::/0", True), ("10.0.0.0/8", False), ("::1", False)]
)
def test_trusting_every_address_as_a_proxy_is_warned_of(
    proxy: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_any_proxy(["127.0.0.1", proxy])
    assert [
        f"{proxy}, which is every address: any client can forge X-Forwarded-For" in text for text in caplog.messages
    ] == ([True] if warned else [])


def test_without_keys_only_known_names_are_answered(fake: httpx.Client):
    def ask(host: str, **headers: str) -> int:
        return fake.get("/v1/models", headers={"host": host, **headers}).status_code

    port = fake.base_url.port
    assert {ask(name) for name in (f"localhost:{port}", "a.localhost", "LOCALHOST.", "[::1]:80", "192.168.0.9")} == {
        200
    }
    rebound = f"evil.example:{port}"
    assert {ask(name) for name in (rebound, "localhost.evil.example", "127.0.0.1.evil.example", "[evil]")} == {403}
    assert ask(rebound, origin=f"http://{rebound}") == 403
    assert fake.get("/flush_cache", headers={"sec-fetch-site": "cross-site"}).status_code == 403  # an image
    assert fake.get("/health", headers={"host": rebound}).status_code == 200


def test_names_that_are_allowed_are_answered():
    with running_server(config_with(allowed_hosts=["Chat.example"], drain_seconds=1), target=run_fake_engine) as url:
        for name, status in (("chat.example:8080", 200), ("evil.example", 403)):
            assert httpx.get(f"{url}/v1/models", headers={"host": name}).status_code == status


@pytest.mark.parametrize("origin", [None, PAGE, "http://127.0.0.1:30000", "https://evil.example", "null", "http://["])
@pytest.mark.parametrize("allowed", [(), (PAGE,), ("*",)])
def test_without_keys_other_origins_must_be_named(origin: str | None, allowed: tuple[str, ...]):
    headers = [(b"host", b"127.0.0.1:30000"), *([(b"origin", origin.encode())] if origin else ())]
    request = Request({"type": "http", "method": "POST", "path": "/generate", "headers": headers})
    gate = AccessControl(cast(Service, SimpleNamespace(config=config_with(cors_origins=allowed))), None)
    fine = origin in (None, "http://127.0.0.1:30000", *allowed) or "*" in allowed
    with contextlib.nullcontext() if fine else pytest.raises(PermissionDeniedError, match=r"server\.cors_origins"):
        gate.check_admin(request)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_public_address_without_keys_is_refused(host: str):
    with (
        pytest.raises(ConfigError, match=r"allow_public_without_keys"),
        running_server(config_with(host=host), target=run_fake_engine),
    ):
        pass


def test_a_wrong_key_file_is_refused_at_the_start(tmp_path: Path):
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: {acme: {keys: [sha256:12]}}")
    with (
        pytest.raises(ConfigError, match=r"tenants\.acme\.keys\[0\]"),
        running_server(config_with(keys=str(path)), target=run_fake_engine),
    ):
        pass
