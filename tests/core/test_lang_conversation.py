"""Test that the text of a growing conversation is the text that its template renders.

Run: python -m pytest tests/core/test_lang_conversation.py
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config.checkpoint import locate
from dovetail.errors import RequestError
from dovetail.lang.conversation import Conversation
from dovetail.lang.ir import Image
from dovetail.templates.chat_template import ChatTemplate
from dovetail.tokenizer import Tokenizer

TINY = Tokenizer.from_dir(locate("tiny"))
STRICT = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    {"bos_token": "<s>"},
)


def tiny(messages, opened):
    return TINY.apply_chat_template(messages, None, opened)


def strict(messages, opened):
    return STRICT.render({"messages": messages, "add_generation_prompt": opened})


def grown(turns) -> Conversation:
    found = Conversation()
    for role, parts in turns:
        found = found.begin(role)
        for part in parts:
            found = found.plus(part, lambda: tiny)
        found = found.end(role)
    return found


turn = st.tuples(st.sampled_from(["system", "user", "assistant"]), st.lists(st.text(max_size=8), max_size=3))


@given(st.lists(turn, max_size=5), turn)
def test_every_moment_of_a_message_is_a_prefix_of_its_end(turns, last):
    closed = grown(turns)
    role, parts = last
    opened = closed.begin(role)
    before = closed.text(tiny) if turns else ""
    for part in parts:
        text = opened.text(tiny)
        assert text.startswith(before)
        before, opened = text, opened.plus(part, lambda: tiny)
    whole = opened.end(role)
    messages = [{"role": r, "content": "".join(p)} for r, p in [*turns, last]]
    assert whole.text(tiny) == tiny(messages, False)
    assert whole.text(tiny).startswith(opened.text(tiny))
    assert [m.shown() for m in whole.all_messages] == messages


def test_an_assistants_message_begins_with_the_generation_prompt():
    opened = grown([("user", ["hi"])]).begin("assistant")
    assert opened.text(tiny) == tiny([{"role": "user", "content": "hi"}], True)
    assert opened.plus("So", lambda: tiny).text(tiny).endswith("assistant\nSo")


def test_templates_that_trim_and_refuse():
    opened = Conversation().begin("user").plus("  hi ", lambda: strict)
    assert opened.text(strict) == "<s><user>hi "
    assert opened.end("user").text(strict) == "<s><user>hi</user>"
    late = opened.end("user").begin("system")
    with pytest.raises(RequestError, match="refuses this conversation: late"):
        late.text(strict)


def test_text_between_messages_stands_where_it_was_appended():
    found = grown([("user", ["a"])]).plus(" mind ", lambda: tiny).begin("user").plus("b", lambda: tiny).end("user")
    first = tiny([{"role": "user", "content": "a"}], False)
    assert found.text(tiny) == first + " mind " + first.replace("\na<", "\nb<")
    alone = Conversation().plus("x", lambda: tiny)
    assert (alone.text(tiny), alone.chat) == ("x", False)


def test_what_was_added():
    start = Conversation().begin("assistant").plus("a", lambda: tiny)
    assert start.plus("b", lambda: tiny).since(start) == ((), "b")
    with pytest.raises(RequestError, match="a fork ended a message that began before the fork"):
        start.end("assistant").since(start)
    plain = Conversation().plus("a", lambda: tiny)
    assert plain.plus("b", lambda: tiny).since(plain) == ((), "b")
    closed = grown([("user", ["q"])])
    assert [m.text for m in closed.begin("user").plus("r", lambda: tiny).end("user").since(closed)[0]] == ["r"]


def test_pictures_are_typed_parts():
    message = (
        grown([("user", ["see"])]).begin("user").plus(Image("a.png"), lambda: tiny).plus("!", lambda: tiny).end("user")
    )
    assert message.images == (Image("a.png"),)
    content = message.all_messages[1].shown()["content"]
    assert content == [{"type": "image", "image": "a.png"}, {"type": "text", "text": "!"}]
    assert message.all_messages[1].text == "<image>!"
