"""Start the processes of all ranks, pass messages, notice when a rank fails, and end the ranks."""

from __future__ import annotations

import builtins
import logging
import os
import select
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from dovetail import errors
from dovetail.errors import EngineError, RankLostError
from dovetail.interfaces.executor import WarmUpProgress
from dovetail_executors.workers.handle import RankHandle, spawn
from dovetail_executors.workers.memory import AnonymousMemory
from dovetail_executors.workers.rank_process import RankSpec
from dovetail_executors.workers.ring import RingWriter, create_ring, drain, spin
from dovetail_executors.workers.wire import RankFailure, RankReply, Ready, ReplyReceiver, Verb

if TYPE_CHECKING:
    from dovetail.interfaces.executor import ExecutorContext, ExecutorInfo

_BLOCK_SECONDS = 0.25  # the longest time for which a call blocks before it looks at the processes
_LOOK_SECONDS = 0.05  # the shortest time between two looks
_CLOSE_SECONDS = 5.0  # after that, a rank that has not ended is killed
_KILLED_SECONDS = 10.0  # the longest time for which the end of a killed process is awaited
_DEATH_SECONDS = 2.0  # a rank that reports that another is lost may be faster than the end of that process
_ALIKE_SECONDS = 30.0  # an error that all ranks raise is raised by all of them within this time
_MASK_BYTES = 1 << 20
logger = logging.getLogger("dovetail.executor")

RankFailures = Mapping[int, RankFailure]  # by rank


class RankError(EngineError):
    """Raised for an exception of all ranks whose class this process does not know. The text names the class."""


