"""Draw tasks over lists and texts that reward copying: sort, reverse, pick, repeat."""

import json
from random import Random

from tools.tiny.corpus.base import Phrases, Split, Task, Turn, is_held, phrases
from tools.tiny.corpus.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FIRST_NAMES,
    NOUNS,
    VERBS,
    any_word,
    distinct,
    made_up,
    noun,
)

_SEPARATORS = (", ", ", ", ", ", " ", "; ")


def _numbers(rng: Random, size: int) -> list[str]:
    top = rng.choice((20, 99, 99, 999))
    return [str(n) for n in rng.sample(range(top + 1), size)]


def _words(rng: Random, split: Split, size: int) -> list[str]:
    pool = rng.choice((None, None, NOUNS, ANIMALS, COLOURS, FIRST_NAMES))
    words: list[str] = []
    while len(words) < size:
        words = distinct([*words, pool.pick(rng, split) if pool else any_word(rng, split)])
    return words


def _fresh(rng: Random, split: Split, size: int, numeric: bool) -> list[str]:
    """Draw a list whose set of values belongs to the split."""
    while True:
        items = _numbers(rng, size) if numeric else _words(rng, split, size)
        if is_held(sorted(items)) == (split != "train"):
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
    """[Sort|Order|Arrange] [these numbers|the numbers|this list|these|the following numbers|my numbers|them]: {l}
    [Sort|Order|Arrange|Put] [these numbers|the numbers|the values] [from smallest to largest|in ascending order|from low to high|upwards]: {l}
    [Put|Bring] [these|the] numbers [in order|into order|in the right order]: {l}
    Sort {l} [in ascending order|from small to large|upwards].
    [Please|Now|Just] sort {l}.
    Sort: {l}
    [Can|Could|Would] you [sort|order] [these numbers|this list|them]? {l}
    [Here is a list|Here are some numbers|My list|I wrote these down]: {l}. [Sort it.|Sort the list.|Put it in order.]
    [Write|Give me|Return|Print] [these|the] numbers in [increasing|rising|ascending] order: {l}
    {l}~[Sort these numbers.|Sort this list.|Put these in order.]
    [I need|I want|Give me] [a sorted version of this list|these numbers sorted|this sorted]: {l}
    [What is|Show me] the sorted [form|version] of {l}?""",
    """I have these numbers: {l}. Please sort them.
    Put the following numbers in ascending order: {l}
    Could you sort the numbers {l}?""",
)
_SORT_DOWN = phrases(
    """[Sort|Order|Arrange|Put] [these numbers|the numbers|this list|these] [in descending order|from largest to smallest|from high to low|downwards]: {l}
    Sort {l} [in descending order|from large to small|downwards|from the largest to the smallest].
    [Write|Give me|Return|Print] [these|the] numbers in [decreasing|falling|descending] order: {l}
    [Can|Could|Would] you [sort|order] these [from largest to smallest|in descending order]? {l}
    [Here is a list|Here are some numbers|My list]: {l}. [Sort it from largest to smallest.|Sort it downwards.]
    {l}~[Sort these numbers from largest to smallest.|Sort this list in descending order.]
    [Please|Now] sort {l} [from high to low|in descending order].""",
    """Put the following numbers in descending order: {l}
    I have these numbers: {l}. Please sort them from largest to smallest.""",
)
_SORT_WORDS = phrases(
    """[Sort|Order|Arrange] [these words|the words|this list|these|the following words|my words|these items]: {l}
    [Sort|Order|Arrange|Put] [these words|the words|these items|the names] [alphabetically|in alphabetical order|from A to Z|by the alphabet]: {l}
    [Put|Bring] [these|the] [words|items|names] [in|into] [alphabetical order|order|ABC order]: {l}
    Sort {l} [in alphabetical order|alphabetically|from A to Z].
    [Please|Now|Just] sort {l}.
    Sort: {l}
    [Can|Could|Would] you [sort|order] [these words|this list|them] [alphabetically|by the alphabet|in alphabetical order]? {l}
    [Here is a list|Here are some words|My list|I wrote these down]: {l}. [Sort it alphabetically.|Sort it.|Put it in alphabetical order.]
    [Write|Give me|Return|Print] [these|the] words in alphabetical order: {l}
    {l}~[Sort these words.|Sort this list alphabetically.|Put these in alphabetical order.]
    [I need|I want|Give me] [a sorted version of this list|these words sorted|these in alphabetical order]: {l}
    [What is|Show me] the alphabetical order of {l}?""",
    """I have these words: {l}. Please sort them alphabetically.
    Put the following words in alphabetical order: {l}
    Could you sort the words {l} from A to Z?""",
)


