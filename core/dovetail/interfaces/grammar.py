"""Grammar backends: compile a constraint once, then mask the logits of each step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dovetail.sampling_params import GrammarSpec
    from dovetail.types import IntArray


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """The vocabulary that masks are made for.

    ``token_bytes[i]`` are the bytes token i adds to the text, ``None`` for special and unused ids. ``vocab_size`` is the
    width of the model's logits, which may exceed ``len(token_bytes)``; ids beyond it are never allowed.
    ``tokenizer_json`` is the tokenizer in Hugging Face's file format.
    """

    vocab_size: int
    token_bytes: Sequence[bytes | None]
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str


class Matcher(ABC):
    """The state of one request inside its grammar. Used from one thread at a time."""

    @abstractmethod
    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """Write the allowed next tokens into ``bitmask[row]``: int32 ``[rows, ceil(V / 32)]``, bit i % 32 of word
        i // 32 is token i. Every word of the row is written; bits at and beyond V are 0. The end-of-sequence tokens are
        allowed exactly where the text may end."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token. False, with the state unchanged, if the grammar forbids it."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens. Needs ``grammar.rollback``."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """True once an end-of-sequence token was accepted, or nothing but one may follow."""

    @property
    def inner(self) -> Matcher | None:
        """Who alone decides about the next token, for ``GrammarBackend.fill_bitmasks``: itself, unless it wraps the matcher of a
        backend; None where the wrapper decides."""
        return self

    def jump_forward(self) -> str:
        """The text that must come next, empty if there is a choice. Needs ``grammar.jump_forward``."""
        return ""


class CompiledGrammar(ABC):
    """A constraint, compiled for one vocabulary; shared between requests and threads."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """A fresh state at the start of the grammar."""

    @property
    def num_bytes(self) -> int:
        """Memory it occupies, for the compile cache's bound."""
        return 0


class GrammarBackend(ABC):
    """Compiles constraints. ``compile`` is called from worker threads."""

    def __init__(self, config: BaseModel, context: GrammarContext) -> None:
        """``config`` is this backend's own section."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile. Raises ``GrammarError`` that says what in the constraint is wrong, or, with its ``keyword``, what this
        backend does not support. A constraint is honoured whole or refused: no text that violates it may be let through."""

    def check(self, spec: GrammarSpec) -> None:
        """Raise the ``GrammarError`` of a constraint that ``compile`` is known to refuse, in milliseconds and without
        compiling. ``auto`` passes over a backend that raises one with a ``keyword``. Called from worker threads."""
        return None

    def dump(self, grammar: CompiledGrammar) -> bytes:
        """A grammar of this backend's as bytes, for ``load`` in another process. Needs ``grammar.portable``."""
        raise NotImplementedError

    def load(self, data: bytes) -> CompiledGrammar:
        """What ``dump`` of a backend with the same config and context wrote. Called from worker threads."""
        raise NotImplementedError

    def fill_bitmasks(self, matchers: Sequence[Matcher], bitmask: IntArray, rows: Sequence[int]) -> None:
        """Fill ``bitmask[rows[i]]`` from ``matchers[i]``; backends with a batched call override this."""
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill_bitmask(bitmask, row)