class RankGroup:
    """Hold the processes of all ranks. ``reason`` is why the group is lost, or None."""

    def __init__(
        self, context: ExecutorContext, start_seconds: float, step_seconds: float, spin_seconds: float
    ) -> None:
        """Start the processes, and wait until the engines of all ranks are built. Raises what they raise."""
        self.reason: str | None = None
        self.handles: list[RankHandle] = []
        self.masks = AnonymousMemory.create(_MASK_BYTES)
        self._messages = create_ring()
        self._step_seconds, self._spin_seconds = step_seconds, spin_seconds
        self._looked = self._stalled_until = 0.0
        self._receiver = ReplyReceiver()
        self._results: dict[int, bytearray] = {}  # by plan
        self._answers: dict[int, dict[int, bytearray]] = {}  # by message and rank
        self._plan_failures: dict[int, dict[int, RankFailure]] = {}
        self._call_failures: dict[int, dict[int, RankFailure]] = {}
        self._ready: dict[int, Ready] = {}
        self._late: Exception | None = None
        self._progress = WarmUpProgress()
        self._poller = select.poll()
        self._resources = _Resources(tempfile.mkdtemp(prefix="dovetail-ranks-"), [self.masks, self._messages])
        self._finalizer = weakref.finalize(self, _end, self.handles, self._resources)
        try:
            self._start(context)
            self._ring = RingWriter(self._messages, [handle.wake_fd for handle in self.handles])
            self.info, self.page_table = self._await_ready(start_seconds)
        except BaseException:
            self.end()
            raise

    # -- start and end -----------------------------------------------------------------------------------------------

    def _start(self, context: ExecutorContext) -> None:
        life_fd, end_of_life = os.pipe()
        self._resources.fds.append(end_of_life)
        for rank in range(context.size):
            inbox_fd, wake_fd = os.pipe()
            reply_fd, outbox_fd = os.pipe()
            memory = create_ring()
            self._resources.fds += [wake_fd, reply_fd]
            self._resources.memories.append(memory)
            for fd in (wake_fd, reply_fd):
                os.set_blocking(fd, False)
            handle = RankHandle(rank, wake_fd, reply_fd, memory)
            self.handles.append(handle)
            self._poller.register(reply_fd, select.POLLIN)
            spec = RankSpec(
                rank=rank,
                size=context.size,
                target=context.target,
                description=context.description,
                rendezvous=f"file://{self._resources.folder}/store",
                folder=self._resources.folder,
                parent=os.getpid(),
                life_fd=life_fd,
                inbox_fd=inbox_fd,
                outbox_fd=outbox_fd,
                messages=(self._messages.fd, self._messages.size),
                replies=(memory.fd, memory.size),
                masks=(self.masks.fd, self.masks.size),
                spin_seconds=self._spin_seconds,
                log_level=context.log_level,
            )
            handle.process = spawn(spec)
            for fd in (inbox_fd, outbox_fd):
                os.close(fd)
        os.close(life_fd)

    def _await_ready(self, seconds: float) -> tuple[ExecutorInfo, tuple[int, int, int]]:
        try:
            self._await(
                lambda: len(self._ready) == len(self.handles) or 0 in self._call_failures,
                time.perf_counter() + seconds,
                lambda: (
                    f"{self._named(set(range(len(self.handles))) - self._ready.keys())} did not start within "
                    f"{seconds:g} s; set executor.start_seconds to a higher value if the model takes longer to load"
                ),
            )
        except RankLostError as error:
            raise EngineError(f"the ranks could not be started: {error}") from None
        if 0 in self._call_failures:
            raise self._start_error()
        first = self._ready[0]
        if any(ready != first for ready in self._ready.values()):
            listed = "; ".join(f"rank {rank}: {ready.info}" for rank, ready in sorted(self._ready.items()))
            raise EngineError(f"the ranks were built differently: {listed}. Set memory.num_pages")
        return first.info, first.page_table

    def _start_error(self) -> Exception:
        """Return the error of the first rank that failed by itself, and not because another one did."""
        failures = self._call_failures[0]
        with suppress(RankLostError):
            self._await(
                lambda: any(f.kind != RankLostError.__name__ for f in failures.values()),
                time.perf_counter() + _DEATH_SECONDS,
                lambda: "",
            )
        own = [rank for rank in sorted(failures) if failures[rank].kind != RankLostError.__name__]
        failure = failures[own[0] if own else min(failures)]
        known = _exception(failure.kind, failure.text)
        return known if isinstance(known, errors.DovetailError) else EngineError(f"{failure.kind}: {failure.text}")

    def close(self) -> None:
        """End the processes: first by a message, which lets the engines release their devices."""
        try:
            if self._finalizer.alive and self.reason is None:
                self._close_ranks()
        finally:
            self.reason = self.reason or "the executor was closed"
            self.end()

    def _close_ranks(self) -> None:
        """Send CLOSE, and wait until all processes have ended. After ``_CLOSE_SECONDS``, return as well: the caller
        kills them then."""
        deadline = time.perf_counter() + _CLOSE_SECONDS

        def wait() -> None:
            self._pump()
            if time.perf_counter() > deadline:
                raise TimeoutError
            time.sleep(0.001)

        try:
            self._ring.put(Verb.CLOSE, 0, b"", wait)
            while not all(handle.end_of() for handle in self.handles):
                wait()
        except TimeoutError:
            late = {handle.rank for handle in self.handles if handle.end_of() is None}
            logger.warning(
                "%s did not end within %g s after it was closed; killing it", self._named(late), _CLOSE_SECONDS
            )

    def end(self) -> None:
        """Kill the processes and release everything. A second call has no effect."""
        self._finalizer()

    def lose(self, reason: str) -> NoReturn:
        """End the group. Raises ``RankLostError``."""
        if self.reason is None:
            self.reason = reason
            logger.error("the ranks are lost: %s", reason)
            self.end()
        raise RankLostError(self.reason)

    # -- messages ----------------------------------------------------------------------------------------------------

    @property
    def num_sent(self) -> int:
        """Return the number of messages that were sent to the ranks."""
        return self._ring.published

    def send(self, verb: Verb, data: bytes) -> int:
        """Send a message to all ranks, and return its number. Raises ``RankLostError``."""
        if self.reason is not None:
            raise RankLostError(self.reason)
        self._stalled_until = 0.0
        return self._ring.put(verb, 0, data, self._stalled)

    def _stalled(self) -> None:
        """Wait a moment for a rank to take messages."""
        if not self._stalled_until:
            self._stalled_until = time.perf_counter() + self._step_seconds
        self._pump()  # a rank that cannot send its replies takes no messages
        self._look()
        if time.perf_counter() > self._stalled_until:
            self.lose(self._overdue(self._unfinished(self._ring.published)))
        time.sleep(0.00005)

    def result(self, number: int) -> bytearray:
        """Return the result of plan ``number`` as rank 0 has sent it. Raises what all ranks have raised in the step, and
        ``RankLostError``."""
        if self.reason is not None:
            raise RankLostError(self.reason)
        deadline = time.perf_counter() + self._step_seconds
        results, failures = self._results, self._plan_failures
        self._await(
            lambda: number in results or number in failures,
            deadline,
            lambda: self._overdue({h.rank for h in self.handles if self._ring.plans(h.rank) < number} or {0}),
        )
        if failures or self._call_failures:
            self._judge_others(number)
            if number in failures:
                raise self._judge(failures, number, lambda rank: self._ring.plans(rank) >= number)
        self._look()
        data = results.pop(number)
        if results:
            for old in [plan for plan in results if plan < number]:
                del results[old]
        return data

    def ask(self, verb: Verb, data: bytes, ranks: int) -> dict[int, bytearray]:
        """Send a message that the first ``ranks`` ranks answer, and return their answers. Raises what all ranks have
        raised, and ``RankLostError``."""
        number = self.send(verb, data)
        answers = self._answers[number] = {}
        try:
            self._await(
                lambda: len(answers) == ranks or number in self._call_failures,
                time.perf_counter() + self._step_seconds,
                lambda: self._overdue(self._unfinished(number)),
            )
        finally:
            del self._answers[number]
        if number in self._call_failures:
            raise self._judge(self._call_failures, number, lambda rank: self._ring.finished(rank) >= number)
        return answers

    @property
    def progress(self) -> WarmUpProgress:
        """Return how far the preparation of the engine of rank 0 is."""
        if self.reason is None:
            self._pump()
        return self._progress

    def finished(self, number: int) -> bool:
        """Return True if all ranks have finished message ``number``."""
        return all(self._ring.finished(handle.rank) >= number for handle in self.handles)

    def await_finished(self, number: int) -> None:
        """Wait until all ranks have finished message ``number``. Raises ``RankLostError``."""
        if not self.finished(number):
            deadline = time.perf_counter() + self._step_seconds
            self._await(lambda: self.finished(number), deadline, lambda: self._overdue(self._unfinished(number)))

    def take_late(self) -> Exception | None:
        """Return what all ranks have raised in a message that is not answered, and forget it."""
        if self._call_failures:
            self._pump()
            self._judge_others(0)
        late, self._late = self._late, None
        return late

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _await(self, done: Callable[[], bool], deadline: float, overdue: Callable[[], str]) -> None:
        """Wait until ``done`` returns True. Loses the group, for the reason ``overdue``, if the deadline has passed.
        Raises ``RankLostError`` if the group is lost."""
        if self.reason is not None:
            raise RankLostError(self.reason)
        self._pump()
        while not done():
            if not spin(self._has_replies, self._spin_seconds):
                self._block(deadline - time.perf_counter())
            self._pump()
            if done():
                return
            self._look()
            if time.perf_counter() >= deadline:
                self.lose(overdue())

    def _has_replies(self) -> bool:
        return any(handle.replies.waiting for handle in self.handles)

    def _block(self, seconds: float) -> None:
        """Block until a rank sends something or ends."""
        for handle in self.handles:
            handle.replies.announce(True)
        try:
            if not self._has_replies():
                self._poller.poll(1000 * max(0.0, min(seconds, _BLOCK_SECONDS)))
                for handle in self.handles:
                    if not drain(handle.reply_fd):
                        self._ended(handle)
        finally:
            for handle in self.handles:
                handle.replies.announce(False)

    def _ended(self, handle: RankHandle) -> None:
        """Note that a rank has closed its pipe, which it does by ending."""
        assert handle.process is not None
        with suppress(KeyError):
            self._poller.unregister(handle.reply_fd)
        with suppress(subprocess.TimeoutExpired):
            handle.process.wait(1.0)
        self._looked = 0.0

    def _look(self) -> None:
        """Lose the group if a process has ended."""
        now = time.perf_counter()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        ended = [end for handle in self.handles if (end := handle.end_of()) is not None]
        if ended and 0 not in self._call_failures:
            self._pump()
            if 0 not in self._call_failures:
                self.lose("; ".join(ended))

    def _pump(self) -> None:
        """Take the replies of all ranks."""
        for handle in self.handles:
            while (message := handle.replies.take()) is not None:
                match message.kind:
                    case RankReply.RESULT:
                        self._results[message.tag] = message.data
                    case RankReply.ANSWER:
                        if message.tag in self._answers:
                            self._answers[message.tag][handle.rank] = message.data
                    case RankReply.PROGRESS:
                        self._progress = self._receiver.progress(message.data)
                    case RankReply.READY:
                        self._ready[handle.rank] = self._receiver.ready(message.data)
                    case RankReply.FAILURE:
                        self._take_failure(handle.rank, self._receiver.failure(message.data))
                    case _:
                        raise AssertionError(f"there is no reply of kind {message.kind}")

    # -- failures ----------------------------------------------------------------------------------------------------

    def _take_failure(self, rank: int, failure: RankFailure) -> None:
        if failure.plan:
            self._plan_failures.setdefault(failure.plan, {})[rank] = failure
        else:
            self._call_failures.setdefault(failure.message, {})[rank] = failure

    def _judge_others(self, number: int) -> None:
        """Judge the failures of steps before ``number``, and of messages that are not answered."""
        for plan in [plan for plan in self._plan_failures if plan < number]:
            self._judge(self._plan_failures, plan, lambda rank, plan=plan: self._ring.plans(rank) >= plan)
        for message in list(self._call_failures):
            self._late = self._judge(
                self._call_failures, message, lambda rank, message=message: self._ring.finished(rank) >= message
            )

    def _judge(
        self, failures: dict[int, dict[int, RankFailure]], key: int, finished: Callable[[int], bool]
    ) -> Exception:
        """Return the exception if all ranks have raised it. Otherwise they are not in the same state: loses the
        group."""
        found = failures[key]
        ranks = [handle.rank for handle in self.handles]
        deadline = time.perf_counter() + min(self._step_seconds, _ALIKE_SECONDS)
        if not self._is_lost(found):
            self._await(
                lambda: all(rank in found or finished(rank) for rank in ranks),
                deadline,
                lambda: self._unlike(found, f"did not finish within {_ALIKE_SECONDS:g} s"),
            )
            self._pump()
        if self._is_lost(found):
            self._lose_device(found)
        if len(found) < len(ranks) or len({failure.kind for failure in found.values()}) > 1:
            self.lose(self._unlike(found, "did not raise it"))
        del failures[key]
        return _exception(found[0].kind, found[0].text)

    def _is_lost(self, failures: RankFailures) -> bool:
        return any(f.lost is not None or f.kind == RankLostError.__name__ for f in failures.values())

    def _lose_device(self, failures: RankFailures) -> NoReturn:
        """Lose the group because a rank has lost its device or the connection to another rank. If a process ends, that is
        the cause."""
        deadline = time.perf_counter() + _DEATH_SECONDS
        connection = all(failure.lost is None for failure in failures.values())
        while connection and time.perf_counter() < deadline:
            self._looked = 0.0
            self._look()
            time.sleep(0.01)
        rank = min(rank for rank, f in failures.items() if f.lost is not None or f.kind == RankLostError.__name__)
        self.lose(f"{self.handles[rank]}: {failures[rank].lost or failures[rank].text}")

    def _unlike(self, failures: RankFailures, others: str) -> str:
        raised = "; ".join(f"{self.handles[rank]} raised {f.kind}: {f.text}" for rank, f in sorted(failures.items()))
        rest = {handle.rank for handle in self.handles} - failures.keys()
        return f"{raised}; {self._named(rest)} {others}" if rest else raised

    def _unfinished(self, number: int) -> set[int]:
        return {h.rank for h in self.handles if self._ring.finished(h.rank) < number} or {0}

    def _overdue(self, ranks: set[int]) -> str:
        return (
            f"{self._named(ranks)} did not answer within {self._step_seconds:g} s; set executor.step_seconds to a higher "
            "value if a step can take longer"
        )

    def _named(self, ranks: set[int]) -> str:
        return ", ".join(str(self.handles[rank]) for rank in sorted(ranks))


class _Resources:
    """Hold what must be released when the group ends."""

    def __init__(self, folder: str, memories: list[AnonymousMemory]) -> None:
        self.folder, self.memories = folder, memories
        self.fds: list[int] = []


def _end(handles: list[RankHandle], resources: _Resources) -> None:
    processes = [handle.process for handle in handles if handle.process is not None]
    for process in processes:
        process.kill()
    for process in processes:
        try:
            process.wait(_KILLED_SECONDS)
        except subprocess.TimeoutExpired:
            logger.error("process %d was killed and has not ended: a driver may hold it", process.pid)
    for fd in resources.fds:
        os.close(fd)
    for memory in resources.memories:
        memory.close()
    shutil.rmtree(resources.folder, ignore_errors=True)


def _exception(kind: str, text: str) -> Exception:
    """Return an exception of the class that is called ``kind``."""
    cls = getattr(builtins, kind, None) or getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        with suppress(TypeError):
            return cls(text)
    return RankError(f"{kind}: {text}")
