"""Start an engine process, send requests to it, deliver its outputs and detect its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, cast

import msgspec
import zmq

from dovetail.errors import ConfigError, EngineDeadError, EngineError, RequestError
from dovetail.messages import (
    AbortAllMsg,
    AbortMsg,
    Answer,
    Command,
    CommandReply,
    EngineFailed,
    EngineReady,
    EngineStats,
    FlushCacheMsg,
    GenerateMsg,
    HeldAdapterMsg,
    LoadAdapterMsg,
    PingMsg,
    RequestFailed,
    ShutdownMsg,
    StatsRequestMsg,
    ToEngine,
    TokenOutput,
    UnloadAdapterMsg,
    decode_from_engine,
    encode,
)
from dovetail.server.engine_process import EXIT_ENGINE_FAILED, Endpoints, EngineTarget, run_engine
from dovetail.server.fair_sender import FairSender
from dovetail.server.heartbeat import Heartbeat
from dovetail.server.process_tree import RunningProcess, descendants, end_leftovers
from dovetail.server.socket_folder import make_socket_folder
from dovetail.server.streams import OutputStream
from dovetail.types import FinishKind, FinishReason

if TYPE_CHECKING:
    from dovetail.config import Config

logger = logging.getLogger("dovetail.server")

_LAST_MESSAGE_SECONDS = 1.0
_NO_MESSAGE_SECONDS = 0.05
_EXIT_SECONDS = 5.0
_KILL_SECONDS = 10.0
_LEFTOVER_SECONDS = 2.0
_SHUTDOWN = "shutdown"
_FRAMES_AT_ONCE = 16
_WINDOW = 2
"""A tenant has this many times ``scheduler.max_running`` requests in the engine at most: enough to replace those that end."""


class EngineClient:
    """Control one engine process. An object belongs to the event loop that called ``start``.

    When the process ends, or reports that it is about to end, every call that waits for it raises ``EngineDeadError``, and so
    does every later call: nothing hangs. The same holds if it is killed because it has given no sign of life for
    ``supervision.kill_seconds``. It is not restarted (see ``SupervisedEngine``). ``failure`` is the reason if the process
    has ended by itself or was killed because it did not respond, and None otherwise. ``died`` is set once the process accepts
    no more requests.
    """

    def __init__(self, config: Config, target: EngineTarget = run_engine) -> None:
        """``target`` is the function that the process runs."""
        self._config = config
        self._target = target
        self._process: BaseProcess | None = None
        self._streams: dict[str, OutputStream] = {}
        self._groups: dict[str, OutputStream] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._dead: str | None = "it has not been started"
        self._last_message: str | None = None
        self._wrong_setting = False
        self._heartbeat = Heartbeat(config.supervision.stall_seconds)
        self._watch: asyncio.Task[None] | None = None
        self._children: list[RunningProcess] = []
        self._sender = FairSender(self._send, self._later, 1, config.scheduler.max_waiting)
        self.died = asyncio.Event()
        self.failure: str | None = None
        self.info: dict[str, Any] = {}

    # start and stop

    async def start(self) -> dict[str, Any]:
        """Start the process, wait until it is ready and return its info. Raises ``EngineError`` if the engine cannot start."""
        self._loop = asyncio.get_running_loop()
        self._folder = make_socket_folder()
        endpoints = Endpoints(f"ipc://{self._folder}/in", f"ipc://{self._folder}/out")
        self._bind(endpoints)
        process = multiprocessing.get_context("spawn").Process(
            target=self._target, args=(self._config, endpoints), name="dovetail-engine"
        )
        self._dead = None
        ready = self._expect("ready")
        process.start()
        self._process = process
        self._has_exited = self._loop.create_future()
        self._loop.add_reader(process.sentinel, self._on_exit)
        try:
            info = msgspec.json.decode((await ready).info)
            await self._ping()
            shutil.rmtree(self._folder, ignore_errors=True)  # both sockets are connected and need no names
            self.info = info
            self._sender.window = _WINDOW * (self._config.scheduler.max_running or info["max_running"])
        except BaseException as error:
            await self.stop()
            if isinstance(error, EngineDeadError):
                kind = ConfigError if self._wrong_setting else EngineError
                raise kind(f"the engine did not start: {self._last_message or error}") from None
            raise
        self._watch = asyncio.ensure_future(self._watch_heartbeat())
        return self.info

    async def stop(self, drain: bool = False) -> None:
        """Stop the process: at once, or with ``drain`` after the running requests. Open requests end with ``EngineDeadError``."""
        process = self._process
        if process is None:
            return
        if not self.info:  # the process is still loading and reads no messages
            self._kill(process)
        if self._watch is not None:
            self._watch.cancel()
        while drain and self.alive and len(self._sender):
            await asyncio.sleep(_NO_MESSAGE_SECONDS)
        with suppress(EngineDeadError):
            self._send(ShutdownMsg(drain=drain))
        if not drain:
            self._mark_dead("it was stopped")
        confirmed = self._expect(_SHUTDOWN)
        if not await self._exited(process, None if drain else _EXIT_SECONDS):
            if not (confirmed.done() or self.failure):
                self.failure = f"it did not respond within {_EXIT_SECONDS:g} s when it was to stop, and was killed"
                logger.error("the engine has ended: %s", self.failure)
            self._kill(process)
            if not await self._exited(process, _KILL_SECONDS):
                logger.error("the engine process %s was killed and does not end", process.pid)
        self._mark_dead("it was stopped")
        if self._children:
            await asyncio.to_thread(end_leftovers, self._children, _LEFTOVER_SECONDS)
        self._release(process)

    @property
    def alive(self) -> bool:
        """Return True from ``start`` until the process has ended."""
        return self._dead is None

    @property
    def stalled(self) -> bool:
        """Return True while the engine has given no sign of life for ``supervision.stall_seconds``."""
        return self.alive and self._heartbeat.silent >= self._config.supervision.stall_seconds

    async def end_if_hung(self, seconds: float) -> None:
        """Kill the engine if it does not respond within ``seconds``."""
        with suppress(EngineDeadError):
            try:
                await asyncio.wait_for(self._ping(), seconds)
            except TimeoutError:
                self._end_hung(f"it did not respond within {seconds:g} s" if seconds else "it did not respond any more")

    @property
    def pid(self) -> int | None:
        """Return the process id of the engine."""
        return self._process.pid if self._process else None

    # requests

    def check(self, tenant: str, count: int) -> None:
        """Raise ``QueueFullError`` if ``count`` more requests of ``tenant`` may not wait."""
        self._sender.check(tenant, count)

    def open(self, group: str, msgs: Sequence[GenerateMsg]) -> OutputStream:
        """Send requests whose outputs are read from one stream. ``group`` identifies them to ``abort``. A rid must never be used
        again. Raises ``EngineDeadError``, or ``RequestError`` if ``group`` is in use."""
        if group in self._groups:
            raise RequestError(f"rid {group!r} is in use by a running request; choose another", param="rid")
        if msgs:
            self._sender.check(msgs[0].tenant, len(msgs))
        stream = OutputStream(group, (msg.rid for msg in msgs), self._close, self._end)
        self._groups[group] = stream
        self._streams.update((msg.rid, stream) for msg in msgs)
        try:
            self._sender.put(msgs)
        except BaseException:  # the caller gets no stream that it could close
            stream.close()
            raise
        return stream

    def abort(self, group: str, message: str = "aborted by request") -> bool:
        """Abort the requests of ``group``, or those whose id begins with ``group`` and a slash. They end with finish reason
        ``abort``. Return False if there are none."""
        stream = self._groups.get(group)
        members = [rid for rid in self._streams if rid.rpartition("/")[0] == group] if stream is None else stream.rids
        for rid in members:
            if rid in self._streams[rid].open and not self._drop(rid, message):
                self._send(AbortMsg(rid, message))
        return bool(members)

    def _drop(self, rid: str, message: str) -> bool:
        """End a request that was not sent to the engine yet. Return False if it was."""
        if not self._sender.drop(rid):
            return False
        stream = self._streams[rid]
        stream.put(TokenOutput(rid, [], FinishReason(FinishKind.ABORT, message=message)))
        stream.wake()
        return True

    def abort_all(self, message: str = "aborted by the operator") -> None:
        """Abort every request of this engine."""
        for rid in self._sender.unsent:
            self._drop(rid, message)
        self._send(AbortAllMsg(message))

    @property
    def num_open(self) -> int:
        """Return the number of groups that are not closed yet."""
        return len(self._groups)

    # commands

    async def stats(self) -> EngineStats:
        """Return the engine's gauges and totals after the current step."""
        call_id = self._call_id()
        return await self._call(call_id, StatsRequestMsg(call_id))

    async def command(self, msg: Command) -> CommandReply:
        """Send a command and return its reply. The ``call_id`` of ``msg`` is replaced. A command about an adapter is sent after all
        requests for it that have been accepted."""
        if isinstance(msg, LoadAdapterMsg | HeldAdapterMsg | UnloadAdapterMsg) and self.alive:
            self._sender.send_of_adapter(msg.name)
        call_id = self._call_id()
        return await self._call(call_id, msgspec.structs.replace(msg, call_id=call_id))

    async def flush_cache(self) -> CommandReply:
        """Drop every cached prefix. The reply reports whether this was possible."""
        return await self.command(FlushCacheMsg(""))

    async def _ping(self) -> None:
        """Return when the engine has read everything that was sent before."""
        call_id = self._call_id()
        await self._call(call_id, PingMsg(call_id))

    async def _call(self, call_id: str, msg: ToEngine) -> Any:
        reply = self._expect(call_id)
        try:
            self._send(msg)
            return await reply
        finally:
            self._calls.pop(call_id, None)

    def _call_id(self) -> str:
        return f"call-{next(self._call_ids)}"

    def _expect(self, call_id: str) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        return future

    # the sockets

    def _bind(self, endpoints: Endpoints) -> None:
        self._context = zmq.Context()
        self._outbox, self._inbox = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.set_hwm(0)
            socket.linger = 0
        self._outbox.bind(endpoints.inbox)
        self._inbox.bind(endpoints.outbox)
        self._fd = cast(int, self._inbox.get(zmq.FD))
        self._loop.add_reader(self._fd, self._on_readable)

    def _send(self, msg: ToEngine) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine process is not running: {self._dead}")
        try:
            self._outbox.send(encode(msg), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the engine process does not take messages") from None

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` after some seconds, and after other work of the event loop."""
        if seconds:
            self._loop.call_later(seconds, call)
        else:
            self._loop.call_soon(call)

    def _on_readable(self) -> None:
        """Read until nothing is left, because the descriptor is edge-triggered. Yield to the event loop after some frames."""
        for _ in range(_FRAMES_AT_ONCE):
            if self._inbox.closed:
                return
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dispatch(decode_from_engine(frame))
        self._loop.call_soon(self._on_readable)

    def _dispatch(self, answers: list[Answer]) -> None:
        self._heartbeat.heard()
        touched: dict[int, OutputStream] = {}
        for answer in answers:
            if isinstance(answer, TokenOutput | RequestFailed):
                if isinstance(answer, RequestFailed) or answer.finish is not None:
                    self._sender.finished(answer.rid)
                stream = self._streams.get(answer.rid)
                if stream is None:  # closed before its abort reached the engine
                    continue
                touched[id(stream)] = stream
                if isinstance(answer, TokenOutput):
                    stream.put(answer)
                else:
                    stream.open.discard(answer.rid)
                    stream.fail(answer.error())
            elif isinstance(answer, EngineFailed):
                self._last_message, self._wrong_setting = answer.message, answer.wrong_setting
                self._mark_dead(None)
            else:
                self._resolve("ready" if isinstance(answer, EngineReady) else answer.call_id, answer)
        for stream in touched.values():
            stream.wake()

    def _resolve(self, call_id: str, answer: Answer) -> None:
        future = self._calls.pop(call_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def _end(self, rid: str) -> None:
        with suppress(EngineDeadError):
            if not self._sender.drop(rid):
                self._send(AbortMsg(rid))

    def _close(self, stream: OutputStream) -> None:
        del self._groups[stream.group]
        for rid in stream.rids:
            del self._streams[rid]
        with suppress(EngineDeadError):
            for rid in stream.open:
                self._end(rid)

    # the end

    async def _watch_heartbeat(self) -> None:
        """Ping the engine, report that it stands still, and kill it if that lasts."""
        bounds, heartbeat = self._config.supervision, self._heartbeat
        reported, last = False, self._loop.time()
        while True:
            await asyncio.sleep(heartbeat.interval)
            now = self._loop.time()
            if heartbeat.tick(now - last):
                with suppress(EngineDeadError):
                    self._send(PingMsg(""))
            last = now
            if self.stalled and not reported:
                self._report_stall(heartbeat.silent)
            reported = self.stalled
            if bounds.kill_seconds is not None and heartbeat.silent >= bounds.kill_seconds:
                self._end_hung(f"it gave no sign of life for {heartbeat.silent:.1f} s (supervision.kill_seconds)")

    def _report_stall(self, silent: float) -> None:
        """Log the stall, and make the engine write the stacks of its threads to stderr."""
        logger.error(
            "the engine has given no sign of life for %.1f s; no requests are accepted until it responds", silent
        )
        if self._process is not None and self._process.pid is not None and hasattr(signal, "SIGUSR1"):
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGUSR1)

    def _end_hung(self, reason: str) -> None:
        if self._process is not None and self.alive:
            self._last_message = reason
            self._kill(self._process)
            self._mark_dead(None)

    def _kill(self, process: BaseProcess) -> None:
        """Kill the process. The processes that it has started end by themselves, or are killed after a while (``stop``)."""
        if process.pid is not None:
            self._children = descendants(process.pid)
        process.kill()

    def _on_exit(self) -> None:
        """Handle the end of the process, which its sentinel reports."""
        assert self._process is not None
        self._loop.remove_reader(self._process.sentinel)
        self._exit_task = asyncio.ensure_future(self._after_exit(self._process))

    async def _after_exit(self, process: BaseProcess) -> None:
        await asyncio.to_thread(process.join)
        status = process.exitcode
        self._has_exited.set_result(None)
        if self.info and (self.failure or self.alive):
            logger.error("the engine process ended with status %s", status)
        if self.alive:  # its last messages may still be in the socket
            await asyncio.sleep(_LAST_MESSAGE_SECONDS if status == EXIT_ENGINE_FAILED else _NO_MESSAGE_SECONDS)
            self._mark_dead(None)

    def _mark_dead(self, reason: str | None) -> None:
        if self._dead is not None or self._process is None:
            return
        if reason is None:
            self.failure = self._last_message or f"it ended with status {self._process.exitcode}"
            if self.info:
                logger.error("the engine has ended: %s", self.failure)
        self._dead = reason or self.failure
        self._sender.clear()
        self.died.set()
        error = EngineDeadError(f"the engine process has ended: {self._dead}")
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        for stream in list(self._groups.values()):
            stream.fail(error)
            stream.wake()

    async def _exited(self, process: BaseProcess, seconds: float | None) -> bool:
        """Wait up to ``seconds`` for the end of the process. Return False if it still runs."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._has_exited), seconds)
        return self._has_exited.done()

    def _release(self, process: BaseProcess) -> None:
        self._loop.remove_reader(process.sentinel)
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)
        if self._has_exited.done():
            process.close()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)
