"""Choose the token ids from which random prompts are made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptVocabulary:
    """Hold the ids that stand for text, in ascending order, without special tokens and tokens for which the tokenizer
    has no text."""

    ids: tuple[int, ...]

    @classmethod
    def of_size(cls, size: int, special: Iterable[int] = ()) -> PromptVocabulary:
        """Return all ids below ``size`` except ``special``."""
        excluded = frozenset(special)
        return cls(tuple(i for i in range(size) if i not in excluded))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PromptVocabulary:
        """Return the ids of the tokenizer's tokens that have a text."""
        return cls(tuple(i for i, data in enumerate(tokenizer.token_bytes) if data))
