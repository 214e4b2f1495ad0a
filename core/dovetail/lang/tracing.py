"""Running a program on symbols: what it appends is written down, no model is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Self

from dovetail.lang.conversation import Conversation, Template
from dovetail.lang.exception_watch import ExceptionWatch
from dovetail.lang.ir import (
    Assign,
    Expr,
    ExprSeq,
    Gen,
    Image,
    Join,
    Ref,
    RoleBegin,
    RoleEnd,
    SeparateReasoning,
    Text,
    calls_of,
    leaves,
    names_of,
)
from dovetail.lang.state_interface import GATHER, State, line_of, program_line
from dovetail.lang.symbols import Symbol, TraceStop, has_symbol


@dataclass(frozen=True, slots=True)
class Appended:
    """``expr`` was appended to a state."""

    state: TracedState
    expr: Expr
    line: str


@dataclass(frozen=True, slots=True)
class Forked:
    """A state was forked."""

    parent: TracedState
    children: tuple[TracedState, ...]
    line: str


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One call of the model: ``kind`` (``gen`` or ``select``), the variable it makes, and the number of its state (0 is the
    program's own; forks are numbered as they are made)."""

    kind: str
    name: str | None
    state: int
    line: str


@dataclass(slots=True)
class Tape:
    """What is written down. ``until_call`` ends the trace at the first call or symbol."""

    until_call: bool = False
    steps: list[Appended | Forked] = field(default_factory=list)
    count: int = 0


class TracedState(State):
    """A state that only writes down."""

    def __init__(self, tape: Tape, names: Sequence[str] = (), values: Mapping[str, Any] | None = None) -> None:
        self._tape = tape
        self.number = tape.count
        tape.count += 1
        self._names = set(names)
        self._values = dict(values or {})  # those that were set and not generated
        self._read: set[str] = set()  # of which the program has symbols

    def append(self, expr: Expr) -> None:
        """Write it down. Ends the trace where a variable changes whose symbol the program has: that stands for what it was."""
        names = names_of(expr)
        if changed := self._read.intersection(names):
            raise TraceStop(f"{program_line()} changes {min(changed)!r}, whose value the program has read")
        self._tape.steps.append(Appended(self, expr, program_line()))
        self._names.update(names)
        for name in names:
            self._values.pop(name, None)
        if self._tape.until_call and not all(map(_is_static, leaves(expr))):
            raise TraceStop("the static prefix ends")

    def get_var(self, name: str) -> Any:
        """A symbol, or the value that the program has set itself."""
        if name in self._values:
            return self._values[name]
        self._read.add(name)
        return Symbol(Ref(self, name))

    def set_var(self, name: str, value: Any) -> None:
        """Write it down."""
        if type(value) is Symbol and isinstance(value.as_expr(), Ref):
            self.append(Assign(name, value.as_expr()))
            return
        if has_symbol(value):
            raise TraceStop(f"{program_line()} gives {name!r} a value that is made of unknown ones")
        self.append(Assign(name, value))
        self._values[name] = value

    def get_meta_info(self, name: str) -> Any:
        """Ends the trace."""
        raise TraceStop(f"{program_line()} needs the meta info of {name!r}")

    def text(self) -> str:
        """Ends the trace."""
        raise TraceStop(f"{program_line()} needs the text")

    def messages(self) -> list[dict[str, Any]]:
        """Ends the trace."""
        raise TraceStop(f"{program_line()} needs the messages")

    def error(self) -> Any:
        """Ends the trace."""
        raise TraceStop(f"{program_line()} asks for an error")

    def stream(self, var_name: str | None = None) -> NoReturn:
        """Ends the trace."""
        raise TraceStop(f"{program_line()} reads a stream")

    text_iter = text_async_iter = stream

    def sync(self) -> None:
        """Nothing is running."""

    def _children(self, size: int) -> Sequence[Self]:
        children = [type(self)(self._tape, tuple(self._names), self._values) for _ in range(size)]
        self._tape.steps.append(Forked(self, tuple(children), program_line()))
        return children

    def _join(self, forks: Sequence[State], mode: str) -> None:
        self.append(Join(tuple(forks), mode))
        if mode == GATHER:
            self._names.update(*(fork._names for fork in forks if isinstance(fork, TracedState)))

    def __contains__(self, name: object) -> bool:
        return name in self._names


