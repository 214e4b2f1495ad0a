"""Test compiling in processes that can be ended: time, memory, crashes, cancellation.

.venv/bin/python -m pytest -q -p no:xdist tests/core/test_grammar_process.py
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.config import PluginConfig
from dovetail.constraints import backend_choice as grammar_choice
from dovetail.constraints import compilers
from dovetail.constraints import process as grammar_process
from dovetail.constraints.backend_choice import GrammarRecipe
from dovetail.constraints.compilers import ProcessCompiler
from dovetail.constraints.jobs import GrammarTicket
from dovetail.constraints.service import GrammarService
from dovetail.constraints.shortage import is_shortage
from dovetail.errors import EngineError, GrammarError, QueueFullError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarContext
from dovetail.sampling_params import GrammarKind, GrammarSpec

BACKEND = """
    import os, signal, time
    from dovetail.errors import GrammarError
    from dovetail.interfaces.grammar import CompiledGrammar, GrammarBackend

    class Compiled(CompiledGrammar):
        def __init__(self, text, pid):
            self.text, self.pid = text, pid

        def matcher(self):
            return self

    class Backend(GrammarBackend):
        def __init__(self, config, context):
            assert context.token_bytes == [b"a", None]
            if config.kind == "unbuildable":
                raise ImportError("no such library")
            if config.kind == "dies" and os.getpriority(os.PRIO_PROCESS, 0) >= 5:  # in the worker
                os._exit(3)

        def check(self, spec):
            if spec.text.startswith("lacks"):
                raise GrammarError("there is no x", keyword="x")

        def compile(self, spec):
            word, _, number = spec.text.partition(" ")
            if word == "bad":
                raise GrammarError("bad at line 1", param="regex")
            if word == "sleep":
                time.sleep(float(number))
            if word == "spin":
                end = time.monotonic() + float(number)
                while time.monotonic() < end:
                    sum(range(10**6))
            if word == "take":
                taken = bytearray(int(number) << 20)
            if word == "hoard":
                self.hoard = [bytearray(1 << 20) for _ in range(int(number))]
            if word == "record":  # record the process that compiles it
                with open(number, "a") as file:
                    print(os.getpid(), file=file)
                time.sleep(2)
            if word == "xcpu":
                os.kill(os.getpid(), signal.SIGXCPU)  # what the kernel sends at the limit of processor time
            if word == "abort":
                os.abort()
            if word == "bug":
                raise KeyError("oops")
            return Compiled(spec.text, os.getpid())

        def dump(self, grammar):
            if grammar.text == "stays":
                raise RuntimeError("std::bad_alloc")
            return f"{grammar.pid} {grammar.text}".encode()

        def load(self, data):
            pid, _, text = data.decode().partition(" ")
            return Compiled(text, int(pid))
"""
OFFERS = frozenset({Feature.GRAMMAR_REGEX})
CONTEXT = GrammarContext(2, [b"a", None], (1,), "{}")
MIB = 2**20


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"grammar_backend_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(BACKEND), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


Make = Callable[..., GrammarService]


@pytest.fixture
def make(module: str) -> Iterator[Make]:
    services: list[GrammarService] = []

    def build(
        *names: str,
        portable: bool = True,
        seconds: float = 5.0,
        memory: int = 64,
        workers: int = 1,
        stall: float = 3.0,
        processes: int = 1,
    ) -> GrammarService:
        offers = OFFERS | {Feature.GRAMMAR_PORTABLE} if portable else OFFERS
        recipes = [
            GrammarRecipe(name, f"grammar {name!r}", f"{module}:Backend", PluginConfig(kind=name), offers)
            for name in names or ("fake",)
        ]
        compiler = ProcessCompiler(
            recipes, CONTEXT, seconds=seconds, memory=memory * MIB, stall_seconds=stall, processes=processes
        )
        services.append(GrammarService(compiler, workers=workers))
        return services[-1]

    yield build
    for service in services:
        service.close()


def regex(text: str, backend: str | None = None) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, text, backend)


def wait(ticket: GrammarTicket, seconds: float = 60.0) -> GrammarTicket:
    end = time.monotonic() + seconds
    while not ticket.ready:
        assert time.monotonic() < end, "the ticket is never ready"
        time.sleep(0.002)
    return ticket


def pid_of(service: GrammarService, text: str) -> int:
    """Return the process in which a text was compiled."""
    compiled = wait(service.submit(regex(text))).matcher()
    assert compiled.text == text  # pyright: ignore[reportAttributeAccessIssue]
    return compiled.pid  # pyright: ignore[reportAttributeAccessIssue]


def refusal(service: GrammarService, text: str) -> GrammarError:
    with pytest.raises(GrammarError) as caught:
        wait(service.submit(regex(text))).matcher()
    return caught.value


def alive(pid: int) -> bool:
    """Return whether the process runs. A process that has ended and is still listed does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"


