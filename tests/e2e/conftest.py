"""Start servers for the tests: each is started once for the module that requests it."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail.config import Config
from dovetail.server.launch import running_server
from forked_ranks import fork_ranks
from fresh import heavy_imported

sys.path.insert(0, str(Path(__file__).parent))  # the engine process imports fake_engine by its name


def config_with(**server: object) -> Config:
    """Return the default config on a free port, with one CPU thread, because tests run in parallel."""
    return Config.model_validate({"threads": 1, "server": {"port": 0, "log_level": "warning", **server}})


@pytest.fixture(scope="module", autouse=True)
def _engines_are_forked() -> Iterator[Callable[..., Any]]:
    """Fork the processes that tests would spawn, and the ranks of their engines, from one that has imported torch. test_server_command.py spawns them
    as ``dovetail serve`` does. Yields the function that finds contexts otherwise."""
    usual = multiprocessing.get_context
    with pytest.MonkeyPatch.context() as patch:
        forked = heavy_imported()
        patch.setattr(multiprocessing, "get_context", lambda kind=None: forked if kind == "spawn" else usual(kind))
        fork_ranks(patch)
        yield usual


@pytest.fixture
def spawned(_engines_are_forked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawn the test's engines, which take their time to load."""
    monkeypatch.setattr(multiprocessing, "get_context", _engines_are_forked)


@pytest.fixture(scope="module")
def fake_url() -> Iterator[str]:
    """Start a server whose engine repeats the prompt (``fake_engine``)."""
    from fake_engine import run_fake_engine

    with running_server(config_with(max_body_mib=1, drain_seconds=2, health_seconds=5), target=run_fake_engine) as url:
        yield url


@pytest.fixture(scope="module")
def fake(fake_url: str) -> Iterator[httpx.Client]:
    """Return a client of it."""
    with httpx.Client(base_url=fake_url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def tiny_url() -> Iterator[str]:
    """Start a server of the embedded model: real engine process, weights and tokenizer. It is shared, so each test
    must leave it as it was."""
    with running_server(config_with(max_body_mib=8, drain_seconds=5)) as url:
        yield url


@pytest.fixture(scope="session")
def tiny(tiny_url: str) -> Iterator[httpx.Client]:
    """Return a client of it."""
    with httpx.Client(base_url=tiny_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a browser."""
    from browser import browser

    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """Open a page of a browser, and check at the end that it has logged no error."""
    chromium.look(1100, 800)
    chromium.trouble.clear()
    yield chromium
    assert chromium.trouble == []


@pytest.fixture(scope="session")
def _scripted() -> Iterator[Any]:
    from scripted_server import scripted_server

    with scripted_server() as server:
        yield server


@pytest.fixture
def scripted(_scripted: Any) -> Any:
    """Return a server of the pages whose answers the test writes (``scripted_server``)."""
    _scripted.reset()
    return _scripted
