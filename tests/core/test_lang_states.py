"""Test how states execute the parts that are appended to them. Run: python -m pytest tests/core/test_lang_states.py"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
from pathlib import Path

import pytest

import dovetail as sgl
from dovetail import ProgramError

sys.path.insert(0, str(Path(__file__).parent))
from lang_backend import Scripted, answer_to


def here() -> int:
    """Return the line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_program_is_its_text():
    @sgl.function
    def program(s, name):
        s += "Hello " + name + "." + sgl.gen("a")
        s += ["x", sgl.gen("b"), "y"]

    state = program.run("Ann", backend=Scripted())
    first = "Hello Ann."
    second = first + answer_to(first) + "x"
    assert state["a"] == answer_to(first)
    assert state["b"] == answer_to(second)
    assert state.text() == second + answer_to(second) + "y"
    assert "a" in state
    assert "c" not in state
    assert state.get_meta_info("b") == {"prompt_tokens": len(second)}
    with pytest.raises(KeyError, match="no variable 'c'; known: a, b"):
        _ = state["c"]


def test_appending_returns_before_the_model_does():
    go = threading.Event()
    backend = Scripted(lambda text: go.wait(10) or None)

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s += "y"
        assert "a" in s
        go.set()
        assert s["a"] == answer_to("x")

    assert program.run(backend=backend).text() == "x" + answer_to("x") + "y"


def test_parts_that_wait_are_carried_out_in_their_order():
    go = threading.Event()

    @sgl.function
    def program(s):
        for i in range(6):
            s += f"{i}" + sgl.gen("a")
            s += "."
        go.set()

    text = ""
    for i in range(6):
        text += str(i)
        text += answer_to(text) + "."
    assert program.run(backend=Scripted(lambda text: go.wait(10) or None)).text() == text


def test_forks_are_answered_at_the_same_time():
    together = threading.Barrier(8, timeout=10)
    backend = Scripted(lambda text: together.wait() and None)

    @sgl.function
    def program(s):
        s += "question"
        forks = s.fork(8)
        forks += lambda i: str(i) + sgl.gen("a")
        forks.join()

    state = program.run(backend=backend)
    assert state["a"] == [answer_to(f"question{i}") for i in range(8)]
    assert state.text() == "question"
    assert {(h.group, h.group_size) for h in backend.hints} == {(backend.hints[0].group, 8)}
    assert backend.hints[0].group


def test_only_the_first_call_of_a_fork_is_in_its_group():
    backend = Scripted()

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += "x"
        forks += sgl.gen("a")
        forks += sgl.gen("b")
        alone = forks[0].fork(1)[0]
        alone += "." + sgl.gen("c")
        alone.sync()

    program.run(backend=backend)
    assert sorted(h.group_size for h in backend.hints) == [1, 1, 1, 2, 2]


def test_a_name_that_is_used_again_has_its_last_value():
    @sgl.function
    def program(s):
        said = []
        for _ in range(5):
            s += "." + sgl.gen("a")
            said.append(s["a"])
        return said

    backend = Scripted()
    state = program.run(backend=backend)
    assert state.ret_value == [answer_to(prompt) for prompt in backend.prompts]
    assert len(set(state.ret_value)) == 5


def test_a_name_that_is_asked_for_twice_is_waited_for_twice():
    def slowly(text: str) -> None:
        time.sleep(0.1)  # both are appended before the first is answered, and the answers arrive at different times

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s += "second" + sgl.gen("a")
        return s["a"]

    first = "x" + answer_to("x")
    assert program.run(backend=Scripted(slowly)).ret_value == answer_to(first + "second")


def test_messages_are_written_by_the_template():
    @sgl.function
    def program(s):
        s += sgl.system("S") + sgl.user("U")
        with s.user():
            s += "V"
        s += sgl.assistant_begin() + "so: " + sgl.gen("a") + sgl.assistant_end()
        s.user("W")

    backend = Scripted()
    state = program.run(backend=backend)
    prompt = "[system|S][user|U][user|V][assistant|so: "
    assert backend.prompts == [prompt]
    assert state.text() == prompt + answer_to(prompt) + "][user|W]"
    assert [m["role"] for m in state.messages()] == ["system", "user", "user", "assistant", "user"]
    assert state.messages()[3]["content"] == "so: " + answer_to(prompt)