def gone(pid: int) -> bool:
    """Wait for the process to end, and return whether it has ended."""
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.01)
    return not alive(pid)


def test_one_process_compiles_at_low_priority_and_ends_with_the_service(make: Make) -> None:
    service = make()
    pids = {pid_of(service, text) for text in ("a", "b", "c")}
    assert len(pids) == 1
    assert os.getpid() not in pids
    (pid,) = pids
    assert os.getpriority(os.PRIO_PROCESS, pid) >= os.getpriority(os.PRIO_PROCESS, 0) + 5
    service.close()
    assert gone(pid)


def test_another_process_waits_for_the_next_constraint(make: Make) -> None:
    service = make(processes=2, seconds=30)
    first = pid_of(service, "a")
    compiler = service._compiler
    assert isinstance(compiler, ProcessCompiler)
    assert pid_of(service, "b") == first
    end = time.monotonic() + 30
    while len(compiler._idle) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    idle = {process.pid for process in compiler._idle}
    assert len(idle) == 2
    assert pid_of(service, "c") == first, "the process that was used last is used again"
    assert {process.pid for process in compiler._idle} == idle, "there are never more processes than allowed"
    service.close()
    assert all(map(gone, idle))


def test_what_cannot_travel_is_compiled_again_once_it_is_known_to_be_harmless(make: Make) -> None:
    service = make(portable=False, seconds=2.0)
    assert pid_of(service, "a") == os.getpid()
    assert "longer than 2 s" in str(refusal(service, "sleep 60"))
    assert pid_of(make(), "stays") == os.getpid()


def test_refusals_come_back_whole(make: Make) -> None:
    service = make("one", "two")
    error = refusal(service, "bad")
    assert (str(error), error.param, error.code) == ("bad at line 1", "regex", "invalid_grammar")
    error = refusal(service, "lacks x")
    assert (error.keyword, error.code) == ("x", "unsupported_grammar")
    assert "one and two do not support 'x' (there is no x). No other" in str(error)
    assert "oops" in str(refusal(service, "bug"))


