"""Test programs that need values that a trace does not have, that end in unusual ways, or whose templates change the
earlier text.

Run: python -m pytest tests/core/test_lang_traps.py
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import dovetail as sgl
from dovetail.errors import EngineError, ProgramError, RequestError
from dovetail.lang.backends.base import Generated

sys.path.insert(0, str(Path(__file__).parent))
from lang_backend import Scripted, answer_to, marked


def reassigns(s):
    s += "p" + sgl.gen("x")
    before = s["x"]
    s += sgl.gen("x") + "|"
    s += before
    return before


def reassigns_beside_a_fork(s):
    s += "p" + sgl.gen("x")
    forks, before = s.fork(1), s["x"]
    s += sgl.gen("x")
    forks[0] += before + sgl.gen("z")
    forks.join()


def sets_what_a_join_brought(s):
    forks = s.fork(2)
    forks += "q" + sgl.gen("v")
    forks.join()
    found = s["v"]
    s["v"] = "new"
    return found


def joins_texts(s):
    s += "p" + sgl.gen("x")
    text = "pre " + s["x"]
    text += " more"
    s["y"] = s["x"] + "!"
    return text, [s["x"] + "?"]


def compares_joined_texts(s):
    s += "p" + sgl.gen("x")
    s += "same" if s["x"] + "a" == answer_to("p") + "a" else "other"


def asks_for_a_joined_text(s):
    forks = s.fork(2)
    forks += "q" + sgl.gen("v")
    forks.join("concatenate")
    s += "in" if "v" in s else "out"


def catches(look):
    def program(s):
        s += "p" + sgl.gen("x")
        try:
            s += f"found {look(s['x'])}"
        except Exception as error:
            s += f"caught {type(error).__name__}"

    return program


def catches_all(s):
    s += "p" + sgl.gen("x")
    try:
        s += str(len(s["x"]))
    except:  # noqa: E722
        s += "caught"


PROGRAMS = {
    "reassigned": reassigns,
    "reassigned beside a fork": reassigns_beside_a_fork,
    "set after a join": sets_what_a_join_brought,
    "not gathered": asks_for_a_joined_text,
    "joined texts": joins_texts,
    "joined texts compared": compares_joined_texts,
    "json": catches(json.loads),
    "re": catches(lambda x: re.findall("<", x)),
    "join": catches(lambda x: ",".join([x])),
    "isinstance": catches(lambda x: isinstance(x, str)),
    "replace": catches(lambda x: "abc".replace("b", x)),
    "bare except": catches_all,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trace_never_takes_another_way_than_the_program(name: str):
    eager, traced = (sgl.function(PROGRAMS[name]).run(backend=Scripted(), traced=traced) for traced in (False, True))
    assert (traced.text(), traced.values(), traced.ret_value) == (eager.text(), eager.values(), eager.ret_value)


def test_the_line_is_the_programs_where_a_library_looks():
    stopped = sgl.function(PROGRAMS["json"]).trace().stopped
    assert stopped
    assert stopped.startswith(__file__)


def test_a_join_takes_what_was_there_when_it_was_called():
    gate = threading.Event()

    @sgl.function
    def late(s):
        forks = s.fork(2)
        forks += lambda i: f"{i}" + sgl.gen("v")
        forks.join("concatenate")
        forks += "later"
        s["brought"] = "no"
        gate.set()

    for traced in (False, True):
        gate.clear()
        state = late.run(backend=Scripted(during=lambda text: gate.wait(10)), traced=traced)
        assert state.text() == "".join(f"{i}" + answer_to(f"{i}") for i in range(2))


def test_what_a_join_brings_is_in_the_state():
    @sgl.function
    def asks(s):
        forks = s.fork(2)
        forks += "a" + sgl.gen("v")
        forks.join()
        return "v" in s, "w" in s

    assert asks.run(backend=Scripted(during=lambda text: time.sleep(0.02))).ret_value == (True, False)


# -- streams ---------------------------------------------------------------------------------------------------------


@sgl.function
def leaves(s):
    s += "a" + sgl.gen("x")
    sys.exit(3)


def test_who_listens_hears_that_the_program_has_left():
    state = leaves.run(stream=True, backend=Scripted())
    with pytest.raises(ProgramError, match="SystemExit: 3"):
        list(state.text_iter())
    with pytest.raises(ProgramError, match="SystemExit: 3"):
        state["nothing"]


def test_threads_of_a_program_that_is_heard_may_fork_and_see_failures():
    @sgl.function
    def spreads(s):
        s += "a" + sgl.gen("x")

        def one(i: int) -> Any:
            fork = s.fork(1)[0]
            fork += str(i) + sgl.gen("y")
            return fork["y"]

        def read(_: int) -> str:
            try:
                return s["z"]
            except ProgramError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(one, range(3)))
            s += sgl.image("p.png") + sgl.gen("z")
            return found, list(pool.map(read, range(1)))

    state = spreads.run(stream=True, backend=Scripted())
    start = "a" + answer_to("a")
    with pytest.raises(ProgramError, match="does not accept pictures"):
        state.text()
    list_of_pieces = state._pieces(None)
    assert "".join(list_of_pieces).startswith(start)
    for _ in range(500):
        if state.ret_value is not None:
            break
        time.sleep(0.01)
    found, errors = state.ret_value
    assert found == [answer_to(f"{start}{i}") for i in range(3)]
    assert "does not accept pictures" in errors[0]


@sgl.function
def chat(s):
    s += sgl.system("sys")
    s += sgl.user("hi")
    s += sgl.assistant(sgl.gen("x"))
    s += sgl.user("more")
    s += sgl.assistant(sgl.gen("y"))


def wants_a_user(messages, opened):
    if not any(m["role"] == "user" for m in messages):
        raise RequestError("no user has asked anything")
    return marked(messages, opened)


def forgets(messages, opened):
    """Render only the last answer."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    kept = [
        {**m, "content": m["content"] if i == last and i > users[-1] else ""} if m["role"] == "assistant" else m
        for i, m in enumerate(messages)
    ]
    return marked(kept, opened)


