"""Read adapters on a thread, keep them in host memory, and copy them to the slots of one rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.engine.read_thread import Note, Read, ReadThread, note_nothing
from dovetail.errors import WeightsError

if TYPE_CHECKING:
    from dovetail.engine.adapter_files import AdapterImage
    from dovetail.engine.adapters import EngineAdapters
    from dovetail.types import AdmittedRequest, IntArray


class AdapterImages:
    """Carry out the commands about adapters on one rank. ``key`` names one version of an adapter."""

    def __init__(self, adapters: EngineAdapters) -> None:
        self._adapters = adapters
        self._images: dict[int, AdapterImage] = {}
        self._reading: dict[int, Read[tuple[AdapterImage, str]]] = {}
        self._thread: ReadThread[tuple[AdapterImage, str]] = ReadThread("adapters")

    def run(self, command: str, *args: Any) -> Any:
        """Carry out a command. None of them waits for a file or for the device, except ``check``.

        - ``check, directory``: check the headers of an adapter; return a stamp of its files, and why it is refused, or "".
        - ``read, key, directory, stamp``: begin to read an adapter. If ``stamp`` is not empty, the files must still have it.
        - ``cancel, key``: do not read an adapter if reading it has not begun. ``poll`` still returns it, with an error if it was not read.
        - ``poll``: return [key, stamp, error] of all adapters that were read or cancelled since the last call; the error is
          empty if there is none.
        - ``install, key, slot``: copy an adapter that was read to a slot.
        - ``drop, key``: forget an adapter that ``poll`` has returned.
        - ``describe``: return the largest rank and the bytes of a slot.
        """
        match command:
            case "check":
                return self._check(*args)
            case "read":
                key, directory, expected = args
                self._reading[key] = self._thread.submit(self._read, directory, expected)
            case "cancel":
                (key,) = args
                if (reading := self._reading.get(key)) is not None:
                    reading.cancel()
            case "poll":
                return self._poll()
            case "install":
                key, slot = args
                self._adapters.install(self._images[key], slot)
            case "drop":
                (key,) = args
                self._images.pop(key, None)
            case "describe":
                return [self._adapters.max_rank, self._adapters.slot_bytes]
            case _:
                raise ValueError(f"there is no command {command!r} of adapters")
        return None

    def close(self) -> None:
        """End the thread and its read. One that does not return ends with the process; the others must have ended before, because
        Torch aborts a process that ends while a thread computes."""
        self._thread.close()

    def _check(self, directory: str) -> list[str]:
        try:
            self._adapters.check(directory)
            return [stamp_of(directory), ""]
        except WeightsError as error:
            return ["", str(error)]

    def _read(self, note: Note, directory: str, expected: str) -> tuple[AdapterImage, str]:
        stamp = stamp_of(directory, note)
        if expected and stamp != expected:
            raise WeightsError(f"the files in {directory} have changed since the adapter was loaded; load it again")
        image = self._adapters.read(directory, note)
        if stamp_of(directory, note) != stamp:
            raise WeightsError(f"the files in {directory} changed while they were read; load it again")
        return image, stamp

    def _poll(self) -> list[list[Any]]:
        for read in self._reading.values():
            self._thread.end_if_hung(read)
        ended = [(key, future) for key, future in self._reading.items() if future.done()]
        found: list[list[Any]] = []
        for key, future in ended:
            del self._reading[key]
            if future.cancelled():
                found.append([key, "", "it was cancelled"])
                continue
            error = future.exception()
            if error is None:
                self._images[key], stamp = future.result()
                found.append([key, stamp, ""])
            else:
                text = str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"
                found.append([key, "", text])
        return found


def stamp_of(directory: str, note: Note = note_nothing) -> str:
    """Return a text that changes when the files of an adapter do. Raises ``WeightsError`` if one is missing."""
    from dovetail.engine.peft import CONFIG, TENSORS

    stats: list[os.stat_result] = []
    try:
        for file in (Path(directory) / CONFIG, Path(directory) / TENSORS):
            note(file)
            stats.append(file.stat())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{directory} is no adapter saved by PEFT ({CONFIG}, {TENSORS}): {error}") from None
    return " ".join(f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}" for stat in stats)


def adapter_slots(reqs: Sequence[AdmittedRequest]) -> IntArray | None:
    """Return the slot of the adapter of each request, int32 ``[rows]``; None if none has an adapter."""
    slots = [req.adapter for req in reqs]
    return np.array(slots, np.int32) if any(slots) else None
