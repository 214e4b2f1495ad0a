"""Parsers of what models write: tool calls and reasoning, taken out of the text of an output while it grows.

A parser belongs to one model and serves all of its requests; a stream is the state of one output. Text runs through the
reasoning stream first; what that calls content runs through the tool stream.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.interfaces.features import Feature
    from dovetail.sampling_params import GrammarSpec


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser may know of its model: the source of its chat template (empty where it has none), and the texts of its
    special tokens. Grammars cannot write special tokens; a ``ConstraintGate`` can, and lets characters stand for them."""

    chat_template: str = ""
    special_tokens: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments, an object; ``strict`` asks
    that whatever call the model makes of it honours the schema."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The calls that are wanted: of ``tools`` alone, at least one if ``required``, at most one unless ``parallel``."""

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ConstraintGate:
    """What an output has before a constraint on it begins; all texts are written by whole tokens of the model.

    The output begins with ``lead``, which is forced; where it is ``optional``, an output that begins otherwise has no free
    part. With ``until``, one token's text, a free part follows that ends with it; the output may end before that only if
    ``may_end``. Then ``prefix`` is forced, and then the grammar begins (with the prefix, if ``prefix_in_grammar``).

    ``marks`` are special tokens that the grammar writes: pairs of one's text and the character that stands for it in the
    grammar, from U+000E to U+001F: no JSON text has those, and no output does where one stands for a mark.
    """

    lead: str = ""
    optional: bool = False
    until: str = ""
    may_end: bool = False
    prefix: str = ""
    prefix_in_grammar: bool = False
    marks: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolConstraint:
    """A grammar that enforces a ``ToolRequest``, and what precedes it. A gate that ``covers_reasoning`` takes the place of
    the reasoning parser's own; any other begins where the reasoning ends."""

    grammar: GrammarSpec
    gate: ConstraintGate = ConstraintGate()
    covers_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of one call. ``index`` counts the output's calls from 0; ``id`` and ``name`` come with the first part of each
    and only there; ``arguments`` is the next fragment of its JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolDelta(NamedTuple):
    """What new text turned out to be."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ReasoningDelta(NamedTuple):
    """What new text turned out to be."""

    reasoning: str = ""
    content: str = ""


class ToolStream(ABC):
    """The calls in one output. Never raises.

    The content and the calls, all deltas joined, depend on the text alone, not on how it was cut into pieces. No text is
    lost: from the character on at which it cannot be part of a call, it is content; text without a call comes out as it
    went in. Left out are the marks that make a call, and whitespace next to them. What was told of a call stays told: one
    that the text breaks off has arguments that break off. Calls come in order, one after the other.
    """

    @abstractmethod
    def feed(self, text: str) -> ToolDelta:
        """What is certain now. Text that may be the beginning of a call is held back."""

    @abstractmethod
    def finish(self) -> ToolDelta:
        """No text follows: what was held back. Called once, last."""


class ToolParser(ABC):
    """The format of tool calls that a model was trained on."""

    special_tokens: tuple[str, ...] = ()
    """Texts that the parser must see, also where they are special tokens, which are otherwise left out of the text."""
    call_end: str | None = None
    """The mark that ends each call: where it is one token, an output that may have one call only stops at it."""

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """``config`` is this parser's own section."""

    @abstractmethod
    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """The state of one output at its start. Calls of functions that are not in ``tools`` are content."""

    @abstractmethod
    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """What makes every output honour ``request``: ``required``, and the schemas of all functions where it is, else
        of those that are ``strict``. None where nothing needs to be enforced.

        ``offers`` are the features of the server's grammar backends. Raises ``GrammarError`` that says what cannot be
        enforced in this format, or with these. An output that the constraint ends is parsed to its last call.
        """

    def new_id(self) -> str:
        """An id for a call, as the model's chat template expects it."""
        return f"call_{secrets.token_hex(12)}"


class ReasoningStream(ABC):
    """The reasoning in one output. Never raises.

    The reasoning and the content, all deltas joined, depend on the text alone, not on how it was cut into pieces. No text is
    lost but the marks around the reasoning, and whitespace next to them.
    """

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """What is certain now. Text that may be the beginning of a mark is held back."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """No text follows: what was held back. Called once, last."""


class ReasoningParser(ABC):
    """How a model marks its reasoning."""

    special_tokens: tuple[str, ...] = ()
    """As those of ``ToolParser``."""

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """``config`` is this parser's own section."""

    @abstractmethod
    def stream(self, prompt: str) -> ReasoningStream:
        """The state of an output that follows ``prompt``, which may have opened the reasoning, or closed it."""

    @abstractmethod
    def gate(self, prompt: str) -> ConstraintGate | None:
        """What an output that follows ``prompt`` has before its answer, so that a constraint on the answer waits for it.
        None where the answer begins at once."""
