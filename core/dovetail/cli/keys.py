"""Create, list and revoke the API keys of a key file: ``dovetail keys``."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.config.tenants import KeyEntry

app = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", "-f", help="The key file (.yaml or .json), as in server.keys.")]
GROUPS = ("tenants", "admins")
HEAD = "# Kept by `dovetail keys`; docs/tenants.md explains it.\n"


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the tenant, or of the admin.")],
    file: File,
    admin: Annotated[bool, typer.Option("--admin", help="Create the key of an admin.")] = False,
    label: Annotated[str, typer.Option(help="What the key is for. Logs show it.")] = "",
    expires: Annotated[str | None, typer.Option(help="The day or time from which the key is refused.")] = None,
) -> None:
    """Create a key, print it, and add its digest to the file. The key is not stored, so it cannot be shown again."""
    from dovetail.config.tenants import key_digest
    from dovetail.server.tenants.keys import new_key

    key = new_key()
    entry = {"hash": key_digest(key.encode()), **({"label": label} if label else {})}
    if expires is not None:
        entry["expires"] = expires
    with _locked(file):
        tree = _read(file) if file.exists() else {}
        owners = _mapping(tree, "admins" if admin else "tenants")
        _mapping(owners, name).setdefault("keys", []).append(entry)
        _write(file, tree)
    typer.echo(key)


@app.command("list")
def list_(file: File) -> None:
    """List the tenants and admins of a file, their keys and limits."""
    from dovetail.cli.tables import add, console, table
    from dovetail.config.tenants import load_keys

    found = load_keys(str(file), os.environ)
    grid = table("name", "kind", "keys", "limits")
    for name, tenant in found.tenants.items():
        limits = found.limits(name).model_dump(exclude_defaults=True)
        add(grid, name, "tenant", _ids(tenant.keys), ", ".join(f"{key} {value}" for key, value in limits.items()))
    for name, admin in found.admins.items():
        add(grid, name, "admin", _ids(admin.keys), "none")
    console().print(grid)


@app.command()
def revoke(
    key: Annotated[
        str, typer.Argument(help="Label of the key, or the first digits of its digest, as `list` shows them.")
    ],
    file: File,
) -> None:
    """Remove a key from a file. A running server reads the file again within seconds. Running requests of the key still finish."""
    with _locked(file):
        name, left = _revoke(key, file)
    typer.echo(f"revoked a key of {name}; {left} left")


def _revoke(key: str, file: Path) -> tuple[str, int]:
    """Remove a key. Return the name of its owner and how many keys the owner has left. Raises ``ConfigError``."""
    tree = _read(file)
    found = [
        (name, entries, entry)
        for group in GROUPS
        for name, owner in (tree.get(group) or {}).items()
        for entries in [(owner or {}).get("keys", [])]
        for entry in entries
        if _matches(entry, key)
    ]
    if len(found) != 1:
        names = ", ".join(name for name, _, _ in found) or "none"
        raise ConfigError(
            f"{len(found)} keys of {file} match {key!r} (owners: {names}); `dovetail keys list` shows all keys"
        )
    name, entries, entry = found[0]
    entries.remove(entry)
    _write(file, tree)
    return name, len(entries)


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock the key file, so that one command at a time reads and replaces it. The lock is on its folder, because the file itself is
    replaced."""
    import fcntl

    try:
        folder = os.open(file.parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"key file {file} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            raise ConfigError(f"the folder of key file {file} cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(folder)


def _ids(entries: tuple[KeyEntry, ...]) -> str:
    return ", ".join(f"{e.id} (until {e.expires:%Y-%m-%d})" if e.expires else e.id for e in entries) or "none"


def _matches(entry: Any, key: str) -> bool:
    digest, label = (entry["hash"], entry.get("label")) if isinstance(entry, dict) else (entry, None)
    return label == key or (len(key) >= 6 and digest.removeprefix("sha256:").startswith(key.removeprefix("sha256:")))


def _mapping(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping at ``key``, which is created if it is missing."""
    if tree.get(key) is None:
        tree[key] = {}
    return tree[key]


def _read(file: Path) -> dict[str, Any]:
    """Return the tree of a file that can be written again without loss. Raises ``ConfigError``."""
    from dovetail.config.sources import read_file
    from dovetail.config.tenants import load_keys

    load_keys(str(file), os.environ)  # a file that is already invalid is not changed
    if file.suffix == ".toml":
        raise ConfigError(f"{file}: this command writes .yaml and .json; a TOML file must be edited by hand")
    lines = file.read_text(encoding="utf-8").removeprefix(HEAD).splitlines()
    if file.suffix != ".json" and any("#" in line for line in lines):
        raise ConfigError(f"{file} has comments, which would be lost; edit it by hand, or remove them")
    return read_file(file, "key file").tree


def _write(file: Path, tree: dict[str, Any]) -> None:
    """Replace the file atomically, so that a server never reads an incomplete file. Raises ``ConfigError`` for a tree that a server would
    refuse."""
    import yaml

    from dovetail.config.tenants import check_keys

    check_keys(tree, str(file))
    text = json.dumps(tree, indent=2, default=str) + "\n"
    if file.suffix != ".json":
        text = HEAD + yaml.safe_dump(tree, sort_keys=False)
    draft = file.with_name(f".{file.stem}.{os.getpid()}{file.suffix}")
    try:
        draft.touch(0o600)
        draft.write_text(text, encoding="utf-8")
        if file.exists():
            draft.chmod(file.stat().st_mode & 0o777)
        draft.replace(file)
    except OSError as error:
        raise ConfigError(f"key file {file} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
