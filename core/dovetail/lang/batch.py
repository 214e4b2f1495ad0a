"""Run a program over many rows of arguments."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.errors import DovetailError, RequestError
from dovetail.lang.state import ProgramState
from dovetail.lang.symbols import symbols
from dovetail.lang.tracing import trace

if TYPE_CHECKING:
    from dovetail.lang.backends.base import Backend
    from dovetail.lang.ir import SamplingOptions

MOST_THREADS = 128
"""The number of rows that run at a time if the caller sets no other."""


class BatchProgram(Protocol):
    """Describe what ``run_batch`` needs of a program; ``program.Function`` is one."""

    func: Callable[..., Any]
    """The function whose first argument is a state."""
    arg_names: list[str]
    """The names of its other arguments."""

    def guarded(self, state: ProgramState, arguments: inspect.BoundArguments, traced: bool) -> None:
        """Run on ``state`` and wait for its calls. An exception of the program becomes the error of ``state``."""
        ...


def run_batch(
    program: BatchProgram,
    rows: Sequence[inspect.BoundArguments],
    backend: Backend,
    num_threads: int | str,
    progress_bar: bool,
    sampling: SamplingOptions,
    traced: bool,
) -> Iterator[ProgramState]:
    """Yield the states of the rows in the order of the rows, as they are done."""
    count = threads_for(num_threads, len(rows))
    send_common_prefix(program, rows, backend)
    with ThreadPoolExecutor(count, "dovetail-row") as pool, _progress(progress_bar, len(rows)) as advance:
        running = [pool.submit(_one, program, row, backend, sampling, traced) for row in rows]
        for future in running:
            future.add_done_callback(advance)
        try:
            for future in running:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def threads_for(requested: int | str, rows: int) -> int:
    """Return the number of rows that run at a time. Raises ``ValueError``."""
    if requested == "auto":
        return max(min(rows, MOST_THREADS), 1)
    if not isinstance(requested, int) or requested < 1:
        raise ValueError(f"num_threads is {requested!r}; allowed: 'auto', or 1 and more")
    return max(min(requested, rows), 1)


def send_common_prefix(program: BatchProgram, rows: Sequence[inspect.BoundArguments], backend: Backend) -> str:
    """Let the backend compute the common prefix of all prompts before the rows are sent, and return this prefix.

    It is found by tracing the program up to its first call, with the arguments that all rows share and symbols for the
    others.
    """
    if len(rows) < 2 or not backend.features.prefills:
        return ""
    found = trace(program.func, shared_arguments(program, rows), until_call=True).prefix()
    try:
        text = found.text(backend.template())
    except RequestError:  # the template rejects a conversation that has only begun; the rows will have more of it
        return ""
    if text:
        with contextlib.suppress(DovetailError):  # each row will report the same error itself
            backend.prefill(text, found.chat)
    return text


def shared_arguments(program: BatchProgram, rows: Sequence[inspect.BoundArguments]) -> dict[str, Any]:
    """Return the arguments that are the same in all rows, and symbols in place of the others."""
    by_name = []
    for row in rows:
        row.apply_defaults()
        by_name.append(dict(list(row.arguments.items())[1:]))
    first = by_name[0]
    same = {n: v for n, v in first.items() if all(n in row and (row[n] is v or _equal(row[n], v)) for row in by_name)}
    return {**symbols([n for n in program.arg_names if n not in same]), **same}


def _equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # arrays have no truth value
        return False


def _one(
    program: BatchProgram, row: inspect.BoundArguments, backend: Backend, sampling: SamplingOptions, traced: bool
) -> ProgramState:
    state = ProgramState(backend, sampling)
    program.guarded(state, row, traced)
    return state


@contextlib.contextmanager
def _progress(shown: bool, count: int) -> Iterator[Any]:
    """Show a bar on stderr; yield the function to call with each row that is done."""
    if not shown:
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("rows", total=count)

        def advance(done: Future[Any]) -> None:
            progress.advance(task)

        yield advance


def _nothing(done: Future[Any]) -> None:
    pass