def test_a_template_that_wants_to_see_a_user_first():
    state = chat.run(stream=True, backend=Scripted(template=wants_a_user))
    assert "".join(state.text_iter()) == state.text()


def test_a_template_that_forgets_is_heard_on():
    state = chat.run(stream=True, backend=Scripted(template=forgets))
    heard = "".join(state.text_iter())
    assert heard.index(state["x"]) < heard.index("more") < heard.index(state["y"])


class Thinks(Scripted):
    def generate(self, conversation, sampling, hints, on_text=None):
        for piece in ("<think>deep</think>", "\n\nSo") if on_text else ():
            on_text(piece)
        return [Generated("<think>deep</think>\n\nSo", {})]


def test_reasoning_is_not_heard_as_part_of_the_prompt():
    @sgl.function
    def thinks(s):
        s += sgl.user("hi") + sgl.assistant(sgl.separate_reasoning(sgl.gen("x"))) + sgl.user("more")

    state = thinks.run(stream=True, backend=Thinks())
    assert "".join(state.text_iter()) == state.text() == "[user|hi][assistant|So][user|more]"
    assert list(state.text_iter("x")) == ["So"]
    assert list(state.text_iter("x_reasoning_content")) == ["deep"]


# -- without a thread, and ahead of rows -----------------------------------------------------------------------------


class Interrupted(Scripted):
    def generate(self, conversation, sampling, hints, on_text=None):
        raise KeyboardInterrupt


def test_ctrl_c_ends_a_program_without_threads():
    with pytest.raises(KeyboardInterrupt):
        chat.run(backend=Interrupted(), use_thread=False)


class NoPrefix(Scripted):
    def prefill(self, text: str, chat: bool) -> None:
        raise RequestError("the prompt is too long")


def test_rows_run_where_their_prefix_cannot():
    @sgl.function
    def asks(s, x):
        s += "common " + x + sgl.gen("y")

    states = asks.run_batch([{"x": "1"}, {"x": "2"}], backend=NoPrefix())
    assert [state["y"] for state in states] == [answer_to(f"common {x}") for x in "12"]


# -- a server --------------------------------------------------------------------------------------------------------


def test_a_line_of_events_ends_where_the_server_ends_it():
    """JSON may contain U+2028, at which str.splitlines splits."""
    text = "a\u2028b\x85c"
    event = {"text": text, "meta_info": {"finish_reason": {"type": "stop"}}}
    body = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\ndata: [DONE]\n\n"
    with answered(body) as url, sgl.RuntimeEndpoint(url) as endpoint:
        state = sgl.function(says).run(stream=True, backend=endpoint)
        assert "".join(state.text_iter("x")) == state["x"] == text


def test_closing_an_endpoint_wakes_who_waits_for_it():
    with answered(None) as url:
        endpoint = sgl.RuntimeEndpoint(url)
        state = sgl.function(says).run(stream=True, backend=endpoint)
        while not endpoint._sockets:
            time.sleep(0.01)
        endpoint.close()
        with pytest.raises(ProgramError) as failed:
            state.text()
    assert isinstance(failed.value.__cause__, EngineError)


class Answers(BaseHTTPRequestHandler):
    """Serve the native API, as far as a program without messages needs it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = json.dumps(
            {"text": answer_to(asked["text"]), "meta_info": {"finish_reason": {"type": "stop"}}}
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


class Many(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 512, True


def test_hundreds_of_calls_at_once_are_each_answered():
    """There are more calls than a pool of connections would keep idle."""

    @sgl.function
    def forks(s):
        s += "a"
        copies = s.fork(100)
        for turn in "xy":
            copies += lambda i, turn=turn: f"{i}" + sgl.gen(turn)
        copies.join()

    with Many(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with sgl.RuntimeEndpoint(f"http://127.0.0.1:{server.server_port}") as endpoint:
            found = forks.run(backend=endpoint).values()
        server.shutdown()
    assert found == forks.run(backend=Scripted()).values()


def says(s):
    s += "hello" + sgl.gen("x")


@contextmanager
def answered(body: bytes | None) -> Iterator[str]:
    """Yield the address of a server that gives one answer; with None it never answers."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            if body is not None:
                head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
                connection.sendall(head % len(body) + body)
            while connection.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        worker = threading.Thread(target=serve)
        worker.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        worker.join(5)
    assert not worker.is_alive()
