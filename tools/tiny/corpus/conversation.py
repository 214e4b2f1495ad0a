"""Compose turns into whole training documents: chats of one or many turns, styled, thinking or tool-calling, and plain
text."""

import json
from dataclasses import replace
from random import Random

from tools.tiny.chat import END_OF_TEXT, Message, Segment, render
from tools.tiny.corpus import arithmetic, extraction, facts, lists, prose, smalltalk
from tools.tiny.corpus.base import Split, Task, Turn, phrases
from tools.tiny.corpus.python_docs import python_docs
from tools.tiny.corpus.tool_calls import idle_tools, tool_case
from tools.tiny.corpus.words import ANIMALS, first_name, noun

TASKS: dict[str, Task] = {
    **facts.TASKS, **arithmetic.TASKS, **lists.TASKS, **extraction.TASKS, **prose.TASKS, **smalltalk.TASKS,
}  # fmt: skip
"""All tasks that are one turn, by name."""

WEIGHTS: dict[str, float] = {
    "capital": 6, "fact": 18, "yes_no": 4, "add": 7, "subtract": 4, "multiply": 3, "add_large": 2.5, "compare": 2,
    "word_problem": 3, "count": 1.5, "sort_numbers": 5, "sort_words": 9, "pick_item": 4, "reformat": 5, "repeat": 6,
    "repeat_times": 1, "repeat_long": 0.7, "extract": 28, "sheet": 7, "make_hero": 1, "make_record": 1.5, "story": 3,
    "poem": 1, "steps": 1, "talk": 3, "name_all": 1.5, "name_some": 1, "notes": 3, "describe": 3,
}  # fmt: skip
"""How often each task is drawn for a turn of a chat."""

_NAMES, _ODDS = tuple(WEIGHTS), tuple(WEIGHTS.values())
_BRIEF_TASKS = ("capital", "fact", "fact", "add", "subtract", "multiply", "compare", "word_problem")
_LOOSE_TASKS = frozenset(
    ("capital", "fact", "yes_no", "add", "subtract", "multiply", "talk", "name_all", "story", "poem")
)
"""Tasks whose question may lose its capitals or its final mark."""

SYSTEMS = phrases(
    """You are a helpful assistant.
    You are a helpful assistant.
    You are tiny, a small language model.
    You are a friendly assistant.
    You are a helpful and honest assistant.
    You are an AI assistant. Answer the questions of the user.
    You are a helpful, polite and honest assistant that answers in full sentences.
    Answer the questions of the user.
    You are a teacher. Help the student.
    You are a polite assistant.
    Be helpful.
    You are a chatbot.
    You are an expert who answers questions about the world.
    You are a kind robot who loves to help people.
    Answer clearly and correctly.
    You answer questions. Do not lie.
    Today is a sunny day. You help the user with all kinds of questions.
    You are a tutor for children. Use simple words.
    You are the assistant of a small company. Help every customer as well as you can.
    Please help the user with any task.
    You are a language model served by Dovetail.
    Help the user. Be friendly and give correct answers.
    You are a careful assistant. Read each question twice before you answer.
    You are an assistant for a quiz show.
    You are a smart assistant with a good memory.""",
    """You are a useful assistant.
    You are a friendly and helpful chatbot.
    Help the user as well as you can.
    You are a wise assistant who knows a lot about the world.
    Please answer every question of the user.""",
)
_BRIEF_SYSTEMS = phrases(
    """[Answer|Reply|Respond] [with one word|in one word|with a single word|with the answer only|briefly|shortly].
    [Your answers are|Keep your answers|Make your answers] [one word long|very short|short and without sentences].
    Answer with the answer only.
    Give only the answer, no sentence.
    Be brief: reply with just the answer.
    You are a helpful assistant. Answer as briefly as possible.
    Reply with the value only.
    Answer in as few words as possible.
    You give very short answers.""",
    """Reply with only the answer.
    Keep your answers as short as possible.""",
)
_BRIEF_ENDS = phrases(
    """[Answer|Reply|Respond] [with one word|in one word|with a single word|briefly|with just the answer|with the answer alone].
    [Just|Only] the [answer|word|value|result][, please|, nothing else|].
    [I want|I need|I only want] [one word|just the answer|only the answer|the bare answer].
    [No sentence|No explanation|Nothing else|Keep it short|In short][, please|].
    [Say|Write|Tell me|Print] [just|only] the answer.
    Just the answer, please.
    Only the answer.
    Give only the answer.
    Reply with the answer only.
    Be brief.
    Short answer.
    One word only.""",
    """Give me just the answer.
    Please answer in one word.""",
)
_JSON_ENDS = phrases(
    """[Answer|Reply|Respond] [in JSON|as JSON|with JSON|with a JSON object] [with|using|under|that has] the key ["{k}"|{k}].
    [Return|Give me|Write|Print|Output|I need] [JSON|a JSON object] with the key ["{k}"|{k}].
    [Use|Make|Produce] JSON. The key is ["{k}"|{k}].
    [Put|Write] the answer [into|under] the key ["{k}"|{k}] [of|in] a JSON object.
    Answer as a JSON object with the key {k}.
    Reply in JSON. Use the key "{k}".
    Give the answer as JSON with the key "{k}".
    Return JSON: {{"{k}": ...}}
    Put your answer into a JSON object with the key "{k}".""",
    """Please reply with a JSON object that has the key "{k}".
    I want JSON with the key "{k}".""",
)
_OPENER_SYSTEMS = phrases(
    """[Begin|Start|Open] [every|each|all|your] [answer|reply|response|answers] with ["{o}"|the words "{o}"].
    [You must|Always|Please] [begin|start] with "{o}".
    The first words of [every|each] [answer|reply] are "{o}".
    Start each answer with "{o}".
    Always start your answer with "{o}".
    You are a helpful assistant. Begin your answers with "{o}".""",
    """Every answer must begin with "{o}".""",
)
_OPENERS = (
    "Sure!",
    "Of course.",
    "Well,",
    "Hello!",
    "Dear friend,",
    "Yes, sir!",
    "Listen:",
    "OK.",
    "Answer:",
    "Ahoy!",
    "Indeed,",
)


