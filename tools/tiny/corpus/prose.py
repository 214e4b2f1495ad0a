"""Draw plain prose: little stories, poems and instructions."""

from random import Random

from tools.tiny.corpus import words
from tools.tiny.corpus.base import Split, Task, Turn, phrases, with_article
from tools.tiny.corpus.things import DAYS, MONTHS

_OPENINGS = (
    "Once upon a time, there was {aa} named {n}.",
    "Long ago, in {p}, there lived {aa} called {n}.",
    "{n} was {aa} who lived in {p}.",
    "In {p} lived {aa}. Its name was {n}.",
    "There was once {aa} called {n} who had a {j} {o}.",
    "One {d} morning, {n} the {a} woke up very early.",
)
_WISHES = (
    "{n} loved to look at the {o} and dream of far places.",
    "Every day, {n} walked to {q} to look for {ao}.",
    "More than anything, {n} wanted to find {ao}.",
    "{n} had one wish: to see {q}.",
    "All the other animals said that {n} was too {j} to travel.",
    "{n} was very {m}, and everyone in {p} knew it.",
)
_TROUBLES = (
    "One day, the {o} was gone.",
    "One {d}, a great storm came over {p}.",
    "Then {n} heard a strange sound behind {q}.",
    "But the way to {q} was long and dark.",
    "One night, {n} met {ab} who was lost.",
    "On {d}, {ab} came and took the {o} away.",
    "Then the rain began and the path was gone.",
)
_FEELINGS = (
    "{n} felt {m}, but did not give up.",
    '"What shall I do now?" asked {n}.',
    "At first, {n} was afraid.",
    "{n} sat down and thought for a long time.",
    '"I can do this," said {n}, and took a deep breath.',
    "{n} looked left and right, but nobody was there.",
)
_HELPERS = (
    "Then {ab} named {f} came along and offered to help.",
    'A kind {b} called {f} said, "Follow me, I know the way."',
    "Luckily, {f} the {b} had {ao} that could help.",
    '"Do not worry," said {f} the {b}. "We will look together."',
    "Near {q}, {n} met {f}, a {j} {b} with a warm smile.",
)
_DEEDS = (
    "Together they walked to {q} and looked under every stone.",
    "They crossed the river, climbed the hill and came to {q}.",
    "They worked all night until the {o} was ready.",
    "{f} held the {o} while {n} opened the door.",
    "Side by side, they walked for {k} days.",
    "After {k} hours, they saw a light near {q}.",
    "They shared some bread and told each other stories.",
)
_ENDS = (
    "In the end, they found the {o} and went home happy.",
    "From that day on, {n} and {f} were the best of friends.",
    "{n} learned that a friend is worth more than any {o}.",
    "And they lived happily in {p} ever after.",
    "That evening, {n} fell asleep with a smile.",
    "Since then, everyone in {p} tells the story of {n} and {f}.",
    "And the {o} is still there today, near {q}.",
)
_PLACES = (
    "a small village", "the deep forest", "a quiet valley", "a house by the sea", "the old town", "a green garden", "a tall tower",
    "the snowy mountains", "a sunny island", "the big city", "a little farm", "an old castle", "the wide desert", "a cave by the lake",
)  # fmt: skip
_GOALS = (
    "the old bridge", "the blue lake", "the top of the hill", "the hidden garden", "the market", "the lighthouse", "the golden gate",
    "the edge of the forest", "the great tower", "the silver river", "the station", "the old mill", "the harbour", "the library",
)  # fmt: skip
_MOODS = "happy sad brave curious tired kind clever shy proud patient hungry careful"


