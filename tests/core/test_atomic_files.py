"""Test that files are written whole or not at all, and that writers do not lose each other's records.

.venv/bin/python -m pytest -q tests/core/test_atomic_files.py
"""

import ctypes
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.atomic_files import has_digest, replacement, write_atomically, write_digest
from dovetail.ops.cpu import library as building
from dovetail.registry.measured import MeasuredPart, MeasuredRecord, add_records, read_records

WRITERS, RECORDS = 4, 20


def record(writer: int, index: int) -> MeasuredRecord:
    winner, loser = (MeasuredPart(name=name, distribution="d", version="1") for name in ("a", "b"))
    return MeasuredRecord(
        slot=f"kind{writer}",
        winner=winner,
        loser=loser,
        device="cpu",
        model="m",
        workload=f"w{index}",
        shape="s",
        metric="m",
        ratio=1.5,
        low=None,
        high=None,
        measured="2026-01-01T00:00:00",
    )


def add_many(file: Path, writer: int) -> None:
    for index in range(RECORDS):
        add_records(file, [record(writer, index)])


def test_no_record_of_concurrent_writers_is_lost(tmp_path: Path):
    file = tmp_path / "new folder" / "tuning.json"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(file, writer)) for writer in range(WRITERS)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(60)
    assert {(r.slot, r.workload) for r in read_records(file)} == {
        (f"kind{writer}", f"w{index}") for writer in range(WRITERS) for index in range(RECORDS)
    }
    assert {path.name for path in file.parent.iterdir()} == {"tuning.json", "tuning.json.lock"}


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path):
    file = tmp_path / "result.json"
    write_atomically(file, "old")
    file.chmod(0o640)
    with pytest.raises(FileNotFoundError), replacement(file) as draft:
        draft.rename(tmp_path / "nowhere" / "else")
    assert (file.read_text(), [*tmp_path.iterdir()]) == ("old", [file])
    write_atomically(file, b"new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)


def test_links_and_devices_stay_what_they_are(tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    write_atomically(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    write_atomically(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()


def test_a_digest_fits_one_content(tmp_path: Path):
    file = tmp_path / "kernels.so"
    assert not has_digest(file)
    file.write_bytes(b"x" * 100_000)
    assert not has_digest(file)
    write_digest(file)
    assert has_digest(file)
    file.write_bytes(b"x" * 99_999)
    assert not has_digest(file)


@pytest.mark.skipif(building.library().handle is None, reason=f"no compiled kernels: {building.library().text}")
def test_a_truncated_kernel_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loading it would end the process with SIGBUS, so the library is loaded by another process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "FLAGS", ("-O0", *building.FLAGS[1:]))  # compiles sooner
    file = building._built(building.SOURCE)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 3])
    assert building._built(building.SOURCE) == file
    assert file.stat().st_size == len(whole)
    load = f"import torch, ctypes; ctypes.CDLL({str(file)!r})"
    assert subprocess.run([sys.executable, "-c", load], check=False).returncode == 0
    assert isinstance(ctypes.CDLL(str(file)), ctypes.CDLL)
