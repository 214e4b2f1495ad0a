"""Test programs as they are written for SGLang's frontend: the same names, parameters and conventions.

Run: python -m pytest tests/core/test_lang_compat.py
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

import dovetail as sgl
from dovetail.lang import api
from dovetail.lang.ir import REGEX_FLOAT, REGEX_INT, REGEX_STR

sys.path.insert(0, str(Path(__file__).parent))
from lang_backend import Scripted, answer_to

GEN = """name max_tokens min_tokens n stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
    ignore_eos return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs dtype choices choices_method regex
    json_schema"""
RUN = """max_new_tokens n stop stop_token_ids temperature top_p top_k min_p frequency_penalty presence_penalty ignore_eos
    return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs"""


def test_arguments_stand_where_they_stand_there():
    assert list(inspect.signature(sgl.gen).parameters)[:23] == GEN.split()
    for short in (sgl.gen_int, sgl.gen_string):
        assert list(inspect.signature(short).parameters)[:4] == ["name", "max_tokens", "n", "stop"]
    assert list(inspect.signature(sgl.select).parameters) == ["name", "choices", "temperature", "choices_method"]
    assert list(inspect.signature(sgl.separate_reasoning).parameters) == ["expr", "model_type"]
    assert list(inspect.signature(sgl.OpenAI).parameters)[:4] == [
        "model_name",
        "is_chat_model",
        "chat_template",
        "is_azure",
    ]
    assert list(inspect.signature(sgl.RuntimeEndpoint).parameters)[:3] == ["base_url", "api_key", "verify"]


def test_every_setting_of_a_run_is_taken():
    @sgl.function(num_api_spec_tokens=8)
    def program(s):
        s += "x" + sgl.gen("a")

    values = dict.fromkeys(RUN.split(), 1) | {
        "stop": "x",
        "stop_token_ids": [1],
        "temperature": 0.5,
        "ignore_eos": True,
    }
    backend = Scripted()
    program.run(backend=backend, use_thread=True, **values)
    (sampling,) = backend.samplings
    given = sampling.given()
    assert {"max_tokens": 1, "stop": ("x",), "stop_token_ids": (1,)}.items() <= given.items()
    assert set(given) == {*RUN.split(), "max_tokens"} - {"max_new_tokens"}
    program.run_batch([{}], backend=Scripted(), num_threads="auto", progress_bar=False, generator_style=False, **values)


def test_words_are_where_programs_import_them_from():
    for name in ("function", "gen", "select", "user", "assistant_begin", "set_default_backend", "image"):
        assert getattr(api, name) is getattr(sgl, name)
    assert sgl.lang.choices.greedy_token_selection is sgl.greedy_token_selection
    assert all((REGEX_INT, REGEX_FLOAT, REGEX_STR))


def test_programs_that_are_called_run():
    @sgl.function
    def product(s, lhs, rhs=2):
        s += f"{lhs} times {rhs} is " + sgl.gen("expression", stop=")")
        with s.var_scope("answer"):
            s += str(lhs * rhs)

    state = product(3, rhs=4, backend=Scripted())
    assert state["answer"] == "12"
    assert str(state) == f"ProgramState({state.text()})"
    state["answer"] = int(state["answer"])
    assert state["answer"] == 12


def test_an_argument_of_the_program_goes_before_a_setting_of_that_name():
    @sgl.function
    def sample(s, question, n):
        s += question
        forks = s.fork(n)
        forks += "Reasoning:" + sgl.gen("reasoning", stop="\n") + "\n"
        forks += "Tool:" + sgl.gen("tool", choices=["calculator", "browser"]) + "\n"
        forks.join()

    state = sample.run(question="q", n=3, temperature=1.0, backend=Scripted())
    assert state["reasoning"] == [answer_to("qReasoning:")] * 3
    assert set(state["tool"]) <= {"calculator", "browser"}


def test_forks_are_written_to_by_index_and_their_variables_read():
    @sgl.function
    def tips(s):
        s += "Two tips. "
        forks = s.fork(2)
        for i in range(2):
            forks[i] += f"Tip {i}:"
            forks[i] += sgl.gen("tip", 16, stop=["\n\n"])
        for i, fork in enumerate(forks):
            s += f"{i}: " + fork["tip"] + "\n"
        s += "In summary" + sgl.gen("summary")

    state = tips.run(backend=Scripted())
    said = [answer_to(f"Two tips. Tip {i}:") for i in range(2)]
    assert state.text().startswith(f"Two tips. 0: {said[0]}\n1: {said[1]}\nIn summary<")
    with pytest.raises(TypeError, match=r"forks\[0\] cannot be replaced"):
        sgl.function(lambda s: s.fork(1).__setitem__(0, s)).run(backend=Scripted())


def test_statements_are_encoded_apart_and_put_together():
    @sgl.function
    def encoded(s, *contexts):
        forks = s.fork(len(contexts))
        forks += lambda i: f"Statement {i}: " + contexts[i] + "\n"
        forks.join(mode="concate_and_append")
        s += sgl.gen("answer", max_tokens=4)

    assert encoded.run("a", "b", backend=Scripted()).text().startswith("Statement 0: a\nStatement 1: b\n<")


def test_wrong_words_are_refused_where_they_stand():
    for wrong, message in (
        (lambda: sgl.select("x", []), "choices is"),
        (lambda: sgl.select("x", ["a", ""]), "none of them empty"),
        (lambda: sgl.select("x", "ab"), "choices is 'ab'"),
        (lambda: sgl.select("x", ["a"], temperature=1), "temperature of select is 1"),
        (lambda: sgl.gen(regex="a", dtype=int), "dtype and regex; only one"),
        (lambda: sgl.gen(dtype=list), "dtype is <class 'list'>; allowed: int"),
        (lambda: sgl.gen(stop_regex="a"), "stop_regex"),
        (lambda: sgl.separate_reasoning(sgl.gen("a"), "unknown"), "model_type 'unknown'"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    with pytest.raises(TypeError, match="takes no z; it takes x, y"):
        sgl.function(lambda s, x, y: None).bind(z=1)
    with pytest.raises(TypeError, match="no setting min_tokens, topp; allowed: frequency_penalty, "):
        sgl.function(lambda s: None).run_batch([{}], backend=Scripted(), topp=0.5, min_tokens=1, stop="x")
    with pytest.raises(TypeError, match="takes no argument"):
        sgl.function(lambda: None)
    with pytest.raises(ValueError, match="join mode is 'both'; allowed: gather"):
        sgl.function(lambda s: s.fork(2).join("both")).run(backend=Scripted())
    with pytest.raises(ValueError, match="2 parts for 3 forks"):
        sgl.function(lambda s: s.fork(3).__iadd__(["a", "b"])).run(backend=Scripted())
    with pytest.raises(ValueError, match="fork size is 0"):
        sgl.function(lambda s: s.fork(0)).run(backend=Scripted())


def test_a_session_is_named_in_every_call_of_the_programs_own_state():
    @sgl.function
    def turns(s):
        s += "a" + sgl.gen("x") + sgl.gen("y")
        s.fork(1)[0].append(sgl.gen("z"))

    backend = Scripted()
    turns.run(backend=backend, session="ann")
    assert [hints.session for hints in backend.hints[:2]] == ["ann", "ann"]
    assert all(hints.session == "" for hints in backend.hints[2:])
