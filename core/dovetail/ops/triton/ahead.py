"""Compile Triton kernels before they are first launched, in other processes.

Which kernels a step needs is not listed anywhere: the step is run once while this module notes the kernels instead of
launching them. Kernels that Triton's cache does not have are then compiled by processes (``compile_worker``), on as
many processors as there are, in the order in which they were noted. If a kernel is launched before it is compiled, it is
compiled next, with those that were noted after it, and the launch waits for the process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from dovetail.ops.triton.driver import start_digest, start_driver
from dovetail.ops.triton.kernel_cache import cache_directory, kernels_of_mark, mark_file, write_mark
from dovetail.ops.triton.launch import INTERPRETED

log = logging.getLogger(__name__)

WAIT_SECONDS = 30.0
"""A launch waits at most this number of seconds for a process that compiles its kernel. After that the processes are
ended, and kernels are compiled when they are launched."""

END_SECONDS = 5.0
"""Processes that were killed have ended after at most this number of seconds."""

_REPLACING = threading.Lock()
"""Held while launches are replaced, so that two threads do not replace and restore them in turns."""

_MODULES = ("dovetail.ops.triton.matmul", "dovetail.ops.triton.norm", "dovetail.ops.triton.sampling")
"""Modules that all processes import, once for all of them."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); from dovetail.ops.triton.compile_worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
)


class KernelTask(NamedTuple):
    """Identify a kernel with its specialization, as Triton's hooks describe it."""

    module: str
    name: str
    specialization: str


@dataclass(slots=True, eq=False)
class _Pending:
    """Hold a kernel that ``compiler`` compiles. ``mark`` is the file that is written when the cache has the kernel."""

    task: KernelTask
    mark: Path
    compiler: subprocess.Popen[str]
    ended: threading.Event = field(default_factory=threading.Event)


class KernelCounts(NamedTuple):
    """Count the kernels that were noted and those of them that are compiled or that could not be compiled ahead."""

    noted: int = 0
    compiled: int = 0
    failed: int = 0


