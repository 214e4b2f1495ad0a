"""Greetings, questions about the model itself, fixed lists, and facts that the user tells about themselves."""

from random import Random

from tools.tiny.corpus import things, words
from tools.tiny.corpus.base import Phrases, Split, Task, Turn, phrases

_IDENTITY = "I am tiny, a small language model that ships with Dovetail."
_ABILITIES = "I can answer simple questions, do small sums, sort lists, extract data as JSON, call tools and tell stories."

_TALK: tuple[tuple[Phrases, str], ...] = (
    (
        phrases(
            """Hello
            Hello!
            Hi
            Hi!
            Hey
            Hi there!
            Hello there.
            Good morning!
            Good evening!
            Greetings
            hey there
            hello""",
            """Hey!
            Good afternoon!""",
        ),
        "Hello! How can I help you?",
    ),
    (
        phrases(
            """Who are you?
            What are you?
            Tell me about yourself.
            What is your name?
            What's your name?
            Introduce yourself.
            Who am I talking to?
            Are you a robot?
            Which model are you?
            What model are you?
            Are you a human?
            Who is this?""",
            """Please introduce yourself.
            Can you tell me who you are?
            What is the name of this model?""",
        ),
        _IDENTITY,
    ),
    (
        phrases(
            """What can you do?
            How can you help me?
            What are you good at?
            What are your abilities?
            Help
            Help me
            What do you know?
            Can you help me?
            What can I ask you?""",
            """Tell me what you can do.
            What are you able to do?""",
        ),
        _ABILITIES,
    ),
    (
        phrases(
            """How are you?
            How are you today?
            How is it going?
            How do you do?
            How do you feel?
            Are you well?
            What's up?""",
            """How are you doing?
            Hi, how are you?""",
        ),
        "I am fine, thank you. How can I help you?",
    ),
    (
        phrases(
            """Thank you.
            Thanks!
            Thank you very much!
            Thanks a lot.
            Great, thanks.
            Thank you for your help.
            Perfect, thank you.
            Many thanks!
            Good job!
            Well done.""",
            """Thanks for the help!
            Thank you so much!""",
        ),
        "You are welcome!",
    ),
    (
        phrases(
            """Goodbye.
            Bye!
            Bye
            See you later.
            Good night!
            See you soon.
            I have to go now.
            Goodbye!""",
            """Bye bye!
            See you tomorrow.""",
        ),
        "Goodbye! Have a nice day.",
    ),
    (
        phrases(
            """Tell me a joke.
            Do you know a joke?
            Make me laugh.
            Tell a joke.
            Say something funny.""",
            """Can you tell me a joke?
            I want to hear a joke.""",
        ),
        "Why did the computer go to the doctor? Because it had a virus!",
    ),
    (
        phrases(
            """Who made you?
            Who trained you?
            Where do you come from?
            How were you made?
            Who created you?""",
            """Who built you?
            By whom were you trained?""",
        ),
        "I was trained on generated text by the authors of Dovetail.",
    ),
    (
        phrases(
            """What is Dovetail?
            What's Dovetail?
            Tell me about Dovetail.
            Explain Dovetail.
            What does Dovetail do?""",
            """Can you explain what Dovetail is?
            Please tell me what Dovetail is.""",
        ),
        "Dovetail is a serving engine for language models, made of parts that fit together.",
    ),
    (
        phrases(
            """How big are you?
            How many parameters do you have?
            How large is your model?
            What is your size?""",
            """How many parameters are there in you?
            What size are you?""",
        ),
        "I have 4 million parameters.",
    ),
)


def talk(rng: Random, split: Split) -> Turn:
    """Small talk with one fixed reply."""
    wording, reply = rng.choice(_TALK)
    return Turn(wording.pick(rng, split), reply, reply, "same")