@pytest.mark.parametrize("mode", ["concatenate", "concate_and_append"])
def test_forks_join_their_texts(mode: str):
    @sgl.function
    def program(s):
        s += sgl.assistant_begin() + "a:"
        forks = s.fork(3)
        for i, fork in enumerate(forks):
            fork += f" {i}" + sgl.gen("x")
        forks.join(mode)
        s += sgl.assistant_end()

    begin = "[assistant|a:"
    parts = [f" {i}" + answer_to(f"{begin} {i}") for i in range(3)]
    state = program.run(backend=Scripted())
    assert state.text() == begin + "".join(parts) + "]"
    assert "x" not in state


def test_forks_join_their_messages():
    @sgl.function
    def program(s):
        s += sgl.user("q")
        forks = s.fork(2)
        forks += [sgl.assistant("a"), sgl.assistant("b")]
        forks.join("concatenate")

    assert [m["content"] for m in program.run(backend=Scripted()).messages()] == ["q", "a", "b"]


def test_gathering_leaves_what_the_source_has():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("own")
        forks = s.fork(2)
        forks[0] += "y" + sgl.gen("only")
        forks += sgl.gen("own") + sgl.gen("both")
        forks.join("gather_variable")

    state = program.run(backend=Scripted())
    assert state["own"] == answer_to("x")
    assert len(state["only"]) == 1
    assert len(state["both"]) == 2


def test_scopes_and_values_of_the_programs_own():
    @sgl.function
    def program(s):
        s["k"] = [1]
        with s.var_scope("part"):
            s += "a" + sgl.gen("x")
        with s.copy() as other:
            other += "b" + sgl.gen("y")
        s["y"] = other["y"]

    state = program.run(backend=Scripted())
    assert state["k"] == [1]
    assert state["part"] == "a" + answer_to("a")
    assert state["y"] == answer_to(state["part"] + "b")


def test_several_outputs_are_a_list_and_the_first_goes_on():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a", n=3)

    state = program.run(backend=Scripted())
    assert state["a"] == [answer_to("x"), answer_to("x", "1"), answer_to("x", "2")]
    assert state.text() == "x" + answer_to("x")
    assert len(state.get_meta_info("a")) == 3


def test_settings_of_calls_go_before_those_of_the_run():
    @sgl.function
    def program(s, stop):
        s += sgl.gen("a", max_tokens=3) + sgl.gen("b", temperature=0.5, stop=stop) + sgl.gen("c", dtype=int)

    backend = Scripted()
    program.bind(stop="!").run(backend=backend, max_new_tokens=7, temperature=0, top_p=0.5)
    assert [(g.max_tokens, g.temperature, g.top_p, g.stop) for g in backend.samplings] == [
        (3, 0, 0.5, None),
        (7, 0.5, 0.5, ("!",)),
        (7, 0, 0.5, None),
    ]
    assert backend.samplings[2].constraint == ("regex", "[+-]?[0-9]{1,18}")


# -- errors ----------------------------------------------------------------------------------------------------------


def failing(text: str) -> None:
    if "bad" in text:
        raise ValueError("no")


def test_a_failure_surfaces_where_its_value_is_read_with_the_line():
    lines: list[int] = []

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s += "bad"
        lines.append(here() + 1)
        s += sgl.gen("b")
        s += sgl.gen("c")

    state = program.run(backend=Scripted(failing))
    (line,) = lines
    assert state["a"] == answer_to("x")
    for name in ("b", "c"):
        with pytest.raises(
            ProgramError, match=rf"gen\('b'\) at .*test_lang_states.py:{line} failed: ValueError: no"
        ) as e:
            _ = state[name]
        assert isinstance(e.value.__cause__, ValueError)
    for read in (state.text, state.messages, lambda: state.fork(2), lambda: list(state.text_iter())):
        with pytest.raises(ProgramError):
            read()
    assert "failed" in repr(state)
    assert "gen('b')" in str(state.error())


