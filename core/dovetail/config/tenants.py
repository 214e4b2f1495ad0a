"""Define the key file, which lists the tenants that may call the server, with their keys and limits. ``server.keys``
names it; docs/tenants.md explains it.

Keys are kept as SHA-256 digests. A generated key is 256 random bits, which cannot be found by trying, with a fast hash
or a slow one. Slow hashes (bcrypt, scrypt) make short passwords expensive to guess; here they would only make each
request expensive to check.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from dovetail.config.plugin import Section
from dovetail.config.problems import dotted, from_pydantic, report
from dovetail.config.sources import Path_, Raw, SettingsSource, parse_yaml, read_file
from dovetail.errors import ConfigError

ENVIRONMENT = "env:"
"""The prefix of ``server.keys: env:NAME``, where the environment variable NAME holds the text of a key file."""

SHORTEST_KEY = 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Name = Annotated[str, StringConstraints(pattern=_NAME)]
"""The name of a tenant, an admin or a salt. It becomes a label of metrics and the beginning of a namespace."""


def key_digest(key: bytes) -> str:
    """Return a key as it is written in the file: ``sha256:`` and 64 hexadecimal digits."""
    return "sha256:" + hashlib.sha256(key).hexdigest()


_EMPTY = key_digest(b"")


def _no_empty_key(digest: str) -> str:
    if digest == _EMPTY:
        raise ValueError("it is the digest of an empty key; make one with `dovetail keys new`")
    return digest


def _with_zone(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class KeyEntry(Section):
    """Hold one key. A bare digest is short for ``{hash: ...}``."""

    hash: Annotated[str, StringConstraints(pattern=rf"^{_DIGEST.pattern}$"), AfterValidator(_no_empty_key)] = Field(
        description="`sha256:` and the SHA-256 of the key in hexadecimal."
    )
    label: str = Field(default="", max_length=64, description="What the key is for; shown in the usage log.")
    expires: Annotated[datetime, AfterValidator(_with_zone)] | None = Field(
        default=None, description="From this moment on the key is refused. Without a time zone it is UTC."
    )

    @property
    def id(self) -> str:
        """Return the key's name in logs: its label, or the first digits of its digest."""
        return self.label or self.hash.removeprefix("sha256:")[:8]


class TenantLimits(Section):
    """Limit what a tenant may use. Without a value there is no limit, or the server's limit applies."""

    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="A request with n outputs, or several prompts, counts once for each output.",
    )
    tokens_per_minute: int | None = Field(default=None, ge=1, le=10**12, description="Tokens of prompts and outputs.")
    max_concurrency: int | None = Field(
        default=None, ge=1, le=10**9, description="Number of outputs that may wait or run at the same time."
    )
    priority: int = Field(
        default=0,
        ge=-(2**31),
        lt=2**31,
        description="Priority of the tenant's requests, under `policy: priority`. A request's own priority is added if it is negative.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Share of the server while several tenants wait: one of weight 2 is served twice as often as one of weight 1.",
    )
    max_body_mib: float | None = Field(default=None, gt=0, le=2**20, description="Replaces `server.max_body_mib`.")
    max_seconds: float | None = Field(default=None, gt=0, le=10**6, description="Replaces `server.max_seconds`.")
    adapters: tuple[str, ...] | None = Field(
        default=None,
        description="Adapters (LoRA) that the tenant may use: names, or patterns such as `team-*`. Without a value it may use all, with an empty list none.",
    )


class TenantSection(TenantLimits):
    """Describe one tenant: its keys, its limits, its namespace of cached prefixes."""

    keys: tuple[KeyEntry, ...] = ()
    salt: Name | None = Field(
        default=None,
        description="Name of the tenant's namespace of cached prefixes, by default the name of the tenant. Tenants with the same salt share their prefixes, and can find out by timing what the others have sent.",
    )


class AdminSection(Section):
    """Name the keys that may call every route, without limits."""

    keys: tuple[KeyEntry, ...] = ()


