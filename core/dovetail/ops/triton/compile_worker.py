"""Compile Triton kernels into Triton's cache, in processes that need no device.

torch is not imported, because that takes seconds in which nothing is compiled: modules with kernels get a stand-in,
which is enough to import them. If a module needs more, its kernels are compiled by the engine.

``main`` reads one task per line from its standard input, and has processes compile them that it forks once everything
is imported. It writes one line for each finished task to its standard output, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import ModuleType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
from triton.runtime import driver

NICENESS = 5
"""Requests come first: the processes leave the processors to the engine if there are not enough of them."""

_PR_SET_PDEATHSIG = 1


class _Anything:
    """Stand in for anything of torch that a module mentions when it is imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return _Anything()

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything()
        setattr(self, name, found)
        return found

    def __or__(self, other: Any) -> _Anything:
        return self

    __ror__ = __or__


class _StandIn(ModuleType):
    """Stand in for torch, or for a module of it."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything()
        setattr(self, name, found)
        return found


class _NoTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import stand-ins for torch and its modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "torch":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class AbsentDevice(CudaDriver):
    """Stand in for the driver of a device of ``capability``. Kernels are compiled for it, and not launched."""

    def __init__(self, capability: int) -> None:
        self.launcher_cls = CudaLauncher
        self._capability = capability

    def get_current_device(self) -> int:
        """Return the number under which Triton keeps what it has compiled."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return a stream that nothing uses."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the device for which kernels are compiled."""
        return GPUTarget("cuda", self._capability, 32)


def compile_kernel(module: str, name: str, specialization: str) -> float:
    """Compile one kernel, and what launches it, into Triton's cache. ``specialization`` is what Triton passes to its
    hooks. Return the seconds that this took."""
    start = time.perf_counter()
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    kernel = function.preload(specialization)
    with contextlib.suppress(Exception):  # the engine builds it as well, and raises what is wrong
        CudaLauncher(kernel.src, kernel.metadata)
    return time.perf_counter() - start


def prepare(capability: int, parent: int) -> None:
    """Prepare a process that ``parent`` has forked: it ends with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    driver.set_active(AbsentDevice(capability))


def main(capability: int, processes: int, modules: str) -> None:
    """Compile for devices of ``capability`` (90 stands for 9.0) in up to ``processes`` processes. ``modules`` are
    imported before the processes are forked, separated by commas."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert "torch" not in sys.modules, "import this module before torch"
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    sys.stdout = os.fdopen(answers, "w", buffering=1)
    sys.meta_path.insert(0, _NoTorch())
    for module in modules.split(","):
        importlib.import_module(module)
    fork = get_context("fork")
    with ProcessPoolExecutor(
        processes, mp_context=fork, initializer=prepare, initargs=(capability, os.getpid())
    ) as pool:
        for line in sys.stdin:
            task = json.loads(line)
            future = pool.submit(compile_kernel, *task)
            future.add_done_callback(lambda done, task=task: _report(task, done))


def _report(task: list[str], done: Future[float]) -> None:
    error = done.exception()
    answer = {"task": task, "seconds": 0.0 if error else done.result(), "error": None if error is None else repr(error)}
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
