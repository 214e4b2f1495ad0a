"""Parse tool calls and reasoning out of the text of an output while it grows.

A parser belongs to one model and serves all of its requests; a stream is the state of one output. The text of an output
runs through the reasoning stream first. What the reasoning stream returns as content then runs through the tool stream.

The chat layer (``dovetail.chat``) builds the parsers, opens one stream per output, and calls ``feed`` with each piece
of text and ``finish`` once at the end. It also calls ``constraint`` and ``gate`` before a request is sent to the
engine.
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
    """Describe the model that a parser is built for. ``chat_template`` is the source of the model's chat template,
    empty if the model has none. ``special_tokens`` are the texts of its special tokens. A grammar cannot produce
    special tokens. A ``ConstraintGate`` can: it maps characters of the grammar to special tokens (``marks``).
    """

    chat_template: str = ""
    special_tokens: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Tool:
    """Describe a function that the model may call. ``parameters`` is the JSON schema of its arguments, an object.
    ``strict`` requires that every call of this function satisfies the schema."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Describe which calls a request allows: calls of ``tools`` only, at least one if ``required``, at most one unless
    ``parallel``."""

    tools: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ConstraintGate:
    """Describe the part of an output that precedes its constraint. The model's tokenizer must be able to write each of
    these texts with whole tokens.

    The parts follow each other in this order:

    - ``lead`` is forced at the start of the output. If ``optional``, the output may begin differently; it then has no
      free part.
    - If ``until`` is set (the text of a single token), a free part follows and ends with that token. The output may end
      within the free part only if ``may_end``.
    - ``prefix`` is forced.
    - The grammar begins. If ``prefix_in_grammar``, the grammar covers the prefix as well.

    ``marks`` lists special tokens that the grammar produces: pairs of the special token's text and the character that
    represents it in the grammar. The characters are U+000E to U+001F. No JSON text contains them, and the output never
    contains a character that represents a mark.
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
    """Hold a grammar that enforces a ``ToolRequest``, and the gate that precedes it. If ``covers_reasoning``, ``gate``
    replaces the gate of the reasoning parser; otherwise ``gate`` begins where the reasoning ends."""

    grammar: GrammarSpec
    gate: ConstraintGate = ConstraintGate()
    covers_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Describe a new part of one call. ``index`` counts the calls of the output from 0. ``id`` and ``name`` are set in
    the first part of each call and only there. ``arguments`` is the next fragment of the JSON text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolDelta(NamedTuple):
    """Hold the content and the parts of calls that a ``ToolStream`` has found in new text."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ReasoningDelta(NamedTuple):
    """Hold the reasoning and the content that a ``ReasoningStream`` has found in new text."""

    reasoning: str = ""
    content: str = ""


class ToolStream(ABC):
    """Separate the calls in one output from its content. Never raises.

    The content and the calls, all deltas joined, depend on the text only and not on how it was cut into pieces. No text
    is lost: from the character at which a text can no longer be part of a call, it is content. Text without a call is
    returned unchanged. The marks that delimit a call, and whitespace next to them, are left out. A part of a call that
    was returned is never revoked: if the text breaks off within a call, its arguments break off as well. Calls are
    returned in order, one after the other.
    """

    @abstractmethod
    def feed(self, text: str) -> ToolDelta:
        """Return what is certain after ``text``, the next piece of the output. Hold back text that may be the beginning
        of a call."""

    @abstractmethod
    def finish(self) -> ToolDelta:
        """Return the text that was held back. Called once, after the last ``feed``."""


class ToolParser(ABC):
    """Parse the format of tool calls that a model was trained on."""

    special_tokens: tuple[str, ...] = ()
    """List the special tokens that the parser must see. The detokenizer keeps them in the text; it leaves out all
    others."""
    call_end: str | None = None
    """Name the mark that ends each call, or None. If the mark is a single token, an output that may have only one call
    stops at it."""

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """Store what the parser needs of ``config``, which is this parser's own config section, and of ``context``."""

    @abstractmethod
    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """Return the state of one output at its start. Calls of functions that are not in ``tools`` are content."""

    @abstractmethod
    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """Return a constraint under which every output honours ``request``, or None if nothing needs to be enforced.

        The constraint enforces ``request.required`` and the schemas of the functions: of all functions if ``required``,
        of those that are ``strict`` otherwise. An output that ends when the constraint ends parses completely, up to
        its last call.

        ``offers`` are the features of the server's grammar backends. Raises ``GrammarError`` that names what cannot be
        enforced in this format, or with these features.
        """

    def new_id(self) -> str:
        """Return a new id for a call, in the form that the model's chat template expects."""
        return f"call_{secrets.token_hex(12)}"


class ReasoningStream(ABC):
    """Separate the reasoning in one output from its content. Never raises.

    The reasoning and the content, all deltas joined, depend on the text only and not on how it was cut into pieces. No
    text is lost except the marks around the reasoning and whitespace next to them.
    """

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Return what is certain after ``text``, the next piece of the output. Hold back text that may be the beginning
        of a mark."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """Return the text that was held back. Called once, after the last ``feed``."""


class ReasoningParser(ABC):
    """Parse the marks that a model puts around its reasoning."""

    special_tokens: tuple[str, ...] = ()
    """List the special tokens that the parser must see; see ``ToolParser.special_tokens``."""

    opening: str = ""
    """The text with which an output may begin reasoning again after a prompt that has opened it, so that
    ``thinking_budget`` holds for all of it. Empty: it cannot."""

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """Store what the parser needs of ``config``, which is this parser's own config section, and of ``context``."""

    @abstractmethod
    def stream(self, prompt: str) -> ReasoningStream:
        """Return the state of an output that follows ``prompt``. The prompt may have opened the reasoning already, or
        closed it."""

    @abstractmethod
    def gate(self, prompt: str) -> ConstraintGate | None:
        """Return the gate for an output that follows ``prompt``, so that a constraint on the answer begins after the
        reasoning. Return None if the answer begins at once."""
