"""Test `dovetail chat` at a terminal: turns, commands, and what is shown. Run: pytest tests/core/test_cli_chat.py"""

from __future__ import annotations

import io
import json
import signal
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from dovetail.cli.chat_backends import ChatAnswer, ChatSettings
from dovetail.cli.chat_session import ChatSession
from dovetail.cli.chat_view import ChatView, figures, safe
from dovetail.errors import EngineError
from dovetail.sampling_params import GrammarKind, SamplingParams

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}


class Parrot:
    """Repeat the last message in two pieces, and record the requests.

    Messages control it: "fail", "think", "stop" (Ctrl-C after the first piece), "call".
    """

    name = "parrot"

    def __init__(self) -> None:
        self.asked: list[tuple[list, ChatSettings]] = []
        self.closed = 0

    def answer(self, messages, settings, answer):
        self.asked.append((list(messages), settings))
        text = messages[-1]["content"]
        try:
            if text == "fail":
                raise EngineError("the parrot is out")
            if text == "think":
                yield answer.add("hm", "")
            yield answer.add("", f"<{text}")
            if text == "stop":
                raise KeyboardInterrupt
            yield answer.add("", ">")
            answer.prompt, answer.cached, answer.output, answer.finish = 9, 4, 2, "stop"
            if text == "call":
                answer.calls, answer.finish = [CALL], "tool_calls"
        finally:
            self.closed += 1

    def resolved(self):
        one = {"slot": "cache", "chosen": "radix", "rule": "priority", "note": "as measured", "candidates": []}
        return {"resolutions": [one, {**one, "slot": "speculative", "chosen": None, "rule": "explicit", "note": ""}]}


@pytest.fixture
def talk():
    view = ChatView()
    view.out = Console(file=io.StringIO(), width=100, highlight=False)
    replies = iter(["5", ""])
    return ChatSession(
        Parrot(), ChatSettings(SamplingParams(temperature=0)), "be brief", view, lambda question: next(replies)
    )


def shown(talk: ChatSession) -> str:
    """Return what was printed since the last call."""
    file = talk._view.out.file
    text = file.getvalue()
    file.seek(0)
    file.truncate()
    return text


def asked(talk: ChatSession) -> list[str]:
    """Return the contents of the messages of the last request."""
    return [message["content"] for message in talk._backend.asked[-1][0]]


def test_a_turn_is_streamed_with_its_figures_and_the_next_knows_it(talk):
    assert talk.handle("one\nline")
    assert shown(talk).startswith("<one\nline>\n9 prompt · 4 cached · 2 output · ")
    talk.handle("two")
    assert asked(talk) == ["be brief", "one\nline", "<one\nline>", "two"]
    assert talk._backend.closed == 2


