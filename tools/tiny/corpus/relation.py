"""Define a relation, and tables of pairs that several relations are built from."""

from dataclasses import dataclass

from tools.tiny.corpus import things
from tools.tiny.corpus.base import Phrases
from tools.tiny.corpus.world import COUNTRIES


@dataclass(frozen=True, slots=True)
class Relation:
    """`pairs` maps a subject {s} to its value {v}; {S} and {V} are the same with a capital first letter.

    `nouns` name the value ("the capital of {s}") and go into general question forms; `asks` are questions of this
    relation alone; `say` is the one sentence the model answers with; `also` says the same in plain text.
    """

    name: str
    pairs: dict[str, str]
    nouns: tuple[str, ...]
    asks: Phrases
    say: str
    also: tuple[str, ...] = ()
    weight: float = 1.0


def column(field: str) -> dict[str, str]:
    return {country.name: getattr(country, field) for country in COUNTRIES if getattr(country, field)}


def following(items: tuple[str, ...] | str, step: int, ring: bool = True) -> dict[str, str]:
    size = len(items)
    return {item: items[(i + step) % size] for i, item in enumerate(items) if ring or 0 <= i + step < size}


def unit_table() -> dict[str, str]:
    return {" in ".join(subject.split("|")): value for subject, value in things.UNITS.items()}
