"""Define what a trace does not know yet: the text of a future call, or an argument that differs between the rows of a
batch.

A symbol can be appended to a prompt. A program that needs its value (an ``if``, an f-string, ``len``) ends the trace at
that point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from dovetail.lang.ir import Arg, Expr, joined
from dovetail.lang.state_interface import program_line


class TraceStop(BaseException):
    """Raised to end the trace. It is not an ``Exception``, so that no ``except Exception`` of the program catches
    it."""


class Symbol:
    """Stand for an unknown value. ``made`` is the expression of that value."""

    def __init__(self, made: Expr) -> None:
        self._made = made

    @property  # isinstance(symbol, str) reads it
    def __class__(self) -> NoReturn:  # pyright: ignore
        _stop_trace(self)

    def as_expr(self) -> Expr:
        """Return the expression that is appended in place of the symbol."""
        return self._made

    def __add__(self, other: object) -> Expr | Symbol:
        return _sum(joined(self, other), other)

    def __radd__(self, other: object) -> Expr | Symbol:
        return _sum(joined(other, self), other)

    def __repr__(self) -> str:
        return f"<unknown: {self._made!r:.80}>"


def _sum(made: Expr, other: object) -> Expr | Symbol:
    """Return the sum of a symbol and ``other``. With text it is a symbol too, because a program may need its value
    later."""
    return Symbol(made) if type(other) in (str, Symbol) else made


def _stop_trace(symbol: Symbol, *_: object) -> NoReturn:
    raise TraceStop(f"{program_line()} needs the value of {symbol!r}")


_OPERATIONS = """getattr str format bool len iter next contains getitem call int float index hash eq ne lt le gt ge
    mul rmul mod rmod sub rsub truediv and or reversed bytes enter exit fspath complex round"""
for _name in _OPERATIONS.split():
    setattr(Symbol, f"__{_name}__", _stop_trace)


def symbols(names: Sequence[str]) -> dict[str, Symbol]:
    """Return a symbol for each argument."""
    return {name: Symbol(Arg(name)) for name in names}


def has_symbol(value: Any) -> bool:
    """Return whether ``value`` is a symbol or contains one."""
    if type(value) is Symbol:
        return True
    if isinstance(value, dict):
        return any(map(has_symbol, value.values()))
    return isinstance(value, list | tuple | set) and any(map(has_symbol, value))
