"""List all facts that the model learns as relations, and the questions that fit any relation."""

from tools.tiny.corpus.base import phrases
from tools.tiny.corpus.relation import Relation
from tools.tiny.corpus.relations_words import WORD_RELATIONS
from tools.tiny.corpus.relations_world import WORLD_RELATIONS

RELATIONS: tuple[Relation, ...] = (*WORLD_RELATIONS, *WORD_RELATIONS)

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
