"""Render chat templates for a server in worker processes, which bound their time and memory."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from dovetail.errors import ConfigError, PluginError, QueueFullError, RequestError
from dovetail.fair_queue import FairTurns
from dovetail.templates.chat_template import ChatTemplate
from dovetail.templates.worker import INVALID, REFUSED, WorkerSetup

MEMORY_MIB = 2048
"""The address space of a worker process: a template may write, and a conversation may hold, a good part of it."""

_LARGE = 1 << 16
_PATIENCE = 3.0
"""Wait this many times the limit of processor time: on a busy machine, a process has only part of a processor."""
_START_SECONDS = 60.0
_AT_ONCE_MS = 1
"""Wait for an answer on the event loop for this number of milliseconds: most answers come sooner than the loop would notice them."""
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from dovetail.templates.worker import main; main(int(sys.argv[1]))"
)


class ProcessEndedError(QueueFullError):
    """The process ended before it has answered, and not because of a limit."""


class TemplateProcess:
    """Run one worker process. One caller uses it at a time. It ends when this object is garbage-collected, and when the
    server ends."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Start the process. Its answer to the setup comes first."""
        self.seconds = setup.seconds
        self._conn, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C goes to the server alone
        )
        theirs.close()
        self._poll = select.poll()
        self._poll.register(self._conn.fileno(), select.POLLIN)
        self.kill = weakref.finalize(self, _end, self._process, self._conn)
        self.ready = False
        self.send(pickle.dumps(setup, 5))

    def fileno(self) -> int:
        """Return the descriptor that is readable once there is an answer."""
        return self._conn.fileno()

    def send(self, message: bytes) -> None:
        """Send a message. Raises ``ProcessEndedError``."""
        try:
            self._conn.send_bytes(message)
        except OSError:
            raise self._ended() from None

    def wait(self, milliseconds: float) -> bool:
        """Wait for an answer. Return False if there is none in that time. Blocks."""
        return bool(self._poll.poll(milliseconds))

    def receive(self) -> str:
        """Return the text of the answer, for which the caller has waited. Raises ``RequestError``, ``ConfigError`` or
        ``ProcessEndedError``."""
        try:
            answer = self._conn.recv_bytes()
        except (EOFError, OSError):
            raise self._ended() from None
        kind, text = answer[:1], answer[1:].decode("utf-8", "surrogatepass")
        if kind == INVALID:
            raise ConfigError(text)
        if kind == REFUSED:
            raise RequestError(text, param="messages")
        return text

    def terminate(self) -> None:
        """End the process. A caller that waits for its answer is woken."""
        if self.kill.alive:
            self._process.kill()

    def overdue(self) -> RequestError:
        """Kill the process, which has not answered in time. Return the error to raise."""
        self.kill()
        return RequestError(
            f"the model's chat template did not end within {self.seconds:g} s (server.limits.template_seconds)",
            param="messages",
        )

    def _ended(self) -> RequestError | ProcessEndedError:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        if code == -signal.SIGXCPU:
            return self.overdue()
        self.kill()
        return ProcessEndedError(f"the process that renders chat templates has ended (status {code}); retry")


