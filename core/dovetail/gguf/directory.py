"""Present a GGUF file as a directory in Hugging Face layout: config.json, the tokenizer's files, and ``gguf.json``, which
names the file of the weights. The directory is written once and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path

from dovetail.atomic_files import locked
from dovetail.errors import ConfigError
from dovetail.folders import cache_folder
from dovetail.gguf.files import PIECE, SHARD, piece_files, shard_files

LAYOUT = 4
"""The number of the layout of these directories. A change of what is written must change it."""

MARKER = "gguf.json"


def gguf_directory(file: Path) -> Path:
    """Return the directory that presents ``file``, a GGUF file, one of the parts of a split one, or one of the pieces of a
    cut one. It is written unless that was done before; pieces are put together in it. Raises ``ConfigError``."""
    pieces = piece_files(file)
    sources = pieces or shard_files(file)
    folder = cache_folder() / "gguf" / f"{_short(sources[0])}-{_key(sources)}"
    if (folder / MARKER).is_file():
        return folder
    try:
        with locked(folder):
            if not (folder / MARKER).is_file():
                _write(sources, folder, join=bool(pieces))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; set XDG_CACHE_HOME to a folder that can be") from error
    return folder


def gguf_files(directory: Path) -> list[Path]:
    """Return the files of the weights of a directory that ``gguf_directory`` has written. Raises ``ConfigError``."""
    try:
        return [directory / name for name in json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{directory / MARKER} cannot be read: {error}; delete the directory") from error


def is_gguf_directory(directory: Path) -> bool:
    """Return whether ``gguf_directory`` has written the directory."""
    return (directory / MARKER).is_file()


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the GGUF checkpoints of a directory: single files, and the first part or piece of those that are divided."""
    found: dict[str, Path] = {}
    for file in sorted(directory.iterdir()):
        shard, piece = SHARD.fullmatch(file.name), PIECE.fullmatch(file.name)
        if file.is_file() and (file.suffix == ".gguf" or piece) and not file.name.startswith(("mmproj", ".")):
            found.setdefault(shard["start"] if shard else piece["start"] if piece else file.name, file)
    return list(found.values())


def join_pieces(pieces: list[Path], file: Path) -> None:
    """Write the content of all pieces, one after another, to ``file``."""
    with file.open("wb") as joined:
        for piece in pieces:
            with piece.open("rb") as content:
                shutil.copyfileobj(content, joined, 16 << 20)


def _write(sources: list[Path], folder: Path, *, join: bool) -> None:
    from dovetail.gguf.presentation import presentation  # imports numpy, which finding a checkpoint must not

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        names = [str(source.resolve()) for source in sources]
        file = sources[0]
        if join:
            names, file = ["model.gguf"], draft / "model.gguf"
            join_pieces(sources, file)
        for name, content in presentation(file).items():
            (draft / name).write_text(content, encoding="utf-8")
        (draft / MARKER).write_text(json.dumps({"layout": LAYOUT, "files": names}), encoding="utf-8")
        draft.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _key(sources: list[Path]) -> str:
    """Return a text that differs if the place, the size or the time of a file does."""
    stats = [(str(source.resolve()), source.stat().st_size, source.stat().st_mtime_ns) for source in sources]
    return hashlib.sha256(json.dumps([LAYOUT, stats]).encode()).hexdigest()[:16]


def _short(file: Path) -> str:
    return re.sub(r"[^\w.-]+", "-", file.name.partition(".gguf")[0])[:60]
