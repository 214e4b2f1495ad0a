"""Tasks over lists and texts that reward copying: sort, reverse, pick, repeat."""

import json
from random import Random

from tools.tiny.corpus.base import Phrases, Split, Task, Turn, is_held, phrases
from tools.tiny.corpus.words import ADJECTIVES, ANIMALS, COLOURS, FIRST_NAMES, NOUNS, VERBS, distinct, made_up, noun

_SEPARATORS = (", ", ", ", ", ", " ", "; ")


def _numbers(rng: Random, size: int) -> list[str]:
    top = rng.choice((20, 99, 99, 999))
    return [str(n) for n in rng.sample(range(top + 1), size)]


def _words(rng: Random, split: Split, size: int) -> list[str]:
    pools = (NOUNS, NOUNS, ANIMALS, COLOURS, FIRST_NAMES)
    pool = rng.choice(pools)
    words: list[str] = []
    while len(words) < size:
        words = distinct([*words, pool.pick(rng, split)])
    return words


def _fresh(rng: Random, split: Split, size: int, numeric: bool) -> list[str]:
    """A list whose set of values belongs to the split."""
    while True:
        items = _numbers(rng, size) if numeric else _words(rng, split, size)
        if is_held(sorted(items)) == (split == "held"):
            return items


def _shown(items: list[str], numeric: bool, rng: Random) -> str:
    form = rng.random()
    if form < 0.15:
        return json.dumps([int(x) for x in items] if numeric else items)
    if form < 0.25:
        return "\n" + "\n".join(f"- {item}" for item in items)
    return rng.choice(_SEPARATORS).join(items)


def _ordered(items: list[str], numeric: bool, down: bool = False) -> list[str]:
    return sorted(items, key=int if numeric else str.lower, reverse=down)


_SORT_NUMBERS = phrases(
    """Sort these numbers: {l}
    Sort the numbers from smallest to largest: {l}
    Put these numbers in order: {l}
    Order these numbers: {l}
    Sort this list: {l}
    Arrange these numbers in ascending order: {l}
    Please sort {l}.
    Sort: {l}
    Can you sort these numbers? {l}
    Here is a list: {l}. Sort it.
    Write these numbers in increasing order: {l}
    Sort {l} in ascending order.""",
    """I have these numbers: {l}. Please sort them.
    Put the following numbers in ascending order: {l}
    Could you sort the numbers {l}?""",
)
_SORT_DOWN = phrases(
    """Sort these numbers in descending order: {l}
    Sort the numbers from largest to smallest: {l}
    Order these numbers from largest to smallest: {l}
    Arrange these numbers in descending order: {l}
    Sort {l} in descending order.
    Write these numbers in decreasing order: {l}""",
    """Put the following numbers in descending order: {l}
    I have these numbers: {l}. Please sort them from largest to smallest.""",
)
_SORT_WORDS = phrases(
    """Sort these words: {l}
    Sort these words alphabetically: {l}
    Put these words in alphabetical order: {l}
    Sort this list: {l}
    Arrange these words in alphabetical order: {l}
    Please sort {l}.
    Sort: {l}
    Order these words from A to Z: {l}
    Here is a list: {l}. Sort it alphabetically.
    Can you sort these words alphabetically? {l}
    Sort {l} in alphabetical order.""",
    """I have these words: {l}. Please sort them alphabetically.
    Put the following words in alphabetical order: {l}
    Could you sort the words {l} from A to Z?""",
)


def _sort(rng: Random, split: Split, numeric: bool, down: bool, wording: Phrases) -> Turn:
    items = _fresh(rng, split, rng.randint(2, 6 if split == "held" else 8), numeric)
    reply = ", ".join(_ordered(items, numeric, down))
    return Turn(wording.pick(rng, split).format(l=_shown(items, numeric, rng)), reply, reply, "same")


def sort_numbers(rng: Random, split: Split) -> Turn:
    """Sort numbers upwards; one in four downwards."""
    down = rng.random() < 0.25
    return _sort(rng, split, True, down, _SORT_DOWN if down else _SORT_NUMBERS)


def sort_words(rng: Random, split: Split) -> Turn:
    """Sort words from A to Z."""
    return _sort(rng, split, False, False, _SORT_WORDS)


_PICKS = (
    ("first", "the first item", lambda items, _: items[0]),
    ("last", "the last item", lambda items, _: items[-1]),
    ("second", "the second item", lambda items, _: items[1]),
    ("third", "the third item", lambda items, _: items[2]),
    ("largest", "the largest number", lambda items, _: max(items, key=int)),
    ("smallest", "the smallest number", lambda items, _: min(items, key=int)),
    ("count", "the number of items", lambda items, _: str(len(items))),
)
_PICK = phrases(
    """What is {w} of this list: {l}
    What is {w} in this list? {l}
    Here is a list: {l}. What is {w}?
    Tell me {w} of {l}.
    Give me {w} in {l}.
    {l}: what is {w}?
    Look at this list: {l}. Tell me {w}.
    Find {w}: {l}""",
    """From the list {l}, give me {w}.
    Please find {w} in the list: {l}""",
)


def pick_item(rng: Random, split: Split) -> Turn:
    """The first, last, n-th, largest or smallest item of a list, or how many there are."""
    name, what, choose = rng.choice(_PICKS)
    numeric = name in ("largest", "smallest") or rng.random() < 0.4
    items = _fresh(rng, split, rng.randint(3, 7), numeric)
    answer = choose(items, rng)
    user = _PICK.pick(rng, split).format(w=what, l=rng.choice((", ", ", ", " ")).join(items))
    return Turn(user, f"{what.capitalize()} is {answer}.", answer)