class TemplateRenderer:
    """Render the chat templates of one model. An object belongs to one event loop.

    Small conversations of all tenants share one process, in turns for tenants, and a second one renders for a tenant that
    has none running. Large ones are rendered by others, on the threads that ``on_thread`` provides. A process that has
    ended is replaced, and what it had not answered is rendered once again.
    """

    def __init__(self, templates: tuple[ChatTemplate, ChatTemplate], seconds: float) -> None:
        """``seconds`` is the processor time that one conversation may take."""
        first, second = ((template.source, template.constants) for template in templates)
        self._setup = WorkerSetup((first, second), seconds, MEMORY_MIB)
        self._idle: list[TemplateProcess] = []
        self._running: weakref.WeakSet[TemplateProcess] = weakref.WeakSet()
        self._turns = FairTurns(1)
        self._tenant: str | None = None  # the first one; when there is another, a second process is started
        self._has_second = False
        self._tasks: set[asyncio.Task[str]] = set()
        self._closed = False

    def start(self) -> None:
        """Start the first process, without waiting for it."""
        self._idle.append(self._new())

    async def check(self) -> None:
        """Wait until the first process has compiled the templates. Raises ``ConfigError`` if it cannot."""
        process = self._idle.pop()
        try:
            await self._get_ready(process)
        except RequestError as error:
            raise ConfigError(f"the model's chat template cannot be compiled: {error}") from error
        self._idle.append(process)

    def close(self) -> None:
        """End all processes, and start no more. Conversations that they render, or that wait for one, are refused with
        ``QueueFullError``."""
        self._closed = True
        self._idle.clear()
        for process in [*self._running]:
            process.terminate()

    async def render(
        self,
        variables: Mapping[str, Any],
        large: bool,
        on_thread: Callable[[Callable[[], str]], Awaitable[str]],
        tenant: str = "",
        weight: float = 1.0,
    ) -> str:
        """Return the text of a conversation of ``tenant``. Raises ``RequestError`` if the template refuses it or exceeds a
        limit, ``QueueFullError`` if the processes were killed, and ``PluginError`` for variables that cannot be sent to
        them."""
        if large:
            return await on_thread(lambda: self._render_blocking(_message(variables)))
        message = _message(variables)
        if len(message) > _LARGE:
            return await on_thread(lambda: self._render_blocking(message))
        if tenant != self._tenant:
            self._expect(tenant)
        if self._turns.idle and self._idle and self._idle[-1].ready:
            process, text = self._sent(message)
            if text is not None:
                return text
            self._turns.begin_at_once(tenant)
            work = self._turn(message, process, tenant, weight)
        else:
            work = self._in_turn(message, tenant, weight)
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)  # its answer must be read even if its client has gone

    def _sent(self, message: bytes) -> tuple[TemplateProcess | None, str | None]:
        """Send a message to an idle process. Return its answer if it comes at once, else the process, or None if it has
        ended."""
        process = self._idle.pop()
        try:
            process.send(message)
            return process, self._received(process) if process.wait(_AT_ONCE_MS) else None
        except ProcessEndedError:
            return None, None

    def _expect(self, tenant: str) -> None:
        """Start a second process, without waiting for it, once there are several tenants."""
        if self._tenant is None:
            self._tenant = tenant
        elif not (self._has_second or self._closed):
            self._has_second = True
            self._idle.insert(0, self._new())

    async def _in_turn(self, message: bytes, tenant: str, weight: float) -> str:
        await self._turns.begin(tenant)
        return await self._turn(message, None, tenant, weight)

    async def _turn(self, message: bytes, process: TemplateProcess | None, tenant: str, weight: float) -> str:
        """Use the turn of ``tenant``, which has begun. ``process`` has the message already; None if none has it."""
        start = time.monotonic()
        try:
            return await self._answer(message, process)
        finally:
            self._turns.end(tenant, (time.monotonic() - start) / weight)

    async def _answer(self, message: bytes, process: TemplateProcess | None) -> str:
        try:
            return await self._wait(process or await self._prepared(self._take(), message))
        except ProcessEndedError:
            pass
        return await self._wait(await self._prepared(self._new(), message))

    async def _prepared(self, process: TemplateProcess, message: bytes) -> TemplateProcess:
        if not process.ready:
            await self._get_ready(process)
        process.send(message)
        return process

    async def _wait(self, process: TemplateProcess) -> str:
        if not await _readable(process, _PATIENCE * process.seconds):
            raise process.overdue()
        return self._received(process)

    def _render_blocking(self, message: bytes) -> str:
        try:
            return self._answer_blocking(self._take(), message)
        except ProcessEndedError:
            pass
        return self._answer_blocking(self._new(), message)

    def _answer_blocking(self, process: TemplateProcess, message: bytes) -> str:
        if not process.ready:
            if not process.wait(1000 * _START_SECONDS):
                raise process.overdue()
            process.receive()
            process.ready = True
        process.send(message)
        if not process.wait(1000 * _PATIENCE * process.seconds):
            raise process.overdue()
        return self._received(process)

    async def _get_ready(self, process: TemplateProcess) -> None:
        if not await _readable(process, _START_SECONDS):
            raise process.overdue()
        process.receive()
        process.ready = True

    def _take(self) -> TemplateProcess:
        try:
            return self._idle.pop()  # by one caller, also from several threads
        except IndexError:
            return self._new()

    def _new(self) -> TemplateProcess:
        if self._closed:
            raise QueueFullError("the server is shutting down and renders no more chat templates")
        process = TemplateProcess(self._setup)
        self._running.add(process)
        return process

    def _received(self, process: TemplateProcess) -> str:
        try:
            text = process.receive()
        except RequestError:
            if process.kill.alive:  # it has refused the conversation
                self._idle.append(process)
            raise
        self._idle.append(process)
        return text


def _message(variables: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(variables, 5)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise PluginError(f"the variables of the chat template must be data: {error}") from error


async def _readable(process: TemplateProcess, seconds: float) -> bool:
    """Wait for an answer. Return False if there is none within ``seconds``."""
    loop = asyncio.get_running_loop()
    answered = loop.create_future()
    descriptor = process.fileno()
    timer = loop.call_later(seconds, lambda: answered.done() or answered.set_result(False))
    loop.add_reader(descriptor, lambda: answered.done() or answered.set_result(True))
    try:
        return await answered
    finally:
        timer.cancel()
        loop.remove_reader(descriptor)
        os.set_blocking(descriptor, True)  # uvloop has changed that; a long message would not be sent whole


def _end(process: subprocess.Popen[bytes], conn: Connection) -> None:
    conn.close()
    process.kill()
    process.wait()
