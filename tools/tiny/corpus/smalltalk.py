"""Draw greetings, questions about the model itself, fixed lists, and facts that users state about themselves."""

from random import Random

from tools.tiny.corpus import things, words
from tools.tiny.corpus.base import Phrases, Split, Task, Turn, phrases, variants

_IDENTITY = "I am tiny, a small language model that ships with Dovetail."
_ABILITIES = (
    "I can answer simple questions, do small sums, sort lists, extract data as JSON, call tools and tell stories."
)

_TALK: tuple[tuple[Phrases, str], ...] = (
    (
        phrases(
            """[Hello|Hi|Hey|Good day|Good morning|Good evening|Good night to you|Welcome][!|.|,|] [you|there|friend|tiny|again|assistant|everyone|][!|.|]
            Hello
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
            """[Who|What] are you[ exactly| really|, please|]?
            [Tell me|Say|Explain] [who|what] you are.
            [What|Which] [kind of|sort of|type of] [model|program|thing|assistant] are you?
            [Do you have a name|What do people call you|How are you called|What should I call you]?
            [Say|Tell me|Write] [something|a bit|more] about [yourself|you].
            Who are you?
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
            """[What|Which things|What else|What kinds of things] can you do[ for me| for us| well|]?
            [Explain|Say|List|Show me] what you can do.
            [What|Which tasks] [do you do|are you made for|can I use you for|are you for]?
            [How|With what] [can|could|do] you help [me|us|people]?
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
            """[How|So how|And how] are you[ today| now| feeling| this morning|, tiny|]?
            [How is|How's] [life|your day|everything|it]?
            Are you [fine|okay|all right|happy]?
            How are you?
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
            """[Thanks|Thank you|Cheers|Many thanks][ a lot| so much| for that| for your time| for this| again|][!|.|]
            [That was|This is|That is] [helpful|great|very kind|good|perfect].
            [Nice|Great|Good|Excellent|Wonderful][!|.]
            Thank you.
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
            """[Goodbye|Bye|Farewell|So long|Good night|See you][!|.|,|] [friend|tiny|for now|then|then|]
            I [have to|must|will|want to] [leave|go|stop|sleep][ now| soon|].
            See you [next time|again|around|on Monday][!|.]
            Goodbye.
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
            """[Tell|Give|Write] me [a joke|something funny|one joke|a good joke].
            [Do you know|Have you got|Know] [a joke|any jokes|something funny]?
            [Make|Try to make] [me|us] [laugh|smile].
            Tell me a joke.
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
            """Who [made|trained|created|wrote|developed|programmed|designed|built] you?
            [By whom|How|Where] were you [made|created|written|built|taught]?
            [What|Which data|Which text] were you trained on?
            Where do you come from?
            Who made you?
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
            """[Tell me|Say|Explain] [what|] Dovetail [is|means|does].
            [What|Can you say what] is Dovetail [for|about|]?
            [Describe|Explain|Define] Dovetail.
            What is Dovetail?
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
            """How [big|large|small] [are you|is your model|is tiny]?
            [Tell me|What is] [your size|your number of parameters|your parameter count][.|?]
            How big are you?
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
    """Draw small talk with one fixed reply."""
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
    """Ask for a fixed list, in its order."""
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
    """Ask for some members of a kind; a checker can only see that they are separated."""
    what, size = rng.choice(tuple(_EXAMPLES)), rng.randint(2, 6)
    picked: list[str] = []
    while len(picked) < size:
        picked = words.distinct([*picked, _EXAMPLES[what].pick(rng, "train")])
    shown = things.number_word(size) if rng.random() < 0.5 else str(size)
    return Turn(_NAME_SOME.pick(rng, split).format(k=shown, x=what), ", ".join(picked), ", ")


_TELL = {
    "name": phrases(
        """[My name is|I am|I'm|People call me|They call me|It's me,|This is|Here is] {v}.
        [Hi|Hello|Hey|Good morning], [my name is|I am|this is] {v}[.|!]
        [By the way|For your information], my name is {v}.
        I am {v}.
        Hi, I'm {v}.
        Hello, my name is {v}.
        You can call me {v}.
        I am called {v}.""",
        """Hey, I am {v}!
        Please call me {v}.""",
    ),
    "favourite colour": phrases(
        """[By the way,|Remember,|I tell you:|] my favourite colour is {v}.
        {v} is my favourite colour.
        I like {v} best of all colours.
        The colour I love most is {v}.
        Remember: my favourite colour is {v}.""",
        """For the record, my favourite colour is {v}.""",
    ),
    "home town": phrases(
        """[I live|I was born|My house is|My family lives] in {v}.
        {v} is my home town.
        I am from {v}.
        My home is in {v}.
        I come from {v}.
        My home town is {v}.""",
        """I was born in {v} and still live there.""",
    ),
    "dog's name": phrases(
        """My dog [is called|is named|answers to|has the name] {v}.
        {v} is [the name of my dog|my dog].
        We call our dog {v}.
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
    """[What is|What's|Tell me|Say|Name|Repeat] my {x}[?|.]
    Do you [remember|know|recall] my {x}?
    What did I [say|tell you] my {x} is?
    [Can|Could] you [tell me|repeat|say|recall] my {x}?
    [I forgot|Remind me of] my {x}.
    [Earlier I told you|I told you] my {x}. What is it?
    And what is my {x}?""",
    """Do you still know my {x}?
    Please tell me my {x} again.""",
)


_TELL_ANY = phrases(
    """[My|Remember: my|Note that my|Keep in mind that my|Please remember that my|For later: my|Listen, my|I tell you that my] {x} is {v}.
    My {x}: {v}.
    [{v} is|I have {v} as] my {x}.
    The {x} I have is {v}.
    I [say|call|made] my {x} {v}.""",
    """Just so you know, my {x} is {v}.""",
)
_TOLD_ANY = "I will remember that your {x} is {v}."


def _own_value(what: str, rng: Random, split: Split) -> str:
    if what == "lucky number":
        return str(rng.randint(1, 9999))
    if what == "favourite colour":
        return words.open_pick(words.COLOURS, rng, split)
    draw = {"home town": words.city, "secret word": words.any_word}.get(what, words.first_name)
    return draw(rng, split)


def _any_memory(rng: Random, split: Split) -> tuple[Turn, Turn]:
    what = words.noun(rng, split)
    value = (
        rng.choice((words.any_word, words.person, words.city))(rng, split)
        if rng.random() < 0.8
        else str(rng.randint(0, 9999))
    )
    tell = Turn(_TELL_ANY.pick(rng, split).format(x=what, v=value), _TOLD_ANY.format(x=what, v=value), value)
    return tell, Turn(_RECALL.pick(rng, split).format(x=what), f"Your {what} is {value}.", value)


def memory(rng: Random, split: Split) -> tuple[Turn, Turn]:
    """Return a turn that states something and a later turn of the same conversation that asks for it."""
    if rng.random() < 0.35:
        return _any_memory(rng, split)
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
    """[Here are some notes.|Here are my notes.|These are my notes.|Some facts:]~{t}~~[What is|What's|Tell me|Give me] the {x} of {n}[?|.]
    {t}~~[What is|Tell me|I want to know|Find] the {x} of {n}[?|.]
    [Read|Study|Use|Take] [these notes|this list|these lines] [and answer the question|to answer|].~{t}~[Question: what|What] is the {x} of {n}?
    [Notes|List|Facts|Data]:~{t}~~[Tell me|Give me|Name|Say] the {x} of {n}.
    What is the {x} of {n}? [Look at these notes|Use this list|The answer is in here]:~{t}
    [Find|Look up] the {x} of {n} [in these notes|in this list|below]:~{t}
    {t}~[Question|Q]: [What|what] is the {x} of {n}?~[Answer|A]:
    {t}~~[According to|From|In] [the notes|the list|this], what is the {x} of {n}?""",
    """Look at my notes:~{t}~~I need the {x} of {n}.""",
)


def notes(rng: Random, split: Split, rows: int | None = None) -> Turn:
    """Find one line among many that look alike."""
    names: list[str] = []
    size = rows or rng.choice((3, 3, 5, 5, 8, 8, 12, 12, 20, 30, 60))
    while len(names) < size:
        names = words.distinct([*names, words.first_name(rng, split)])
    picked = [(name, *rng.choice(_NOTE_KINDS)) for name in names]
    values = [words.open_pick(pool, rng, split) for _, _, pool in picked]
    lines = [f"The {what} of {name} is {value}." for (name, what, _), value in zip(picked, values, strict=True)]
    at = rng.randrange(size)
    user = _NOTES.pick(rng, split).format(t="\n".join(lines), x=picked[at][1], n=names[at])
    return Turn(user, lines[at], values[at])


_READ = phrases(
    """{t} {q}
    {t}~{q}
    Text: {t}~[Question: |]{q}
    {q}~{t}
    {q} [Here is the text|The text|Read this]: {t}
    [Someone wrote|I read this|A note says|Listen]: {t} {q}
    {t} [Question|My question|Now tell me]: {q}
    [Use|Read|Take] [this text|the text|the sentence]: {t}~{q}""",
    """{t}~~{q}
    Read this: {t} {q}""",
)
_ABOUT = (
    ("[Who is this about|Who is the text about|Which person is this|Who is in the text]?", "This is about {n}.", "n"),
    ("[Where does {n} work|Where is {n}|In which city does {n} work|In what place is {n}]?", "{n} works in {t}.", "t"),
    ("[What is the job of {n}|What does {n} do|What is {n}|Which job does {n} have]?", "{n} is a {j}.", "j"),
    ("[What does {n} have|What does {n} own|Which thing does {n} have|What belongs to {n}]?", "{n} has a {o}.", "o"),
    ("[What color is the {o}|What colour is the {o}|Which colour does the {o} have]?", "The {o} is {c}.", "c"),
)


def describe(rng: Random, split: Split) -> Turn:
    """Answer about a text given just before: who, where or what."""
    said = {
        "n": words.first_name(rng, split), "t": words.city(rng, split), "j": words.open_pick(words.JOBS, rng, split),
        "o": words.noun(rng, split), "c": words.open_pick(words.COLOURS, rng, split),
    }  # fmt: skip
    question, reply, key = rng.choice(_ABOUT)
    asked = rng.choice(variants(question)).format(**said)
    text = "{n} is a {j} in {t} and has a {c} {o}.".format(**said)
    return Turn(_READ.pick(rng, split).format(t=text, q=asked), reply.format(**said), said[key])


TASKS: dict[str, Task] = {
    "talk": talk, "name_all": name_all, "name_some": name_some, "notes": notes, "describe": describe,
}  # fmt: skip