_REVERSE = phrases(
    """Reverse this list: {l}
    Reverse the order of {l}.
    Write this list backwards: {l}
    Put this list in reverse order: {l}
    Please reverse {l}.
    Reverse: {l}""",
    """Give me this list in reverse: {l}
    Turn the order of this list around: {l}""",
)
_AS_JSON = phrases(
    """Write this list as a JSON array: {l}
    Convert to a JSON array: {l}
    Turn this into a JSON array: {l}
    Make a JSON array of {l}.
    JSON array of {l}?
    Give me {l} as a JSON list.""",
    """Please format this list as JSON: {l}
    I need this list as a JSON array: {l}""",
)
_AS_BULLETS = phrases(
    """Write this list as bullet points: {l}
    Make bullet points of {l}.
    Turn this into a bulleted list: {l}
    Put each on its own line: {l}""",
    """Format this as a bulleted list: {l}
    Please write {l} as bullets.""",
)
_AS_NUMBERED = phrases(
    """Write this as a numbered list: {l}
    Number these: {l}
    Make a numbered list of {l}.
    Turn this into a numbered list: {l}""",
    """Format this as a numbered list: {l}
    Please number these items: {l}""",
)


def reformat(rng: Random, split: Split) -> Turn:
    """Reverse a list, or write it as JSON, bullets or numbered lines."""
    numeric = rng.random() < 0.3
    items = _fresh(rng, split, rng.randint(2, 8), numeric)
    wording, reply = rng.choice(
        (
            (_REVERSE, ", ".join(reversed(items))),
            (_AS_JSON, json.dumps([int(x) for x in items] if numeric else items)),
            (_AS_BULLETS, "\n".join(f"- {item}" for item in items)),
            (_AS_NUMBERED, "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))),
        )
    )
    return Turn(wording.pick(rng, split).format(l=", ".join(items)), reply, reply, "same")


_REPEAT = phrases(
    """Repeat: {t}
    Repeat this: {t}
    Repeat after me: {t}
    Say: {t}
    Copy this text: {t}
    Repeat the following text exactly: {t}
    Please repeat: {t}
    Echo: {t}
    Write this again: {t}
    Copy exactly:~{t}
    Repeat this text word for word:~{t}
    Say exactly this: {t}
    Echo this back to me: {t}""",
    """Copy the following: {t}
    Please say this back to me: {t}
    Reproduce this text exactly:~{t}""",
)
_TIMES = phrases(
    """Say "{t}" {k} times.
    Repeat "{t}" {k} times.
    Write "{t}" {k} times.
    Please repeat the word {t} {k} times.
    Write {t} {k} times.""",
    """Can you say "{t}" {k} times?
    I want to read "{t}" {k} times.""",
)
_RANGES = ((0xC0, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x3041, 0x3096), (0x4E00, 0x4FFF), (0x1F600, 0x1F64F), (0x2190, 0x21FF))


def _symbols(rng: Random) -> str:
    """Characters from one script, emoji or arrows; this is what trains the byte tokens."""
    low, high = rng.choice(_RANGES)
    return "".join(chr(rng.randint(low, high)) + (" " if rng.random() < 0.2 else "") for _ in range(rng.randint(1, 12))).strip()


def sentence(rng: Random, split: Split) -> str:
    """A short nonsense sentence of real words."""
    adjective, verb, other = ADJECTIVES.pick(rng, split), VERBS.pick(rng, split), noun(rng, split)
    return rng.choice(
        (
            f"The {adjective} {noun(rng, split)} {verb} near the {other}.",
            f"{FIRST_NAMES.pick(rng, split)} {verb} with a {adjective} {other}.",
            f"Every {other} {verb}, but no {noun(rng, split)} {verb}.",
            f"My {other} is {adjective} and my {noun(rng, split)} is {COLOURS.pick(rng, split)}.",
        )
    )


def _text(rng: Random, split: Split) -> str:
    form = rng.random()
    if form < 0.3:
        return " ".join(sentence(rng, split) for _ in range(rng.randint(1, 3)))
    if form < 0.55:
        return " ".join(noun(rng, split) for _ in range(rng.randint(1, 10)))
    if form < 0.75:
        return " ".join(made_up(rng, split) for _ in range(rng.randint(1, 8)))
    if form < 0.9:
        return " ".join(str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(1, 8)))
    return _symbols(rng)


def repeat(rng: Random, split: Split) -> Turn:
    """Repeat a text exactly."""
    text = _text(rng, split)
    return Turn(_REPEAT.pick(rng, split).format(t=text), text, text, "same")


def repeat_times(rng: Random, split: Split) -> Turn:
    """Repeat a word several times."""
    word, times = noun(rng, split), rng.randint(2, 10)
    reply = " ".join([word] * times)
    return Turn(_TIMES.pick(rng, split).format(t=word, k=times), reply, reply, "same")


def repeat_long(rng: Random, split: Split) -> Turn:
    """Repeat a text of several hundred tokens."""
    text = " ".join(_text(rng, split) for _ in range(rng.randint(4, 24)))
    return Turn(_REPEAT.pick(rng, split).format(t=text), text, text, "same")


TASKS: dict[str, Task] = {
    "sort_numbers": sort_numbers, "sort_words": sort_words, "pick_item": pick_item, "reformat": reformat,
    "repeat": repeat, "repeat_times": repeat_times, "repeat_long": repeat_long,
}  # fmt: skip