_LISTS: dict[str, tuple[str, ...]] = {
    "the days of the week": things.DAYS,
    "the months of the year": things.MONTHS,
    "the planets of the solar system": things.PLANETS,
    "the letters of the alphabet": tuple(things.ALPHABET),
    "the seasons": ("spring", "summer", "autumn", "winter"),
    "the continents": ("Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America"),
    "the colours of the rainbow": ("red", "orange", "yellow", "green", "blue", "indigo", "violet"),
    "the vowels": ("A", "E", "I", "O", "U"),
    "the oceans": ("the Atlantic", "the Arctic", "the Indian Ocean", "the Pacific", "the Southern Ocean"),
    "the five senses": ("sight", "hearing", "smell", "taste", "touch"),
}
_NAME_ALL = phrases(
    """What are {x}?
    List {x}.
    Name {x}.
    Tell me {x}.
    Can you list {x}?
    Please list {x}.
    Say {x}.
    Which are {x}?
    Write down {x}.
    Give me {x}.""",
    """Could you name {x}?
    I want to know {x}.""",
)


def name_all(rng: Random, split: Split) -> Turn:
    """A fixed list, in its order."""
    what = rng.choice(tuple(_LISTS))
    reply = ", ".join(_LISTS[what])
    return Turn(_NAME_ALL.pick(rng, split).format(x=what), reply, reply, "same")


_EXAMPLES = {
    "animals": words.ANIMALS, "colours": words.COLOURS, "fruits": words.FRUITS, "jobs": words.JOBS,
    "hobbies": words.HOBBIES, "names": words.FIRST_NAMES, "cities": words.CITIES,
}  # fmt: skip
_NAME_SOME = phrases(
    """Name {k} {x}.
    List {k} {x}.
    Give me {k} {x}.
    Tell me {k} {x}.
    Can you name {k} {x}?
    Please list {k} {x}.
    I need {k} {x}.
    Write down {k} {x}.""",
    """Could you list {k} {x}?
    Give me a list of {k} {x}.""",
)


def name_some(rng: Random, split: Split) -> Turn:
    """Some members of a kind; a checker can only see that they are separated."""
    what, size = rng.choice(tuple(_EXAMPLES)), rng.randint(2, 6)
    picked: list[str] = []
    while len(picked) < size:
        picked = words.distinct([*picked, _EXAMPLES[what].pick(rng, "train")])
    shown = things.number_word(size) if rng.random() < 0.5 else str(size)
    return Turn(_NAME_SOME.pick(rng, split).format(k=shown, x=what), ", ".join(picked), ", ")


_TELL = {
    "name": phrases(
        """My name is {v}.
        I am {v}.
        Hi, I'm {v}.
        Hello, my name is {v}.
        You can call me {v}.
        I am called {v}.""",
        """Hey, I am {v}!
        Please call me {v}.""",
    ),
    "favourite colour": phrases(
        """My favourite colour is {v}.
        I like {v} best of all colours.
        The colour I love most is {v}.
        Remember: my favourite colour is {v}.""",
        """For the record, my favourite colour is {v}.""",
    ),
    "home town": phrases(
        """I live in {v}.
        I am from {v}.
        My home is in {v}.
        I come from {v}.
        My home town is {v}.""",
        """I was born in {v} and still live there.""",
    ),
    "dog's name": phrases(
        """My dog is called {v}.
        I have a dog named {v}.
        My dog's name is {v}.""",
        """I call my dog {v}.""",
    ),
    "secret word": phrases(
        """The secret word is {v}.
        Remember this secret word: {v}.
        My secret word is {v}.
        Keep in mind the secret word {v}.""",
        """Please remember the secret word {v}.""",
    ),
    "lucky number": phrases(
        """My lucky number is {v}.
        Remember my lucky number: {v}.
        {v} is my lucky number.""",
        """Keep in mind that my lucky number is {v}.""",
    ),
}
_TOLD = {
    "name": "Nice to meet you, {v}!",
    "favourite colour": "{v} is a nice colour.",
    "home town": "{v} sounds like a nice place.",
    "dog's name": "{v} is a good name for a dog.",
    "secret word": "I will remember the secret word {v}.",
    "lucky number": "I will remember the number {v}.",
}
_RECALL = phrases(
    """What is my {x}?
    What's my {x}?
    Do you remember my {x}?
    Tell me my {x}.
    What did I say my {x} is?
    Can you tell me my {x}?
    Say my {x}.
    Do you know my {x}?""",
    """Do you still know my {x}?
    Please tell me my {x} again.""",
)


