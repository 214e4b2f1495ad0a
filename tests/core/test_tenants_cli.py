"""Test ``dovetail keys``.

Run: pytest tests/core/test_tenants_cli.py
"""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from dovetail.cli import main
from dovetail.cli.keys import new
from dovetail.config.tenants import load_keys
from dovetail.server.tenants.keys import KeyRing


@pytest.fixture
def keys(capsys, monkeypatch):
    """Run ``dovetail keys ...``; returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words):
        status = 0
        try:
            main(["keys", *map(str, words)])
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def made(keys, *words):
    status, out, err = keys("new", *words)
    assert (status, err) == (0, "")
    return out.strip()


def owner(file, key):
    return KeyRing(load_keys(str(file), {})).caller([(b"x-api-key", key.encode())])


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_a_key_is_made_listed_and_revoked(keys, tmp_path, name):
    file = tmp_path / name
    first = made(keys, "acme", "--file", file)
    second = made(keys, "acme", "--file", file, "--label", "laptop", "--expires", "2999-01-31")
    admin = made(keys, "ops", "--file", file, "--admin")
    assert [owner(file, key).name for key in (first, second, admin)] == ["acme", "acme", "ops"]
    assert [owner(file, key).admin for key in (first, admin)] == [False, True]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(key in file.read_text() for key in (first, second, admin))
    listed = keys("list", "--file", file)[1]
    assert "laptop (until 2999-01-31)" in listed
    assert owner(file, first).key in listed
    assert keys("revoke", "laptop", "--file", file)[1] == "revoked a key of acme; 1 left\n"
    assert keys("revoke", owner(file, admin).key, "--file", file)[0] == 0
    assert [entry.id for entry in load_keys(str(file), {}).tenants["acme"].keys] == [owner(file, first).key]
    assert load_keys(str(file), {}).admins["ops"].keys == ()


def test_limits_stay_and_are_listed(keys, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("defaults: {requests_per_minute: 5}\ntenants: {acme: {priority: 2}}\n")
    made(keys, "acme", "--file", file)
    assert load_keys(str(file), {}).limits("acme").requests_per_minute == 5
    assert "requests_per_minute 5, priority 2" in keys("list", "--file", file)[1]


@pytest.mark.parametrize(
    ("text", "words", "why"),
    [
        ("# mine\ntenants: {}\n", ("new", "acme"), "has comments"),
        ("tenants: {}\n", ("new", "a b"), "a b"),
        ("tenants: {}\n", ("new", "acme", "--expires", "soon"), "expires"),
        ("tenants: {acme: {}}\n", ("new", "acme", "--admin"), "a tenant and of an admin"),
        ("tenants: {acme: {keys: [x]}}\n", ("new", "acme"), "too short"),
        ("tenants: {acme: {keys: []}}\n", ("revoke", ""), "0 keys"),
        ("tenants: {acme: {}}\n", ("revoke", "laptop"), "0 keys"),
    ],
)
def test_what_is_refused_changes_nothing(keys, tmp_path, text, words, why):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    status, out, err = keys(*words, "--file", file)
    assert (status, out) == (2, "")
    assert why in err
    assert file.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["keys.yaml"]


def test_no_key_is_lost_where_several_are_made_at_the_same_time(tmp_path):
    file = tmp_path / "keys.yaml"
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda i: new(f"tenant{i}", file), range(16)))
    assert done == [None] * 16
    assert sorted(load_keys(str(file), {}).tenants) == sorted(f"tenant{i}" for i in range(16))