@pytest.mark.parametrize("text", ["sleep 600", "spin 600"])
def test_a_compilation_that_takes_too_long_ends_its_process_and_nothing_else(make: Make, text: str) -> None:
    service = make(seconds=0.5, workers=2)
    first = pid_of(service, "warm")
    start = time.monotonic()
    slow = service.submit(regex(text))
    time.sleep(0.2)
    assert pid_of(service, "other") != first, "the other worker has another process"
    with pytest.raises(GrammarError, match=r"longer than 0\.5 s to compile"):
        wait(slow).matcher()
    assert time.monotonic() - start < 20
    assert gone(first)
    assert "longer than 0.5 s" in str(refusal(service, text)), "remembered, so that it costs no second process"
    assert service.totals.compiles == 3
    assert pid_of(service, "next") not in (first, os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
def test_memory_is_bounded(make: Make) -> None:
    service = make(memory=64)
    first = pid_of(service, "take 40")
    error = refusal(service, "take 400")
    assert "needs more than 64 MiB to compile" in str(error)
    assert gone(first)
    assert pid_of(service, "take 41") != first


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
def test_a_process_that_keeps_memory_is_replaced(make: Make) -> None:
    service = make(memory=64)
    first = pid_of(service, "a")
    assert pid_of(service, "hoard 40") == first
    assert gone(first)
    assert pid_of(service, "b") != first


def test_a_compiler_that_crashes_costs_one_request(make: Make) -> None:
    service = make()
    assert "crashes the compiler (signal 6)" in str(refusal(service, "abort"))
    assert pid_of(service, "a")


def next_pid(pid_file: Path, known: list[int]) -> int:
    """Return the process that has just begun to compile a "record"."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pids = [int(line) for line in pid_file.read_text().split()] if pid_file.exists() else []
        if len(pids) > len(known):
            assert pids[: len(known)] == known
            return pids[-1]
        time.sleep(0.01)
    raise AssertionError("no process compiles it")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_from_outside_fails_no_request(make: Make, tmp_path: Path, how: signal.Signals) -> None:
    service, pid_file = make(workers=2), tmp_path / "pids"
    ticket = service.submit(regex(f"record {pid_file}"))
    first = next_pid(pid_file, [])
    os.kill(first, how)
    other = pid_of(service, "other")
    second = next_pid(pid_file, [first])
    assert wait(ticket).matcher().pid == second  # pyright: ignore[reportAttributeAccessIssue]
    assert len({first, second, other, os.getpid()}) == 4
    assert service.totals.refusals == 0


def test_of_a_constraint_whose_workers_are_killed_twice_the_server_is_to_blame(make: Make, tmp_path: Path) -> None:
    service, pid_file = make(workers=2), tmp_path / "pids"
    spec, killed = regex(f"record {pid_file}"), list[int]()
    ticket = service.submit(spec)
    for _ in range(2):
        killed.append(next_pid(pid_file, killed))
        os.kill(killed[-1], signal.SIGKILL)
        assert pid_of(service, f"other {killed[-1]}") not in killed, "other constraints are compiled meanwhile"
    with pytest.raises(EngineError, match=r"killed from outside \(signal 9\), twice for this regex.*retry later"):
        wait(ticket).matcher()
    again = wait(service.submit(spec)).matcher()
    assert again.pid == next_pid(pid_file, killed), "the failure is not remembered"  # pyright: ignore[reportAttributeAccessIssue]
    assert service.totals.refusals == 0


def test_a_worker_that_reaches_its_limit_of_processor_time_refuses_the_constraint(make: Make) -> None:
    assert "took longer than 5 s to compile" in str(refusal(make(), "xcpu"))


@pytest.mark.parametrize(
    ("name", "text"),
    [("unbuildable", "could not be built: ImportError: no such library"), ("dies", "exit code 3")],
)
def test_a_backend_that_cannot_be_built_is_the_servers_fault(make: Make, name: str, text: str) -> None:
    service = make("fake", name)
    with pytest.raises(EngineError, match=text):
        wait(service.submit(regex("a", name))).matcher()
    assert pid_of(service, "a")


def test_a_compilation_without_waiting_requests_is_ended_after_a_grace_period(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "GRACE_SECONDS", 0.2)
    service = make(seconds=60)
    first = pid_of(service, "warm")
    left, kept = (service.submit(regex("sleep 3")) for _ in range(2))
    left.cancel()
    compiled = wait(kept).matcher()
    assert compiled.pid == first, "another request waited for it"  # pyright: ignore[reportAttributeAccessIssue]
    alone = service.submit(regex("sleep 600"))
    time.sleep(0.3)
    alone.cancel()
    assert gone(first)
    assert pid_of(service, "next") != first


def test_a_request_that_comes_as_a_compilation_is_given_up_has_it_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_process, "GRACE_SECONDS", 0.0)
    service = make(seconds=60)
    first = pid_of(service, "warm")
    spec = regex("sleep 2")
    for _ in range(5):
        service.submit(spec).cancel()
        kept = service.submit(spec)
        time.sleep(0.05)
        kept.cancel()
    last = service.submit(spec)
    assert wait(last).matcher()
    assert service.totals.refusals == 0
    assert first


def test_the_loop_goes_on_while_a_compilation_spins(make: Make) -> None:
    """The thread that drives the engine is delayed by moments at most, because no compilation holds its interpreter
    lock."""
    service = make(seconds=3.0)
    pid_of(service, "warm")
    ticket = service.submit(regex("spin 600"))
    turns = 0
    while not ticket.ready:
        time.sleep(0.001)
        turns += 1
    assert turns > 100, "one or two where the lock is held, thousands on an idle machine"
    with pytest.raises(GrammarError, match="longer than 3 s"):
        ticket.matcher()


def test_nothing_is_started_before_it_is_needed(make: Make) -> None:
    before = threading.active_count()
    service = make()
    assert threading.active_count() == before
    service.close()


def test_a_service_without_references_ends_its_processes(module: str) -> None:
    recipe = GrammarRecipe("fake", "fake", f"{module}:Backend", PluginConfig(kind="fake"), OFFERS)
    compiler = ProcessCompiler([recipe], CONTEXT, seconds=5, memory=64 * MIB)
    service = GrammarService(compiler)
    wait(service.submit(regex("a"))).matcher()
    (pid,) = [process.pid for process in compiler._idle]
    del compiler, service
    assert gone(pid)


def test_a_worker_that_was_stopped_is_replaced_within_seconds(make: Make, tmp_path: Path) -> None:
    service, pid_file = make(stall=0.3, seconds=20), tmp_path / "pids"
    idle = pid_of(service, "first")
    os.kill(idle, signal.SIGSTOP)
    began = time.monotonic()
    ticket = service.submit(regex(f"record {pid_file}"))
    first = next_pid(pid_file, [])
    assert first != idle
    os.kill(first, signal.SIGSTOP)
    assert wait(ticket).matcher().pid == next_pid(pid_file, [first])  # pyright: ignore[reportAttributeAccessIssue]
    assert time.monotonic() - began < 20, "a stopped process would have been given 120 s to answer"
    assert service.totals.refusals == 0


def test_a_shortage_refuses_a_constraint_and_is_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a backend is about to need is requested before, because libraries end the process if they get none."""
    service = make()
    monkeypatch.setattr(grammar_choice, "RETRY_SECONDS", 0.0)
    with monkeypatch.context() as short:
        short.setattr(grammar_choice, "BUILD_BYTES", 1 << 60)
        with pytest.raises(QueueFullError, match=r"memory or threads are short.*MiB are not available.*retry later"):
            wait(service.submit(regex("x"))).matcher()
    assert pid_of(service, "x") != os.getpid()
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(QueueFullError, match="start new thread"):
            wait(make(workers=3).submit(regex("y"))).matcher()
    with monkeypatch.context() as short:
        short.setattr(compilers, "COMPILE_BYTES", 1 << 60)
        with pytest.raises(QueueFullError, match="retry later"):
            wait(service.submit(regex("z"))).matcher()
    assert pid_of(service, "z") != os.getpid()
    assert service.totals.refusals == 0


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), True),
        (RuntimeError("std::bad_alloc"), True),
        (ImportError("libx.so: failed to map segment from shared object"), True),
        (ImportError("no such library"), False),
        (OSError(errno.ENOENT, "No such file"), False),
        (EngineError("killed because it ran out of memory"), False),
        (None, False),
    ],
)
def test_what_is_a_shortage(error: BaseException | None, expected: bool) -> None:
    assert is_shortage(error) is expected
