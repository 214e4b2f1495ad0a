"""JSON tasks: extract the named keys from a text, write character sheets, make up small objects."""

import json
from random import Random

from tools.tiny.corpus import words
from tools.tiny.corpus.base import Phrases, Split, Task, Turn, joined, phrases, with_article
from tools.tiny.corpus.records import RECORDS, Record, Scalar, mentioned

Value = Scalar | None | list[str]

_INSTRUCTIONS = phrases(
    """Extract {k} as JSON: {t}
    Extract {k} from this text as JSON.~{t}
    Extract {k} as JSON.~~{t}
    Extract {k} from the text and answer with JSON.~~Text: {t}
    {t}~~Extract {k} as JSON.
    {t}~~Give me {k} as JSON.
    {t}~Return {k} in JSON.
    Return a JSON object with the keys {k}.~~{t}
    Return a JSON object with the keys {k} for this text: {t}
    Text: {t}~Keys: {k}~JSON:
    Text: {t}~~Return JSON with {k}.
    Read the text and return JSON with {k}.~~{t}
    Answer with a JSON object that has {k}.~Text: {t}
    Please extract {k} into a JSON object: {t}
    Can you extract {k} from the following sentence as JSON? {t}
    Turn this into JSON with {k}: {t}
    Convert to JSON with the keys {k}: {t}
    What are {k} in this text? Answer in JSON.~{t}
    Find {k} in the text. Output JSON only.~~{t}
    I need {k} as JSON from this sentence: {t}
    From the sentence "{t}" extract {k} as JSON.
    Fill a JSON object with {k}.~~Text: {t}
    Parse the text into JSON. Keys: {k}.~~{t}
    JSON with {k} please: {t}
    Extract the data as JSON ({k}): {t}
    Extract information from the text below.~Keys: {k}~~{t}
    Use the text to fill in {k}. Reply with JSON.~{t}""",
    """Please read this text and give me a JSON object with {k}: {t}
    Get {k} out of the following text, as JSON.~~{t}
    {t}~~Please write {k} of this text as a JSON object.
    Extract these keys as JSON: {k}.~Text: {t}
    Make a JSON object with the keys {k} from the sentence: {t}""",
)
_SYSTEMS = phrases(
    """Extract {k} from the text of the user as JSON.
    You extract data. For every text, answer with a JSON object with the keys {k}.
    Return JSON with the keys {k}.
    You are an extraction engine. Keys: {k}. Answer with JSON only.
    Read what the user writes and return a JSON object with {k}.
    Your task: turn each message into JSON with {k}.""",
    """You turn texts into JSON objects with {k}.
    For each message, extract {k} and reply with JSON only.""",
)
_TYPES = {str: "string", int: "integer", float: "number", type(None): "string"}
_FILLERS = (
    "It was a sunny day.", "Please note this.", "Thank you very much.", "That is all we know.", "This is the latest news.",
    "Here is what I heard.", "I hope this helps.", "Let me tell you something.", "More will follow soon.", "Good to know!",
)  # fmt: skip


