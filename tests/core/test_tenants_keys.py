"""Test key files, and which tenant or admin a key belongs to.

Run: pytest tests/core/test_tenants_keys.py
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from dovetail.config import ServerSection
from dovetail.config.tenants import KeyFile, key_digest, load_keys
from dovetail.errors import AuthenticationError, ConfigError, PermissionDeniedError
from dovetail.server.tenants.keys import KeyRing, new_key
from dovetail.server.tenants.tenancy import Tenancy
from dovetail.server.tenants.usage import UsageEntry, UsageLog

KEY, OTHER, ADMIN = "dvt-acme-0123456789abcdef", "dvt-beta-0123456789abcdef", "dvt-ops-0123456789abcdef"


def digest(key):
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def tree(**more):
    return {
        "tenants": {"acme": {"keys": [digest(KEY)]}, "beta": {"keys": [{"hash": digest(OTHER), "label": "laptop"}]}},
        "admins": {"ops": {"keys": [digest(ADMIN)]}},
        **more,
    }


def write(path, value):
    path.write_text(json.dumps(value))
    return str(path)


def refused(path, value):
    with pytest.raises(ConfigError) as caught:
        load_keys(write(path, value), {})
    return str(caught.value)


@pytest.fixture
def ring():
    return KeyRing(KeyFile.model_validate(normal(tree())))


def normal(value):
    """Return the file with every key as a mapping, as ``load_keys`` makes it."""
    for group in ("tenants", "admins"):
        for owner in value[group].values():
            owner["keys"] = [{"hash": k} if isinstance(k, str) else k for k in owner["keys"]]
    return value


def bearer(key):
    return [(b"authorization", b"Bearer " + key.encode())]


def test_a_digest_is_plain_sha256():
    assert key_digest(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_keys_are_long_and_never_the_same():
    keys = {new_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(len(key) >= 4 + 43 and key.startswith("dvt-") and key.isascii() for key in keys)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_has_tenants_and_admins(tmp_path, suffix):
    file = load_keys(write(tmp_path / f"keys.{suffix}", tree()), {})
    assert [*file.tenants, *file.admins] == ["acme", "beta", "ops"]
    assert file.tenants["acme"].keys[0].id == digest(KEY)[7:15]
    assert file.tenants["beta"].keys[0].id == "laptop"


def test_what_a_tenant_does_not_say_the_defaults_do(tmp_path):
    value = tree(defaults={"requests_per_minute": 60, "max_concurrency": 4})
    value["tenants"]["acme"] |= {"requests_per_minute": None, "priority": 3}
    file = load_keys(write(tmp_path / "keys.json", value), {})
    assert (file.limits("acme").requests_per_minute, file.limits("acme").max_concurrency) == (None, 4)
    assert (file.limits("beta").requests_per_minute, file.limits("acme").priority) == (60, 3)


def test_the_environment_may_hold_digests_and_keys():
    value = tree()
    value["tenants"]["acme"]["keys"] = [KEY, {"key": KEY + "2", "label": "two"}]
    file = load_keys("env:SOME_KEYS", {"SOME_KEYS": json.dumps(value)})
    assert [entry.hash for entry in file.tenants["acme"].keys] == [digest(KEY), digest(KEY + "2")]
    assert KEY not in repr(file)


@pytest.mark.parametrize("text", [None, "", "[", "- a", "just words"])
def test_a_variable_that_holds_no_key_file_is_refused_without_showing_it(text):
    with pytest.raises(ConfigError, match="environment variable SOME_KEYS") as caught:
        load_keys("env:SOME_KEYS", {} if text is None else {"SOME_KEYS": text})
    assert "just words" not in str(caught.value)


@pytest.mark.parametrize("entry", [KEY, {"key": KEY}, {"key": KEY, "label": "x"}])
def test_a_file_with_a_key_in_plain_text_is_refused_and_not_shown(tmp_path, entry):
    value = tree()
    value["tenants"]["acme"]["keys"] = [entry]
    message = refused(tmp_path / "keys.json", value)
    assert digest(KEY) in message
    assert "tenants.acme.keys[0]" in message
    assert "keys.json" in message
    assert KEY not in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"tenants": {"a b": {}}}, "tenants.a b"),
        ({"tenants": {"acme/x": {}}}, "acme/x"),
        ({"tenants": {"": {}}}, "tenants"),
        ({"tenants": {"acme": {"requests_per_minute": 0}}}, "greater than or equal to 1"),
        ({"tenants": {"acme": {"tokens_per_minute": -5}}}, "greater than or equal to 1"),
        ({"tenants": {"acme": {"max_concurrency": 0}}}, "greater than or equal to 1"),
        ({"tenants": {"acme": {"max_seconds": 0}}}, "greater than 0"),
        ({"tenants": {"acme": {"requests_per_minut": 5}}}, "did you mean 'requests_per_minute'"),
        ({"tenants": {"acme": {"salt": "a/b"}}}, "salt"),
        ({"tenants": {"acme": {"keys": ["sha256:12"]}}}, "too short for a key"),
        ({"tenants": {"acme": {"keys": [12]}}}, "tenants.acme.keys[0]"),
        ({"tenants": {"acme": {"keys": [{"label": "x"}]}}}, "hash is missing"),
        ({"tenants": {"acme": {"keys": [digest("")]}}}, "empty key"),
        ({"tenants": {"acme": {"keys": [digest(KEY), digest(KEY)]}}}, "have the same key"),
        ({"tenants": {"acme": {"keys": [digest(ADMIN)]}}}, "have the same key"),
        ({"tenants": {"ops": {"keys": []}}}, "a tenant and of an admin"),
        ({"tenants": []}, "tenants is []"),
        ({"tenant": {}}, "did you mean 'tenants'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_wrong(tmp_path, change, part):
    assert part in refused(tmp_path / "keys.json", {**tree(), **change})


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"key file .*none\.yaml cannot be read"):
        load_keys(str(tmp_path / "none.yaml"), {})


@pytest.mark.parametrize(
    "headers",
    [
        bearer(KEY),
        [(b"authorization", b"bEARER   " + KEY.encode() + b" ")],
        [(b"x-api-key", KEY.encode())],
        [(b"x-api-key", KEY.encode()), *bearer(KEY)],
        [*bearer(KEY), *bearer(KEY)],
        [(b"authorization", b"Basic YTpi"), (b"x-api-key", KEY.encode())],
        [(b"accept", b"*/*"), *bearer(KEY)],
    ],
)
def test_a_key_is_found_in_both_headers(ring, headers):
    assert ring.caller(headers).name == "acme"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ([], "no API key was given"),
        ([(b"authorization", b"")], "no API key was given"),
        ([(b"authorization", b"Basic YTpi")], "scheme is 'Basic'"),
        ([(b"authorization", KEY.encode())], "is not a known one"),
        ([(b"authorization", b"Bearer")], "is empty"),
        ([(b"authorization", b"Bearer ")], "is empty"),
        ([(b"x-api-key", b"")], "is empty"),
        (bearer(KEY + "x"), "is not known to this server"),
        (bearer(KEY[:-1]), "is not known to this server"),
        (bearer(KEY.upper()), "is not known to this server"),
        (bearer(digest(KEY)), "is not known to this server"),  # the digest from the file is not a key
        (bearer("k\u00e9y-\u4f60\u597d"), "is not known to this server"),
        ([(b"authorization", b"Bearer \xff\xfe\x00")], "is not known to this server"),
        (bearer("x" * 1_000_000), "at most 1024"),
        ([*bearer(KEY), *bearer(OTHER)], "2 different API keys"),
        ([*bearer(KEY), (b"x-api-key", OTHER.encode())], "2 different API keys"),
        ([*bearer(KEY), (b"x-api-key", b"")], "2 different API keys"),
    ],
)
def test_other_headers_are_refused_and_no_key_is_shown(ring, headers, why):
    with pytest.raises(AuthenticationError, match=why) as caught:
        ring.caller(headers)
    assert KEY not in str(caught.value)
    assert KEY.upper() not in str(caught.value)


def test_a_key_expires(tmp_path):
    value = tree()
    value["tenants"]["acme"]["keys"] = [{"hash": digest(KEY), "expires": "2030-01-01"}]
    file = load_keys(write(tmp_path / "keys.json", value), {})
    at = 1893456000.0  # 2030-01-01 00:00 UTC
    assert KeyRing(file, lambda: at - 1).caller(bearer(KEY)).name == "acme"
    with pytest.raises(AuthenticationError, match="expired at 2030-01-01"):
        KeyRing(file, lambda: at).caller(bearer(KEY))


# the file as it changes


def tenancy(path, **section):
    return Tenancy(ServerSection(keys=str(path), **section), {})


def test_only_an_admins_key_is_an_admins(tmp_path):
    tenants = tenancy(write(tmp_path / "keys.json", tree()))
    assert tenants.admin(bearer(ADMIN)).name == "ops"
    with pytest.raises(PermissionDeniedError, match="admin"):
        tenants.admin(bearer(KEY))
    with pytest.raises(AuthenticationError):
        tenants.admin([])
    assert tenants.unknown == 1


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path, caplog):
    path = tmp_path / "keys.json"
    tenants = tenancy(write(path, tree()))
    acme = tenants.tenants["acme"]
    lease = acme.admit(1, 1, 1)

    async def story():
        watch = asyncio.ensure_future(tenants.watch(0.01))

        async def until(done):
            async with asyncio.timeout(5):
                while not done():
                    await asyncio.sleep(0.005)

        path.write_text("{broken")
        await until(lambda: "stay" in caplog.text)
        assert tenants.caller(bearer(KEY)).name == "acme"
        path.unlink()
        await until(lambda: caplog.text.count("stay") == 2)
        assert tenants.caller(bearer(KEY)).name == "acme"
        value = tree()
        del value["tenants"]["beta"]
        value["tenants"]["acme"]["max_concurrency"] = 7
        write(path, value)
        await until(lambda: acme.limits.max_concurrency == 7)
        watch.cancel()

    asyncio.run(story())
    with pytest.raises(AuthenticationError):
        tenants.caller(bearer(OTHER))
    assert acme is tenants.tenants["acme"]
    assert acme.running == 1
    lease.settle(1)
    assert acme.running == 0


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path, mode):
    path = Path(write(tmp_path / "keys.json", tree()))
    path.chmod(0o644)
    assert load_keys(str(path), {}).tenants
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:o}.*chmod go-w {path}"):
        load_keys(str(path), {})


def test_a_file_that_is_rewritten_all_the_time_is_read_again(tmp_path):
    path = write(tmp_path / "keys.json", tree())
    tenants = tenancy(path)
    value = tree()
    value["tenants"]["acme"]["max_concurrency"] = 7

    async def story():
        watch = asyncio.ensure_future(tenants.watch(0.02))
        async with asyncio.timeout(20):
            for count in itertools.count():
                if tenants.tenants["acme"].limits.max_concurrency == 7:
                    break
                draft = Path(write(tmp_path / "draft.json", value))
                os.utime(draft, ns=(count, count))
                draft.replace(path)
                await asyncio.sleep(0.002)
        watch.cancel()

    asyncio.run(story())


# the usage log


def entry(**more):
    return UsageEntry("2026-01-01T00:00:00+00:00", "acme", "laptop", "r1", "/generate", 1, 3, 0, 2, 0.5, **more)


def test_the_log_has_a_line_for_each_request_and_may_be_moved_away(tmp_path):
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path)
    log.write(entry(finish=["stop"]))
    log.write(entry(error="TimeLimitError"))
    path.rename(tmp_path / "usage.1")
    log.write(entry(texts=["line\none"]))
    log.close()
    first, second = map(json.loads, (tmp_path / "usage.1").read_text().splitlines())
    assert (first["tenant"], first["finish"], second["error"]) == ("acme", ["stop"], "TimeLimitError")
    assert "prompts" not in first
    assert "texts" not in first
    assert json.loads(path.read_text())["texts"] == ["line\none"]
    assert stat.S_IMODE(os.stat(path).st_mode) == stat.S_IMODE(os.stat(tmp_path / "usage.1").st_mode) == 0o600


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"server\.usage_log"):
        UsageLog(tmp_path / "none" / "usage.jsonl")


def test_a_log_that_cannot_be_written_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "logs"
    folder.mkdir()
    log = UsageLog(folder / "usage.jsonl")
    shutil.rmtree(folder)
    for _ in range(3):
        log.write(entry())
    assert caplog.text.count("No such file") == 1
    assert (log.lost, "No such file" in str(log.problem)) == (3, True)
    folder.mkdir()
    log.write(entry())
    assert (log.lost, log.problem) == (3, None)
    log.close()
    assert json.loads((folder / "usage.jsonl").read_text())["tenant"] == "acme"


def test_a_line_of_which_the_disk_took_a_part_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = UsageLog(tmp_path / "usage.jsonl")
    write_all = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: write_all(file, data[:10]))
        log.write(entry())
    assert log.problem
    log.write(entry())
    log.close()
    torn, whole = (tmp_path / "usage.jsonl").read_text().splitlines()
    assert (len(torn), json.loads(whole)["tenant"]) == (10, "acme")


def test_a_log_without_keys_is_refused_and_so_are_wrong_origins():
    with pytest.raises(ValueError, match=r"give server\.keys"):
        ServerSection(usage_log="x")
    for origin in ("example.org", "https://example.org/", "https://", "", "https://a b"):
        with pytest.raises(ValueError, match="is not an origin"):
            ServerSection(cors_origins=(origin,))
    assert ServerSection(cors_origins=("*", "http://localhost:3000")).cors_origins


def test_the_example_of_the_docs_is_a_key_file(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
    (tmp_path / "keys.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    file = load_keys(str(tmp_path / "keys.yaml"), {})
    assert file.limits("acme").max_concurrency == 16
    assert file.limits("batch").requests_per_minute is None
    line = re.search(r"```json\n(.*?)```", page, re.DOTALL)[1]
    assert set(json.loads(line)) < set(UsageEntry.__struct_fields__)
