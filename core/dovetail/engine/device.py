"""Give an engine its stream, and determine whether an error means that the device is lost or that memory was too small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dovetail.errors import EngineError

if TYPE_CHECKING:
    from dovetail.config.sections import Config

_CPU_OUT_OF_MEMORY = "can't allocate memory"  # torch's CPU allocator raises a RuntimeError


class EngineStream:
    """Make the one stream of an engine on ``device`` the current one of this thread, and ``device`` the current device, while the
    context is entered. On a CPU, do nothing. Contexts may be nested.

    Steps run, and graphs are captured, on the same stream, and not on the default stream with a stream for each kind of graphs:
    with several streams and several captured sizes, an H200 goes from one kernel of a graph to the next 0.18 us later
    (docs/benchmarks.md, "Streams").
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # the current device and the current stream of ``device`` before each context
        self._before: list[tuple[int, torch.cuda.Stream]] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before.append((torch.cuda.current_device(), torch.cuda.current_stream(self._stream.device)))
            torch.cuda.set_stream(self._stream)  # which changes the current device, too

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            device, stream = self._before.pop()
            torch.cuda.set_stream(stream)
            if device != self._stream.device.index:
                torch.cuda.set_device(device)


def lost_device(error: BaseException) -> str | None:
    """Return why the device cannot be used any more after ``error``, or None if it still can. A process cannot use a
    lost device again, so the engine must be started again.

    Kernels run asynchronously, so the error of a kernel surfaces at some later call: as torch's AcceleratorError (which
    is also raised for harmless errors), or as a RuntimeError of cuBLAS or Triton. The error alone is therefore not
    enough. This function makes calls to the device, which all fail once the device is lost. They wait for the work that
    still runs there.
    """
    if not torch.cuda.is_initialized():
        return first_line(error) if isinstance(error, torch.AcceleratorError) else None
    fault = _fault()
    if fault is None:
        return None
    seen = first_line(error)
    return seen if fault in seen else f"{fault} (it surfaced as {type(error).__name__}: {seen})"


def _fault() -> str | None:
    """Wait for all work on the devices that this process uses. Return the error that this raises, or None."""
    try:
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)
    except Exception as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text. The lines that torch adds after it are general advice."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` reports that there was too little memory, on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_OUT_OF_MEMORY in str(error)


@contextmanager
def explained(config: Config) -> Iterator[None]:
    """Explain errors of the code in this context, which builds an engine. If memory does not suffice, raise an
    ``EngineError`` that names the settings that need less. If the device is lost, raise an ``EngineError`` with the
    device's error."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise EngineError(_too_small(config, error)) from error
        reason = lost_device(error)
        if reason is not None:
            raise EngineError(f"the device was lost while the engine was built: {reason}") from error
        raise


def _too_small(config: Config, error: BaseException) -> str:
    section, memory = config.scheduler, config.memory
    pool = {"memory.num_pages": memory.num_pages, "memory.kv_gib": memory.kv_gib}
    chosen = ", ".join(f"{name} ({value})" for name, value in pool.items() if value is not None)
    return (
        f"there is too little memory to build the engine: {first_line(error)} To need less memory, set "
        + (f"a lower {chosen}; " if chosen else "")
        + f"a lower scheduler.chunk_size ({section.chunk}) or scheduler.max_running ({section.rows}); a lower graphs.max_rows "
        f"({config.graphs.max_rows}); or a smaller model. To get more memory, stop other processes on the device"
    )
