"""What programs see of a state, whether it runs or is only traced."""

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
    """Where in the program this is called, as ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _of_a_program(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of(error: BaseException) -> str:
    """Where in the program an exception came from, as ``file:line``."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _of_a_program(f.filename)]
    own = [f for f in frames if f.filename == frames[0].filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown line"


def _of_a_program(filename: str) -> bool:
    """True if it is neither of this language nor of Python's library, by way of which a program may have called it."""
    installed = "site-packages" in filename
    return not filename.startswith(_LANGUAGE) and (installed or not filename.startswith((_LIBRARY, "<frozen")))


def join_mode(mode: str) -> str:
    """``gather`` or ``concatenate`` by any of their names. Raises ``ValueError``."""
    if mode not in _JOIN_MODES:
        raise ValueError(f"join mode is {mode!r}; allowed: {', '.join(_JOIN_MODES)}")
    return _JOIN_MODES[mode]


class State(ABC):
    """A prompt that grows. ``s += part`` appends text, ``gen(...)``, messages; ``s["x"]`` is what a call has found."""

    @abstractmethod
    def append(self, expr: Expr) -> None:
        """What ``+=`` does. Returns before calls of the model are done."""

    @abstractmethod
    def get_var(self, name: str) -> Any:
        """The value of ``name``, as soon as it is there. Raises ``ProgramError`` where the call for it failed, and
        ``KeyError`` where there is none."""

    @abstractmethod
    def set_var(self, name: str, value: Any) -> None:
        """Give ``name`` a value."""

    @abstractmethod
    def get_meta_info(self, name: str) -> Any:
        """What the backend says of the call that made ``name``: finish_reason, prompt_tokens, cached_tokens, ..."""

    @abstractmethod
    def text(self) -> str:
        """All of the prompt and the outputs so far, once they are there."""

    @abstractmethod
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, as ``{"role": ..., "content": ...}``."""

    @abstractmethod
    def sync(self) -> None:
        """Wait for all that was appended. Raises nothing: errors surface where values are read."""

    @abstractmethod
    def _children(self, size: int) -> Sequence[Self]:
        """Copies of this state that go on by themselves."""

    @abstractmethod
    def _join(self, forks: Sequence[State], mode: str) -> None:
        """Take back what forks have found."""

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
        """``size`` copies that go on by themselves and in parallel; what they have in common is computed once. Waits for
        what was appended so far. ``position_ids_offset`` is taken for programs that give it, and must be zeros."""
        if size < 1:
            raise ValueError(f"fork size is {size}; allowed: 1 and more")
        if any(position_ids_offset or ()):
            raise ValueError("position_ids_offset is not zero: every token has the position at which it stands")
        return Forks(self, self._children(size))

    @contextlib.contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[Self]:
        """A copy that goes on by itself."""
        yield self.fork(1, position_ids_offset)[0]

    def role(self, name: str, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """A message of a role: ``s.role("user", "Hello")``, or ``with s.role("user"): s += ...``."""
        if expr is None:
            return self._between(RoleBegin(name), RoleEnd(name))
        self.append(joined(RoleBegin(name), expr, RoleEnd(name)))
        return None

    def system(self, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """A system message; see ``role``."""
        return self.role("system", expr)

    def user(self, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """A user's message; see ``role``."""
        return self.role("user", expr)

    def assistant(self, expr: object = None) -> contextlib.AbstractContextManager[None] | None:
        """An assistant's message; see ``role``."""
        return self.role("assistant", expr)

    def var_scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """``with s.var_scope("x"): s += ...``: what is appended inside becomes the variable ``x``."""
        return self._between(ScopeBegin(name), ScopeEnd(name))

    @contextlib.contextmanager
    def _between(self, begin: Expr, end: Expr) -> Iterator[None]:
        self.append(begin)
        yield
        self.append(end)


class Forks(Sequence[Any]):
    """The copies that ``fork`` has made. Indexed and iterated; ``forks += part`` appends to each: one part for all, a list
    with one for each, or a function of the index."""

    def __init__(self, source: State, states: Sequence[State]) -> None:
        self.states = list(states)
        self.src_state = source

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> Any:
        return self.states[index]

    def __setitem__(self, index: int, state: State) -> None:
        """What ``forks[i] += part`` ends with; another state is refused."""
        if self.states[index] is not state:
            raise TypeError(f"forks[{index}] cannot be replaced; append to it with forks[{index}] += ...")

    def __iadd__(self, part: object) -> Forks:
        for state, own in zip(self.states, self._each(part), strict=True):
            state += own
        return self

    def join(self, mode: str = GATHER) -> None:
        """Take back what the copies have found. ``gather`` (or ``gather_variable``): variables that the source does not have
        become lists in it, one entry for each copy that has them. ``concatenate`` (or ``concate_and_append``): the text that
        each has added is appended to the source. Returns at once; reading waits."""
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
