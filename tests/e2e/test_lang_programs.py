"""Test that ten programs give the same greedy results when run eagerly, from their trace, and on a server.

Run: python -m pytest tests/e2e/test_lang_programs.py
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

import dovetail as sgl

PROGRAMS = sorted((Path(__file__).parents[2] / "examples" / "programs").glob("*.py"))


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"program_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program_of(module: ModuleType) -> sgl.Function:
    (program,) = (value for value in vars(module).values() if isinstance(value, sgl.Function))
    return program


@pytest.fixture(scope="module")
def runtime() -> Iterator[sgl.Runtime]:
    with sgl.Runtime("tiny", device="cpu", threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def greedy(runtime: sgl.Runtime) -> dict[str, dict[str, Any]]:
    """Return the results of each program when it runs eagerly in this process."""
    return {path.stem: loaded(path).example(backend=runtime, temperature=0) for path in PROGRAMS}


def test_there_are_ten():
    assert len(PROGRAMS) == 10


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_eager_and_traced_are_equal(path: Path, runtime: sgl.Runtime, greedy: dict[str, dict[str, Any]]):
    assert loaded(path).example(backend=runtime, temperature=0, traced=True) == greedy[path.stem]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_server_gives_the_same(path: Path, tiny_url: str, greedy: dict[str, dict[str, Any]]):
    with sgl.RuntimeEndpoint(tiny_url) as endpoint:
        assert loaded(path).example(backend=endpoint, temperature=0) == greedy[path.stem]


TRACES = {
    "chain_of_thought": ((("What is 3 + 4?",), {}), 2, 0),
    "multi_turn_chat": (((["a", "b", "c"],), {}), 3, 0),
    "rag": ((("document", "question"), {}), 1, 0),
    "self_consistency": ((("question", 8), {}), 16, 1),
    "skeleton_of_thought": ((("topic", 3), {}), 6, 1),
    "streaming_dialogue": ((("topic", 2), {}), 4, 0),
    "classify": ((("review",), {}), 1, 0),
}
"""Programs whose control flow needs no result of a call, with the calls and forks that they make."""


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_call_graph_is_known_before_the_first_call(path: Path):
    program = program_of(loaded(path))
    if path.stem not in TRACES:
        given = {"extract_json": ("text", 2), "react": ("question", 2), "tree_of_thought": ("question", 2, 1)}[
            path.stem
        ]
        trace = program.trace(*given)
        assert not trace.complete
        assert trace.stopped
        assert str(path) in trace.stopped, "the trace names the line that needs a value"
        return
    (args, kwargs), calls, forks = TRACES[path.stem]
    trace = program.trace(*args, **kwargs)
    assert trace.complete, trace.stopped
    assert (len(trace.calls), len(trace.forks)) == (calls, forks)


# -- what the programs must have found, whatever the model says ------------------------------------------------------


def test_turns_alternate_and_hold_the_answers(greedy: dict[str, dict[str, Any]]):
    found = greedy["multi_turn_chat"]
    assert [m["role"] for m in found["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in found["messages"] if m["role"] == "assistant"] == found["answers"]


def test_the_number_stands_in_the_text(greedy: dict[str, dict[str, Any]]):
    found = greedy["chain_of_thought"]
    assert f"So the answer is {found['answer']}." in found["text"]
    assert found["thought"] in found["text"]
    assert "\n" not in found["thought"]


def test_eight_votes(greedy: dict[str, dict[str, Any]]):
    found = greedy["self_consistency"]
    assert sum(found["votes"].values()) == len(found["thoughts"]) == 8
    assert len(set(found["thoughts"])) == 1, "greedy paths are all the same"
    assert found["votes"][found["winner"]] == max(found["votes"].values())


def test_sampled_paths_differ_and_repeat_themselves(runtime: sgl.Runtime):
    module = loaded(next(p for p in PROGRAMS if p.stem == "self_consistency"))
    first, second = (module.example(backend=runtime, temperature=1.5) for _ in range(2))
    assert first == second, "every path has its seed"
    assert len(set(first["thoughts"])) > 1


def test_paragraphs_are_joined_in_order(greedy: dict[str, dict[str, Any]]):
    found = greedy["skeleton_of_thought"]
    places = [found["answer"].index(f"\nMore about {i + 1}:{found[f'paragraph_{i}']}") for i in range(3)]
    assert places == sorted(places)
    assert len(set(places)) == 3


def test_the_person_fits_the_schema(greedy: dict[str, dict[str, Any]]):
    module = loaded(next(p for p in PROGRAMS if p.stem == "extract_json"))
    jsonschema.validate(json.loads(json.dumps(greedy["extract_json"]["person"])), module.PERSON)
    person, problem = greedy["extract_json"]["person"], greedy["extract_json"]["problem"]
    assert problem == module.find_problem(person, "Alice is 30 years old.")


def test_tools_were_really_called(greedy: dict[str, dict[str, Any]]):
    found = greedy["react"]
    assert found["log"]
    for tool, a, b, result in found["log"]:
        assert result == (a + b if tool == "add" else a * b)
        assert f"Action: {tool}\nInput: {a}, {b}\nObservation: {result}\n" in found["text"]


def test_the_best_idea_was_taken(greedy: dict[str, dict[str, Any]]):
    assert len(greedy["tree_of_thought"]["plan"]) == 2


def test_labels_are_labels(greedy: dict[str, dict[str, Any]]):
    assert set(greedy["classify"].values()) <= {"positive", "negative", "neutral"}
    assert len(greedy["classify"]) == 6


def test_the_document_was_computed_once(runtime: sgl.Runtime):
    module = loaded(next(p for p in PROGRAMS if p.stem == "rag"))
    runtime.flush_cache()
    before = runtime.stats()
    rows = [{"document": module.DOCUMENT, "question": question} for question in module.QUESTIONS]
    states = module.answer_from.run_batch(rows, backend=runtime, temperature=0, max_new_tokens=4)
    prefix = len(runtime.tokenizer.encode(states[0].text().partition("How many")[0], add_special_tokens=False))
    for state in states:
        assert state.get_meta_info("answer")["cached_tokens"] >= prefix - 2 * 16, "all but its last page"
    after = runtime.stats()
    computed = (after.prompt_tokens - after.cached_tokens) - (before.prompt_tokens - before.cached_tokens)
    assert computed < 2 * prefix, "64 rows would have made 64 of them"


def test_a_stream_is_what_was_said(greedy: dict[str, dict[str, Any]]):
    found = greedy["streaming_dialogue"]
    assert f"\nAnn:{found['ann_0']}\n" in found["text"]
    assert found["text"].startswith("Ann and Bob talk about the weather.\n")
