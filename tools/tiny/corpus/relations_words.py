"""List the relations of animals, words, numbers, books, jobs, planets and definitions."""

from tools.tiny.corpus import things
from tools.tiny.corpus.base import phrases
from tools.tiny.corpus.relation import Relation, following

WORD_RELATIONS: tuple[Relation, ...] = (
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
        following(things.ALPHABET, 1, ring=False),
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
        following(things.ALPHABET, -1, ring=False),
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
