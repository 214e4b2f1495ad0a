"""Fill prompts with random token ids, or with text that the embedded model can process.

Both are made in parts that can be joined with ``+``.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from dovetail.bench.draws import Draws
from dovetail.bench.records import CallSampling, LoadCall
from dovetail.bench.specs import Content
from dovetail.bench.workloads.vocabulary import PromptVocabulary
from dovetail.bench.workloads.words import WORDS
from dovetail.errors import ConfigError

Part: TypeAlias = tuple[Any, ...]
"""A part of a prompt: token ids, or messages."""


class Fill(Protocol):
    """Make the parts of prompts."""

    def system(self, draws: Draws, length: int) -> Part:
        """Return the part at the beginning of a prompt."""
        ...

    def user(self, draws: Draws, length: int) -> Part:
        """Return the part that contains the question."""
        ...

    def call(self, prompt: Part, **fields: Any) -> LoadCall:
        """Return a call with this prompt; ``fields`` are other fields of ``LoadCall``."""
        ...


class TokenFill:
    """Make random token ids, and outputs that continue to their full length. Lengths are in tokens."""

    def __init__(self, vocabulary: PromptVocabulary) -> None:
        self._ids = vocabulary.ids

    def system(self, draws: Draws, length: int) -> Part:
        """Return token ids."""
        ids = self._ids
        return tuple(ids[draws.below(len(ids))] for _ in range(length))

    def user(self, draws: Draws, length: int) -> Part:
        """Return token ids."""
        return self.system(draws, length)

    def call(self, prompt: Part, **fields: Any) -> LoadCall:
        """Return a call whose output does not end before its length."""
        return LoadCall(token_ids=prompt, sampling=CallSampling(ignore_eos=True), **fields)


class TextFill:
    """Make messages: notes, and texts to be copied, a task that the embedded model does well. Lengths are in words."""

    def system(self, draws: Draws, length: int) -> Part:
        """Return a system message."""
        return ({"role": "system", "content": f"Notes: {self._words(draws, length)}."},)

    def user(self, draws: Draws, length: int) -> Part:
        """Return a task."""
        return ({"role": "user", "content": f"Copy the following: {self._words(draws, length)}"},)

    def call(self, prompt: Part, **fields: Any) -> LoadCall:
        """Return a chat whose output the model ends."""
        return LoadCall(messages=prompt, **fields)

    def _words(self, draws: Draws, count: int) -> str:
        return " ".join(draws.choice(WORDS) if draws.below(4) else str(draws.below(1000)) for _ in range(count))


def fill_of(content: Content, vocabulary: PromptVocabulary | None) -> Fill:
    """Return the source of ``content``. Raises ``ConfigError`` if random tokens are required and there is no
    vocabulary."""
    if content == "text":
        return TextFill()
    if vocabulary is None or not vocabulary.ids:
        raise ConfigError(
            "random token ids need a vocabulary, and this server does not report one; give a tokenizer or content: text"
        )
    return TokenFill(vocabulary)
