"""Define a state that runs: its parts are executed in order, and calls of the model run in a thread of the state."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self

from dovetail.errors import ProgramError
from dovetail.lang.backends.base import Backend, ReuseHints
from dovetail.lang.conversation import Conversation
from dovetail.lang.interpreter import Interpreter
from dovetail.lang.ir import Assign, Expr, SamplingOptions
from dovetail.lang.references import Join, waits
from dovetail.lang.state_interface import State, program_line
from dovetail.lang.task_queue import TaskQueue


class ProgramState(State):
    """Execute a program's parts; a program's first argument is such a state. ``s += gen("x")`` returns at once;
    ``s["x"]`` waits.

    After a part has failed, the parts after it are skipped; reading a missing value raises ``ProgramError`` with the
    program's line. Any thread may read.
    """

    def __init__(
        self,
        backend: Backend,
        defaults: SamplingOptions | None = None,
        *,
        streaming: bool = False,
        threaded: bool = True,
        session: str = "",
    ) -> None:
        self.backend = backend
        self.ret_value: Any = None
        self._defaults = defaults or SamplingOptions()
        self._threaded, self._streaming = threaded, streaming
        self._queue = TaskQueue(threaded)
        self.interpreter = Interpreter(backend, self._defaults, self._queue.changed, streaming)
        self.interpreter.hints = ReuseHints(session=session)
        self._ended = not streaming
        self._owner = threading.get_ident()
        self._forked_from = Conversation()

    # -- writing -----------------------------------------------------------------------------------------------------

    def append(self, expr: Expr) -> None:
        """Execute ``expr`` after everything that was appended before it."""
        self.append_at(expr, program_line())

    def append_at(self, expr: Expr, line: str) -> None:
        """Execute ``expr``, which is on line ``line`` of the program."""
        if isinstance(expr, Join):
            expr = Join(tuple(map(_ForkSnapshot, expr.forks)), expr.mode)  # type: ignore[arg-type]
        self.interpreter.expect(expr)
        self._queue.submit(lambda: self.interpreter.execute(expr, line), quick=not waits(expr))

    def set_var(self, name: str, value: Any) -> None:
        """Set the variable ``name`` after everything that was appended before."""
        self.append(Assign(name, value))

    def _children(self, size: int) -> Sequence[Self]:
        return self.fork_for([True] * size)

    def fork_for(self, calling: Sequence[bool]) -> Sequence[Self]:
        """Return one copy for each entry of ``calling``. An entry is True if its copy will call the model; these copies
        form a group."""
        self._queue.wait()
        self.interpreter.raise_error()
        group = f"fork-{secrets.token_hex(8)}"
        children = [self._copy() for _ in calling]
        for child, calls in zip(children, calling, strict=True):
            if calls and sum(calling) > 1:
                child.interpreter.hints = ReuseHints(group, sum(calling))
        return children

    def _copy(self) -> Self:
        child = type(self)(self.backend, self._defaults, streaming=self._streaming, threaded=self._threaded)
        child.interpreter.start_from(self.interpreter)
        child._forked_from, child._ended = self.interpreter.conversation, True
        return child

    def _join(self, forks: Sequence[State], mode: str) -> None:
        self.append(Join(tuple(forks), mode))

    # -- reading -----------------------------------------------------------------------------------------------------

    def get_var(self, name: str) -> Any:
        """See ``State.get_var``."""
        self._wait_for(name)
        return self.interpreter.values[name]

    def get_meta_info(self, name: str) -> Any:
        """See ``State.get_meta_info``."""
        self._wait_for(name)
        if name not in self.interpreter.metas:
            raise KeyError(f"the variable {name!r} was not made by a call of the model")
        return self.interpreter.metas[name]

    def text(self) -> str:
        """See ``State.text``. Raises ``ProgramError`` if a part has failed."""
        self.sync()
        self.interpreter.raise_error()
        return self.interpreter.text()

    def messages(self) -> list[dict[str, Any]]:
        """See ``State.messages``. Raises ``ProgramError`` if a part has failed."""
        self.sync()
        self.interpreter.raise_error()
        return [message.shown() for message in self.interpreter.conversation.all_messages]

    def conversation(self) -> Conversation:
        """Return the messages and texts so far. Raises ``ProgramError`` if a part has failed."""
        self.sync()
        self.interpreter.raise_error()
        return self.interpreter.conversation

    def values(self) -> dict[str, Any]:
        """Return all variables once they are available. Raises ``ProgramError`` if a part has failed."""
        self.sync()
        self.interpreter.raise_error()
        return dict(self.interpreter.values)

    def sync(self) -> None:
        """Wait for everything that was appended."""
        with self._queue.changed:
            self._queue.changed.wait_for(self._settled)

    def error(self) -> ProgramError | None:
        """Return the first error once everything that was appended is done; None if there was none."""
        self.sync()
        return self.interpreter.error

    def __contains__(self, name: object) -> bool:
        if name in self.interpreter.values or self.interpreter.pending[str(name)] > 0:
            return True
        self._queue.wait()  # a join may still add the variable
        return name in self.interpreter.values

    def __repr__(self) -> str:
        with self._queue.changed:
            shown = ", ".join(f"{name}={value!r:.60}" for name, value in self.interpreter.values.items())
            what = "failed" if self.interpreter.error else "done" if self._settled() else "running"
        return f"<ProgramState {what}: {shown}>"

    def __str__(self) -> str:
        return repr(self) if self.error() else f"ProgramState({self.text()})"

    # -- streams -----------------------------------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Yield the text as it grows, or the text of one variable. It comes in pieces if the program runs with
        ``stream=True``.

        Raises ``ProgramError`` after the last piece if a part has failed.
        """
        if var_name is None and not self._streaming:
            yield self.text()
            return
        at = 0
        while pieces := self._pieces_from(at, var_name):
            at += len(pieces)
            yield from pieces
        if var_name is None:
            self.interpreter.raise_error()
        else:
            self._wait_for(var_name)

    def stream(self, var_name: str | None = None) -> Iterator[str]:
        """Call ``text_iter``. This is a shorter name for it."""
        return self.text_iter(var_name)

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """Yield ``text_iter`` for an event loop.

        With ``return_meta_data``, yield pairs of a piece and the variable's meta info, which is empty before the end.
        """
        pieces = self.text_iter(var_name)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            meta = self.interpreter.metas.get(var_name or "", {})
            yield (piece, meta) if return_meta_data else piece

    def _pieces_from(self, at: int, name: str | None) -> list[str]:
        """Wait for at least one piece after the first ``at`` pieces and return the new pieces; return an empty list at
        the end."""

        def available() -> bool:
            return len(self._pieces(name)) > at or self._settled() or (name is not None and self.interpreter.has(name))

        with self._queue.changed:
            self._queue.changed.wait_for(available)
            return self._pieces(name)[at:]

    def _pieces(self, name: str | None) -> list[str]:
        return self.interpreter.log if name is None else self.interpreter.logs.get(name, [])

    # -- the program's end -------------------------------------------------------------------------------------------

    def end(self, error: ProgramError | None = None) -> None:
        """Record that the program's function has returned, or raised ``error``."""
        with self._queue.changed:
            self._ended = True
            self.interpreter.error = self.interpreter.error or error
            self._queue.changed.notify_all()

    def _settled(self) -> bool:
        """Return whether no more results will come. The thread that runs the program does not wait for the end of the
        program, because it would wait for itself."""
        ended = self._ended or self.interpreter.error is not None or threading.get_ident() == self._owner
        return self._queue.idle and ended

    def set_owner(self) -> None:
        """Record that the calling thread runs the program."""
        self._owner = threading.get_ident()

    def _wait_for(self, name: str) -> None:
        run = self.interpreter
        with self._queue.changed:
            self._queue.changed.wait_for(lambda: run.has(name) or self._settled())
            if run.has(name):
                return
        run.raise_error()
        known = ", ".join(sorted(run.values)) or "none so far"
        raise KeyError(f"there is no variable {name!r}; known: {known}")


class _ForkSnapshot:
    """Take, for a join, the variables and the conversation that a fork has after the parts that were appended to it before.
    Parts that are appended later are not included."""

    def __init__(self, fork: ProgramState) -> None:
        self._fork, self._ready = fork, threading.Event()
        fork._queue.submit(self._take_snapshot, quick=True)

    def values(self) -> dict[str, Any]:
        """Return all variables. Raises ``ProgramError`` if a part has failed."""
        self._wait()
        return self._values

    def added(self) -> tuple[Any, str]:
        """Return what was appended since the fork: messages, or text. Raises ``ProgramError`` if a part has failed."""
        self._wait()
        return self._conversation.since(self._fork._forked_from)

    def _wait(self) -> None:
        self._ready.wait()
        if self._failed:
            self._fork.interpreter.raise_error()

    def _take_snapshot(self) -> None:
        run = self._fork.interpreter
        self._values, self._conversation, self._failed = dict(run.values), run.conversation, run.error is not None
        self._ready.set()
