"""Define what programs are made of: frozen expressions that are appended to a state one after another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dovetail.lang.choices import ChoicesMethod

REGEX_INT = r"[+-]?[0-9]{1,18}"
REGEX_FLOAT = r"[+-]?[0-9]{1,18}(\.[0-9]{1,18})?"
REGEX_BOOL = "(True|False)"
REGEX_STR = r'"[^"\\\n]{0,1000}"'
"""The constraints that ``dtype`` stands for: numbers of bounded length, and a string in quotes without escapes."""


class Expr:
    """Represent a part of a prompt. Texts and expressions are joined with ``+``."""

    __slots__ = ()

    def __add__(self, other: object) -> Expr:
        return joined(self, other)

    def __radd__(self, other: object) -> Expr:
        return joined(other, self)


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Append text unchanged."""

    text: str


@dataclass(frozen=True, slots=True)
class ExprSeq(Expr):
    """Append expressions one after another."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """Begin a message of ``role``."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """End the message."""

    role: str


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """Append a picture, given as path, ``http`` address, ``data:`` address or bytes, for backends that accept
    pictures."""

    source: str | bytes | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Describe how a call chooses its tokens. The run supplies what is None here, and the backend what is None in the
    run too.

    ``seed`` makes sampling reproducible. ``constraint`` is ``(kind, text)`` with the kinds ``regex`` and
    ``json_schema``.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    constraint: tuple[str, str] | None = None

    @classmethod
    def of(
        cls, *, stop: str | Sequence[str] | None = None, stop_token_ids: Sequence[int] | None = None, **others: Any
    ) -> SamplingOptions:
        """Return the options that a program gives; ``stop`` may be a single string, and both sequences may be of any
        type."""
        texts = (stop,) if isinstance(stop, str) else stop
        return cls(
            stop=None if texts is None else tuple(texts),
            stop_token_ids=None if stop_token_ids is None else tuple(stop_token_ids),
            **others,
        )

    def over(self, defaults: SamplingOptions) -> SamplingOptions:
        """Return these options with the missing ones taken from ``defaults``."""
        missing = {f.name: getattr(defaults, f.name) for f in fields(self) if getattr(self, f.name) is None}
        return replace(self, **missing)

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Generate text, which becomes the variable ``name``."""

    name: str | None
    sampling: SamplingOptions


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """Choose the best of ``choices`` by ``method``; it becomes the variable ``name``."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Expr):
    """Execute ``inner`` and move the reasoning of its generations (``begin`` ... ``end``) to
    ``<name>_reasoning_content``."""

    inner: Expr
    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ScopeBegin(Expr):
    """Begin the text that becomes the variable ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class ScopeEnd(Expr):
    """End the text of the variable ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class Arg(Expr):
    """Stand for an argument that is unknown in a trace."""

    name: str


@dataclass(frozen=True, slots=True)
class Assign(Expr):
    """Set ``name`` to ``value``, or to the value of a ``references.Ref``, without appending to the prompt."""

    name: str
    value: Any


def joined(*parts: object) -> Expr:
    """Join texts and expressions into one flat expression. Raises ``TypeError``."""
    flat: list[Expr] = []
    for part in map(expression, parts):
        flat += part.parts if isinstance(part, ExprSeq) else (part,)
    return flat[0] if len(flat) == 1 else ExprSeq(tuple(flat))


def expression(part: object) -> Expr:
    """Return ``part``, which is text, an expression or a list of them, as an expression. Raises ``TypeError``."""
    as_expr = getattr(type(part), "as_expr", None)  # must come first: isinstance on a symbol ends the trace
    if as_expr is not None:
        return as_expr(part)
    if isinstance(part, Expr):
        return part
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, list | tuple):
        return joined(*part) if part else Text("")
    raise TypeError(
        f"{part!r:.80} ({type(part).__name__}) cannot be a part of a prompt; give text, an expression such as gen(...) "
        "or str(value)"
    )


def leaves(expr: Expr) -> tuple[Expr, ...]:
    """Return the expressions of ``expr`` in order."""
    return expr.parts if isinstance(expr, ExprSeq) else (expr,)


def names_of(expr: Expr) -> list[str]:
    """Return the variables that ``expr`` sets, in order."""
    match expr:
        case ExprSeq(parts):
            return [name for part in parts for name in names_of(part)]
        case SeparateReasoning(inner):
            return [each for name in names_of(inner) for each in (name, reasoning_name(name))]
        case Gen(str(name)) | Select(str(name)) | ScopeBegin(name) | Assign(name):
            return [name]
    return []


def calls_of(expr: Expr) -> list[Gen | Select]:
    """Return the calls of the model that ``expr`` makes, in order."""
    match expr:
        case ExprSeq(parts):
            return [call for part in parts for call in calls_of(part)]
        case SeparateReasoning(inner):
            return calls_of(inner)
        case Gen() | Select():
            return [expr]
    return []


def reasoning_name(name: str) -> str:
    """Return the name of the variable that holds the reasoning of ``name``."""
    return f"{name}_reasoning_content"
