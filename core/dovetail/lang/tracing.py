"""Run a program on symbols: record what it appends without calling a model."""

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
    RoleBegin,
    RoleEnd,
    SeparateReasoning,
    Text,
    calls_of,
    leaves,
    names_of,
)
from dovetail.lang.references import Join, Ref
from dovetail.lang.state_interface import GATHER, State, line_of, program_line
from dovetail.lang.symbols import Symbol, TraceStop, has_symbol


@dataclass(frozen=True, slots=True)
class Appended:
    """Record that ``expr`` was appended to a state."""

    state: TracedState
    expr: Expr
    line: str


@dataclass(frozen=True, slots=True)
class Forked:
    """Record that a state was forked."""

    parent: TracedState
    children: tuple[TracedState, ...]
    line: str


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Describe one call of the model.

    ``kind`` is ``gen`` or ``select``, and ``name`` is the variable that the call sets. ``state`` is the number of its
    state: 0 is the program's own state, and forks are numbered in the order of their creation.
    """

    kind: str
    name: str | None
    state: int
    line: str


@dataclass(slots=True)
class RecordedSteps:
    """Hold the recorded steps. ``until_call`` ends the trace at the first call or symbol."""

    until_call: bool = False
    steps: list[Appended | Forked] = field(default_factory=list)
    count: int = 0


class TracedState(State):
    """Record what is appended instead of executing it."""

    def __init__(
        self, recorded: RecordedSteps, names: Sequence[str] = (), values: Mapping[str, Any] | None = None
    ) -> None:
        self._recorded = recorded
        self.number = recorded.count
        recorded.count += 1
        self._names = set(names)
        self._values = dict(values or {})  # the variables that the program set itself
        self._read: set[str] = set()  # the variables whose symbols the program has

    def append(self, expr: Expr) -> None:
        """Record ``expr``. End the trace if ``expr`` changes a variable that the program has read, because the symbol of
        that variable stands for the old value."""
        names = names_of(expr)
        if changed := self._read.intersection(names):
            raise TraceStop(f"{program_line()} changes {min(changed)!r}, whose value the program has read")
        self._recorded.steps.append(Appended(self, expr, program_line()))
        self._names.update(names)
        for name in names:
            self._values.pop(name, None)
        if self._recorded.until_call and not all(map(_is_static, leaves(expr))):
            raise TraceStop("the static prefix ends")

    def get_var(self, name: str) -> Any:
        """Return a symbol, or the value that the program has set itself."""
        if name in self._values:
            return self._values[name]
        self._read.add(name)
        return Symbol(Ref(self, name))

    def set_var(self, name: str, value: Any) -> None:
        """Record the assignment."""
        if type(value) is Symbol and isinstance(value.as_expr(), Ref):
            self.append(Assign(name, value.as_expr()))
            return
        if has_symbol(value):
            raise TraceStop(f"{program_line()} sets {name!r} to a value that depends on unknown values")
        self.append(Assign(name, value))
        self._values[name] = value

    def get_meta_info(self, name: str) -> Any:
        """End the trace."""
        raise TraceStop(f"{program_line()} needs the meta info of {name!r}")

    def text(self) -> str:
        """End the trace."""
        raise TraceStop(f"{program_line()} needs the text")

    def messages(self) -> list[dict[str, Any]]:
        """End the trace."""
        raise TraceStop(f"{program_line()} needs the messages")

    def error(self) -> Any:
        """End the trace."""
        raise TraceStop(f"{program_line()} needs the error")

    def stream(self, var_name: str | None = None) -> NoReturn:
        """End the trace."""
        raise TraceStop(f"{program_line()} reads a stream")

    text_iter = text_async_iter = stream

    def sync(self) -> None:
        """Do nothing, because nothing is running."""

    def _children(self, size: int) -> Sequence[Self]:
        children = [type(self)(self._recorded, tuple(self._names), self._values) for _ in range(size)]
        self._recorded.steps.append(Forked(self, tuple(children), program_line()))
        return children

    def _join(self, forks: Sequence[State], mode: str) -> None:
        self.append(Join(tuple(forks), mode))
        if mode == GATHER:
            self._names.update(*(fork._names for fork in forks if isinstance(fork, TracedState)))

    def __contains__(self, name: object) -> bool:
        return name in self._names


@dataclass(frozen=True, slots=True)
class ProgramTrace:
    """Describe what a program does before it needs the output of a model.

    ``stopped`` is the reason why the trace ended early; None means that the whole program is known. ``returned`` is
    what its function returned.
    """

    root: TracedState
    steps: tuple[Appended | Forked, ...]
    stopped: str | None
    returned: Any = None

    @property
    def complete(self) -> bool:
        """Return whether the whole program is known."""
        return self.stopped is None

    @property
    def calls(self) -> tuple[TracedCall, ...]:
        """Return the calls of the model in the order in which the program makes them."""
        return tuple(
            TracedCall("gen" if isinstance(call, Gen) else "select", call.name, step.state.number, step.line)
            for step in self.steps
            if isinstance(step, Appended)
            for call in calls_of(step.expr)
        )

    @property
    def forks(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the number of each state that forks, and the numbers of its copies."""
        forked = (step for step in self.steps if isinstance(step, Forked))
        return tuple((fork.parent.number, tuple(child.number for child in fork.children)) for fork in forked)

    def prefix(self) -> Conversation:
        """Return the static prefix: what the program's state has before the first unknown part."""
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
    """Run ``function`` with a recording state and with ``arguments`` by name, some of which may be symbols.

    An exception of the program ends the trace as well: the run itself will raise it.
    """
    recorded, returned, stopped = RecordedSteps(until_call), None, None
    root = TracedState(recorded)
    with ExceptionWatch(TraceStop, Symbol.__name__) as watch:
        try:
            returned = function(root, **arguments)
        except TraceStop as stop:
            stopped = str(stop)
        except Exception as error:
            stopped = f"{line_of(error)} raises {type(error).__name__}: {error}"
    return ProgramTrace(root, tuple(recorded.steps), watch.seen or stopped, returned)


def translated(expr: Expr, states: Mapping[State, State]) -> Expr:
    """Return ``expr`` with the states of a trace replaced by ``states``."""
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
    """Return what a function returned with symbols replaced by their values. Waits for the values."""
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
    assert isinstance(part, Text), "a symbol is joined with text only"
    return part.text


def _is_static(part: Expr) -> bool:
    return isinstance(part, Text | Image | RoleBegin | RoleEnd)


def _no_template() -> Template:
    raise TraceStop("text between messages needs the model's template")
