"""Record what one rank does with torch's profiler."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)


class RankProfiler:
    """Profile the thread that calls ``start``, and the device. ``rank`` is in the name of the file.

    No method raises: under tensor parallelism an error of one rank alone would end all ranks.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._profile: torch.profiler.profile | None = None
        self._prefix = ""

    def start(self, prefix: str, activities: Sequence[str], with_stack: bool, record_shapes: bool) -> str | None:
        """Start to record ``activities`` ("cpu", "cuda"; empty: what the machine has). Return why this failed, or
        None."""
        known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        chosen = [known[name] for name in activities or known if name == "cpu" or torch.cuda.is_available()]
        if not chosen:
            return "activities are only cuda, and there is no CUDA device"
        profile = torch.profiler.profile(activities=chosen, with_stack=with_stack, record_shapes=record_shapes)
        try:
            profile.start()
        except Exception as error:
            log.exception("the profiler did not start")
            return f"{type(error).__name__}: {error}"
        self._profile, self._prefix = profile, prefix
        return None

    def stop(self) -> dict[str, str]:
        """Stop, and write a trace in Chrome's format. Return its ``file``, or the ``error``; empty if nothing was
        recorded."""
        profile, self._profile = self._profile, None
        if profile is None:
            return {}
        file = Path(f"{self._prefix}-{os.getpid()}-rank{self._rank}.trace.json.gz")
        try:
            profile.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(profile, file)
        except Exception as error:
            log.exception("the profile was not written")
            return {"error": f"{type(error).__name__}: {error}"}
        return {"file": str(file)}


def _write(profile: torch.profiler.profile, file: Path) -> None:
    """Write the trace, compressed, so that ``file`` is complete as soon as it exists."""
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=file.parent) as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, "trace.json.gz")
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target)
        packed.replace(file)
