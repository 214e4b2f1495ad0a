"""Define what all tasks of the corpus share: the split, phrase lists, word pools and the turn they produce."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random
from typing import Literal
from zlib import crc32

Split = Literal["train", "held", "strict"]
"""`train` feeds the training data; `held` uses wordings, combinations of values and invented words that training never
saw; `strict` also uses real words that training never saw as values."""

Check = Literal["has", "same", "json"]
"""How a reply is judged: contains the answer, equals it, or parses to the same JSON value."""

HELD_SHARE = 12
"""One value, or combination of values, in this many is kept from training."""


def is_held(value: object) -> bool:
    """Return true if a value is kept from training; the result is the same on every machine and in every run."""
    return crc32(repr(value).encode()) % HELD_SHARE == 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with the reply the model should give.

    `answer` is what `check` looks for in the reply; `thought` is the reasoning used when thinking is asked for;
    `follow` holds (question, reply) pairs that make sense only right after this turn.
    """

    user: str
    reply: str
    answer: str
    check: Check = "has"
    thought: str = ""
    follow: tuple[tuple[str, str], ...] = ()


Task = Callable[[Random, Split], Turn]
"""Type of a task, which draws one turn from its split."""


@dataclass(frozen=True, slots=True)
class Phrases:
    """Wordings of one thing, some of which training never sees; each entry holds the variants of one wording."""

    train: tuple[tuple[str, ...], ...]
    held: tuple[tuple[str, ...], ...]

    def pick(self, rng: Random, split: Split) -> str:
        """Draw one wording of the split."""
        return rng.choice(rng.choice(self.train if split == "train" else self.held))


def phrases(train: str, held: str) -> Phrases:
    """Build Phrases from two texts, one wording a line.

    `~` stands for a line break inside a wording and `[a|b]` for a choice. A training variant that equals a held one
    is dropped.
    """
    unseen = tuple(variants(line) for line in _lines(held))
    taken = {variant for variants in unseen for variant in variants}
    seen = (tuple(v for v in variants(line) if v not in taken) for line in _lines(train))
    return Phrases(tuple(variants for variants in seen if variants), unseen)


def _lines(text: str) -> list[str]:
    return [line.strip().replace("~", "\n") for line in text.strip().splitlines()]


@cache
def variants(line: str) -> tuple[str, ...]:
    """Return every way to choose among `[a|b]` groups."""
    parts = re.split(r"\[([^\]]*\|[^\]]*)\]", line)
    choices = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    return tuple(re.sub(r" +([?.:,!])|( ) +", r"\1\2", "".join(choice)).strip() for choice in product(*choices))


class Pool:
    """Hold a set of values of which one in HELD_SHARE is kept for the strict split."""

    def __init__(self, values: Sequence[str]) -> None:
        self.train = tuple(value for value in values if not is_held(value))
        self.held = tuple(value for value in values if is_held(value)) or self.train

    def pick(self, rng: Random, split: Split) -> str:
        """Draw a value; the strict split draws its own values half of the time."""
        own = split == "strict" and rng.random() < 0.5
        return rng.choice(self.held if own else self.train)


def upper_first(text: str) -> str:
    """Capitalise the first letter and leave the rest unchanged."""
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    """Put the first letter in lower case and leave the rest unchanged."""
    return text[:1].lower() + text[1:]


def with_article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def joined(words: Sequence[str]) -> str:
    """Join words as English does: `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
