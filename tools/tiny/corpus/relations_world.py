"""List the relations of countries, colours, opposites, the calendar and units."""

from tools.tiny.corpus import things
from tools.tiny.corpus.base import phrases
from tools.tiny.corpus.relation import Relation, column, following, unit_table

_CAPITALS = column("capital")

WORLD_RELATIONS: tuple[Relation, ...] = (
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
        column("continent"),
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
        column("currency"),
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
        column("language"),
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
        following(things.DAYS, 1),
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
        following(things.DAYS, -1),
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
        following(things.MONTHS, 1),
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
        following(things.MONTHS, -1),
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
        unit_table(),
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
)
