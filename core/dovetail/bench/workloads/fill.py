"""What prompts are filled with: random token ids, or text that the embedded model can work with. Both come in parts that
are joined by ``+``."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from dovetail.bench.draws import Draws
from dovetail.bench.records import CallSampling, LoadCall
from dovetail.bench.specs import Content
from dovetail.bench.workloads.vocabulary import PromptVocabulary
from dovetail.bench.workloads.words import WORDS
from dovetail.errors import ConfigError

Part: TypeAlias = tuple[Any, ...]
"""Token ids, or messages."""


class Fill(Protocol):
    """Makes the parts of prompts."""

    def system(self, draws: Draws, length: int) -> Part:
        """What stands before all else."""
        ...

    def user(self, draws: Draws, length: int) -> Part:
        """What is asked."""
        ...

    def call(self, prompt: Part, **fields: Any) -> LoadCall:
        """A call with this prompt; ``fields`` are others of ``Call``."""
        ...


class TokenFill:
    """Random token ids, and outputs that go on to their full length. Lengths are tokens."""

    def __init__(self, vocabulary: PromptVocabulary) -> None:
        self._ids = vocabulary.ids

    def system(self, draws: Draws, length: int) -> Part:
        """Token ids."""
        ids = self._ids
        return tuple(ids[draws.below(len(ids))] for _ in range(length))

    def user(self, draws: Draws, length: int) -> Part:
        """Token ids."""
        return self.system(draws, length)

    def call(self, prompt: Part, **fields: Any) -> LoadCall:
        """A call that does not end before its length."""
        return LoadCall(token_ids=prompt, sampling=CallSampling(ignore_eos=True), **fields)


class TextFill:
    """Messages: notes, and texts to be copied, which the embedded model is good at. Lengths are words."""

    def system(self, draws: Draws, length: int) -> Part:
        """A system message."""
        return ({"role": "system", "content": f"Notes: {self._words(draws, length)}."},)

    def user(self, draws: Draws, length: int) -> Part:
        """A task."""
        return ({"role": "user", "content": f"Copy the following: {self._words(draws, length)}"},)

    def call(self, prompt: Part, **fields: Any) -> LoadCall:
        """A chat that ends where the model ends it."""
        return LoadCall(messages=prompt, **fields)

    def _words(self, draws: Draws, count: int) -> str:
        return " ".join(draws.choice(WORDS) if draws.below(4) else str(draws.below(1000)) for _ in range(count))


def fill_of(content: Content, vocabulary: PromptVocabulary | None) -> Fill:
    """What ``content`` names. Raises ``ConfigError`` where random tokens have no vocabulary to come from."""
    if content == "text":
        return TextFill()
    if vocabulary is None or not vocabulary.ids:
        raise ConfigError(
            "random token ids need a vocabulary, and this server does not tell its own; give a tokenizer, or content: text"
        )
    return TokenFill(vocabulary)
