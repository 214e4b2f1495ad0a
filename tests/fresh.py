"""Start fresh Python processes that need not import torch again: each is forked from a process that has imported the
heavy packages and done nothing else. Tests in which the import itself matters start ``sys.executable``."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import IO

HEAVY = (
    *("torch", "scipy.stats", "tokenizers", "pytest"),
    *("dovetail.cli.app", "dovetail.llm.engine", "dovetail.loop.build", "dovetail_attention.torch_native"),
    *("dovetail.server.app", "dovetail.server.engine_process", "dovetail.engine.engine", "dovetail_executors.local"),
    *("transformers.modeling_utils", "dovetail_cache.radix", "dovetail_models.dense", "dovetail_policies.lpm"),
    "set_apart",
)


@functools.cache
def heavy_imported() -> ForkServerContext:
    """Start processes that have imported ``HEAVY`` before they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*HEAVY])
    return context


def run_python(
    arguments: Sequence[str], directory: Path, env: Mapping[str, str], seconds: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` (a script, ``-c code`` or ``-m module``) with ``env`` alone, as ``subprocess.run``
    would."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "out"), Path(folder, "err")
        path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *_usual_path()]
        process = heavy_imported().Process(target=_run, args=(list(arguments), directory, dict(env), path, files))
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*arguments], seconds)
        out, err = (file.read_text("utf-8") if file.exists() else "" for file in files)
        assert process.exitcode is not None
        return subprocess.CompletedProcess([*arguments], process.exitcode, out, err)


class ForkedWorker:
    """Stand in for ``subprocess.Popen`` of ``python *arguments``: its standard input is a pipe, and its output and
    errors go to the file that is open as ``stdout``. The caller waits for its end."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: object) -> None:
        theirs, self.stdin = heavy_imported().Pipe(duplex=False)
        path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *_usual_path()]
        files = Path(stdout.name), Path(stdout.name)
        given = list(command[1:]), Path.cwd(), dict(env), path, files, theirs
        self._process = heavy_imported().Process(target=_run, args=given)
        self._process.start()
        theirs.close()

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """Wait for its end and return its exit code."""
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        """End it now."""
        self._process.kill()


def _run(
    arguments: list[str],
    directory: Path,
    env: dict[str, str],
    path: list[str],
    files: tuple[Path, Path],
    stdin: Connection | None = None,
) -> None:
    if stdin is not None:
        os.dup2(stdin.fileno(), 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(env)
    # schemathesis takes a second to import, and no suite uses it; anyio, a plugin of pytest, is imported already
    os.environ.setdefault("PYTEST_ADDOPTS", "-p no:schemathesis -W ignore::pytest.PytestAssertRewriteWarning")
    for number, file in enumerate(files, 1):
        opened = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.path[:] = ["", *path]
    importlib.invalidate_caches()
    try:
        _run_main(arguments)
    finally:  # as an interpreter ends; processes of multiprocessing leave out what is registered with atexit
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _run_main(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).parent)
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


@functools.cache
def _usual_path() -> list[str]:
    """Return where Python looks for modules unless PYTHONPATH adds other folders."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return json.loads(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)