class KeyFile(Section):
    """Hold the whole file. ``defaults`` are the limits of tenants that do not have their own."""

    defaults: TenantLimits = TenantLimits()
    tenants: dict[Name, TenantSection] = Field(default_factory=dict)
    admins: dict[Name, AdminSection] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_and_keys_are_unique(self) -> KeyFile:
        both = self.tenants.keys() & self.admins.keys()
        if both:
            raise ValueError(f"{sorted(both)[0]!r} is the name of a tenant and of an admin; rename one")
        owners: dict[str, str] = {}
        for name, owner in (*self.tenants.items(), *self.admins.items()):
            for entry in owner.keys:
                if entry.hash in owners:
                    raise ValueError(f"{owners[entry.hash]!r} and {name!r} have the same key, {entry.id}; keep one")
                owners[entry.hash] = name
        return self

    def limits(self, name: str) -> TenantLimits:
        """Return the limits of a tenant: its own values, else the defaults. ``null`` is a value too: no limit."""
        own = self.tenants[name]
        return TenantLimits(
            **{
                key: getattr(own if key in own.model_fields_set else self.defaults, key)
                for key in TenantLimits.model_fields
            }
        )


def load_keys(source: str, env: Mapping[str, str]) -> KeyFile:
    """Read the keys at ``source``, a file or ``env:NAME``. Raises ``ConfigError``, which never shows a key."""
    if source.startswith(ENVIRONMENT):
        layer, plain = _from_env(source.removeprefix(ENVIRONMENT), env), True
    else:
        _refuse_shared(Path(source).expanduser())
        layer, plain = read_file(Path(source), "key file"), False
    return check_keys(layer.tree, layer.origin, plain)


def _refuse_shared(file: Path) -> None:
    """Raise ``ConfigError`` if users other than the owner may write the file, because they could give themselves keys."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return  # reading it reports this
    if os.name == "posix" and mode & 0o022:
        raise ConfigError(
            f"key file {file} may be written by users other than its owner (mode {mode & 0o777:o}); allowed: 644 and less, "
            f"as in: chmod go-w {file}"
        )


def check_keys(given: Mapping[str, Any], origin: str, plain: bool = False) -> KeyFile:
    """Validate the keys of a file that has been read; ``origin`` names it. If ``plain``, they need not be digests.
    Raises ``ConfigError``."""
    tree = _digested(given, origin, plain)
    raw = Raw((SettingsSource(origin, tree),), ())
    try:
        return KeyFile.model_validate(tree)
    except ValidationError as error:
        raise report(from_pydantic(error, KeyFile, tree, (), "a key file"), raw) from None


def _from_env(name: str, env: Mapping[str, str]) -> SettingsSource:
    origin = f"environment variable {name}"
    if not env.get(name):
        raise ConfigError(
            f"server.keys is '{ENVIRONMENT}{name}' and the {origin} is not set; put a key file's text there"
        )
    try:
        tree = parse_yaml(env[name])
    except ValueError:
        raise ConfigError(f"the {origin} is not valid YAML; allowed: the text of a key file") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"the {origin} holds no mapping; allowed: the text of a key file, with tenants and admins")
    return SettingsSource(origin, tree)


def _digested(tree: Mapping[str, Any], origin: str, plain: bool) -> dict[str, Any]:
    """Return ``tree`` with every key as a mapping with its digest. A key that is not a digest is taken as plain
    text."""
    found = dict(tree)
    for group in ("tenants", "admins"):
        owners = found.get(group)
        if isinstance(owners, dict):
            found[group] = {name: _owner(owner, (group, name, "keys"), origin, plain) for name, owner in owners.items()}
    return found


def _owner(owner: Any, path: Path_, origin: str, plain: bool) -> Any:
    if not (isinstance(owner, dict) and isinstance(owner.get("keys"), list)):
        return owner
    return {**owner, "keys": [_entry(entry, (*path, i), origin, plain) for i, entry in enumerate(owner["keys"])]}


def _entry(entry: Any, path: Path_, origin: str, plain: bool) -> Any:
    if isinstance(entry, str):
        entry = {"hash" if _DIGEST.fullmatch(entry) else "key": entry}
    if not (isinstance(entry, dict) and "key" in entry):
        return entry
    rest = {name: value for name, value in entry.items() if name != "key"}
    return {**rest, "hash": _plain_digest(entry["key"], path, origin, plain)}


def _plain_digest(key: Any, path: Path_, origin: str, plain: bool) -> str:
    where = f"{dotted(path)} [{origin}]"
    if not isinstance(key, str) or len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"{where} is no digest, and too short for a key; allowed: sha256: and 64 hexadecimal digits, or in the "
            f"environment a key of at least {SHORTEST_KEY} characters; `dovetail keys new` makes both"
        )
    digest = key_digest(key.encode("utf-8", "replace"))
    if not plain:
        raise ConfigError(f"{where} is a key in plain text, and this file keeps digests; write {digest} in its place")
    return digest