def story_about(animal: str, name: str, rng: Random) -> str:
    """Draw a story of seven parts about the named animal."""
    friend, other = words.FIRST_NAMES.pick(rng, "train"), words.ANIMALS.pick(rng, "train")
    thing, adjective = words.NOUNS.pick(rng, "train"), words.ADJECTIVES.pick(rng, "train")
    filled = {
        "n": name, "a": animal, "aa": with_article(f"{adjective} {animal}"), "b": other, "ab": with_article(other), "f": friend,
        "o": thing, "ao": with_article(thing), "p": rng.choice(_PLACES), "q": rng.choice(_GOALS), "d": rng.choice(DAYS),
        "j": adjective, "m": rng.choice(_MOODS.split()), "k": rng.choice(("two", "three", "four", "five", "seven", "ten")),
    }  # fmt: skip
    parts = (_OPENINGS, _WISHES, _TROUBLES, _FEELINGS, _HELPERS, _DEEDS, _ENDS)
    picked = [
        sentence for part in parts for sentence in rng.sample(part, rng.choice((1, 1, 2)) if part is _DEEDS else 1)
    ]
    text = " ".join(sentence.format(**filled) for sentence in picked)
    return text if rng.random() < 0.7 else text.replace(f" {filled['k']} days", " many days")


_STORY = phrases(
    """Tell me a story.
    Tell me a short story.
    Write a short story.
    Write a story.
    Please tell me a story.
    Can you tell me a story?
    I want to hear a story.
    Tell me a bedtime story.""",
    """Could you tell me a little story?
    Please write a short story.""",
)
_STORY_ABOUT = phrases(
    """Tell me a story about {aa} named {n}.
    Write a short story about {aa} called {n}.
    Tell me a story about {n} the {a}.
    Write a story about {aa} with the name {n}.
    Can you write a story about {n}, {aa}?
    Please tell a story about {aa} whose name is {n}.""",
    """I want to hear a story about {aa} called {n}.
    Could you write a little story about {aa} named {n}?""",
)


def story(rng: Random, split: Split) -> Turn:
    """Draw a little story, which may be about a named animal."""
    animal, name = words.ANIMALS.pick(rng, split), words.first_name(rng, split)
    text = story_about(animal, name, rng)
    if rng.random() < 0.4:
        return Turn(_STORY.pick(rng, split), text, " the ")
    return Turn(_STORY_ABOUT.pick(rng, split).format(a=animal, aa=with_article(animal), n=name), text, name)


_RHYMES = (
    ("The {a} is sleeping in the sun,", "the long and busy day is done."), ("The moon is high, the night is deep,", "the little {a} is fast asleep."),
    ("A {j} {o} upon the shore,", "the waves come in and bring us more."), ("The {c} flowers start to grow,", "the wind is warm, the clouds are slow."),
    ("I saw a {a} beside a tree,", "it turned its head and looked at me."), ("The rain is falling on the town,", "it paints the streets in grey and brown."),
    ("My {o} is old, my {o} is good,", "I carved it once from garden wood."), ("The stars are bright, the sky is wide,", "a {a} is walking by my side."),
    ("The bells will ring, the birds will sing,", "and winter turns again to spring."), ("A {c} kite is flying high,", "it dances in the summer sky."),
)  # fmt: skip
_POEM = phrases(
    """Write a poem.
    Write a short poem.
    Tell me a poem.
    Can you write a poem?
    Please write a little poem.
    Make up a poem.
    Give me a poem with four lines.
    Write a poem about nature.""",
    """Could you write a short poem for me?
    I would like to read a poem.""",
)


def poem_text(rng: Random) -> str:
    """Draw two or three rhymed couplets."""
    filled = {
        "a": words.ANIMALS.pick(rng, "train"), "o": words.NOUNS.pick(rng, "train"),
        "j": words.ADJECTIVES.pick(rng, "train"), "c": words.COLOURS.pick(rng, "train"),
    }  # fmt: skip
    couplets = rng.sample(_RHYMES, rng.choice((2, 2, 3)))
    return "\n".join(line.format(**filled) for couplet in couplets for line in couplet)


def poem(rng: Random, split: Split) -> Turn:
    """Draw a short poem."""
    return Turn(_POEM.pick(rng, split), poem_text(rng), ",\n")