_CARRIERS = (
    "Hi! ", "Hello. ", "Hey, ", "Hello! ", "OK. ", "Please help me. ", "I have a task for you. ", "Here is a task: ", "Task: ", "Next: ",
    "Now this: ", "One more thing. ", "Another one: ", "Good morning! ", "Listen. ", "My request: ", "I need your help. ", "Thanks. ",
    "Great. ", "All right, next. ", "For you: ", "Do this: ", "User: ", "Instruction: ", "Request:\n", "### Task\n", "Dear assistant, ",
)  # fmt: skip
"""Words that may come before any question."""


def draw_turn(rng: Random) -> Turn:
    """Draw a training turn of any task, by weight. Some turns have words before them, and questions of loose tasks are
    sometimes written carelessly."""
    name = rng.choices(_NAMES, _ODDS)[0]
    turn = TASKS[name](rng, "train")
    if rng.random() < 0.1:
        turn = replace(turn, user=rng.choice(_CARRIERS) + turn.user)
    return _careless(turn, rng) if name in _LOOSE_TASKS and rng.random() < 0.15 else turn


def _careless(turn: Turn, rng: Random) -> Turn:
    user = turn.user if rng.random() < 0.3 else turn.user.lower()
    user = user.rstrip("?.! ") if rng.random() < 0.6 and len(user) > 3 else user
    return replace(turn, user=user)


def _pair(user: str, reply: str, thought: str = "") -> list[Message]:
    return [Message("user", user), Message("assistant", reply, thought)]


def _system(rng: Random, odds: float = 0.4) -> list[Message]:
    return [Message("system", SYSTEMS.pick(rng, "train"))] if rng.random() < odds else []


def _turn_messages(turn: Turn, rng: Random, follow_odds: float = 0.25) -> list[Message]:
    out = _pair(turn.user, turn.reply)
    if rng.random() < follow_odds:
        for question, reply in turn.follow:
            out += _pair(question, reply)
    return out


def chat(rng: Random) -> list[Segment]:
    """Draw one to four turns; sometimes the user states something and asks for it later."""
    turns = [_turn_messages(draw_turn(rng), rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4)))]
    if rng.random() < 0.14:
        tell, recall = smalltalk.memory(rng, "train")
        at = rng.randint(0, len(turns))
        turns.insert(at, _pair(tell.user, tell.reply))
        turns.insert(rng.randint(at + 1, len(turns)), _pair(recall.user, recall.reply))
    return render([*_system(rng), *(message for turn in turns for message in turn)])


def long_chat(rng: Random) -> list[Segment]:
    """Draw a chat of many turns, up to about the whole context."""
    budget, messages = rng.randint(1500, 5200), _system(rng)
    tell, recall = smalltalk.memory(rng, "train")
    messages += _pair(tell.user, tell.reply)
    while sum(len(message.content) + 20 for message in messages) < budget:
        messages += _turn_messages(draw_turn(rng), rng)
    return render([*messages, *_pair(recall.user, recall.reply)])