def _dumped(value: dict[str, Value]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _key_text(keys: dict[str, Value], rng: Random) -> str:
    form, names = rng.random(), list(keys)
    if form < 0.35:
        return joined(names)
    if form < 0.5:
        return ", ".join(names)
    if form < 0.65:
        return ", ".join(f'"{name}"' for name in names)
    if form < 0.75:
        return ", ".join(f"{name} ({_TYPES[type(value)]})" for name, value in keys.items())
    if form < 0.85:
        return f"the {joined(names)}"
    if form < 0.93:
        return "{" + ", ".join(f'"{name}": {_TYPES[type(value)]}' for name, value in keys.items()) + "}"
    properties = {name: {"type": _TYPES[type(value)]} for name, value in keys.items()}
    return json.dumps({"type": "object", "properties": properties, "required": names})


def _wanted(record: Record, values: dict[str, Scalar], rng: Random) -> dict[str, Value]:
    """Some keys in some order, now and then under another name, now and then one the text does not mention."""
    fields = rng.sample(list(values), rng.randint(min(2, len(values)), len(values)) if rng.random() < 0.85 else 1)
    wanted: dict[str, Value] = {}
    for name in fields:
        alias = rng.random() < 0.15 and name in record.aliases
        wanted[rng.choice(record.aliases[name]) if alias else name] = values[name]
    if rng.random() < 0.06:
        absent = {key for other in RECORDS for key in other.fields} - set(record.fields) - set(wanted)
        wanted[rng.choice(sorted(absent - {key for keys in record.aliases.values() for key in keys}))] = None
    return wanted


def _padded(text: str, rng: Random) -> str:
    before = f"{rng.choice(_FILLERS)} " if rng.random() < 0.1 else ""
    after = f" {rng.choice(_FILLERS)}" if rng.random() < 0.1 else ""
    return before + text + after


def _draw(rng: Random, split: Split) -> tuple[str, dict[str, Value]]:
    record = rng.choice((*RECORDS, RECORDS[0], RECORDS[0]))
    pattern = record.texts.pick(rng, split)
    values = {name: record.fields[name](rng, split) for name in mentioned(pattern)}
    return _padded(pattern.format(**values), rng), _wanted(record, values, rng)


def extract(rng: Random, split: Split) -> Turn:
    """Extract the keys that the user names."""
    text, wanted = _draw(rng, split)
    user = _INSTRUCTIONS.pick(rng, split).format(k=_key_text(wanted, rng), t=text)
    return Turn(user, _dumped(wanted), _dumped(wanted), "json")


def extract_by_system(rng: Random, split: Split) -> tuple[str, Turn]:
    """A system prompt that names the keys, and a turn whose user gives only the text."""
    text, wanted = _draw(rng, split)
    return _SYSTEMS.pick(rng, split).format(k=_key_text(wanted, rng)), Turn(text, _dumped(wanted), _dumped(wanted), "json")


_SHEETS = phrases(
    """Write a character sheet as JSON for {d}
    Make a character sheet in JSON: {d}
    Create a JSON character sheet for {d}
    Character sheet as JSON: {d}
    Give me a character sheet in JSON for this hero: {d}
    Turn this hero into a JSON character sheet: {d}
    {d}~~Write the character sheet as JSON.
    {d}~Make a JSON character sheet with name, class, level, hp and items.
    Return a JSON object with name, class, level, hp and items for this character: {d}
    Extract name, class, level, hp and items as JSON: {d}
    Fill in the character sheet (JSON with name, class, level, hp, items). {d}""",
    """Please make a JSON character sheet: {d}
    I need the character sheet of this hero as JSON.~{d}
    {d}~~Character sheet in JSON, please.""",
)
_HEROES = phrases(
    """{name} is a level {level} {cls} with {hp} hp who carries {items}.
    {name} the {cls}, level {level}, {hp} hit points, carrying {items}.
    A level {level} {cls} called {name} has {hp} hp and owns {items}.
    The {cls} {name} has {hp} hp, is at level {level} and has {items}.
    {name}, {cls}, level {level}, {hp} hp. Items: {items}.
    With {items} in the bag, {name} the {cls} reached level {level} and has {hp} hp.
    Name: {name}. Class: {cls}. Level: {level}. HP: {hp}. Items: {items}.
    Our hero {name} is a {cls} of level {level}. {name} has {hp} hit points and {items}.""",
    """There is a {cls} named {name} at level {level}, with {hp} hp, armed with {items}.
    {name} has {items}, {hp} hp and the skills of a level {level} {cls}.""",
)


def _hero(rng: Random, split: Split) -> dict[str, Value]:
    items = words.distinct([words.noun(rng, split) for _ in range(rng.randint(1, 4))])
    return {
        "name": words.person(rng, split), "class": words.CLASSES.pick(rng, split),
        "level": rng.randint(1, 20), "hp": rng.randint(1, 150), "items": items,
    }  # fmt: skip


def _describe(hero: dict[str, Value], wording: Phrases, rng: Random, split: Split) -> str:
    items = hero["items"]
    assert isinstance(items, list)
    named = joined([with_article(item) for item in items]) if rng.random() < 0.8 else ", ".join(items)
    rest = {key: value for key, value in hero.items() if key not in ("items", "class")}
    return wording.pick(rng, split).format(**rest, cls=hero["class"], items=named)


def sheet(rng: Random, split: Split) -> Turn:
    """A character sheet for a hero whom the user describes."""
    hero = _hero(rng, split)
    user = _SHEETS.pick(rng, split).format(d=_describe(hero, _HEROES, rng, split))
    return Turn(user, _dumped(hero), _dumped(hero), "json")


_MAKE_HERO = phrases(
    """Make up a character sheet as JSON.
    Invent a hero and write a JSON character sheet.
    Create a random character sheet in JSON.
    Write a character sheet in JSON.
    Generate a JSON character sheet for a fantasy hero.
    Give me a JSON object for a game character.
    Create a character for a role-playing game as JSON.""",
    """Please invent a game character and write it as JSON.
    Generate a character sheet.""",
)
_MAKE_CLASS = phrases(
    """Make up a character sheet for a {c} as JSON.
    Create a {c} as a JSON character sheet.
    Generate a JSON character sheet for a {c}.
    Invent a {c} and write the character sheet in JSON.""",
    """Please create a JSON character sheet for a {c}.""",
)


def make_hero(rng: Random, split: Split) -> Turn:
    """A made-up character sheet; only its shape and, if named, its class can be checked."""
    hero = _hero(rng, "train")
    if rng.random() < 0.5:
        return Turn(_MAKE_CLASS.pick(rng, split).format(c=hero["class"]), _dumped(hero), f'"class": "{hero["class"]}"')
    return Turn(_MAKE_HERO.pick(rng, split), _dumped(hero), '"class": ')


_MAKE_RECORD = phrases(
    """Make up a {r} as a JSON object with {k}.
    Write a JSON object for a {r} with {k}.
    Give me an example of a {r} in JSON with {k}.
    Generate a random {r} as JSON. Keys: {k}.""",
    """Invent a {r} and write it as JSON with {k}.""",
)


def make_record(rng: Random, split: Split) -> Turn:
    """A made-up record with the keys the user names."""
    record = rng.choice(RECORDS)
    values = {name: draw(rng, "train") for name, draw in record.fields.items()}
    keys = rng.sample(list(values), rng.randint(2, len(values)))
    reply = _dumped({key: values[key] for key in keys})
    return Turn(_MAKE_RECORD.pick(rng, split).format(r=record.name, k=joined(keys)), reply, f'"{keys[-1]}": ')


TASKS: dict[str, Task] = {"extract": extract, "sheet": sheet, "make_hero": make_hero, "make_record": make_record}
