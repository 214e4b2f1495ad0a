"""The token ids that random prompts are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptVocabulary:
    """Ids that stand for text, ascending: no special tokens, and none that the tokenizer has no text for."""

    ids: tuple[int, ...]

    @classmethod
    def of_size(cls, size: int, special: Iterable[int] = ()) -> PromptVocabulary:
        """All ids below ``size`` but ``special``."""
        excluded = frozenset(special)
        return cls(tuple(i for i in range(size) if i not in excluded))

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PromptVocabulary:
        """Of the tokenizer's tokens with a text."""
        return cls(tuple(i for i, data in enumerate(tokenizer.token_bytes) if data))