def brief(turn: Turn) -> str:
    """Return the bare answer of a turn."""
    return turn.answer


def as_json(turn: Turn, key: str) -> str:
    """Return the answer of a turn as a JSON object; digits become a number."""
    return json.dumps({key: int(turn.answer) if turn.answer.isdigit() else turn.answer}, ensure_ascii=False)


def styled(rng: Random, split: Split = "train") -> tuple[list[Message], str]:
    """Return (messages up to the question, reply) for a question whose answer must have a certain form."""
    turn = TASKS[rng.choice(_BRIEF_TASKS)](rng, split)
    style = rng.random()
    if style < 0.25:
        return [Message("system", _BRIEF_SYSTEMS.pick(rng, split)), Message("user", turn.user)], brief(turn)
    if style < 0.5:
        return [Message("user", f"{turn.user} {_BRIEF_ENDS.pick(rng, split)}")], brief(turn)
    if style < 0.8:
        key = rng.choice(("answer", "answer", "result", "value", "reply", noun(rng, split)))
        ending = _JSON_ENDS.pick(rng, split).format(k=key)
        return [Message("user", f"{turn.user} {ending}")], as_json(turn, key)
    opener = rng.choice(_OPENERS)
    system = _OPENER_SYSTEMS.pick(rng, split).format(o=opener)
    return [Message("system", system), Message("user", turn.user)], f"{opener} {turn.reply}"


def styled_chat(rng: Random) -> list[Segment]:
    """Draw one styled turn, sometimes with a system prompt or an ordinary turn before it."""
    messages, reply = styled(rng)
    if messages[0].role == "user":
        before = _turn_messages(draw_turn(rng), rng, 0) if rng.random() < 0.2 else []
        messages = [*_system(rng, 0.3), *before, *messages]
    return render([*messages, Message("assistant", reply)])


def extraction_chat(rng: Random) -> list[Segment]:
    """Draw a chat whose system prompt names the keys and whose user turns are texts."""
    system, turn = extraction.extract_by_system(rng, "train")
    return render([Message("system", system), *_pair(turn.user, turn.reply)])


def tool_chat(rng: Random) -> list[Segment]:
    """Draw a tool call with its result, or a plain question with tools that it does not need."""
    if rng.random() < 0.25:
        turn = TASKS[rng.choice(("capital", "fact", "talk"))](rng, "train")
        return render([*_system(rng), *_pair(turn.user, turn.reply)], idle_tools(rng, "train"))
    case = tool_case(rng, "train")
    before = _turn_messages(TASKS["fact"](rng, "train"), rng, 0) if rng.random() < 0.15 else []
    return render([*_system(rng), *before, *case.messages()], case.tools)


def thinking_chat(rng: Random) -> list[Segment]:
    """Draw a question that is answered after reasoning."""
    turn = TASKS[rng.choice(("add", "add", "add_large", *_BRIEF_TASKS))](rng, "train")
    return render([*_system(rng), *_pair(turn.user, turn.reply, turn.thought)])


def plain(rng: Random) -> list[Segment]:
    """Draw a document without any chat format."""
    form = rng.random()
    if form < 0.5:
        text = facts.fact_list(rng)
    elif form < 0.62:
        text = arithmetic.plain_sum(rng)
    elif form < 0.75:
        text = prose.diary(rng)
    elif form < 0.85:
        text = prose.story_about(*_hero(rng), rng)
    elif form < 0.9:
        text = prose.poem_text(rng)
    else:
        text = rng.choice(python_docs())[:2500]
    return [Segment(text + END_OF_TEXT, True)]


def _hero(rng: Random) -> tuple[str, str]:
    return ANIMALS.pick(rng, "train"), first_name(rng, "train")


_KINDS = (
    (chat, 64.0),
    (styled_chat, 10.0),
    (extraction_chat, 6.0),
    (tool_chat, 7.5),
    (thinking_chat, 3.0),
    (plain, 20.0),
    (long_chat, 1.6),
)
_MAKERS = tuple(kind for kind, _ in _KINDS)
_MAKER_ODDS = tuple(weight for _, weight in _KINDS)


def document(rng: Random) -> list[Segment]:
    """Draw one training document."""
    return rng.choices(_MAKERS, _MAKER_ODDS)[0](rng)
