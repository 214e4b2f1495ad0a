"""Programs: functions whose first argument is a state."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from dovetail.lang.batch import run_batch
from dovetail.lang.defaults import backend_of
from dovetail.lang.interpreter import failure
from dovetail.lang.ir import SamplingOptions
from dovetail.lang.replay import replay
from dovetail.lang.state import ProgramState
from dovetail.lang.state_interface import State, line_of
from dovetail.lang.symbols import symbols
from dovetail.lang.tracing import ProgramTrace, trace


class Function:
    """A program. ``run`` it once, ``run_batch`` it over rows of arguments, ``bind`` some of them, ``trace`` it.

    Settings given to ``run`` hold for calls that do not give their own: ``max_new_tokens`` (128), ``temperature`` (1.0), and what else
    ``ir.Sampling`` has, but ``min_tokens`` and ``constraint``; None leaves it to the backend. ``run`` returns when the program and all
    its calls are done; with ``stream=True`` at once, to be read with ``text_iter`` while it goes on.
    ``traced=True`` writes the program down first: where it never needs a value for its control flow, it is carried out from
    what was written down, so that no fork waits for the Python code of another; else it runs as usual, from its beginning.
    ``session`` names a conversation whose end stays cached for the next run with that name. ``use_thread=False`` carries every
    part out in the caller's thread.
    """

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        names = list(inspect.signature(func).parameters)
        if not names:
            raise TypeError(
                f"{func.__name__} takes no argument; a program's first argument is its state: def f(s, ...)"
            )
        self.func = func
        self.arg_names = names[1:]
        self.bound = dict(bound or {})
        self.__name__, self.__doc__ = func.__name__, func.__doc__

    def __repr__(self) -> str:
        return f"<program {self.__name__}({', '.join(self.arg_names)})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; or, with a state as the first argument, go on with that state, as a function of a program."""
        if args and isinstance(args[0], State):
            return self.func(*args, **{**self.bound, **kwargs})
        return self.run(*args, **kwargs)

    def bind(self, **arguments: Any) -> Function:
        """The program with these arguments given. Raises ``TypeError`` for names that it does not take."""
        unknown = sorted(set(arguments) - set(self.arg_names))
        if unknown:
            raise TypeError(f"{self.__name__} takes no {', '.join(unknown)}; it takes {', '.join(self.arg_names)}")
        return Function(self.func, {**self.bound, **arguments})

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        traced: bool = False,
        session: str = "",
        **kwargs: Any,
    ) -> ProgramState:
        """Run once. ``kwargs`` are arguments of the program, and settings. Raises what the program itself raises; what a call of
        the model raises surfaces where its value is read."""
        sampling, kwargs = self._split(kwargs)
        arguments = self.arguments(args, kwargs)
        state = ProgramState(backend_of(backend), sampling, streaming=stream, threaded=use_thread, session=session)
        if stream:
            work = threading.Thread(target=self.guarded, args=(state, arguments, traced), daemon=True)
            work.start()
        else:
            self.execute(state, arguments, traced)
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        traced: bool = False,
        **settings: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run for each row of arguments (a mapping, or a sequence in the order of the program's arguments), several at a time;
        the states come in the order of the rows. What all rows have in common is computed first. ``settings`` are those of
        ``run``. An exception of the program in one row surfaces where that row's state is read. ``generator_style`` yields
        the states as they come."""
        rows, sampling = [self._row(row) for row in batch_kwargs], sampling_of(settings)
        states = run_batch(self, rows, backend_of(backend), num_threads, progress_bar, sampling, traced)
        return states if generator_style else list(states)

    def trace(self, *args: Any, **kwargs: Any) -> ProgramTrace:
        """Write the program down without calling a model. Arguments that are not given are symbols."""
        kwargs.pop("backend", None)
        given = inspect.signature(self.func).bind_partial(None, *args, **{**self.bound, **kwargs})
        given.apply_defaults()
        arguments = dict(list(given.arguments.items())[1:])
        return trace(self.func, {**symbols([n for n in self.arg_names if n not in arguments]), **arguments})

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The function's arguments without its state. Raises ``TypeError``."""
        return inspect.signature(self.func).bind(None, *args, **{**self.bound, **kwargs})

    def execute(self, state: ProgramState, arguments: inspect.BoundArguments, traced: bool) -> None:
        """Run on ``state`` and wait for its calls. Raises what the program raises."""
        state.set_owner()
        known = arguments.arguments
        plan = trace(self.func, dict(list(known.items())[1:])) if traced and _by_name(arguments) else None
        if plan is not None and plan.complete:
            state.ret_value = replay(plan, state)
        else:
            state.ret_value = self.func(state, *arguments.args[1:], **arguments.kwargs)
        state.sync()
        state.end()

    def guarded(self, state: ProgramState, arguments: inspect.BoundArguments, traced: bool) -> None:
        """``execute``; what the program raises becomes the error of its state, ``SystemExit`` too: somebody may wait for it."""
        try:
            self.execute(state, arguments, traced)
        except BaseException as error:
            state.end(failure(error, line_of(error), f"program {self.__name__}"))

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[SamplingOptions, dict[str, Any]]:
        """Settings, and the rest: a name that the program has as an argument is the program's."""
        own = {name: value for name, value in kwargs.items() if name in self.arg_names or name not in _SETTINGS}
        return sampling_of({name: value for name, value in kwargs.items() if name not in own}), own

    def _row(self, row: Mapping[str, Any] | Sequence[Any]) -> inspect.BoundArguments:
        if isinstance(row, Mapping):
            return self.arguments((), row)
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"a row of run_batch is {row!r:.80}; allowed: a dict of arguments, or a list of them")
        return self.arguments(row, {})


_OWN_NAMES = {"max_tokens", "min_tokens", "constraint"}
"""Fields of ``Sampling`` that a call gives and a run does not, or not under this name."""
_SETTINGS = frozenset({f.name for f in fields(SamplingOptions)} - _OWN_NAMES | {"max_new_tokens"})


def sampling_of(settings: Mapping[str, Any]) -> SamplingOptions:
    """How calls choose tokens that do not say it themselves: the settings of ``Function``. Raises ``TypeError``."""
    unknown = sorted(settings.keys() - _SETTINGS)
    if unknown:
        raise TypeError(f"there is no setting {', '.join(unknown)}; there are {', '.join(sorted(_SETTINGS))}")
    given = {"max_new_tokens": 128, "temperature": 1.0, **settings}
    return SamplingOptions.of(max_tokens=given.pop("max_new_tokens"), **given)


def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a function ``def f(s, ...)`` a program. ``num_api_spec_tokens`` is taken for programs that give it; outputs do not
    depend on it."""
    return Function(func) if func is not None else Function


def _by_name(arguments: inspect.BoundArguments) -> bool:
    """True if all arguments have names of their own."""
    kinds = {p.kind for p in arguments.signature.parameters.values()}
    return not kinds & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    }
