"""Draw texts to extract from: hand-written sentences, composed sentences, and values laid out with their keys."""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from tools.tiny.corpus import words
from tools.tiny.corpus.base import Split, joined, lower_first, upper_first
from tools.tiny.corpus.predicates import FRONTS, PREDICATES
from tools.tiny.corpus.records import RECORDS, Record, Scalar, mentioned


class Source(NamedTuple):
    """Hold a text, the values that it gives by field, and the record that they belong to, if any."""

    text: str
    values: dict[str, Scalar]
    record: Record | None


_PRONOUNS = ("He", "She", "They", "It")
_OPENERS = ("This is", "Meet", "Here is", "About", "Look at", "I know", "News of", "Let us talk about", "A word on")


def written(record: Record, rng: Random, split: Split) -> Source:
    """Draw one of the hand-written texts of the record."""
    pattern = record.texts.pick(rng, split)
    values = {name: record.fields[name](rng, split) for name in mentioned(pattern)}
    return Source(pattern.format(**values), values, record)


def composed(record: Record, rng: Random, split: Split) -> Source:
    """Compose a subject with some of its fields, in any order, as one sentence or several."""
    predicates = PREDICATES[record.name]
    fields = rng.sample(list(predicates), rng.randint(1, len(predicates)))
    values = {name: record.fields[name](rng, split) for name in (record.subject, *fields)}
    subject = record.shown.format(s=values[record.subject])
    said = {name: values[name] for name in fields}
    return Source(compose(subject, said, predicates, FRONTS[record.name], rng), values, record)


def compose(
    subject: str, said: Mapping[str, object], predicates: dict[str, str], fronts: dict[str, str], rng: Random
) -> str:
    """Express each field of `said` as a predicate of the subject or as words before or after the sentence."""
    aside = [name for name in said if rng.random() < 0.25][: max(len(said) - 1, 0)]
    main = [rng.choice(predicates[name].split("|")).format(v=said[name]) for name in said if name not in aside]
    extra = [rng.choice(fronts[name].split("|")).format(v=said[name]) for name in aside]
    text = _sentences(subject, main, rng)
    for words_aside in extra:
        if rng.random() < 0.5:
            text = f"{words_aside}, {text if text.startswith(subject) else lower_first(text)}"
        else:
            text = f"{text[:-1]}, {lower_first(words_aside)}."
    return text


def _sentences(subject: str, said: list[str], rng: Random) -> str:
    form = rng.random()
    if form < 0.35:
        return f"{subject} {joined(said)}."
    if form < 0.5:
        return f"{subject}, who {said[0]}, {joined(said[1:])}." if len(said) > 1 else f"{subject} {said[0]}."
    if form < 0.6:
        return f"{rng.choice(_OPENERS)} {subject}: {joined(said)}."
    again = rng.choice((subject, rng.choice(_PRONOUNS), rng.choice(_PRONOUNS)))
    return " ".join(f"{subject if i == 0 else again} {part}." for i, part in enumerate(said))


def _invented(rng: Random, split: Split) -> dict[str, Scalar]:
    """Draw keys and values that have nothing to do with each other."""
    keys = words.distinct([words.noun(rng, split) for _ in range(rng.randint(2, 5))])
    draws: tuple[Callable[[], Scalar], ...] = (
        lambda: words.any_word(rng, split),
        lambda: words.made_up_name(rng, split),
        lambda: words.person(rng, split),
        lambda: words.city(rng, split),
        lambda: rng.randint(0, 9999),
        lambda: rng.randint(0, 99),
        lambda: words.code(rng),
    )
    return {key: rng.choice(draws)() for key in keys}


def _laid_out(values: dict[str, Scalar], rng: Random) -> str:
    shown = [(upper_first(key) if rng.random() < 0.3 else key, value) for key, value in values.items()]
    form = rng.randrange(9)
    if form == 0:
        return ", ".join(key for key, _ in shown) + "\n" + ", ".join(str(value) for _, value in shown)
    if form == 1:
        return json.dumps(values, ensure_ascii=False)
    if form == 2:
        return "\n".join(f"<{key}>{value}</{key}>" for key, value in shown)
    if form == 3:
        return " ".join(f"The {key} is {value}." for key, value in shown)
    if form == 4:
        return upper_first(joined([f"the {key} is {value}" for key, value in shown])) + "."
    sign, end = rng.choice((": ", " = ", "=", " - ", " is ", ": ")), rng.choice(("\n", "\n", ", ", "; ", ". ", " | "))
    return end.join(f"{key}{sign}{value}" for key, value in shown)


def laid_out(record: Record | None, rng: Random, split: Split) -> Source:
    """Lay out keys and values as in a form, a table or a file; without a record they are invented."""
    if record is None:
        values = _invented(rng, split)
    else:
        fields = rng.sample(list(record.fields), rng.randint(2, len(record.fields)))
        values = {name: record.fields[name](rng, split) for name in fields}
    return Source(_laid_out(values, rng), values, record)


def draw(rng: Random, split: Split) -> Source:
    """Draw a source of any kind; the other splits have only hand-written texts, which training never saw."""
    record = rng.choice((*RECORDS, RECORDS[0], RECORDS[0]))
    form = rng.random()
    if split != "train" or form < 0.45:
        return written(record, rng, split)
    if form < 0.8:
        return composed(record, rng, split)
    return laid_out(record if form < 0.9 else None, rng, split)
