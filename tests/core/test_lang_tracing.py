"""Test what a trace contains, and that executing it equals running the program. Run: python -m pytest
tests/core/test_lang_tracing.py"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dovetail as sgl
from dovetail.lang.symbols import symbols
from dovetail.lang.tracing import trace

sys.path.insert(0, str(Path(__file__).parent))
from lang_backend import Scripted, marked


@sgl.function
def program(s, document, question, tag="t"):
    s += sgl.system("Read:\n" + document)
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("a"))
    forks = s.fork(2)
    forks += sgl.user("again") + sgl.assistant(sgl.select("b", choices=["x", "y"]))
    forks.join()
    s += "tag " + s["a"] + tag


def test_the_whole_program_is_known():
    found = program.trace("doc", "what?")
    assert found.complete
    assert [(c.kind, c.name, c.state) for c in found.calls] == [("gen", "a", 0), ("select", "b", 1), ("select", "b", 2)]
    assert found.forks == ((0, (1, 2)),)
    assert all(Path(__file__).name in call.line for call in found.calls)
    assert found.prefix().text(marked) == "[system|Read:\ndoc][user|what?][assistant|"


def test_arguments_that_are_not_given_end_the_prefix():
    assert program.trace("doc").prefix().text(marked) == "[system|Read:\ndoc][user|"
    assert program.trace(question="q").prefix().text(marked) == "[system|Read:\n"
    assert program.bind(document="d").trace().prefix().text(marked) == "[system|Read:\nd][user|"


NEEDS = {
    "f-string": lambda x: f"{x}",
    "if": lambda x: bool(x),
    "len": len,
    "compare": lambda x: x == "a",
    "order": lambda x: x < "a",
    "method": lambda x: x.strip(),
    "index": lambda x: x[0],
    "iterate": lambda x: list(x),
    "int": int,
    "in": lambda x: "a" in x,
    "percent": lambda x: "%s" % x,  # noqa: UP031
    "str": str,
    "key": lambda x: {x: 1},
}


@pytest.mark.parametrize("need", NEEDS)
def test_looking_into_a_symbol_ends_the_trace(need: str):
    seen: list[str] = []

    def looks(s, x):
        s += "a"
        try:
            NEEDS[need](x)
        except Exception:
            seen.append("a program's own except has seen it")
        seen.append("went on")

    found = trace(looks, symbols(["x"]))
    assert not found.complete
    assert not seen
    assert Path(__file__).name in (found.stopped or "")
    assert found.prefix().text(marked) == "a"


def test_reading_what_a_call_found_ends_the_trace():
    for read in (
        lambda s: s.text(),
        lambda s: s.messages(),
        lambda s: s.get_meta_info("a"),
        lambda s: list(s.text_iter("a")),
        lambda s: s.set_var("b", [s["a"]]),
    ):

        def reads(s, read=read):
            s += sgl.gen("a")
            read(s)

        assert not trace(reads, {}).complete


def test_until_the_first_call_no_code_behind_it_runs():
    ran: list[int] = []

    def tells(s):
        s += "x"
        ran.append(1)
        s += sgl.gen("a")
        ran.append(2)

    assert trace(tells, {}, until_call=True).prefix().text(marked) == "x"
    assert ran == [1]


def test_run_batch_sends_what_all_rows_have_first():
    backend = Scripted()
    rows: list[Any] = [{"document": "same", "question": str(i)} for i in range(5)]
    states = program.run_batch(rows, backend=backend, num_threads=3)
    assert backend.prefixes == ["[system|Read:\nsame][user|"]
    assert all(f"[user|{i}]" in state.text() for i, state in enumerate(states))
    differing = Scripted()
    program.run_batch([["a", "q"], ("b", "q")], backend=differing)
    assert differing.prefixes == ["[system|Read:\n"]
    alone = Scripted()
    program.run_batch([rows[0]], backend=alone)
    assert alone.prefixes == []


def test_rows_that_fail_fail_alone():
    @sgl.function
    def picky(s, x):
        s += x + sgl.gen("a")
        if x == "2":
            raise ValueError("two")

    states = picky.run_batch([{"x": str(i)} for i in range(4)], backend=Scripted(), generator_style=True)
    errors = [state.error() for state in states]
    assert [error is None for error in errors] == [True, True, False, True]
    assert "ValueError: two" in str(errors[2])


@pytest.mark.parametrize(
    ("row", "message"), [({"y": 1}, "missing a required argument: 'x'"), ("text", "a row of run_batch is 'text'")]
)
def test_wrong_rows_are_refused_before_any_runs(row: Any, message: str):
    backend = Scripted()
    with pytest.raises(TypeError, match=message):
        sgl.function(lambda s, x: s.append(sgl.gen(x))).run_batch([{"x": "a"}, row], backend=backend)
    assert not backend.prompts


def test_a_batch_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]):
    program.run_batch([("a", str(i)) for i in range(3)], backend=Scripted(), progress_bar=True)
    shown = capsys.readouterr()
    assert "100%" in shown.err
    assert shown.out == ""


def test_no_more_rows_run_at_a_time_than_there_are_threads():
    running, most = [], []

    def during(text: str) -> None:
        running.append(text)
        most.append(len(running))
        time.sleep(0.01)
        running.remove(text)

    one_call = sgl.function(lambda s, x: s.append(sgl.gen(x)))
    one_call.run_batch([{"x": str(i)} for i in range(12)], backend=Scripted(during), num_threads=3)
    assert 1 < max(most) <= 3


def test_a_batch_of_a_wrong_number_of_threads():
    with pytest.raises(ValueError, match="num_threads is 0"):
        program.run_batch([("a", "b")], backend=Scripted(), num_threads=0)


def test_a_trace_that_is_complete_is_not_run_again():
    runs: list[int] = []

    @sgl.function
    def counted(s):
        runs.append(1)
        s += "x" + sgl.gen("a")
        s["b"] = s["a"]
        return [s["a"], {"k": s["b"]}]

    state = counted.run(backend=Scripted(), traced=True)
    assert runs == [1]
    assert state.ret_value == [state["a"], {"k": state["b"]}]
    assert state["a"] == state["b"]


def test_copies_read_what_other_copies_found():
    @sgl.function
    def passes(s):
        first, second = s.fork(2)
        first += "1" + sgl.gen("x")
        second += "2" + first["x"] + sgl.gen("x")
        s += second["x"] + first["x"]

    eager, traced = (passes.run(backend=Scripted(), traced=traced) for traced in (False, True))
    assert passes.trace().complete
    assert eager.text() == traced.text() != ""


def test_errors_of_a_trace_have_their_lines():
    @sgl.function
    def fails(s):
        s += "x"
        s += sgl.gen("a", n=0)

    class Failing(Scripted):
        def generate(self, *args, **kwargs):
            raise ValueError("no")

    eager, traced = (str(fails.run(backend=Failing(), traced=traced).error()) for traced in (False, True))
    assert eager == traced
    assert f"{Path(__file__).name}:" in traced


def test_copies_that_never_call_are_not_in_the_group():
    backend = Scripted()

    @sgl.function
    def some(s):
        forks = s.fork(4)
        forks[1] += "x" + sgl.gen("a")
        forks[3] += "y" + sgl.gen("a")
        forks.join()

    some.run(backend=backend, traced=True)
    assert [hints.group_size for hints in backend.hints] == [2, 2]


# -- random programs -------------------------------------------------------------------------------------------------

step = st.sampled_from(["text", "gen", "select", "user", "assistant", "fork", "gather", "concatenate", "ref", "set"])


def random_program(s: Any, steps: list[tuple[str, int]]) -> None:
    """Execute the steps that hypothesis has drawn, as far as each is possible at its position."""
    forks, made = None, list[str]()
    for i, (what, pick) in enumerate(steps):
        on = s if forks is None else forks[pick % len(forks)]
        match what:
            case "text":
                on += f"t{i}"
            case "gen":
                on += sgl.gen(f"v{i}")
                made += [f"v{i}"] if forks is None else []
            case "select":
                on += sgl.select(f"c{pick}", choices=["p", "q", "r"])
            case "user" | "assistant":
                on += (sgl.user if what == "user" else sgl.assistant)(f"m{i}" + sgl.gen(f"w{pick}"))
            case "fork":
                forks = s.fork(1 + pick) if forks is None else forks
            case "gather" | "concatenate" if forks is not None:
                forks.join(what)
                forks = None
            case "ref" if made:
                on += "(" + s[made[pick % len(made)]] + ")"
            case "set" if made:
                on[f"s{pick}"] = s[made[pick % len(made)]]


@settings(max_examples=60)
@given(st.lists(st.tuples(step, st.integers(0, 2)), max_size=12))
def test_eager_traced_and_one_after_another_are_equal(steps):
    found = []
    for how in ({}, {"traced": True}, {"use_thread": False}, {"stream": True}):
        state = sgl.function(random_program).run(steps, backend=Scripted(), **how)
        found.append((state.text(), state.values(), [m["content"] for m in state.messages()]))
    assert all(each == found[0] for each in found)
