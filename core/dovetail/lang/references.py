"""Define the expressions that refer to other states."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.lang.ir import Assign, Expr, calls_of, leaves
from dovetail.lang.state_interface import State


@dataclass(frozen=True, slots=True)
class Ref(Expr):
    """Stand for the value that ``name`` will have in ``state``."""

    state: State
    name: str


@dataclass(frozen=True, slots=True)
class Join(Expr):
    """Take over the results of forks: their variables as lists (``gather``) or their text (``concatenate``)."""

    forks: tuple[State, ...]
    mode: str


def waits(expr: Expr) -> bool:
    """Return whether executing ``expr`` waits for the model or another state."""
    waiting = Ref | Join
    found = (
        isinstance(part, waiting) or (isinstance(part, Assign) and isinstance(part.value, Ref)) for part in leaves(expr)
    )
    return any(found) or bool(calls_of(expr))
