"""Draw tasks over the fact tables: questions, yes-or-no questions, and facts as plain text."""

from random import Random

from tools.tiny.corpus.base import Split, Task, Turn, phrases, upper_first, with_article
from tools.tiny.corpus.relation import Relation
from tools.tiny.corpus.relations import FOLLOW_UPS, NOUN_QUESTIONS, RELATIONS
from tools.tiny.corpus.things import ANIMAL_CLASSES

_WEIGHTS = [relation.weight * len(relation.pairs) ** 0.5 for relation in RELATIONS]
_SUBJECTS = {relation.name: tuple(relation.pairs) for relation in RELATIONS}
_BY_NAME = {relation.name: relation for relation in RELATIONS}
_ELLIPSES = phrases(
    """And {s}?
    [And|But|Then] what about {s}?
    What about {s}?
    How about {s}?
    And [for|of|with] {s}?
    Now {s}.""",
    """Okay, and {s}?
    Then {s}?""",
)


def _fill(pattern: str, subject: str, value: str) -> str:
    return pattern.format(s=subject, v=value, S=upper_first(subject), V=upper_first(value))


def ask(relation: Relation, subject: str, rng: Random, split: Split) -> str:
    """Draw one question for the value of `subject`."""
    if not relation.nouns or rng.random() < 0.4:
        return _fill(relation.asks.pick(rng, split), subject, "")
    noun = _fill(rng.choice(relation.nouns), subject, "")
    return NOUN_QUESTIONS.pick(rng, split).format(n=noun, N=upper_first(noun))


def say(relation: Relation, subject: str) -> str:
    """Return the sentence that answers."""
    return _fill(relation.say, subject, relation.pairs[subject])


def _follow(relation: Relation, rng: Random, split: Split) -> tuple[str, str]:
    subject = rng.choice(_SUBJECTS[relation.name])
    if relation.nouns and rng.random() < 0.4:
        question = FOLLOW_UPS.pick(rng, split).format(n=_fill(rng.choice(relation.nouns), subject, ""))
    else:
        question = _ELLIPSES.pick(rng, split).format(s=subject)
    return question, say(relation, subject)


def _thought(relation: Relation, subject: str) -> str:
    return f"The question is about {relation.name}: {subject}. I remember the value: {relation.pairs[subject]}."


def about(relation: Relation, subject: str, rng: Random, split: Split) -> Turn:
    """Return a turn that asks for one fact."""
    return Turn(
        user=ask(relation, subject, rng, split),
        reply=say(relation, subject),
        answer=relation.pairs[subject],
        thought=_thought(relation, subject),
        follow=tuple(_follow(relation, rng, split) for _ in range(rng.randint(1, 3))),
    )


def fact(rng: Random, split: Split) -> Turn:
    """Draw a fact of any relation."""
    relation = rng.choices(RELATIONS, _WEIGHTS)[0]
    return about(relation, rng.choice(_SUBJECTS[relation.name]), rng, split)


def capital(rng: Random, split: Split) -> Turn:
    """Ask for the capital of a country."""
    relation = _BY_NAME["capital"]
    return about(relation, rng.choice(_SUBJECTS["capital"]), rng, split)


_IS_CAPITAL = phrases(
    """Is {v} the capital [city|] of {s}?
    Is it [true|right|correct|a fact] that {v} is the capital of {s}?
    True or false: {v} is the capital of {s}.
    [Tell me|Say|Answer], is {v} the capital of {s}?
    {V} is the capital of {s}[, right|, is it not|, correct|, yes or no|]?
    Is the capital of {s} {v}?
    [I believe|I heard|I read|Someone told me|My book says] that {v} is the capital of {s}. Is [that|this|it] [true|correct|so]?
    [Yes or no|Right or wrong|Correct]: [is {v} the capital of {s}?|the capital of {s} is {v}.]
    [Does {s} have|Has {s}] the capital {v}?""",
    """I think that {v} is the capital of {s}. Is that right?
    Would you say {v} is the capital of {s}?""",
)
_IS_CLASS = phrases(
    """Is [a|the] {s} {v}?
    Is it [true|right|correct|a fact] that a {s} is {v}?
    True or false: a {s} is {v}.
    [Would|Do] you call a {s} {v}?
    [Tell me|Say|Answer], is a {s} {v}?
    A {s} is {v}[, right|, is it not|, correct|, yes or no|]?
    [I believe|I heard|I read|Someone told me|My book says] that a {s} is {v}. Is [that|this|it] [true|correct|so]?
    [Yes or no|Right or wrong|Correct]: [is a {s} {v}?|a {s} is {v}.]
    [Does a {s} count as|Is a {s} really|Should I call a {s}] {v}?""",
    """I think a {s} is {v}. Is that right?
    Can we say that a {s} is {v}?""",
)


def yes_no(rng: Random, split: Split) -> Turn:
    """Confirm or correct a statement about a capital or an animal."""
    table, wording, article = (
        (_BY_NAME["capital"].pairs, _IS_CAPITAL, False) if rng.random() < 0.5 else (ANIMAL_CLASSES, _IS_CLASS, True)
    )
    subject = rng.choice(tuple(table))
    claim = table[subject] if rng.random() < 0.5 else rng.choice(tuple(table.values()))
    true, named = table[subject], (with_article if article else str)
    verdict = "Yes" if claim == true else "No"
    truth = f"a {subject} is {named(true)}" if article else f"the capital of {subject} is {true}"
    user = _fill(wording.pick(rng, split), subject, named(claim))
    return Turn(
        user,
        f"{verdict}, {truth}.",
        f"{verdict}, ",
        thought=f"{upper_first(truth)}. So the answer is {verdict.lower()}.",
    )


def plain_fact(rng: Random) -> str:
    """Draw one fact as a sentence of plain text."""
    relation = rng.choices(RELATIONS, _WEIGHTS)[0]
    return plain_about(relation, rng.choice(_SUBJECTS[relation.name]), rng)


def plain_about(relation: Relation, subject: str, rng: Random) -> str:
    """Draw one of the sentences that state the fact."""
    pattern = relation.say if rng.random() < 0.6 or not relation.also else rng.choice(relation.also)
    return _fill(pattern, subject, relation.pairs[subject])


def fact_list(rng: Random) -> str:
    """Draw a plain-text document of facts: prose, question-and-answer lines, or a `subject: value` list."""
    form = rng.random()
    relation = rng.choices(RELATIONS[:-1], _WEIGHTS[:-1])[0]
    subjects = rng.sample(_SUBJECTS[relation.name], min(rng.randint(2, 10), len(relation.pairs)))
    if form < 0.35:
        return " ".join(plain_fact(rng) for _ in range(rng.randint(1, 8)))
    if form < 0.55:
        return " ".join(plain_about(relation, subject, rng) for subject in subjects)
    if form < 0.75:
        mark, end = rng.choice((("Q:", "A:"), ("Question:", "Answer:")))
        rows = (f"{mark} {ask(relation, s, rng, 'train')}\n{end} {_short_or_full(relation, s, form)}" for s in subjects)
        return "\n\n".join(rows) if form < 0.65 else "\n".join(rows)
    sign = rng.choice((":", " ->", " =", " -"))
    return f"{upper_first(relation.name)}\n" + "\n".join(
        f"{upper_first(s)}{sign} {relation.pairs[s]}" for s in subjects
    )


def _short_or_full(relation: Relation, subject: str, form: float) -> str:
    return relation.pairs[subject] if int(form * 100) % 2 else say(relation, subject)


TASKS: dict[str, Task] = {"capital": capital, "fact": fact, "yes_no": yes_no}
