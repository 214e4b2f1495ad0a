"""Test what tenants can learn about each other's prompts, on the embedded model.

Run:

.venv/bin/python -m pytest -q tests/e2e/test_tenants_prefixes.py

benchmarks/tenants.py measures the same by the clock, and what a flood of requests does to others, at greater length.
"""

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from conftest import config_with
from dovetail.server.launch import running_server

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import tenants  # pyright: ignore[reportMissingImports]

sys.path.pop(0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFIX_KEYS", json.dumps(tenants.key_file()))
        with running_server(config_with(keys="env:PREFIX_KEYS", drain_seconds=5)) as url:
            yield url


@pytest.fixture(scope="module")
def ask(url: str):
    """Return the number of cached tokens of a prompt that a tenant sends."""
    with httpx.Client(base_url=url, timeout=60) as client:

        def send(tenant: str, ids: list[int], **more: object) -> int:
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "n": 1}, **more}
            answer = client.post("/generate", json=body, headers={"x-api-key": tenants.KEYS[tenant]})
            return answer.raise_for_status().json()["meta_info"]["cached_tokens"]

        yield send


def fresh(length: int = 200) -> list[int]:
    return tenants.random_ids(random.SystemRandom(), length)


def test_only_a_tenant_itself_finds_what_it_has_sent(ask):
    prompt = fresh()
    assert ask("victim", prompt) == 0
    assert ask("victim", prompt) >= 150
    for salt in ("", "victim", "victim/", "/victim", "../victim", "victim/\u0000"):
        assert ask("spy", prompt, cache_salt=salt) == 0, salt
        assert ask("ops", prompt, cache_salt=salt) == 0, salt


def test_salts_of_requests_divide_a_tenants_own(ask):
    prompt = fresh()
    assert [ask("victim", prompt, cache_salt=salt) for salt in ("a", "b", "")] == [0, 0, 0]
    assert all(ask("victim", prompt, cache_salt=salt) >= 150 for salt in ("a", "b", ""))


def test_tenants_of_one_salt_find_each_others(ask):
    """This shows that the tests above can fail."""
    prompt = fresh()
    assert ask("friend", prompt) == 0
    assert ask("partner", prompt) >= 150


def test_groups_and_sessions_of_one_name_are_of_each_tenant(ask):
    prompt = fresh()
    hints = {"group": "g", "group_size": 2}
    assert ask("victim", prompt, **hints) == ask("spy", prompt, **hints) == 0
    assert ask("victim", prompt, **hints) >= 150
    assert ask("victim", prompt[:100], session="s") >= 80
    assert ask("spy", prompt[:100], session="s") >= 80  # the tenant's own prefix, from above


def test_no_tenant_can_infer_prompts_from_times_either(url: str):
    """A small sample of the measurement in benchmarks/tenants.py, with bounds that chance does not reach."""

    def p(*names: str) -> float:
        keys = tuple(tenants.KEYS[name] for name in names)
        return asyncio.run(tenants.timing(url, keys, trials=9, length=384, seed=5)).p

    assert p("friend", "partner") < 1e-2
    assert p("victim", "spy") > 1e-3
