"""Define programs: functions whose first argument is a state."""

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
    """Represent a program: ``run`` it once, ``run_batch`` it over rows of arguments, ``bind`` some of its arguments, or
    ``trace`` it.

    Settings given to ``run`` apply to calls that do not give their own: ``max_new_tokens`` (128) and the other fields
    of ``ir.SamplingOptions`` except ``min_tokens`` and ``constraint``. The backend supplies what is None. ``run`` returns when the program and all its calls are done; with ``stream=True`` it returns at once,
    and ``text_iter`` reads the text while the program runs.

    With ``traced=True`` the program is first recorded. If it never needs a value for its control flow, it is executed
    from the recording, so that no fork waits for the Python code of another; otherwise it runs as usual from its
    beginning. ``session`` names a conversation whose end stays cached for the next run with that name. With
    ``use_thread=False`` every part is executed in the caller's thread.
    """

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        names = list(inspect.signature(func).parameters)
        if not names:
            raise TypeError(
                f"{func.__name__} takes no argument; the first argument of a program is its state: def f(s, ...)"
            )
        self.func = func
        self.arg_names = names[1:]
        self.bound = dict(bound or {})
        self.__name__, self.__doc__ = func.__name__, func.__doc__

    def __repr__(self) -> str:
        return f"<program {self.__name__}({', '.join(self.arg_names)})>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program; if the first argument is a state, continue that state instead, as a function that is called
        by a program."""
        if args and isinstance(args[0], State):
            return self.func(*args, **{**self.bound, **kwargs})
        return self.run(*args, **kwargs)

    def bind(self, **arguments: Any) -> Function:
        """Return the program with these arguments given. Raises ``TypeError`` for names that it does not take."""
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
        """Run the program once. ``kwargs`` are arguments of the program and settings.

        Raises what the program itself raises; the error of a call of the model is raised where its value is read.
        """
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
        """Run the program for each row of arguments, several rows at a time, and return the states in the order of the
        rows.

        A row is a mapping, or a sequence in the order of the program's arguments. The common prefix of all rows is
        computed first. ``settings`` are those of ``run``. An exception of the program in one row is raised where that
        row's state is read. With ``generator_style`` the states are yielded as they are done.
        """
        rows, sampling = [self._row(row) for row in batch_kwargs], sampling_of(settings)
        states = run_batch(self, rows, backend_of(backend), num_threads, progress_bar, sampling, traced)
        return states if generator_style else list(states)

    def trace(self, *args: Any, **kwargs: Any) -> ProgramTrace:
        """Record the program without calling a model. Arguments that are not given are symbols."""
        kwargs.pop("backend", None)
        given = inspect.signature(self.func).bind_partial(None, *args, **{**self.bound, **kwargs})
        given.apply_defaults()
        arguments = dict(list(given.arguments.items())[1:])
        return trace(self.func, {**symbols([n for n in self.arg_names if n not in arguments]), **arguments})

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Return the function's arguments without its state. Raises ``TypeError``."""
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
        """Call ``execute``. Any exception of the program, even ``SystemExit``, becomes the error of its state, because a
        reader may wait for the state."""
        try:
            self.execute(state, arguments, traced)
        except BaseException as error:
            state.end(failure(error, line_of(error), f"program {self.__name__}"))

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[SamplingOptions, dict[str, Any]]:
        """Return the settings and the other arguments. A name that is an argument of the program belongs to the
        program."""
        own = {name: value for name, value in kwargs.items() if name in self.arg_names or name not in _SETTINGS}
        return sampling_of({name: value for name, value in kwargs.items() if name not in own}), own

    def _row(self, row: Mapping[str, Any] | Sequence[Any]) -> inspect.BoundArguments:
        if isinstance(row, Mapping):
            return self.arguments((), row)
        if isinstance(row, str) or not isinstance(row, Sequence):
            raise TypeError(f"a row of run_batch is {row!r:.80}; allowed: a dict of arguments, or a list of them")
        return self.arguments(row, {})


_OWN_NAMES = {"max_tokens", "min_tokens", "constraint"}
"""The fields of ``SamplingOptions`` that a call gives and a run does not give, or gives under another name."""
_SETTINGS = frozenset({f.name for f in fields(SamplingOptions)} - _OWN_NAMES | {"max_new_tokens"})


def sampling_of(settings: Mapping[str, Any]) -> SamplingOptions:
    """Return the sampling of calls that do not give their own, from the settings of ``Function``. Raises
    ``TypeError``."""
    unknown = sorted(settings.keys() - _SETTINGS)
    if unknown:
        raise TypeError(f"there is no setting {', '.join(unknown)}; allowed: {', '.join(sorted(_SETTINGS))}")
    given = {"max_new_tokens": 128, **settings}
    return SamplingOptions.of(max_tokens=given.pop("max_new_tokens"), **given)


def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a function ``def f(s, ...)`` a program.

    ``num_api_spec_tokens`` is accepted for programs that pass it; outputs do not depend on it.
    """
    return Function(func) if func is not None else Function


def _by_name(arguments: inspect.BoundArguments) -> bool:
    """Return whether every argument can be passed by its name: the function has no positional-only parameters and takes
    neither ``*args`` nor ``**kwargs``."""
    kinds = {p.kind for p in arguments.signature.parameters.values()}
    return not kinds & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    }