@dataclass(frozen=True, slots=True)
class ProgramTrace:
    """What a program does before it needs what a model has said. ``stopped`` says where it did; None: nowhere, so that the
    whole program is known. ``returned`` is what its function returned."""

    root: TracedState
    steps: tuple[Appended | Forked, ...]
    stopped: str | None
    returned: Any = None

    @property
    def complete(self) -> bool:
        """True if the whole program is known."""
        return self.stopped is None

    @property
    def calls(self) -> tuple[TracedCall, ...]:
        """The calls of the model, in the order in which the program makes them."""
        return tuple(
            TracedCall("gen" if isinstance(call, Gen) else "select", call.name, step.state.number, step.line)
            for step in self.steps
            if isinstance(step, Appended)
            for call in calls_of(step.expr)
        )

    @property
    def forks(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The number of each state that forks, and those of its copies."""
        forked = (step for step in self.steps if isinstance(step, Forked))
        return tuple((fork.parent.number, tuple(child.number for child in fork.children)) for fork in forked)

    def prefix(self) -> Conversation:
        """The static prefix: what the program's state has before anything that is not known."""
        found = Conversation()
        for step in self.steps:
            if not isinstance(step, Appended) or step.state is not self.root:
                continue
            for part in leaves(step.expr):
                match part:
                    case Text(text):
                        found = found.plus(text, _no_template)
                    case Image():
                        found = found.plus(part, _no_template)
                    case RoleBegin(role):
                        found = found.begin(role)
                    case RoleEnd(role):
                        found = found.end(role)
                    case _ if not _is_static(part):
                        return found
        return found


def trace(function: Callable[..., Any], arguments: Mapping[str, Any], *, until_call: bool = False) -> ProgramTrace:
    """Run ``function`` with a state that writes down and ``arguments`` by name, some of which may be symbols. An exception
    of the program ends the trace as well: the run itself will raise it."""
    tape, returned, stopped = Tape(until_call), None, None
    root = TracedState(tape)
    with ExceptionWatch(TraceStop, Symbol.__name__) as watch:
        try:
            returned = function(root, **arguments)
        except TraceStop as stop:
            stopped = str(stop)
        except Exception as error:
            stopped = f"{line_of(error)} raises {type(error).__name__}: {error}"
    return ProgramTrace(root, tuple(tape.steps), watch.seen or stopped, returned)


def translated(expr: Expr, states: Mapping[State, State]) -> Expr:
    """``expr`` with the states of a trace replaced by ``states``."""
    match expr:
        case ExprSeq(parts):
            return ExprSeq(tuple(translated(part, states) for part in parts))
        case SeparateReasoning(inner=inner):
            return replace(expr, inner=translated(inner, states))
        case Ref(state, name):
            return Ref(states[state], name)
        case Join(forks, mode):
            return Join(tuple(states[fork] for fork in forks), mode)
        case Assign(name, Ref() as source):
            return Assign(name, translated(source, states))
    return expr


def known(value: Any, states: Mapping[State, State]) -> Any:
    """What a function returned, symbols replaced by their values. Waits for them."""
    if type(value) is Symbol:
        found = [_known_part(part, states) for part in leaves(value.as_expr())]
        return found[0] if len(found) == 1 else "".join(found)
    if isinstance(value, list | tuple):
        return type(value)([known(each, states) for each in value])
    if isinstance(value, dict):
        return {key: known(each, states) for key, each in value.items()}
    return states.get(value, value) if isinstance(value, State) else value


def _known_part(part: Expr, states: Mapping[State, State]) -> Any:
    if isinstance(part, Ref):
        return states[part.state].get_var(part.name)
    assert isinstance(part, Text), "nothing else is joined to a symbol"
    return part.text


def _is_static(part: Expr) -> bool:
    return isinstance(part, Text | Image | RoleBegin | RoleEnd)


def _no_template() -> Template:
    raise TraceStop("text stands between messages, which the model's template is needed for")
