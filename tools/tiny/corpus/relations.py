"""Every fact the model learns, as relations: a table of subject-value pairs and the ways to ask for the value."""

from dataclasses import dataclass

from tools.tiny.corpus import things
from tools.tiny.corpus.base import Phrases, phrases
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


def _column(field: str) -> dict[str, str]:
    return {country.name: getattr(country, field) for country in COUNTRIES if getattr(country, field)}


def _following(items: tuple[str, ...] | str, step: int, ring: bool = True) -> dict[str, str]:
    size = len(items)
    return {item: items[(i + step) % size] for i, item in enumerate(items) if ring or 0 <= i + step < size}


def _unit_table() -> dict[str, str]:
    return {" in ".join(subject.split("|")): value for subject, value in things.UNITS.items()}


_CAPITALS = _column("capital")

RELATIONS: tuple[Relation, ...] = (
    Relation(
        "capital",
        _CAPITALS,
        ("the capital of {s}", "the capital of {s}", "the capital city of {s}", "{s}'s capital"),
        phrases(
            """Which city is the capital of {s}?
            What city is the capital of {s}?
            Which city is {s}'s capital?
            What is the name of the capital of {s}?
            {S}: what is its capital?
            I am travelling to {s}. What is its capital?
            Name the capital of {s}.
            Capital of {s}?
            In {s}, which city is the capital?
            What's the capital city called in {s}?
            {S} has which capital?
            Which capital does {s} have?
            I am learning about {s}. Which city is its capital?""",
            """Name the city that is the capital of {s}.
            Do you know which city is the capital of {s}?
            What is the name of {s}'s capital city?
            My friend lives in {s}. What is the capital there?""",
        ),
        "The capital of {s} is {v}.",
        ("{V} is the capital of {s}.", "{S}'s capital is {v}.", "The capital city of {s} is {v}."),
        weight=5,
    ),
    Relation(
        "country of a capital",
        {capital: name for name, capital in _CAPITALS.items() if capital not in name},
        (),
        phrases(
            """Which country has {s} as its capital?
            {S} is the capital of which country?
            What country is {s} the capital of?
            Of which country is {s} the capital?
            {S} is the capital of what country?
            Whose capital is {s}?
            {s} is a capital. Of which country?
            Tell me the country whose capital is {s}.""",
            """Name the country that has {s} as its capital.
            The capital is {s}. Which country is it?
            Which country is {s} the capital city of?""",
        ),
        "{S} is the capital of {v}.",
        weight=1.5,
    ),
    Relation(
        "continent",
        _column("continent"),
        ("the continent of {s}",),
        phrases(
            """Which continent is {s} in?
            What continent is {s} in?
            On which continent is {s}?
            In which continent is {s}?
            Where in the world is {s}?
            {S} is in which continent?
            {S} is on what continent?
            In what part of the world is {s}?
            What continent does {s} belong to?
            Where is {s}?
            Which continent does {s} lie in?""",
            """Tell me which continent {s} is in.
            To which continent does {s} belong?
            On what continent can I find {s}?""",
        ),
        "{S} is in {v}.",
        ("{S} is a country in {v}.", "{S} lies in {v}."),
        weight=1.5,
    ),
    Relation(
        "currency",
        _column("currency"),
        ("the currency of {s}", "{s}'s currency"),
        phrases(
            """What money is used in {s}?
            Which currency is used in {s}?
            What currency does {s} use?
            Which currency does {s} have?
            How do people pay in {s}?
            What is the money of {s} called?
            I am going to {s}. Which currency do I need?""",
            """What currency do people use in {s}?
            Which money do I need in {s}?
            What is the currency called in {s}?""",
        ),
        "The currency of {s} is the {v}.",
        ("In {s} people pay with the {v}.", "{S} uses the {v}."),
    ),
    Relation(
        "language",
        _column("language"),
        ("the main language of {s}", "the language of {s}"),
        phrases(
            """Which language do people speak in {s}?
            What language is spoken in {s}?
            Which language is spoken in {s}?
            What do people speak in {s}?
            What language do they speak in {s}?
            I am moving to {s}. Which language should I learn?""",
            """What language do people speak in {s}?
            In {s}, which language is spoken?
            Which language should I learn for {s}?""",
        ),
        "The main language of {s} is {v}.",
        ("People in {s} speak {v}.", "In {s} most people speak {v}."),
    ),
    Relation(
        "colour",
        things.COLOURS,
        ("the colour of {s}", "the color of {s}"),
        phrases(
            """What colour is {s}?
            What color is {s}?
            Which colour is {s}?
            Which color is {s}?
            {S} is what colour?
            What color does {s} have?
            What colour does {s} have?
            {S} is usually what color?
            I want to paint {s}. Which colour do I need?""",
            """What is the usual colour of {s}?
            Which colour does {s} have?
            {S}: what colour is it?
            I am drawing {s}. What color should I use?""",
        ),
        "{S} is {v}.",
        ("The colour of {s} is {v}.", "The color of {s} is {v}."),
        weight=2,
    ),
    Relation(
        "opposite",
        things.OPPOSITES,
        ('the opposite of "{s}"', "the opposite of {s}", "the antonym of {s}", "the opposite of the word {s}"),
        phrases(
            """What is the reverse of {s}?
            Which word means the opposite of {s}?
            If it is not {s}, what is it? Give the opposite.
            {S} is the opposite of what?
            Give me a word that means the opposite of {s}.
            Opposite of {s}?""",
            """Which word is the opposite of {s}?
            Find the opposite of {s}.
            {S} and its opposite: what is the other word?""",
        ),
        "The opposite of {s} is {v}.",
        ("{S} is the opposite of {v}.",),
        weight=2,
    ),
    Relation(
        "day after",
        _following(things.DAYS, 1),
        ("the day after {s}", "the next day after {s}"),
        phrases(
            """Which day comes after {s}?
            What day comes after {s}?
            What day follows {s}?
            If today is {s}, what day is tomorrow?
            Today is {s}. What day is tomorrow?
            Which day is after {s}?""",
            """Which day follows {s}?
            It is {s} today. Which day will it be tomorrow?
            What weekday comes right after {s}?""",
        ),
        "The day after {s} is {v}.",
        ("{V} comes after {s}.",),
    ),
    Relation(
        "day before",
        _following(things.DAYS, -1),
        ("the day before {s}",),
        phrases(
            """Which day comes before {s}?
            What day comes before {s}?
            If today is {s}, what day was yesterday?
            Today is {s}. What day was yesterday?
            Which day is before {s}?
            What day is just before {s}?""",
            """It is {s} today. Which day was it yesterday?
            Which weekday comes right before {s}?
            What day was it one day before {s}?""",
        ),
        "The day before {s} is {v}.",
    ),
    Relation(
        "month after",
        _following(things.MONTHS, 1),
        ("the month after {s}", "the next month after {s}"),
        phrases(
            """Which month comes after {s}?
            What month comes after {s}?
            What month follows {s}?
            If this month is {s}, what is next month?
            Which month is after {s}?""",
            """Which month follows {s}?
            It is {s} now. Which month is next?
            What month comes right after {s}?""",
        ),
        "The month after {s} is {v}.",
        ("{V} comes after {s}.",),
    ),
    Relation(
        "month before",
        _following(things.MONTHS, -1),
        ("the month before {s}",),
        phrases(
            """Which month comes before {s}?
            What month comes before {s}?
            If this month is {s}, what was last month?
            Which month is before {s}?
            What month is just before {s}?""",
            """It is {s} now. Which month was it before?
            Which month comes right before {s}?
            What was the month before {s}?""",
        ),
        "The month before {s} is {v}.",
    ),
    Relation(
        "month number",
        dict(zip(things.ORDINALS, things.MONTHS, strict=True)),
        ("the {s} month of the year", "the {s} month"),
        phrases(
            """Which month is the {s} of the year?
            Which month is the {s} one?
            What month is number {s}? I mean the {s} month.
            In a year, which month is {s}?""",
            """Which is the {s} month?
            What do we call the {s} month of the year?""",
        ),
        "The {s} month of the year is {v}.",
    ),
    Relation(
        "days in a month",
        {month: str(days) for month, days in zip(things.MONTHS, things.MONTH_LENGTHS, strict=True)},
        ("the number of days in {s}",),
        phrases(
            """How many days are in {s}?
            How many days does {s} have?
            How many days are there in {s}?
            How long is {s} in days?
            {S} has how many days?""",
            """How many days has {s}?
            Count the days of {s}. How many are there?""",
        ),
        "{S} has {v} days.",
    ),
    Relation(
        "units",
        _unit_table(),
        ("the number of {s}",),
        phrases(
            """How many {s}?
            How many {s} are there?
            Do you know how many {s} there are?
            Tell me how many {s} there are.
            I want to know how many {s} there are.
            Say how many {s} there are.
            There are how many {s}?""",
            """Can you say how many {s} there are?
            Exactly how many {s} are there?
            I forgot how many {s} there are. Can you help?""",
        ),
        "There are {v} {s}.",
        weight=1.5,
    ),
    Relation(
        "sound",
        things.SOUNDS,
        ("the sound of {s}", "the sound that {s} makes"),
        phrases(
            """What sound does {s} make?
            What does {s} say?
            Which sound does {s} make?
            How does {s} sound?
            What noise does {s} make?""",
            """Which noise does {s} make?
            What noise would I hear from {s}?
            Imitate {s}. What does it say?""",
        ),
        "{S} says {v}.",
    ),
    Relation(
        "young",
        things.YOUNG,
        ("the name of a baby {s}", "the word for a young {s}"),
        phrases(
            """What is a baby {s} called?
            What do you call a baby {s}?
            What is a young {s} called?
            What do we call a young {s}?
            How is a baby {s} called?""",
            """What do people call a baby {s}?
            A baby {s} is called what?
            Which word means a young {s}?""",
        ),
        "A baby {s} is called a {v}.",
    ),
    Relation(
        "legs",
        things.LEGS,
        ("the number of legs of {s}",),
        phrases(
            """How many legs does {s} have?
            How many legs has {s}?
            {S} has how many legs?
            On how many legs does {s} stand?
            Count the legs of {s}.""",
            """How many legs are there on {s}?
            How many legs can I count on {s}?""",
        ),
        "{S} has {v} legs.",
    ),
    Relation(
        "class of animal",
        things.ANIMAL_CLASSES,
        ("the class of animal of the {s}", "the animal group of the {s}"),
        phrases(
            """What kind of animal is a {s}?
            What type of animal is a {s}?
            Which class of animal is a {s}?
            Which group of animals does the {s} belong to?
            What is a {s}: mammal, bird, fish, reptile, amphibian or insect?
            Is a {s} a mammal, a bird, a fish or something else?""",
            """What sort of animal is a {s}?
            Which type of animal is a {s}?
            To which group of animals does the {s} belong?""",
        ),
        "The {s} is in this group of animals: {v}.",
    ),
    Relation(
        "home",
        things.HOMES,
        ("the home of {s}",),
        phrases(
            """Where does {s} live?
            What does {s} live in?
            Where is {s} at home?
            In what place does {s} live?
            Where can I find {s}?""",
            """In which place does {s} live?
            Where would {s} live?""",
        ),
        "{S} lives in {v}.",
    ),
    Relation(
        "plural",
        things.PLURALS,
        ('the plural of "{s}"', "the plural of {s}", "the plural form of {s}"),
        phrases(
            """One {s}, two what?
            How do you write more than one {s}?
            What is the plural of the word {s}?
            Which word is the plural of {s}?
            There is one {s}. Now there are two of them: two what?""",
            """Give the plural form of the noun {s}.
            What do you call more than one {s}?""",
        ),
        "The plural of {s} is {v}.",
    ),
    Relation(
        "past tense",
        things.PAST_TENSES,
        ('the past tense of "{s}"', "the past tense of {s}", "the simple past of {s}", "the past form of {s}"),
        phrases(
            """Today I {s}. Yesterday I what?
            What is the past tense of the verb {s}?
            Put the verb {s} into the past tense.
            Which word is the past tense of {s}?
            Past tense of {s}?""",
            """Today they {s}. Yesterday they what?
            Give the past form of the verb {s}.""",
        ),
        "The past tense of {s} is {v}.",
    ),
    Relation(
        "symbol",
        things.SYMBOLS,
        ("the chemical symbol for {s}", "the symbol of {s}", "the chemical symbol of {s}"),
        phrases(
            """Which chemical symbol does {s} have?
            What symbol does {s} have?
            How do chemists write {s}?
            Which symbol stands for {s}?
            What is the symbol for the element {s}?""",
            """What symbol stands for {s}?
            Which letters are the chemical symbol of {s}?""",
        ),
        "The chemical symbol for {s} is {v}.",
    ),
    Relation(
        "sides",
        things.SIDES,
        ("the number of sides of a {s}",),
        phrases(
            """How many sides does a {s} have?
            How many sides has a {s}?
            How many corners does a {s} have?
            A {s} has how many sides?
            Count the sides of a {s}.""",
            """How many sides are there in a {s}?
            How many edges does a {s} have?""",
        ),
        "A {s} has {v} sides.",
    ),
    Relation(
        "author",
        things.AUTHORS,
        ("the author of {s}", 'the author of "{s}"', "the writer of {s}"),
        phrases(
            """Who wrote {s}?
            Who is the author of {s}?
            Who is the writer of {s}?
            By whom is {s}?
            {S} was written by whom?
            Which author wrote {s}?
            Who wrote the book {s}?""",
            """Which writer wrote {s}?
            {S} is a book by whom?
            Do you know who wrote {s}?""",
        ),
        "{S} was written by {v}.",
        ("{V} wrote {s}.", "The author of {s} is {v}."),
    ),
    Relation(
        "job",
        things.JOBS,
        ("the name for someone who {s}", "the word for a person who {s}"),
        phrases(
            """Who {s}?
            What do you call a person who {s}?
            What is a person who {s} called?
            What do we call someone who {s}?
            Someone {s}. What is this person?
            Which person {s}?""",
            """Someone who {s} is called what?
            What is the job of a person who {s}?""",
        ),
        "A person who {s} is called {v}.",
    ),
    Relation(
        "planet",
        dict(zip(things.ORDINALS, things.PLANETS, strict=False)),
        ("the {s} planet from the Sun", "the {s} planet"),
        phrases(
            """Which planet is the {s} from the Sun?
            Which planet is {s} in the solar system?
            Counting from the Sun, which planet is {s}?""",
            """What planet is the {s} from the Sun?
            Starting at the Sun, what is the {s} planet?""",
        ),
        "The {s} planet from the Sun is {v}.",
    ),
    Relation(
        "letter after",
        _following(things.ALPHABET, 1, ring=False),
        ("the letter after {s}", "the letter after {s} in the alphabet", "the next letter after {s}"),
        phrases(
            """Which letter comes after {s}?
            What letter comes after {s}?
            What letter follows {s}?
            In the alphabet, what comes after {s}?""",
            """Which letter follows {s}?
            In the alphabet, which letter is right after {s}?""",
        ),
        "The letter after {s} is {v}.",
    ),
    Relation(
        "letter before",
        _following(things.ALPHABET, -1, ring=False),
        ("the letter before {s}", "the letter before {s} in the alphabet"),
        phrases(
            """Which letter comes before {s}?
            What letter comes before {s}?
            What letter is before {s}?
            In the alphabet, what comes before {s}?""",
            """Which letter is right before {s}?
            In the alphabet, which letter stands before {s}?""",
        ),
        "The letter before {s} is {v}.",
    ),
    Relation(
        "number in words",
        {str(n): things.number_word(n) for n in range(101)},
        ("the number {s} in words", "the word for {s}"),
        phrases(
            """How do you write {s} in words?
            Write {s} in words.
            Spell out the number {s}.
            How is {s} written in words?
            Write the number {s} as a word.
            {s} in words?""",
            """Write out {s} in words.
            How do you spell the number {s}?""",
        ),
        "The number {s} in words is {v}.",
    ),
    Relation(
        "number in digits",
        {things.number_word(n): str(n) for n in range(101)},
        ("the number {s} in digits",),
        phrases(
            """How do you write {s} in digits?
            Write {s} in digits.
            Write {s} as a number.
            Which number is {s}?
            {S} in digits?
            How is {s} written in digits?""",
            """Write out {s} in digits.
            Write the number {s} with digits.""",
        ),
        "The number {s} in digits is {v}.",
    ),
    Relation(
        "Roman numeral",
        {str(n): things.roman(n) for n in range(1, 51)},
        ("the Roman numeral for {s}", "the number {s} in Roman numerals"),
        phrases(
            """How do you write {s} in Roman numerals?
            Write {s} in Roman numerals.
            Write {s} as a Roman numeral.
            How did the Romans write {s}?""",
            """How is {s} written in Roman numerals?
            Write the number {s} the Roman way.""",
        ),
        "The Roman numeral for {s} is {v}.",
    ),
    Relation(
        "trivia",
        things.TRIVIA,
        ("{s}",),
        phrases(
            """Which is {s}?
            Quiz: {s}?
            {S} is what?
            Question for you: what is {s}?""",
            """Trivia time: what is {s}?
            {S}: what is it?""",
        ),
        "{S} is {v}.",
        weight=2,
    ),
    Relation(
        "definition",
        things.DEFINITIONS,
        (),
        phrases(
            """What is {s}?
            What's {s}?
            Explain what {s} is.
            What does {s} mean?
            Can you explain what {s} is?
            Tell me what {s} is.
            Define {s}.
            Please explain {s}.
            Describe {s} in one sentence.
            I do not know what {s} is. Can you explain it?
            How would you describe {s}?
            Give me a definition of {s}.""",
            """Could you explain what {s} is?
            Explain {s} to me.
            What exactly is {s}?
            Please tell me what {s} is.""",
        ),
        "{S} is {v}.",
        weight=2,
    ),
)

