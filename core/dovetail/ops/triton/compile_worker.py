"""Compile Triton kernels into Triton's cache, in processes that need no device.

torch is not imported, because that takes seconds in which nothing is compiled: modules with kernels get a stand-in,
which is enough to import them. If a module needs more, its kernels are compiled by the engine.

``main`` reads tasks from its standard input. Processes that it forks once everything is imported compile them in this order. A
line ``{"last": tasks}`` adds tasks, and a line ``{"first": tasks}`` moves those of them that are still waiting before all others.
``main`` writes one line for each finished task to its standard output. It returns when its standard input has ended and all tasks
are finished.
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
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from types import ModuleType
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
from triton.runtime import driver

from dovetail.ops.triton.digest import use_kept_digest

NICENESS = 5
"""Requests come first: the processes leave the processors to the engine if there are not enough of them."""

_PR_SET_PDEATHSIG = 1


class Task(NamedTuple):
    """Identify a kernel, as ``ahead.KernelTask`` does, which cannot be imported here."""

    module: str
    name: str
    specialization: str


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
    use_kept_digest()
    fork = get_context("fork")
    with ProcessPoolExecutor(
        processes, mp_context=fork, initializer=prepare, initargs=(capability, os.getpid())
    ) as pool:
        tasks = WaitingTasks(pool, processes)
        for line in sys.stdin:
            message: dict[str, list[list[str]]] = json.loads(line)
            tasks.bring_forward([Task(*task) for task in message.get("first", ())])
            tasks.add([Task(*task) for task in message.get("last", ())])
        tasks.wait()


class WaitingTasks:
    """Give tasks to the processes of ``pool``, as many at a time as there are processes. The pool itself could not change
    their order."""

    def __init__(self, pool: Executor, processes: int) -> None:
        self._pool, self._processes, self._idle = pool, processes, processes
        self._waiting: OrderedDict[Task, None] = OrderedDict()
        self._changed = threading.Condition()

    def add(self, tasks: Sequence[Task]) -> None:
        """Have tasks compiled after all others."""
        with self._changed:
            self._waiting.update(dict.fromkeys(tasks))
        self._submit()

    def bring_forward(self, tasks: Sequence[Task]) -> None:
        """Have those of ``tasks`` that still wait compiled before all others, in this order."""
        with self._changed:
            for task in reversed(tasks):
                if task in self._waiting:
                    self._waiting.move_to_end(task, last=False)

    def wait(self) -> None:
        """Wait until all tasks are finished."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._idle == self._processes)

    def _submit(self) -> None:
        """Give tasks to idle processes."""
        while True:
            with self._changed:
                if not self._idle or not self._waiting:
                    return
                task, _ = self._waiting.popitem(last=False)
                self._idle -= 1
            try:
                future = self._pool.submit(compile_kernel, *task)
            except BrokenExecutor as error:
                future = Future[float]()
                future.set_exception(error)
            future.add_done_callback(lambda done, task=task: self._finish(task, done))

    def _finish(self, task: Task, done: Future[float]) -> None:
        error = done.exception()
        _report(task, 0.0 if error else done.result(), error)
        broken = isinstance(error, BrokenExecutor)  # a process was killed, and the others with it
        with self._changed:
            left = list(self._waiting) if broken else []
            if broken:
                self._waiting.clear()
            self._idle += 1
            self._changed.notify_all()
        for other in left:
            _report(other, 0.0, error)
        if not broken:  # a broken pool calls this while it holds its own lock
            self._submit()


def _report(task: Task, seconds: float, error: BaseException | None) -> None:
    answer = {"task": task, "seconds": seconds, "error": None if error is None else repr(error)}
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
