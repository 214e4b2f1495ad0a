"""Render chat templates in a process with bounded processor time and memory.

The process receives ``WorkerSetup``, then the variables of one conversation after another. It answers each with one byte
for the outcome and a text: the prompt, or why there is none. It imports as few modules as possible.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
from collections.abc import Mapping
from math import ceil
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from dovetail.errors import DovetailError, RequestError
from dovetail.templates.chat_template import ChatTemplate

RENDERED, REFUSED, INVALID = b"r", b"e", b"i"
MOST_CHARS = 1 << 26
"""The longest prompt, in characters."""
_MIB = 1 << 20


class WorkerSetup(NamedTuple):
    """Hold the first message to the process: the source and the constants of the template for conversations without
    tools, and of the one with tools, and the limits in seconds of processor time and MiB of memory."""

    templates: tuple[tuple[str, Mapping[str, Any]], tuple[str, Mapping[str, Any]]]
    seconds: float
    memory_mib: int


def main(descriptor: int) -> None:
    """Answer the messages of a connection until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Connection(descriptor) as conn:
        setup: WorkerSetup = pickle.loads(conn.recv_bytes())
        _limit(resource.RLIMIT_AS, setup.memory_mib * _MIB)
        _limit(resource.RLIMIT_CORE, 0)
        _allow(setup.seconds)
        try:
            templates = [ChatTemplate(source, constants) for source, constants in setup.templates]
            for template in templates:
                template.compile()
        except (DovetailError, MemoryError) as error:
            conn.send_bytes(INVALID + str(error or "it needs too much memory to be compiled").encode())
            return
        conn.send_bytes(RENDERED)
        while True:
            try:
                message = conn.recv_bytes()
            except EOFError:
                return
            _allow(setup.seconds)
            conn.send_bytes(_answer(templates, message, setup))


def _answer(templates: list[ChatTemplate], message: bytes, setup: WorkerSetup) -> bytes:
    try:
        variables = pickle.loads(message)
        text = templates[bool(variables["tools"])].render(variables)
        if len(text) > MOST_CHARS:
            return REFUSED + f"it writes {len(text)} characters; allowed: {MOST_CHARS}".encode()
        return RENDERED + text.encode("utf-8", "surrogatepass")
    except RequestError as error:
        return REFUSED + str(error).encode("utf-8", "surrogatepass")
    except MemoryError:
        return REFUSED + f"it needs more than {setup.memory_mib} MiB of memory".encode()


def _allow(seconds: float) -> None:
    """Let the system end this process (SIGXCPU) after ``seconds`` more of processor time, also if the server is gone."""
    times = os.times()
    _limit(resource.RLIMIT_CPU, ceil(times.user + times.system + seconds))


def _limit(what: int, value: int) -> None:
    _, most = resource.getrlimit(what)
    resource.setrlimit(what, (value if most < 0 else min(value, most), most))
