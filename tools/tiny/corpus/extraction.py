"""Draw JSON tasks: extract the named keys from a text, write character sheets, make up small objects."""

import json
from random import Random

from tools.tiny.corpus import sources, words
from tools.tiny.corpus.base import Split, Task, Turn, joined, phrases, with_article
from tools.tiny.corpus.lists import sentence as nonsense
from tools.tiny.corpus.predicates import HERO_FRONTS, HERO_PREDICATES
from tools.tiny.corpus.records import RECORDS, Scalar

Value = Scalar | None | list[str]

_INSTRUCTIONS = phrases(
    """[Extract|Pull out|Pick out|Read off|Collect|Find|Take] {k} [as JSON|as a JSON object|into JSON|in JSON format]: {t}
    [Extract|Pull|Pick|Read|Collect|Find|Get] {k} from [this|the following|the] [text|sentence|message|note] as [JSON|a JSON object].~{t}
    [Extract|Find|List|Give|Return] {k} as JSON.~~{t}
    [Extract|Read|Take|Find] {k} from the text and [answer with|reply with|output|print] JSON.~~Text: {t}
    {t}~~[Extract|Return|Give me|Output|Print|Write|Find] {k} as [JSON|a JSON object].
    {t}~[Return|Give|Put|Show|Write] {k} [in JSON|in a JSON object|as JSON].
    [Return|Give me|Output|Print|Build|Create|Produce|Write] a JSON object with the keys {k}.~~{t}
    [Return|Give me|Output|Build|Create|Produce] a JSON object with the keys {k} [for this text|from this text|for the following]: {t}
    Text: {t}~[Keys|Fields|Wanted|Columns]: {k}~[JSON:|Answer in JSON.|Output JSON.]
    [Text|Input|Message|Sentence]: {t}~~[Return|Give me|Output|Write] JSON with {k}.
    [Read|Study|Take|Look at] the [text|sentence|message] and [return|write|give me] [JSON|a JSON object] with {k}.~~{t}
    [Answer|Reply|Respond] with a JSON object that [has|contains|holds] {k}.~[Text:|Input:|] {t}
    [Please|Now|Just] [extract|find|collect|read] {k} [into a JSON object|as JSON]: {t}
    [Can|Could|Would] you [extract|find|pick out] {k} from [the following sentence|this text|this] as JSON? {t}
    [Turn|Change|Transform|Parse] this [text|sentence|] into [JSON|a JSON object] with {k}: {t}
    [Convert|Translate|Map] [this|it|the text] to JSON with the [keys|fields|properties] {k}: {t}
    What are {k} in [this|the] [text|sentence]? [Answer in JSON.|Reply in JSON.|JSON only.]~{t}
    [Find|Locate|Look for] {k} in the text. [Output JSON only.|Only JSON.|Answer with JSON.]~~{t}
    I [need|want|would like|am looking for] {k} as JSON [from this sentence|from this text|from this]: {t}
    From [the sentence|the text|the message] "{t}" [extract|take|get] {k} as JSON.
    [Fill|Fill in|Complete] a JSON object with {k}.~~Text: {t}
    Parse the [text|sentence|message] into JSON. [Keys|Fields]: {k}.~~{t}
    JSON with {k}[ please|, please|]: {t}
    [Extract the data|Extract the fields|Extract] as JSON ({k}): {t}
    Extract [information|data] from the text [below|].~[Keys|Fields]: {k}~~{t}
    Use the text to fill in {k}. [Reply|Answer] with JSON.~{t}
    [Make|Write|Build] [JSON|a JSON object] [out of|of|from] this text with {k}.~{t}
    {k} as JSON: {t}
    [Extract|Find|Return|Give me|List] [the following|the|these] [fields|values|properties|attributes|details] as JSON: {k}.~[Text: |Input: |]{t}
    [Extract|Find|Return] [these|the following] [fields|values|properties] [from the text|]: {k}.~[Text: |]{t}~[Answer in JSON.|JSON:|Use JSON.]
    [The|Your|My] [keys|fields|properties] are {k}. [Fill them from this text|Use this text|Read this and fill them as JSON]: {t}
    [Give|Show|Return|Send] me the [values|data] [of|for] {k} in this [text|sentence], as JSON: {t}
    [Take|Fetch|Grab|Draw|Read] {k} [from|out of] [this text|the text below|this sentence|what follows], as JSON.~[~|]{t}
    [Make|Build|Create] [a|one] JSON object [with the fields|with only|that has just] {k} [from|out of|for] [the text|this|this sentence]: {t}
    {t}~~[Now|Please|Next,] [write|give|show|print] {k} [of|from] [this text|the text above] [as JSON|in JSON].
    [Hey|Hi], [read|look at|check] this [text|note] and [write|give|send] me [a JSON object|JSON] with {k}: {t}
    [Summarize|Record|Store|Save] [this|the text] as [JSON|a JSON object] with {k}.~{t}
    [Schema|Format|Template|Keys wanted]: {k}~[Text|Input|Data]: {t}~[Output|JSON|Result]:
    {t}~{k} as JSON[, please|]""",
    """Please read this text and give me a JSON object with {k}: {t}
    Get {k} out of the following text, as JSON.~~{t}
    {t}~~Please write {k} of this text as a JSON object.
    Extract these keys as JSON: {k}.~Text: {t}
    Make a JSON object with the keys {k} from the sentence: {t}""",
)
_SYSTEMS = phrases(
    """[Extract|Find|Read] {k} from [the text of the user|what the user writes|each message|the user's text] as JSON.
    You extract data. For every [text|message], [answer|reply] with a JSON object with the keys {k}.
    [Return|Output|Write|Produce] JSON with the keys {k}.
    You are an extraction [engine|tool|service|machine]. [Keys|Fields]: {k}. Answer with JSON only.
    Read what the user writes and [return|write|output] a JSON object with {k}.
    Your [task|job]: turn [each message|every text] into JSON with {k}.
    [You always answer|Always answer|Answer] with a JSON object that [has|contains] {k}.
    You [parse|convert|transform] [messages|texts] to JSON with {k}. [Nothing else.|Do not explain.|]
    The user sends [a text|texts|notes]. [Reply|Answer] with {k} as JSON.""",
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


def _wanted(source: sources.Source, rng: Random) -> dict[str, Value]:
    """Draw some keys in some order, sometimes under another name, and sometimes one that the text does not mention."""
    record, values = source.record, source.values
    fields = rng.sample(list(values), rng.randint(min(2, len(values)), len(values)) if rng.random() < 0.85 else 1)
    wanted: dict[str, Value] = {}
    for name in fields:
        alias = record is not None and rng.random() < 0.15 and name in record.aliases
        wanted[rng.choice(record.aliases[name]) if record and alias else name] = values[name]
    if record and rng.random() < 0.06:
        named = {key for keys in record.aliases.values() for key in keys} | set(values) | set(wanted)
        wanted[rng.choice(sorted({key for other in RECORDS for key in other.fields} - named))] = None
    return wanted


def _filler(rng: Random) -> str:
    return rng.choice(_FILLERS) if rng.random() < 0.5 else nonsense(rng, "train")


def _padded(text: str, rng: Random) -> str:
    before = f"{_filler(rng)} " if rng.random() < 0.1 else ""
    after = f" {_filler(rng)}" if rng.random() < 0.1 else ""
    return before + text + after


def _draw(rng: Random, split: Split) -> tuple[str, dict[str, Value]]:
    source = sources.draw(rng, split)
    return _padded(source.text, rng), _wanted(source, rng)


def extract(rng: Random, split: Split) -> Turn:
    """Extract the keys that the user names."""
    text, wanted = _draw(rng, split)
    user = _INSTRUCTIONS.pick(rng, split).format(k=_key_text(wanted, rng), t=text)
    return Turn(user, _dumped(wanted), _dumped(wanted), "json")


def extract_by_system(rng: Random, split: Split) -> tuple[str, Turn]:
    """Draw a system prompt that names the keys, and a turn whose user gives only the text."""
    text, wanted = _draw(rng, split)
    return _SYSTEMS.pick(rng, split).format(k=_key_text(wanted, rng)), Turn(
        text, _dumped(wanted), _dumped(wanted), "json"
    )


_SHEETS = phrases(
    """[Write|Make|Create|Build|Draw up|Fill in|Prepare] a character sheet [as JSON|in JSON] for {d}
    [Write|Make|Create|Build|Produce|Return] a [JSON character sheet|character sheet in JSON][:| for this hero:| of this character:] {d}
    Character sheet [as|in] JSON: {d}
    [Give|Show|Send] me [a|the] character sheet in JSON [for|of] this hero: {d}
    [Turn|Change|Convert] this [hero|character|text] into a JSON character sheet: {d}
    {d}~~[Write|Make|Return|Create|Give me] [the|a] character sheet as JSON.
    {d}~[Make|Write|Build|Return] a JSON character sheet with name, class, level, hp and items.
    Return a JSON object with name, class, level, hp and items for this [character|hero]: {d}
    [Extract|Find|Read] name, class, level, hp and items as JSON: {d}
    [Fill in|Complete] the character sheet (JSON with name, class, level, hp, items). {d}
    [What is|Can you write] the JSON character sheet of this hero? {d}
    [Hero|Character]: {d}~[Character sheet|Sheet] (JSON):""",
    """Please make a JSON character sheet: {d}
    I need the character sheet of this hero as JSON.~{d}
    {d}~~Character sheet in JSON, please.""",
)
_HEROES = phrases(
    """{name} is a level {level} {cls} with {hp} hp who [carries|owns|holds|has] {items}.
    {name} the {cls}, level {level}, {hp} hit points, [carrying|holding|with] {items}.
    A level {level} {cls} called {name} has {hp} hp and [owns|carries|holds] {items}.
    The {cls} {name} has {hp} hp, is at level {level} and has {items}.
    {name}, {cls}, level {level}, {hp} hp. [Items|Bag|Gear]: {items}.
    With {items} in the bag, {name} the {cls} reached level {level} and has {hp} hp.
    Name: {name}. Class: {cls}. Level: {level}. HP: {hp}. Items: {items}.
    Our hero {name} is a {cls} of level {level}. {name} has {hp} hit points and {items}.
    [With|On] {hp} hp and {items}, {name} is a level {level} {cls}.
    {name} [owns|has|holds] {items}, {hp} hp and the [power|rank|title|wisdom] of a level {level} {cls}.
    {items}: that is all {name} [has|owns], [a|the] {cls} of level {level} with {hp} hp.
    [The|A] level {level} {cls} {name} [fights|travels|walks] with {items} and {hp} hp.
    {name} - {cls} - level {level} - {hp} hp - {items}
    {hp} hp, level {level}, {items}: {name} [is|makes] a [great|fine|strong] {cls}.
    [I play|I am|My hero is] {name}, a {cls} [at|on] level {level}. I have {hp} hp and [carry|own] {items}.
    [There was|We need|I see] a {cls}, {name}, [who has|with] {hp} hp, level {level} and {items}.""",
    """There is a {cls} named {name} at level {level}, with {hp} hp, armed with {items}.
    {name} has {items}, {hp} hp and the skills of a level {level} {cls}.""",
)


def _hero(rng: Random, split: Split) -> dict[str, Value]:
    items = words.distinct([words.noun(rng, split) for _ in range(rng.randint(1, 4))])
    return {
        "name": words.person(rng, split), "class": words.open_pick(words.CLASSES, rng, split),
        "level": rng.randint(1, 20), "hp": rng.randint(1, 150), "items": items,
    }  # fmt: skip


def _describe(hero: dict[str, Value], rng: Random, split: Split) -> str:
    items = hero["items"]
    assert isinstance(items, list)
    named = joined([with_article(item) for item in items]) if rng.random() < 0.8 else ", ".join(items)
    if split == "train" and rng.random() < 0.55:
        said = {**hero, "items": named}
        order = {key: said[key] for key in rng.sample(list(HERO_PREDICATES), 4)}
        return sources.compose(str(hero["name"]), order, HERO_PREDICATES, HERO_FRONTS, rng)
    rest = {key: value for key, value in hero.items() if key not in ("items", "class")}
    return _HEROES.pick(rng, split).format(**rest, cls=hero["class"], items=named)


def sheet(rng: Random, split: Split) -> Turn:
    """Draw a character sheet for a hero that the user describes."""
    hero = _hero(rng, split)
    user = _SHEETS.pick(rng, split).format(d=_describe(hero, rng, split))
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
    I would like a random character sheet in JSON.""",
)
_MAKE_CLASS = phrases(
    """Make up a character sheet for a {c} as JSON.
    Create a {c} as a JSON character sheet.
    Generate a JSON character sheet for a {c}.
    Invent a {c} and write the character sheet in JSON.""",
    """Please create a JSON character sheet for a {c}.""",
)


def make_hero(rng: Random, split: Split) -> Turn:
    """Draw a made-up character sheet; only its shape and, if named, its class can be checked."""
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
    """Draw a made-up record with the keys that the user names."""
    record = rng.choice(RECORDS)
    values = {name: draw(rng, "train") for name, draw in record.fields.items()}
    keys = rng.sample(list(values), rng.randint(2, len(values)))
    reply = _dumped({key: values[key] for key in keys})
    return Turn(_MAKE_RECORD.pick(rng, split).format(r=record.name, k=joined(keys)), reply, f'"{keys[-1]}": ')


TASKS: dict[str, Task] = {"extract": extract, "sheet": sheet, "make_hero": make_hero, "make_record": make_record}
