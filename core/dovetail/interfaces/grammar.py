"""Define grammar backends, which compile a constraint once and then mask the logits of each step."""

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
    """Describe the vocabulary that bitmasks are made for.

    ``token_bytes[i]`` are the bytes that token i adds to the text, ``None`` for special and unused ids. ``vocab_size``
    is the width of the model's logits, which may exceed ``len(token_bytes)``; ids at and beyond ``len(token_bytes)``
    are never allowed. ``tokenizer_json`` is the tokenizer in Hugging Face's file format.
    """

    vocab_size: int
    token_bytes: Sequence[bytes | None]
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str


class Matcher(ABC):
    """Hold the state of one request in its grammar. Used from one thread at a time. If a method raises, the request
    ends with an error and the other requests of the batch continue."""

    @abstractmethod
    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """Write the allowed next tokens into ``bitmask[row]``. Mutates that row only.

        ``bitmask`` is int32 ``[rows, ceil(V / 32)]``; bit i % 32 of word i // 32 stands for token i. Writes every word
        of the row; bits at and beyond V are 0. The end-of-sequence tokens are allowed exactly where the text may end.
        The engine calls this before it samples, for the next token of each request and for every draft token.
        """

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by one token and return True. If the grammar forbids the token, return False and leave the state
        unchanged.

        The scheduler calls this for every sampled token. The engine calls it while it fills the bitmasks of draft
        tokens, and then calls ``rollback``.
        """

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens. Needs ``grammar.rollback``."""

    @property
    @abstractmethod
    def is_terminated(self) -> bool:
        """Return True if an end-of-sequence token was accepted, or if only an end-of-sequence token may follow."""

    @property
    def inner(self) -> Matcher | None:
        """Return the matcher that alone decides about the next token, for ``GrammarBackend.fill_bitmasks``. That is the
        matcher itself unless it wraps the matcher of a backend. A wrapper returns None while it decides itself."""
        return self

    def jump_forward(self) -> str:
        """Return the text that must come next; it is empty if there is a choice. Called after a token was accepted.
        Needs ``grammar.jump_forward``."""
        return ""


class CompiledGrammar(ABC):
    """Hold a constraint that was compiled for one vocabulary. Requests and threads share it, so it must not change."""

    @abstractmethod
    def matcher(self) -> Matcher:
        """Return a new matcher at the start of the grammar. Called once for each request."""

    @property
    def num_bytes(self) -> int:
        """Return the memory that the grammar occupies, in bytes. The compile cache uses it to keep to its limit."""
        return 0


class GrammarBackend(ABC):
    """Compile constraints into grammars. ``compile``, ``check`` and ``load`` are called from worker threads, several at
    a time."""

    def __init__(self, config: BaseModel, context: GrammarContext) -> None:
        """Store what the backend needs of ``context`` and of ``config``, this backend's own config section."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``.

        A constraint is honoured completely or refused: the compiled grammar must not accept a text that violates it.
        Raises ``GrammarError``, whose message describes what is wrong with the constraint. If this backend does not
        support the constraint but another backend might, the error names the unsupported part as its ``keyword``.
        """

    def check(self, spec: GrammarSpec) -> None:
        """Raise the ``GrammarError`` of a constraint that ``compile`` is known to refuse. Called before ``compile``.
        Takes milliseconds and does not compile. If the error has a ``keyword``, ``auto`` continues with the next
        backend.
        """
        return None

    def dump(self, grammar: CompiledGrammar) -> bytes:
        """Return ``grammar``, which this backend has compiled, as bytes for ``load`` in another process. Called in the
        process that compiles grammars. Needs ``grammar.portable``."""
        raise NotImplementedError

    def load(self, data: bytes) -> CompiledGrammar:
        """Return the grammar that ``dump`` has written in another process, where a backend with the same config and
        context has compiled it. Needs ``grammar.portable``."""
        raise NotImplementedError

    def fill_bitmasks(self, matchers: Sequence[Matcher], bitmask: IntArray, rows: Sequence[int]) -> None:
        """Fill ``bitmask[rows[i]]`` from ``matchers[i]``, for every i. Backends with a batched call override this
        method."""
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill_bitmask(bitmask, row)