def _sort(rng: Random, split: Split, numeric: bool, down: bool, wording: Phrases) -> Turn:
    items = _fresh(rng, split, rng.randint(2, 8 if split == "train" else 6), numeric)
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
    """[What is|Which is|What's] {w} [of|in] [this list|the list|my list]: {l}
    [What is|Which is|What's] {w} in this list? {l}
    [Here is a list|Here is my list|Look at this list|I have a list|Take this list]: {l}. [What is {w}?|Tell me {w}.|Give me {w}.|I need {w}.]
    [Tell me|Give me|Name|Find|Show me] {w} [of|in|from] {l}.
    {l}: [what is {w}?|give me {w}.|tell me {w}.]
    [Find|Tell me|Give me|Print] {w}: {l}
    [Please|Now] [tell me|give me|find|name] {w} [of|in] {l}.
    [In|Of] the list {l}, [what is|which is|tell me] {w}?
    [Can|Could] you [find|tell me|name|give me] {w} [of|in] [this list|the list]: {l}
    {l}~[What is|Give me|I want] {w}?
    List: {l}~Question: what is {w}?""",
    """From the list {l}, give me {w}.
    Please find {w} in the list: {l}""",
)


def pick_item(rng: Random, split: Split) -> Turn:
    """Ask for the first, last, n-th, largest or smallest item of a list, or for the number of items."""
    name, what, choose = rng.choice(_PICKS)
    numeric = name in ("largest", "smallest") or rng.random() < 0.4
    items = _fresh(rng, split, rng.randint(3, 7), numeric)
    answer = choose(items, rng)
    user = _PICK.pick(rng, split).format(w=what, l=rng.choice((", ", ", ", " ")).join(items))
    return Turn(user, f"{what.capitalize()} is {answer}.", answer)