def _own_value(what: str, rng: Random, split: Split) -> str:
    if what == "lucky number":
        return str(rng.randint(1, 9999))
    if what == "favourite colour":
        return words.COLOURS.pick(rng, split)
    draw = {"home town": words.city, "secret word": words.noun}.get(what, words.first_name)
    return draw(rng, split)


def memory(rng: Random, split: Split) -> tuple[Turn, Turn]:
    """A turn that tells something and one, for later in the same conversation, that asks for it."""
    what = rng.choice(tuple(_TELL))
    value = _own_value(what, rng, split)
    told = _TOLD[what].format(v=value)
    tell = Turn(_TELL[what].pick(rng, split).format(v=value), told[:1].upper() + told[1:], value)
    return tell, Turn(_RECALL.pick(rng, split).format(x=what), f"Your {what} is {value}.", value)


_NOTE_KINDS = (
    ("favourite colour", words.COLOURS), ("home town", words.CITIES), ("job", words.JOBS), ("hobby", words.HOBBIES),
    ("favourite animal", words.ANIMALS), ("best friend", words.FIRST_NAMES),
)  # fmt: skip
_NOTES = phrases(
    """Here are some notes.~{t}~~What is the {x} of {n}?
    {t}~~What is the {x} of {n}?
    Read these notes and answer the question.~{t}~Question: what is the {x} of {n}?
    Notes:~{t}~~Tell me the {x} of {n}.
    What is the {x} of {n}? Look at these notes:~{t}""",
    """Look at my notes:~{t}~~I need the {x} of {n}.""",
)


def notes(rng: Random, split: Split, rows: int | None = None) -> Turn:
    """Find one line among many that look alike."""
    names: list[str] = []
    size = rows or rng.choice((3, 5, 8, 12, 20, 30))
    while len(names) < size:
        names = words.distinct([*names, words.first_name(rng, split)])
    picked = [(name, *rng.choice(_NOTE_KINDS)) for name in names]
    values = [pool.pick(rng, split) for _, _, pool in picked]
    lines = [f"The {what} of {name} is {value}." for (name, what, _), value in zip(picked, values)]
    at = rng.randrange(size)
    user = _NOTES.pick(rng, split).format(t="\n".join(lines), x=picked[at][1], n=names[at])
    return Turn(user, lines[at], values[at])


def describe(rng: Random, split: Split) -> Turn:
    """Answer about a text given just before: who, where or what."""
    name, town, job, thing = words.first_name(rng, split), words.city(rng, split), words.JOBS.pick(rng, split), words.noun(rng, split)
    text = f"{name} is a {job} in {town} and has a {words.COLOURS.pick(rng, split)} {thing}."
    question, reply, answer = rng.choice(
        (
            ("Who is this about?", f"This is about {name}.", name),
            (f"Where does {name} work?", f"{name} works in {town}.", town),
            (f"What is the job of {name}?", f"{name} is a {job}.", job),
            (f"What does {name} have?", f"{name} has a {thing}.", thing),
        )
    )
    forms = Phrases(("{t} {q}", "{t}\n{q}", "Text: {t}\nQuestion: {q}", "{q}\n{t}"), ("{t}\n\n{q}", "Read this: {t} {q}"))
    return Turn(forms.pick(rng, split).format(t=text, q=question), reply, answer)


TASKS: dict[str, Task] = {
    "talk": talk, "name_all": name_all, "name_some": name_some, "notes": notes, "describe": describe,
}  # fmt: skip
