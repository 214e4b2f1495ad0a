"""Write files so that no reader sees a part of them, also if the process or the machine stops, or if several processes
write at the same time."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DIGEST = ".sha256"


def write_atomically(file: Path, data: str | bytes) -> None:
    """Replace ``file`` with one that holds ``data``, and keep its permissions. Missing folders are made. Devices and
    pipes such as /dev/stdout are written in place. Raises ``OSError``; ``file`` is then unchanged."""
    content = data.encode() if isinstance(data, str) else data
    if file.exists() and not file.is_file():
        file.write_bytes(content)
        return
    target = file.resolve()  # a link stays a link
    with replacement(target) as draft:
        if target.exists():
            draft.chmod(target.stat().st_mode & 0o777)
        draft.write_bytes(content)


@contextmanager
def replacement(file: Path) -> Iterator[Path]:
    """Yield the path of an empty file beside ``file``, which replaces ``file`` when the block ends without an exception
    and is deleted otherwise. Its content is on the disk before it does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.stem[:100]}.{secrets.token_hex(8)}{file.suffix[:20]}")
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
    try:
        yield draft
        _sync(draft, os.O_RDWR)
        draft.replace(file)
        with suppress(OSError):  # some file systems cannot flush folders
            _sync(file.parent, os.O_RDONLY)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that belongs to ``file`` while the block runs: other processes and threads that ask for it wait. The
    lock is the file ``<name>.lock`` beside it, which stays. The system releases it when the process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file.with_name(f"{file.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


def write_digest(file: Path) -> None:
    """Write the digest of ``file`` beside it, for ``has_digest``."""
    write_atomically(_digest_file(file), digest(file))


def has_digest(file: Path) -> bool:
    """Return True if ``file`` exists and has the content that it had when ``write_digest`` was called."""
    try:
        return _digest_file(file).read_text(encoding="ascii") == digest(file)
    except (OSError, UnicodeDecodeError):
        return False


def digest(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _digest_file(file: Path) -> Path:
    return file.with_name(file.name + _DIGEST)


def _lock(handle: int) -> None:
    try:
        import fcntl
    except ImportError:  # not on Windows, where one process at a time is expected to write
        return
    fcntl.flock(handle, fcntl.LOCK_EX)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
