"""What an error says of the device: whether it is lost, whether it was too small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dovetail.errors import EngineError

if TYPE_CHECKING:
    from dovetail.config.sections import Config

_CPU_OUT_OF_MEMORY = "can't allocate memory"  # torch's CPU allocator raises a RuntimeError


def lost_device(error: BaseException) -> str | None:
    """Why the device cannot be used any more after ``error``; None if it can. A lost device ends the process.

    Kernels run behind the host, so what one has done wrong surfaces at any later call, in that caller's words: torch's
    AcceleratorError (also raised for what does no harm), cuBLAS' and Triton's RuntimeError. So the device is asked: once it
    is lost, every call fails. Waits for what still runs there.
    """
    if not torch.cuda.is_initialized():
        return first_line(error) if isinstance(error, torch.AcceleratorError) else None
    fault = _fault()
    if fault is None:
        return None
    seen = first_line(error)
    return seen if fault in seen else f"{fault} (it surfaced as {type(error).__name__}: {seen})"


def _fault() -> str | None:
    """What the devices in use answer to a call that does nothing."""
    try:
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):
                torch.cuda.synchronize(device)
    except Exception as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """What matters of an error's text: torch adds paragraphs of general advice."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def out_of_memory(error: BaseException) -> bool:
    """True if ``error`` says that there was too little memory, on a device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_OUT_OF_MEMORY in str(error)


@contextmanager
def explained(config: Config) -> Iterator[None]:
    """Build an engine. Raises ``EngineError`` with what was needed and what to set where memory does not suffice, and with
    what the device says where it is lost."""
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
    chosen = ", ".join(f"{name} ({value:g})" for name, value in pool.items() if value is not None)
    return (
        f"there is too little memory to build the engine: {first_line(error)} What needs less: "
        + (f"a lower {chosen}; " if chosen else "")
        + f"a lower scheduler.chunk_size ({section.chunk}) or scheduler.max_running ({section.rows}); a lower graphs.max_rows "
        f"({config.graphs.max_rows}); a smaller model. What gives more: stop other processes on the device"
    )
