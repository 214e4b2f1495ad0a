"""Run the engine process: one ``Loop`` between two ZMQ sockets.

Each incoming frame holds one message; each outgoing frame holds the outputs of one step. A ``PingMsg`` is answered between two
steps. The process ends when it receives ``ShutdownMsg``, when its parent has died, or when the loop raises. In the last case it reports ``EngineFailed`` and exits with
``EXIT_ENGINE_FAILED`` at once, without cleaning up, because cleaning up may fail, crash or hang after the device was lost.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec
import zmq

from dovetail.errors import ConfigError, DovetailError, PluginError
from dovetail.garbage import pause_collections
from dovetail.messages import (
    Answer,
    CommandReply,
    EngineFailed,
    EngineReady,
    PingMsg,
    ShutdownMsg,
    ToEngine,
    decode_to_engine,
    encode,
)
from dovetail.tokenizer import load_tokenizer
from dovetail.waiting_threads import limit_spinning

if TYPE_CHECKING:
    from dovetail.config import Config

EXIT_ENGINE_FAILED = 70
"""Exit status of an engine process that ended with an exception (EX_SOFTWARE), and of a server whose engine has failed."""

_LINGER_MS = 2000
_IDLE_CHECK_MS = 1000

logger = logging.getLogger("dovetail.engine")


class EngineLoop(Protocol):
    """Describe what the engine process requires of ``dovetail.loop.Loop``."""

    @property
    def info(self) -> dict[str, Any]: ...
    @property
    def has_work(self) -> bool: ...
    def idle(self) -> bool: ...
    def handle(self, msg: ToEngine) -> None: ...
    def step(self) -> list[Answer]: ...


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Hold the ZMQ addresses that the frontend has bound: requests go through ``inbox``, outputs through ``outbox``."""

    inbox: str
    outbox: str


EngineTarget = Callable[["Config", Endpoints], None]
"""A function that an engine process runs."""


def run_engine(config: Config, endpoints: Endpoints) -> None:
    """Run the engine of ``config``. This is the default ``EngineTarget``."""
    limit_spinning()
    serve_loop(lambda: open_loop(config), endpoints, config.server.log_level)


@contextmanager
def open_loop(config: Config) -> Iterator[EngineLoop]:
    """Load the plugins, resolve the components and build the loop. This imports torch. Raises ``DovetailError``."""
    with pause_collections():
        from dovetail.loop import Loop
        from dovetail.ops.start import prepare_kernels
        from dovetail.registry.candidates import call_hook
        from dovetail.registry.loader import load_plugins
        from dovetail.registry.machine import Machine
        from dovetail.registry.resolver import resolve

        machine = Machine.detect(config.device)
        prepare_kernels(machine.device_type)
        resolved = resolve(config, load_plugins(config.plugins), machine)
        tokenizer = load_tokenizer(config)
    loop = Loop(resolved, tokenizer)
    try:
        call_hook(resolved.hooks, "on_engine_start", info=loop.info)
        yield loop
        call_hook(resolved.hooks, "on_engine_stop")
    finally:
        loop.close()


def serve_loop(
    open_loop: Callable[[], AbstractContextManager[EngineLoop]], endpoints: Endpoints, log_level: str
) -> None:
    """Open a loop and run it until ``ShutdownMsg`` arrives. After a failure the process exits, and this function does not return."""
    _ignore_signals()
    _end_with_parent()
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)
        socket.linger = _LINGER_MS
    inbox.connect(endpoints.inbox)
    outbox.connect(endpoints.outbox)
    try:
        with open_loop() as loop:
            try:
                outbox.send(encode([EngineReady(msgspec.json.encode(loop.info))]))
                _drive(loop, inbox, outbox)
            except BaseException as error:  # report it before the loop is closed
                _fail(error, context, outbox)
    except BaseException as error:
        _fail(error, context, outbox)
    context.destroy(linger=_LINGER_MS)


def _drive(loop: EngineLoop, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    """Run steps while there is work, and sleep in ``poll`` while there is none."""
    stopping = False
    while loop.has_work or not stopping:
        if not loop.has_work:
            _await_message(loop, inbox)
        due = loop.has_work
        for msg in _drain(inbox):
            if isinstance(msg, PingMsg | ShutdownMsg):
                outbox.send(encode([CommandReply(msg.call_id, True)]))
                stopping = stopping or isinstance(msg, ShutdownMsg)
                if isinstance(msg, ShutdownMsg) and not msg.drain:
                    return
            else:
                loop.handle(msg)
                due = True
        answers = loop.step() if due else []
        if answers:
            outbox.send(encode(answers))


def _await_message(loop: EngineLoop, inbox: zmq.Socket[bytes]) -> None:
    """Use the time until a message arrives. Once nothing is left to do, check now and then that the engine still runs."""
    wait = 0
    while not inbox.poll(wait):
        wait = 0 if loop.idle() else _IDLE_CHECK_MS


def _drain(inbox: zmq.Socket[bytes]) -> Iterator[ToEngine]:
    while True:
        try:
            frame = inbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        yield decode_to_engine(frame)


def _fail(error: BaseException, context: zmq.Context[Any], outbox: zmq.Socket[bytes]) -> NoReturn:
    _report(error, outbox)
    context.destroy(linger=_LINGER_MS)
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_ENGINE_FAILED)


def _report(error: BaseException, outbox: zmq.Socket[bytes]) -> None:
    if isinstance(error, DovetailError):
        message = str(error)
        logger.debug("%s", message)  # the server prints it
    else:
        message = f"{type(error).__name__}: {error}"
        logger.critical("the engine failed", exc_info=error)
    outbox.send(encode([EngineFailed(message, isinstance(error, ConfigError | PluginError))]))


def _ignore_signals() -> None:
    """Ignore Ctrl-C and SIGTERM, which reach the whole process group: the frontend decides when the engine ends. SIGUSR1 makes the
    process write the stacks of its threads to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine process is a child"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(EXIT_ENGINE_FAILED)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
