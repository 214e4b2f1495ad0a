"""Execute a program from its trace: every part of every state is known before the first call."""

from __future__ import annotations

from typing import Any

from dovetail.lang.ir import calls_of
from dovetail.lang.state import ProgramState
from dovetail.lang.state_interface import State
from dovetail.lang.tracing import Appended, ProgramTrace, known, translated


def replay(trace: ProgramTrace, root: ProgramState) -> Any:
    """Execute a complete trace on ``root`` and return what the program's function would return.

    The copies of a fork that call the model are known, so that exactly these copies are a group.
    """
    assert trace.complete, trace.stopped
    states: dict[State, State] = {trace.root: root}
    callers = {step.state for step in trace.steps if isinstance(step, Appended) and calls_of(step.expr)}
    for step in trace.steps:
        if isinstance(step, Appended):
            state = states[step.state]
            assert isinstance(state, ProgramState)
            state.append_at(translated(step.expr, states), step.line)
        else:
            parent = states[step.parent]
            assert isinstance(parent, ProgramState)
            made = parent.fork_for([child in callers for child in step.children])
            states.update(zip(step.children, made, strict=True))
    return known(trace.returned, states)
