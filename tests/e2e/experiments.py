"""Return what the server of an online experiment reports about its arms. Its tests share this module."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx


def arms(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in client.get("/experiment.json").json()["arms"]}


def eventually(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)