_STEPS = {
    "make tea": ("Boil some water.", "Put a tea bag into a cup.", "Pour the hot water into the cup.", "Wait for three minutes.", "Take out the tea bag and enjoy."),
    "boil an egg": ("Fill a pot with water.", "Bring the water to a boil.", "Put the egg into the water.", "Wait for eight minutes.", "Cool the egg in cold water and peel it."),
    "make a sandwich": ("Take two slices of bread.", "Spread butter on one slice.", "Add cheese and salad.", "Put the other slice on top.", "Cut the sandwich in half."),
    "plant a tree": ("Choose a sunny place.", "Dig a deep hole.", "Set the tree into the hole.", "Fill the hole with soil.", "Water the tree well."),
    "wash a car": ("Rinse the car with water.", "Mix soap and water in a bucket.", "Wash the car with a sponge.", "Rinse off the soap.", "Dry the car with a towel."),
    "write a letter": ("Take paper and a pen.", "Write the date at the top.", "Greet the reader.", "Write what you want to say.", "Sign your name at the end."),
    "make a salad": ("Wash the vegetables.", "Cut them into small pieces.", "Put them into a bowl.", "Add oil, salt and lemon juice.", "Mix everything well."),
    "brush your teeth": ("Put toothpaste on the brush.", "Brush the outside of all teeth.", "Brush the inside of all teeth.", "Spit out the toothpaste.", "Rinse your mouth with water."),
    "bake bread": ("Mix flour, water, salt and yeast.", "Knead the dough for ten minutes.", "Let the dough rise for an hour.", "Form a loaf.", "Bake it for forty minutes."),
    "learn a language": ("Learn a few new words every day.", "Listen to people who speak it.", "Read simple books.", "Speak as often as you can.", "Do not be afraid of mistakes."),
    "fix a bug": ("Read the error message.", "Write a test that shows the bug.", "Find the line that is wrong.", "Change it.", "Run all tests again."),
    "start a server": ("Install the program.", "Choose a model.", "Start the server with one command.", "Wait until it is ready.", "Send it a request."),
}  # fmt: skip
_HOW = phrases(
    """How do I {x}?
    How do you {x}?
    How can I {x}?
    Tell me how to {x}.
    Explain how to {x}.
    Give me the steps to {x}.
    What are the steps to {x}?
    I want to {x}. What do I do?""",
    """Can you tell me how to {x}?
    Please explain how I can {x}.""",
)


def steps(rng: Random, split: Split) -> Turn:
    """Draw numbered instructions."""
    task = rng.choice(tuple(_STEPS))
    reply = "\n".join(f"{i}. {step}" for i, step in enumerate(_STEPS[task], 1))
    return Turn(_HOW.pick(rng, split).format(x=task), reply, reply, "same")


_DIARY = (
    "Today is {d}, and the weather is fine.", "In {m}, I visited {c} with {n}.", "{n} gave me {ao}, and I gave {n} {ao2}.",
    "We ate bread and {f} in the garden.", "On {d}, we took the train to {c}.", "The {a} of my friend {n} is very clever.",
    "It rained all day, so we stayed at home and read books.", "The market in {c} was full of people.", "I found {ao} under the table.",
    "{n} works as a {w} in {c}.", "Tomorrow I will write a letter to {n}.", "We sang songs until late at night.",
    "The sun went down behind the mountains.", "{n} told me a story about {aa}.", "I bought {ao} and a bag of {f} for {k} coins.",
    "My favourite colour is {col}, but {n} likes every colour.", "In the evening, the streets of {c} are quiet.",
)  # fmt: skip


def diary(rng: Random) -> str:
    """Draw loose sentences about days, places and people."""
    name, town = words.FIRST_NAMES.pick(rng, "train"), words.CITIES.pick(rng, "train")
    filled = {
        "d": rng.choice(DAYS), "m": rng.choice(MONTHS), "c": town, "n": name, "f": words.FRUITS.pick(rng, "train"),
        "ao": with_article(words.NOUNS.pick(rng, "train")), "ao2": with_article(words.NOUNS.pick(rng, "train")),
        "a": words.ANIMALS.pick(rng, "train"), "aa": with_article(words.ANIMALS.pick(rng, "train")),
        "w": words.JOBS.pick(rng, "train"), "k": rng.randint(2, 99), "col": words.COLOURS.pick(rng, "train"),
    }  # fmt: skip
    return " ".join(s.format(**filled) for s in rng.sample(_DIARY, rng.randint(2, 10)))


TASKS: dict[str, Task] = {"story": story, "poem": poem, "steps": steps}
