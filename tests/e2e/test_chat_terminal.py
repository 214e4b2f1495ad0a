"""Test `dovetail chat` as a program: at a terminal with a server, piped, and with a model in its own process.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_chat_terminal.py
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dovetail import LLM
from dovetail.cli.chat_backends import ChatAnswer, ChatBackend, ChatSettings, LocalChatBackend, RemoteChatBackend
from dovetail.errors import EngineError, RequestError
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

pty = pytest.importorskip("pty")

SECONDS = 30.0
PROGRAM = [sys.executable, "-c", "from dovetail.cli import main; main()", "chat"]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
SUM = [{"role": "user", "content": "Call the function to multiply 658 by 118."}]
MUL = {
    "type": "function",
    "function": {
        "name": "mul",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
PROMPT = r"\n> $"
GREEDY = SamplingParams(temperature=0, max_new_tokens=60)


class Terminal:
    """Run the program at a separate terminal."""

    def __init__(self, *arguments: str) -> None:
        self.screen = ""
        ours, theirs = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        self._fd = ours

    def write(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def say(self, line: str) -> str:
        """Write a line, and return what is shown up to the next prompt."""
        self.write(f"{line}\n")
        return self.read(PROMPT)

    def read(self, pattern: str) -> str:
        """Return what is shown up to and including ``pattern``, and remove it from the screen."""
        deadline = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.screen, re.DOTALL)) is None:
            assert time.monotonic() < deadline, f"never shown: {pattern}\n{self.screen}"
            try:
                self.screen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", os.read(self._fd, 1 << 16).decode())  # no colours
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the program has ended
                assert re.search(pattern, self.screen, re.DOTALL), self.screen
        text, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return text

    def close(self) -> None:
        os.close(self._fd)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_a_terminal_with_a_server(terminal: Callable[..., Terminal], tiny_url: str) -> None:
    here = terminal("--url", tiny_url)
    assert "chatting with tiny" in here.read(PROMPT)
    first = here.say("What is the capital of France?")
    assert re.search(r"Paris\.\r?\n16 prompt · .*tokens/s · finish stop", first)
    second = here.say("\x1b[200~And of\nItaly?\x1b[201~")  # as a terminal pastes
    assert int(re.search(r"(\d+) cached", second)[1]) >= 16
    assert "temperature=0.5" in here.say("/set temperature=0.5").replace("/set temperature=0.5", "")
    assert re.search("cache +radix +by priority", here.say("/plugins"))
    assert "error: this is not JSON" in here.say("/schema {")
    here.write("/quit\n")
    assert here.process.wait(SECONDS) == 0


def test_pasted_lines_are_one_message_and_ctrl_c_stops_an_answer_only(
    terminal: Callable[..., Terminal], fake_url: str
) -> None:
    here = terminal("--url", fake_url, "--max-new-tokens", "2000")
    here.read(PROMPT)
    here.write("first line\n\nsecond line\n")  # pasted into a terminal that does not say so
    here.read("first line\r?\n\r?\nsecond line(?=.*first line)")
    here.process.send_signal(signal.SIGINT)
    assert "stopped by you" in here.read(PROMPT)
    here.process.send_signal(signal.SIGINT)
    assert "Ctrl-D or /quit ends" in here.read(PROMPT)
    here.write("\x04")
    assert here.process.wait(SECONDS) == 0


def test_piped_is_text_alone(tiny_url: str, tmp_path: Path) -> None:
    given = "What is the capital of France?\n/help\n\nnot reached\n"
    command = [*PROGRAM, "--url", tiny_url, "-n", "12"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris.\n")
    assert done.stdout.count("\n") >= 2
    assert "prompt ·" not in done.stdout


@pytest.fixture(scope="module", params=["local", "remote"])
def speaker(request: pytest.FixtureRequest) -> Iterator[ChatBackend]:
    if request.param == "local":
        made: ChatBackend = LocalChatBackend(LLM("tiny", threads=1), "tiny")
    else:
        made = RemoteChatBackend(request.getfixturevalue("tiny_url"), None)
    yield made
    made.close()


def answered(speaker: ChatBackend, messages: list, settings: ChatSettings) -> ChatAnswer:
    answer = ChatAnswer()
    pieces = list(speaker.answer(messages, settings, answer))
    assert "".join(content for _, content in pieces) == answer.content
    return answer


def test_both_speakers_fill_in_the_same(speaker: ChatBackend) -> None:
    first = answered(speaker, FRANCE, ChatSettings(GREEDY))
    assert first.content == "The capital of France is Paris."
    assert (first.prompt, first.output, first.finish) == (16, 10, "stop")
    assert first.begun < first.first < first.last
    second = answered(speaker, [*FRANCE, first.message, FRANCE[0]], ChatSettings(GREEDY))
    assert second.cached >= 16
    called = answered(speaker, SUM, ChatSettings(GREEDY, (MUL,)))
    assert [call["function"]["name"] for call in called.calls] == ["mul"]
    assert called.finish == "tool_calls"
    slots = {one["slot"]: one["chosen"] for one in speaker.resolved()["resolutions"]}
    assert slots["cache"] == "radix"


def test_both_refuse_in_words(speaker: ChatBackend) -> None:
    with pytest.raises(RequestError, match="2048"):
        answered(speaker, [{"role": "user", "content": "too long " * 2000}], ChatSettings(GREEDY))


def test_a_schema_holds_on_a_server(tiny_url: str) -> None:
    flag = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for schema, pattern in ((flag, r'\{\s*"a"\s*:\s*(true|false)\s*\}'), ({"type": "no such type"}, None)):
        grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        settings = ChatSettings(SamplingParams(temperature=0, max_new_tokens=60, grammar=grammar))
        with closing(RemoteChatBackend(tiny_url, None)) as remote:
            if pattern is not None:
                assert re.fullmatch(pattern, answered(remote, FRANCE, settings).content)
            else:
                with pytest.raises(RequestError, match="schema"):
                    answered(remote, FRANCE, settings)


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_the_url_may_be_that_of_openais_clients(tiny_url: str, end: str) -> None:
    with closing(RemoteChatBackend(tiny_url + end, None)) as remote:
        assert remote.name == "tiny"
        assert answered(remote, FRANCE, ChatSettings(SamplingParams(temperature=0, max_new_tokens=3))).content


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(EngineError, match="does not answer"):
        RemoteChatBackend("http://127.0.0.1:9", None)