NOUN_QUESTIONS = phrases(
    """What is {n}?
    What is {n}?
    What is {n}?
    What's {n}?
    Tell me {n}.
    Please tell me {n}.
    Name {n}.
    Do you know {n}?
    Can you tell me {n}?
    Can you name {n}?
    Could you tell me {n}?
    Could you tell me what {n} is?
    I want to know {n}.
    I would like to know {n}.
    I'd like to know {n}.
    I need to know {n}.
    Give me {n}.
    Please give me {n}.
    Give me {n}, please.
    {N}?
    {N} is what?
    {N} please
    {N} is
    Remind me: what is {n}?
    I forgot {n}. What is it?
    Help me with my homework: what is {n}?
    Quick question: what is {n}?
    What would you say is {n}?
    My teacher asked me for {n}. What should I answer?
    Hello! What is {n}?
    Hi, what is {n}?
    Hi there! Can you tell me {n}?
    Question: What is {n}?
    Question: what is {n}?~Answer:
    Answer this question: What is {n}?
    Fill in the blank: {n} is ___.
    Complete the sentence: {N} is
    Do you happen to know {n}?
    Please answer: what is {n}?
    Tell me what {n} is.
    I have a question. What is {n}?
    What is {n}? Thank you!
    Excuse me, what is {n}?""",
    """Would you happen to know {n}?
    I was wondering what {n} is.
    Hey, what is {n} again?
    Let me know {n}.
    Can you remind me what {n} is?
    Here is my question: what is {n}?
    Could you please name {n}?
    What do you think is {n}?""",
)
"""Questions that fit any noun form {n} of a relation."""

FOLLOW_UPS = phrases(
    """And {n}?
    What about {n}?
    And what is {n}?
    How about {n}?
    Now tell me {n}.
    Next: {n}?""",
    """Okay, and {n}?
    And now {n}?""",
)
"""Short second questions about another subject of the same relation."""