def test_reasoning_stands_before_the_answer_and_is_not_sent_back(talk):
    talk.handle("think")
    assert shown(talk).startswith("hm\n\n<think>\n")
    talk.handle("on")
    assert asked(talk) == ["be brief", "think", "<think>", "on"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(talk):
    assert talk.handle("stop")
    assert "stopped by you" in shown(talk)
    assert talk._backend.closed == 1
    talk.handle("on")
    assert asked(talk) == ["be brief", "stop", "<stop", "on"]


def test_ctrl_c_while_a_piece_is_shown_leaves_the_terminal_usable(talk):
    """Wherever it arrives within ``piece`` or ``end``, the piece is shown, and so is all that comes later."""
    view = talk._view
    for show in (lambda: view.piece("", "a piece"), lambda: view.end(ChatAnswer(), True)):
        at = reached = 0
        while at <= reached:  # until there are fewer calls than that
            at, reached = at + 1, 0

            def count(frame: object, event: str, arg: object, at: int = at) -> None:
                nonlocal reached
                if event in ("call", "c_return"):
                    reached += 1
                    if reached == at:
                        signal.raise_signal(signal.SIGINT)

            sys.setprofile(count)
            try:
                show()
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            shown(talk)
            talk.handle("on")
            assert shown(talk).startswith("<on>\n"), f"Ctrl-C at call {at}"
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert at > 40


def test_an_error_is_said_and_the_turn_can_be_tried_again(talk):
    talk.handle("one")
    assert talk.handle("fail")
    assert "error: the parrot is out" in shown(talk)
    assert [m["content"] for m in talk.messages] == ["one", "<one>"]
    talk.handle("/retry")
    assert asked(talk) == ["be brief", "one", "<one>", "fail"]


def test_retry_takes_the_answer_back(talk):
    talk.handle("/retry")
    assert "there is no turn yet" in shown(talk)
    for text in ("one", "two", "/retry"):
        talk.handle(text)
    assert asked(talk) == ["be brief", "one", "<one>", "two"]
    assert len(talk.messages) == 4


def test_calls_are_shown_and_their_results_sent(talk):
    talk.handle("call")
    assert 'calls add {"a": 2, "b": 3}' in shown(talk)
    messages = talk._backend.asked[-1][0]
    assert messages[-2] == {"role": "assistant", "content": "<call>", "tool_calls": [CALL]}
    assert messages[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "5"}
    talk.handle("call")  # no result this time
    assert len(talk._backend.asked) == 3


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("temperature=0.7", {"temperature": 0.7}),
        ("max_tokens=5 seed=3", {"max_new_tokens": 5, "seed": 3}),
        ('stop=["a", "b c"]', {"stop": ("a", "b c")}),
        ('stop="\\n" top_k=4', {"stop": ("\n",), "top_k": 4}),
        ("top_p=0.5 top_p=", {}),
    ],
)
def test_set(talk, text, given):
    talk.handle(f"/set {text}")
    assert talk.settings.params == replace(SamplingParams(temperature=0), **given)
    talk.handle("hello")
    assert talk._backend.asked[-1][1].params == talk.settings.params


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/set temperature", "give name=value"),
        ("/set heat=1", "allowed: max_new_tokens, temperature"),
        ("/set temperature=-1", "temperature is -1"),
        ("/set temperature=warm", "temperature is 'warm'"),
        ("/schema {not json}", "this is not JSON"),
        ("/schema absent.json", "No such file"),
        ('/tools [1', "this is not JSON"),
        ("/save", "needs a file"),
        ("/nonsense", "there is no /nonsense; /help"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_changes_nothing(talk, command, words):
    before = talk.settings
    assert talk.handle(command)
    assert words in shown(talk)
    assert talk.settings == before
    assert talk._backend.asked == []


def test_schema_and_tools_from_text_and_files_and_off(talk, tmp_path):
    schema, tools = {"type": "object"}, [{"type": "function", "function": {"name": "add"}}]
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    for text in (json.dumps(schema), str(tmp_path / "schema.json")):
        talk.handle(f"/schema {text}")
        assert talk.settings.params.grammar.kind is GrammarKind.JSON_SCHEMA
        assert json.loads(talk.settings.params.grammar.text) == schema
        talk.handle("/schema off")
        assert talk.settings.params.grammar is None
    for text in (json.dumps(tools), str(tmp_path / "tools.json")):
        talk.handle(f"/tools {text}")
        assert list(talk.settings.tools) == tools
        talk.handle("/tools off")
        assert talk.settings.tools == ()


def test_system_clear_save_and_what_begins_with_two_slashes(talk, tmp_path):
    talk.handle("/system")
    talk.handle("//help")
    assert asked(talk) == ["/help"]
    talk.handle("/system speak up")
    talk.handle("ü")
    talk.handle(f"/save {tmp_path / 'talk.json'}")
    saved = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert [m["content"] for m in saved] == ["speak up", "/help", "</help>", "ü", "<ü>"]
    assert [m["role"] for m in saved] == ["system", "user", "assistant", "user", "assistant"]
    talk.handle("/clear")
    talk.handle("new")
    assert asked(talk) == ["speak up", "new"]


def test_plugins_help_and_quit(talk):
    talk.handle("/plugins")
    text = shown(talk)
    assert "by priority; as measured" in text
    assert "none" in text
    talk.handle("/help")
    text = shown(talk)
    assert [name for name in talk._commands if f"/{name}" not in text] == []
    assert talk.handle("/quit") is False


def test_control_characters_are_seen_and_not_obeyed():
    assert safe("a\x1b[31mb\x07\tc\nd\x9b2J\x7f") == "a\u241b[31mb\u2407\tc\nd\ufffd2J\ufffd"


def test_figures_say_only_what_is_known():
    assert figures(ChatAnswer()).plain == "finish none"
    answer = ChatAnswer(
        prompt=1200, cached=0, output=11, drafts=(3, 8), finish="length", begun=10.0, first=11.25, last=13.25
    )
    assert figures(answer).plain == (
        "1200 prompt · 0 cached · 11 output · 1,250 ms to first token · 5 tokens/s · 3 of 8 drafts accepted · finish length"
    )