def test_a_failed_fork_is_a_failed_join_and_no_thread_waits_for_ever():
    @sgl.function
    def program(s):
        forks = s.fork(3)
        forks += lambda i: ("bad" if i == 1 else "good") + sgl.gen("x")
        forks.join()
        s += "behind" + sgl.gen("y")
        forks[0].sync()
        s["good"] = forks[2]["x"]

    state = program.run(backend=Scripted(failing))
    for name in ("x", "y"):
        with pytest.raises(ProgramError, match=r"gen\('x'\) at .*failed: ValueError"):
            _ = state[name]


def test_what_the_program_raises_is_raised():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        program.run(backend=Scripted())
    state = program.run(backend=Scripted(), stream=True)
    with pytest.raises(ProgramError, match=r"program program at .*test_lang_states.py:\d+ failed: LookupError: mine"):
        _ = state["never"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (3, "3 .int. cannot be a part of a prompt"),
        (None, "None cannot be a part of a prompt"),
        ({}, "cannot be a part"),
    ],
)
def test_what_is_no_part_is_refused_at_once(part: object, message: str):
    @sgl.function
    def program(s):
        s += part

    with pytest.raises(TypeError, match=message):
        program.run(backend=Scripted())


def test_messages_must_begin_and_end_in_turn():
    @sgl.function
    def program(s):
        s += sgl.user_begin() + sgl.assistant("x")

    assert "assistant begins inside of user" in str(program.run(backend=Scripted()).error())
    assert "the role user ends, but no message had begun" in str(
        sgl.function(lambda s: s.append(sgl.user_end())).run(backend=Scripted()).error()
    )


def test_a_picture_is_refused_where_the_model_sees_nothing():
    @sgl.function
    def program(s):
        s += sgl.user(sgl.image("cat.png") + "What is it?") + sgl.assistant(sgl.gen("a"))

    state = program.run(backend=Scripted())
    with pytest.raises(ProgramError, match="does not accept pictures"):
        _ = state["a"]


# -- streams ---------------------------------------------------------------------------------------------------------


def test_streams_come_in_pieces_and_joined_they_are_the_text():
    @sgl.function
    def program(s):
        s += sgl.user("q") + sgl.assistant(sgl.gen("a"))
        s += sgl.user("r") + sgl.assistant(sgl.gen("b"))

    state = program.run(backend=Scripted(), stream=True)
    assert len(list(state.stream("a"))) == 4
    pieces = list(state.text_iter())
    assert "".join(pieces) == state.text()
    assert (
        "".join(state.text_iter("b"))
        == state["b"]
        == answer_to("[user|q][assistant|" + state["a"] + "][user|r][assistant|")
    )


def test_a_stream_is_ahead_of_the_program():
    first = threading.Event()
    backend = Scripted(lambda text: (first.wait(10) if "second" in text else True) and None)

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")
        s += "second" + sgl.gen("b")

    state = program.run(backend=backend, stream=True)
    assert "".join(state.text_iter("a")) == answer_to("x")
    assert "running" in repr(state)
    first.set()
    assert state["b"]


def test_streams_for_event_loops():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")

    async def read() -> list[object]:
        state = program.run(backend=Scripted(), stream=True)
        return [piece async for piece in state.text_async_iter("a", return_meta_data=True)]

    pieces = asyncio.run(read())
    assert "".join(piece for piece, _ in pieces) == answer_to("x")


def test_a_state_without_a_stream_comes_in_one_piece():
    @sgl.function
    def program(s):
        s += "x" + sgl.gen("a")

    state = program.run(backend=Scripted())
    assert list(state.text_iter()) == [state.text()]
    assert list(state.text_iter("a")) == [state["a"]]


# -- reasoning -------------------------------------------------------------------------------------------------------


class Thinking(Scripted):
    def generate(self, *args, **kwargs):
        found = super().generate(*args, **kwargs)
        return [type(each)("<think>\nhm\n</think>\n\n" + each.text, each.meta) for each in found]


def test_reasoning_is_kept_apart():
    @sgl.function
    def program(s):
        s += sgl.user("q") + sgl.assistant(sgl.separate_reasoning("A:" + sgl.gen("a"), model_type="qwen3"))

    state = program.run(backend=Thinking())
    said = answer_to("[user|q][assistant|A:")
    assert (state["a"], state["a_reasoning_content"]) == (said, "hm")
    assert state.messages()[-1]["content"] == "A:" + said