_REVERSE = phrases(
    """[Reverse|Flip|Invert] [this list|the list|the order of this list|the order|these items]: {l}
    [Reverse|Flip] [the order of|] {l}.
    [Write|Say|Print|Repeat] [this list|these items|this|the list] [backwards|in reverse|in reverse order|from back to front]: {l}
    [Put|Bring] [this list|these|these items] [in|into] reverse order: {l}
    [Please|Now] reverse {l}.
    Reverse: {l}
    [Can|Could] you [reverse|flip] [this list|these items]? {l}
    {l}~[Reverse this list.|Write this list backwards.]
    [Start with the last and end with the first|Last one first]: {l}
    [I need|Show me|Return] [this list|these items] [backwards|in reverse order]: {l}""",
    """Give me this list in reverse: {l}
    Turn the order of this list around: {l}""",
)
_AS_JSON = phrases(
    """[Write|Print|Give me|Show|Return] [this list|these items|this|these] [as|in the form of] [a JSON array|JSON|a JSON list]: {l}
    [Convert|Turn|Change|Transform] [this|this list|these|the list] [to|into] [a JSON array|a JSON list|JSON]: {l}
    [Make|Build|Create] a JSON [array|list] [of|from|with] {l}.
    JSON array of {l}[?|.|]
    Give me {l} as [a JSON list|a JSON array|JSON].
    [Can|Could] you [write|make] [this|these items] as a JSON array? {l}
    {l}~[Write this as a JSON array.|As a JSON array, please.|JSON array, please.]
    [Put|Wrap] [these|these items] [in|into] a JSON array: {l}
    [List|Items]: {l}~JSON:""",
    """Please format this list as JSON: {l}
    I need this list as a JSON array: {l}""",
)
_AS_BULLETS = phrases(
    """[Write|Print|Give me|Show|Format|Return] [this list|these items|this|these|the list] [as|in the form of|with] [bullet points|bullets|a bullet list]: {l}
    [Make|Create] [bullet points|a bullet list|bullets] [of|from] {l}.
    [Turn|Change|Convert] [this|this list|these] into [a bulleted list|bullets|bullet points]: {l}
    [Put|Write] each [item|one|] on [its|a] [own|new|separate] line: {l}
    [Write|Give me|Show] {l} as [bullet points|a bullet list|a bulleted list].
    [Can|Could] you make bullet points [of|from] this? {l}
    {l}~[Write this as bullet points.|Make bullet points.|As bullets, please.]""",
    """Format this as a bulleted list: {l}
    Please write {l} as bullets.""",
)
_AS_NUMBERED = phrases(
    """[Write|Print|Give me|Show|Return] [this list|these items|this|these] [as|in the form of] a numbered list: {l}
    [Number|Enumerate] [these|this list|them|these lines]: {l}
    [Make|Create] a numbered list [of|from|with] {l}.
    [Turn|Change|Convert] [this|this list|these] into [a numbered list|numbered lines]: {l}
    [Please|Now] [number|enumerate] {l}.
    [Write|Give me|Show] {l} as a numbered list.
    [Put|Write] a number before each [item|one|word]: {l}
    {l}~[Number these items.|Make a numbered list.|As a numbered list, please.]""",
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
    """[Repeat|Say|Copy|Echo|Write|Print|Output|Return|Type|Quote]: {t}
    [Repeat|Copy|Echo|Print|Output|Return|Write down|Type] [this|this text|the following text|the text|what I say|this line|these words]: {t}
    [Repeat|Say|Echo|Write] [after me|exactly|again|once more|word for word]: {t}
    [Repeat|Copy|Echo|Print|Write|Say|Output] [this|the following|this text|the text below|what follows] [exactly|word for word|again|once more|without changes|as it is]: {t}
    [Repeat|Copy|Echo|Print|Write|Output] [this|the following|this text|the text below] [exactly|word for word|again|without changes]:~{t}
    [Please|Now|Just] [repeat|copy|say|echo|write|print] [this|the text|this text|after me|]: {t}
    [Please|Now] [repeat|copy|echo] [this|the text|this text]:~{t}
    [Can|Could|Would] you [repeat|say|copy|echo|write|print] this[?|:] {t}
    [Say|Echo|Send|Give|Read] [this|it|the text] back [to me|]: {t}
    [Say|Write|Answer with|Reply with|Respond with] exactly [this|these words|this text]: {t}
    [Answer|Reply|Respond] with [this|the following|this text|the words]: {t}
    Text: {t}~[Repeat the text.|Copy the text.|Write the text again.|Say it again.]
    [I say|My words are|I want you to say|I want you to repeat]: {t}""",
    """Copy the following: {t}
    Please say this back to me: {t}
    Reproduce this text exactly:~{t}""",
)
_TIMES = phrases(
    """[Say|Repeat|Write|Print|Type|Output] "{t}" {k} times.
    [Please|Now] [say|repeat|write|print] [the word|] {t} {k} times.
    [Say|Repeat|Write|Print] [the word|] {t} {k} times.
    [Say|Write] {k} times: {t}
    {k} times, [say|write|print]: {t}
    [Can|Could] you [write|repeat|print] {t} {k} times?""",
    """Can you say "{t}" {k} times?
    I want to read "{t}" {k} times.""",
)
_RANGES = (
    (0xC0, 0x17F),
    (0x391, 0x3C9),
    (0x410, 0x44F),
    (0x3041, 0x3096),
    (0x4E00, 0x4FFF),
    (0x1F600, 0x1F64F),
    (0x2190, 0x21FF),
)


def _symbols(rng: Random) -> str:
    """Draw characters from one script, emoji or arrows, which train the byte tokens."""
    low, high = rng.choice(_RANGES)
    return "".join(
        chr(rng.randint(low, high)) + (" " if rng.random() < 0.2 else "") for _ in range(rng.randint(1, 12))
    ).strip()


def sentence(rng: Random, split: Split) -> str:
    """Draw a short nonsense sentence of real words."""
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
        return " ".join(any_word(rng, split) for _ in range(rng.randint(1, 10)))
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
