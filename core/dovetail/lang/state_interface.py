"""Define a state as programs use it, whether it runs or is only traced."""

from __future__ import annotations

import contextlib
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from dovetail.lang.ir import Expr, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, expression, joined

_LANGUAGE, _LIBRARY = str(Path(__file__).parent), str(Path(contextlib.__file__).parent)

GATHER, CONCATENATE = "gather", "concatenate"
_JOIN_MODES = {
    "gather": GATHER,
    "gather_variable": GATHER,
    "concatenate": CONCATENATE,
    "concate_and_append": CONCATENATE,
}


def program_line() -> str:
    """Return the line of the program that led to this call, as ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _of_a_program(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """Return the line of the program at which an exception arose, as ``file:line``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _of_a_program(f.filename)]
    own = [f for f in frames if f.filename == frames[0].filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown line"


def _of_a_program(filename: str) -> bool:
    """Return whether the file belongs neither to this language nor to Python's library, through which a program may
    have made the call."""
    installed = "site-packages" in filename
    return not filename.startswith(_LANGUAGE) and (installed or not filename.startswith((_LIBRARY, "<frozen")))


def join_mode(mode: str) -> str:
    """Return ``gather`` or ``concatenate`` for any of their names. Raises ``ValueError``."""
    if mode not in _JOIN_MODES:
        raise ValueError(f"join mode is {mode!r}; allowed: {', '.join(_JOIN_MODES)}")
    return _JOIN_MODES[mode]


class State(ABC):
    """Hold a prompt that grows. ``s += part`` appends text, ``gen(...)`` or messages; ``s["x"]`` is the result of a
    call."""

    @abstractmethod
    def append(self, expr: Expr) -> None:
        """Append ``expr``; ``+=`` calls this. Returns before calls of the model are done."""

    @abstractmethod
    def get_var(self, name: str) -> Any:
        """Return the value of ``name`` as soon as it is available.

        Raises ``ProgramError`` if the call for it failed, and ``KeyError`` if there is no such variable.
        """

    @abstractmethod
    def set_var(self, name: str, value: Any) -> None:
        """Set the variable ``name``."""

    @abstractmethod
    def get_meta_info(self, name: str) -> Any:
        """Return what the backend reports about the call that made ``name``: finish_reason, prompt_tokens,
        cached_tokens, ..."""

    @abstractmethod
    def text(self) -> str:
        """Return the prompt and all outputs so far, once they are available."""

    @abstractmethod
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages so far as ``{"role": ..., "content": ...}``."""

    @abstractmethod
    def sync(self) -> None:
        """Wait for everything that was appended. Raises nothing: errors are raised where values are read."""

    @abstractmethod
    def _children(self, size: int) -> Sequence[Self]:
        """Return copies of this state that continue independently."""

    @abstractmethod
    def _join(self, forks: Sequence[State], mode: str) -> None:
        """Take over the results of forks."""

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    def __iadd__(self, part: object) -> Self:
        if part is None:
            raise TypeError("None cannot be a part of a prompt; did a function forget to return its expression?")
        self.append(expression(part))
        return self

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> Forks:
        """Return ``size`` copies that continue independently and in parallel; their common prefix is computed once.

        Waits for what was appended so far. ``position_ids_offset`` is accepted for programs that pass it, and must be
        zeros.
        """
        if size < 1:
            raise ValueError(f"fork size is {size}; allowed: 1 and more")
        if any(position_ids_offset or ()):
            raise ValueError(
                "position_ids_offset is not zero; allowed: zeros, because a token's position is its index in the prompt"
            )
        return Forks(self, self._children(size))

    @contextlib.contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[Self]:
        """Yield a copy that continues independently."""
        yield self.fork(1, position_ids_offset)[0]

    def role(self, name: str, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """Append a message of a role: ``s.role("user", "Hello")``, or ``with s.role("user"): s += ...``."""
        if expr is None:
            return self._between(RoleBegin(name), RoleEnd(name))
        self.append(joined(RoleBegin(name), expr, RoleEnd(name)))
        return None

    def system(self, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """Append a system message; see ``role``."""
        return self.role("system", expr)

    def user(self, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """Append a user message; see ``role``."""
        return self.role("user", expr)

    def assistant(self, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """Append an assistant message; see ``role``."""
        return self.role("assistant", expr)

    def var_scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Make the text that is appended inside the variable ``name``: ``with s.var_scope("x"): s += ...``."""
        return self._between(ScopeBegin(name), ScopeEnd(name))

    @contextlib.contextmanager
    def _between(self, begin: Expr, end: Expr) -> Iterator[None]:
        self.append(begin)
        yield
        self.append(end)


class Forks(Sequence[Any]):
    """Hold the copies that ``fork`` made. They can be indexed and iterated.

    ``forks += part`` appends to each copy: one part for all, a list with one part for each, or a function of the index.
    """

    def __init__(self, source: State, states: Sequence[State]) -> None:
        self.states = list(states)
        self.src_state = source

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> Any:
        return self.states[index]

    def __setitem__(self, index: int, state: State) -> None:
        """Accept the same state, which ``forks[i] += part`` assigns at its end; reject another state."""
        if self.states[index] is not state:
            raise TypeError(f"forks[{index}] cannot be replaced; append to it with forks[{index}] += ...")

    def __iadd__(self, part: object) -> Forks:
        for state, own in zip(self.states, self._each(part), strict=True):
            state += own
        return self

    def join(self, mode: str = GATHER) -> None:
        """Take over the results of the copies in the source. Returns at once; reading a variable waits.

        ``gather`` (or ``gather_variable``): variables that the source does not have become lists in it, with one entry
        for each copy that has them. ``concatenate`` (or ``concate_and_append``): the text that each copy added is
        appended to the source.
        """
        self.src_state._join(self.states, join_mode(mode))

    def _each(self, part: object) -> list[object]:
        if isinstance(part, list | tuple):
            if len(part) != len(self.states):
                raise ValueError(f"{len(part)} parts for {len(self.states)} forks; give one for each, or one for all")
            return list(part)
        if callable(part) and not isinstance(part, Expr):
            call: Callable[[int], object] = part
            return [call(i) for i in range(len(self.states))]
        return [part] * len(self.states)