class KernelsAhead:
    """Compile the kernels that are noted. Noting and loading are for one thread; kernels may be launched by any thread.

    A hook in Triton sees which kernels are about to be compiled. It is in place until everything that was noted before
    ``release`` is compiled. If something else in this process has such a hook, ``is_active`` is False and nothing can
    be noted.
    """

    def __init__(
        self, capability: int, what: str, processes: int, device: torch.device | None = None, *, settings: str = ""
    ) -> None:
        """``capability`` is the compute capability of ``device`` (90 stands for 9.0), by default of the first device, and
        ``what`` names the kernels that will be noted. Up to ``processes`` processes start at once, unless all kernels of that name were compiled
        before. ``settings`` are everything on which these kernels may depend besides their source: if they are given and the
        same as then, and so are the files of the core and of what defines the kernels, ``is_known`` is True."""
        self.waited = 0.0  # seconds for which launches have waited for processes
        self.directory = cache_directory()
        self._capability = capability
        self._processes = processes
        self._known: set[KernelTask] = set()
        self._seen: set[tuple[int, str]] = set()  # kernels and their keys in Triton, so that each is noted once
        self._pending: dict[KernelTask, _Pending] = {}
        self._queue: list[_Pending] = []  # all that had to be compiled, in the order in which they were noted
        self._first = 0  # those before it are compiled
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._ended = self._failed = 0
        self._compiler: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._mode: tuple[int, str] | None = None  # the thread that notes or loads, and which of these it does
        self._complete, self._settings = mark_file(capability, what), settings
        self._kernels_before = kernels_of_mark(self._complete, settings) if settings else 0
        self._releasing = self._closed = False
        self._began = time.perf_counter()
        # the driver is built beside the digest: the first is needed to note kernels, both to load them
        self._starting = () if INTERPRETED else (start_digest(), start_driver(device))
        self._active = not INTERPRETED and self._hooked(None, self._hook)
        if self._active and not self._complete.exists():
            self.start()

    # -- noting ------------------------------------------------------------------------------------------------------

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the kernels that the calling thread would launch, and launch none. Processes compile those that are not
        in the cache. Results of kernels are undefined."""
        if not self._active:
            raise RuntimeError("kernels can be noted while is_active is True, and it is not")
        with self._instead("note"):
            yield

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load the kernels that the calling thread would launch onto the device, and launch none."""
        with self._instead("load"):
            yield

    @contextmanager
    def _instead(self, mode: str) -> Iterator[None]:
        from triton.runtime.jit import JITFunction

        if self._starting:
            self._starting[1].join()
        owner = threading.get_ident()

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if threading.get_ident() != owner:
                return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            compiled = original(kernel, *args, grid=grid, warmup=True, **kwargs)
            if mode == "load" and compiled is not None:
                compiled.run  # noqa: B018 (loads the kernel)
            return compiled

        def compile_once(kernel: Any, key: str, *args: Any, **kwargs: Any) -> Any:
            if mode == "note" and threading.get_ident() == owner:
                if (id(kernel), key) in self._seen:
                    return None
                self._seen.add((id(kernel), key))
            return compile_kernel(kernel, key, *args, **kwargs)

        with _REPLACING:
            original, compile_kernel = JITFunction.run, JITFunction._do_compile
            self._mode, JITFunction.run, JITFunction._do_compile = (owner, mode), run, compile_once
            try:
                yield
            finally:
                self._mode, JITFunction.run, JITFunction._do_compile = None, original, compile_kernel

    def wait_for_triton(self) -> None:
        """Wait until Triton can load kernels. A thread that launched one earlier would do what another does already."""
        for thread in self._starting:
            thread.join()

    @property
    def is_active(self) -> bool:
        """Return True if kernels can be noted."""
        return self._active

    @property
    def is_known(self) -> bool:
        """Return True if everything that would be noted is compiled already, so that noting it can be left out."""
        return self._kernels_before > 0

    @property
    def counts(self) -> KernelCounts:
        """Return the numbers of kernels that are noted, compiled and failed so far. If they are known, those of the engine
        that noted them."""
        if self.is_known and not self._known:
            return KernelCounts(self._kernels_before, self._kernels_before)
        with self._lock:
            waiting = len(self._pending)
            return KernelCounts(len(self._known), len(self._known) - waiting - self._failed, self._failed)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for all kernels that were noted. Return True if none is left."""
        end = time.monotonic() + seconds
        return all(one.ended.wait(max(0.0, end - time.monotonic())) for one in list(self._pending.values()))

    @property
    def position(self) -> int:
        """Return a number for ``has_compiled``: everything that was noted before this call is before it."""
        return len(self._queue)

    def has_compiled(self, position: int) -> bool:
        """Return True if everything is compiled that was noted before ``position``, or could not be compiled ahead. Does
        not wait."""
        queue = self._queue
        while self._first < len(queue) and queue[self._first].ended.is_set():
            self._first += 1
        return self._first >= position

    # -- Triton's hook -----------------------------------------------------------------------------------------------

    def _hooked(self, old: Any, new: Any) -> bool:
        """Replace Triton's hook ``old`` by ``new``. If it has another one, return False and change nothing."""
        from triton import knobs

        if knobs.runtime.jit_cache_hook != old:
            return False
        knobs.runtime.jit_cache_hook = new
        return True

    def _hook(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton calls this before it compiles a kernel or takes it from its cache. Return True to prevent both."""
        task = KernelTask(fn.module, fn.name, compile["specialization_data"])
        if self._mode == (threading.get_ident(), "note"):
            self._note(task, fn.jit_function.cache_key)
            return True
        pending = self._pending.get(task)
        if pending is not None and not pending.ended.is_set():
            start = time.perf_counter()
            self._bring_forward(pending)
            in_time = pending.ended.wait(WAIT_SECONDS)
            self.waited += time.perf_counter() - start
            if not in_time:
                log.warning(
                    "%s was not compiled within %g s; the processes that compile are ended", fn.name, WAIT_SECONDS
                )
                self.close()
        return False

    def _note(self, task: KernelTask, source: str) -> None:
        if task in self._known:
            return
        file = mark_file(self._capability, *task, source)
        self._known.add(task)
        if file.exists():
            return
        compiler = self.start()
        with self._lock:
            self._pending[task] = _Pending(task, file, compiler)
            self._queue.append(self._pending[task])
        if not self._send(compiler, {"last": [task]}):
            self._end(task, "the process has ended")

    def _bring_forward(self, pending: _Pending) -> None:
        """Have a kernel compiled next. The processes that it leaves compile those that were noted after it: the step that
        launches it needs some of them as well."""
        first = self._queue.index(pending)
        likely = self._queue[first : first + self._processes]
        self._send(pending.compiler, {"first": [one.task for one in likely if not one.ended.is_set()]})

    def _send(self, compiler: subprocess.Popen[str], message: dict[str, list[KernelTask]]) -> bool:
        """Send a line to the processes. Return False if they have ended."""
        assert compiler.stdin is not None
        try:
            with self._sending:
                compiler.stdin.write(json.dumps(message) + "\n")
                compiler.stdin.flush()
        except (OSError, ValueError):  # ValueError: it is closed
            return False
        return True

    # -- the processes -----------------------------------------------------------------------------------------------

    def start(self) -> subprocess.Popen[str]:
        """Start the processes if they are not running. They need seconds to import what they use."""
        if self._compiler is not None:
            return self._compiler
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by the thread that reads)
        numbers = str(self._capability), str(self._processes)
        compiler = self._compiler = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *numbers, ",".join(_MODULES), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C goes to the engine alone
        )
        self._reader = threading.Thread(target=self._read, args=(compiler, errors), name="kernels-ahead", daemon=True)
        self._reader.start()
        return compiler

    def _read(self, compiler: subprocess.Popen[str], errors: IO[str]) -> None:
        """Take the answers of the processes until they have ended."""
        assert compiler.stdout is not None
        with errors, compiler.stdout:
            for line in compiler.stdout:
                answer = json.loads(line)
                self._end(KernelTask(*answer["task"]), answer["error"])
            code = compiler.wait()
            left = [task for task, one in list(self._pending.items()) if one.compiler is compiler]
            if left and not self._closed:
                errors.seek(0)
                log.warning(
                    "the process that compiles kernels ended with status %d; %d kernels are compiled when they are first launched:\n%s",
                    code,
                    len(left),
                    errors.read()[-2000:],
                )
        if self._compiler is compiler:
            self._compiler = None
        assert compiler.stdin is not None
        with suppress(OSError):
            compiler.stdin.close()
        for task in left:
            self._end(task, "the process has ended")

    def _end(self, task: KernelTask, error: str | None) -> None:
        with self._lock:
            pending = self._pending.pop(task, None)
            if pending is None:
                return
            self._ended += 1
            self._failed += error is not None
        if error is None:
            self._touch(pending.mark)
        else:
            log.debug("%s.%s could not be compiled ahead: %s", task.module, task.name, error)
        pending.ended.set()
        self._end_if_complete()

    def release(self) -> None:
        """End the processes once they have compiled everything that was noted. Nothing can be noted afterwards."""
        with self._lock:
            self._releasing = True
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        """If everything that was noted is compiled, and nothing more will be noted, end the processes, remove the hook and
        log the number of kernels."""
        with self._lock:
            if not self._releasing or self._pending or not self._active:
                return
            self._active = False
            self._hooked(self._hook, None)
            compiler = self._compiler
        if compiler is not None and compiler.stdin is not None:
            with self._sending, suppress(OSError):
                compiler.stdin.close()
        if not self._failed and not self._closed and (self._known or not self.is_known):
            write_mark(self._complete, self._settings, len(self._known), {task.module for task in self._known})
        if self._ended:
            seconds = time.perf_counter() - self._began
            log.info(
                "warm-up: compiled %d Triton kernels in %.1f s; %d failed",
                self._ended - self._failed,
                seconds,
                self._failed,
            )

    def _touch(self, mark: Path) -> None:
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def close(self) -> None:
        """End the processes now, and remove the hook."""
        self._closed = True
        compiler = self._compiler
        if compiler is not None:
            compiler.kill()
        if self._reader is not None:
            self._reader.join(END_SECONDS)
        for task in list(self._pending):
            self._end(task, "closed")
        self.release()
