"""Test that workloads are the same on every machine, and that each kind has its properties.

Run: python -m pytest -q tests/core/test_bench_workloads.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import jsonschema
import pytest

from dovetail.bench.prompts import encoded, first_prompt, next_prompt
from dovetail.bench.records import LoadCall, Workload
from dovetail.bench.specs import JsonlSpec, parse_arrivals, parse_workload
from dovetail.bench.workloads import PromptVocabulary, make_workload, repeated, with_roots
from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError
from dovetail.tokenizer import Tokenizer

VOCABULARY = PromptVocabulary.of_size(1000, special=(0, 1, 2, 999))
GAMMA = "{kind: gamma, rate: 5, burstiness: 0.5}"
PINNED = {
    "random": "d4e8a0563161b47d",
    "{kind: random, count: 8, input: [3, 9], content: text}": "37ed83b70f9690e2",
    "shared_prefix": "fde6ff80bcdc1118",
    "chat": "0295092a2d4b7496",
    "json": "dcd9ee8d34df7451",
    "agent": "098e441943ba7cc0",
    "{kind: agent, content: text}": "a4e7181369b3f019",
    "{kind: questions, topic: sorting}": "4238d4070ed8b1e2",
}


def made(text, seed=0, arrivals=None):
    return make_workload(parse_workload(text), seed, VOCABULARY, arrivals and parse_arrivals(arrivals))


def hashes():
    return {text: made(text, 7, GAMMA).content_hash for text in PINNED}


def test_hashes_are_the_same_on_any_machine():
    assert hashes() == PINNED


def test_hashes_do_not_depend_on_the_seed_of_python():
    code = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['hashes']()))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code, __file__], env=environment, capture_output=True, check=True)
        assert json.loads(done.stdout) == PINNED


def test_the_hash_changes_with_all_that_is_asked():
    base = made("random", 0)
    assert base == made("random", 0)
    call = base.calls[0]
    changed = [
        call.model_copy(update=update)
        for update in (
            {"token_ids": (5, *call.token_ids[1:])},
            {"max_tokens": 65},
            {"arrival": 0.000001},
            {"json_schema": {"type": "object"}},
        )
    ]
    seen = {base.model_copy(update={"calls": (one, *base.calls[1:])}).content_hash for one in changed}
    seen |= {made("random", 1).content_hash, base.model_copy(update={"concurrency": 4}).content_hash}
    assert len(seen | {base.content_hash}) == 7


def test_schemas_of_the_same_keys_in_another_order_are_other_schemas():
    keys = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    calls = [
        LoadCall(id="x", group="x", text="say", json_schema={"properties": {name: keys[name] for name in order}})
        for order in ("ab", "ba")
    ]
    assert len({Workload(name="w", calls=(call,)).content_hash for call in calls}) == 2


def test_random_lengths_and_tokens():
    calls = made("{kind: random, count: 400, input: [3, 9], output: [1, 4]}").calls
    lengths, outputs = Counter(len(c.token_ids) for c in calls), Counter(c.max_tokens for c in calls)
    assert (set(lengths), set(outputs)) == (set(range(3, 10)), set(range(1, 5)))
    assert max(lengths.values()) < 3 * min(lengths.values())
    used = {token for call in calls for token in call.token_ids}
    assert used <= set(VOCABULARY.ids)
    assert not used & {0, 1, 2, 999}
    assert len(used) > 800
    assert all(call.sampling.ignore_eos and call.sampling.temperature == 0 for call in calls)
    assert len({call.group for call in calls}) == 400


def test_more_calls_begin_with_the_same_ones():
    for kind, count in (("random", "count"), ("chat", "conversations"), ("agent", "programs"), ("json", "count")):
        few, many = made(f"{{kind: {kind}, {count}: 3}}").calls, made(f"{{kind: {kind}, {count}: 9}}").calls
        assert many[: len(few)] == few


def test_a_shared_prefix_is_shared_by_its_group_alone():
    workload = made("{kind: shared_prefix, groups: 4, per_group: 5, prefix: 40, suffix: [2, 6]}")
    prefixes = {call.group: call.token_ids[:40] for call in workload.calls}
    assert len(set(prefixes.values())) == 4
    assert all(call.token_ids[:40] == prefixes[call.group] for call in workload.calls)
    assert {len(call.token_ids) - 40 for call in workload.calls} == {2, 3, 4, 5, 6}
    assert len({call.token_ids for call in workload.calls}) == 20
    order = [call.group for call in workload.calls]
    assert order != sorted(order), "groups are mixed"
    assert Counter(order) == dict.fromkeys(["g0", "g1", "g2", "g3"], 5)


@pytest.mark.parametrize(("text", "first"), [("chat", 96), ("agent", 288)])
def test_conversations_grow_by_answers_and_questions(text, first):
    workload = made(text)
    system = first - 32
    roots = [call for call in workload.calls if call.parent is None]
    assert {len(call.token_ids) for call in roots} == {first}
    assert len({call.token_ids[:system] for call in roots}) == 1
    assert len({call.token_ids[system:] for call in roots}) == len(roots)
    for before, call in pairwise(workload.calls):
        if call.parent is not None:
            assert call.parent == before.id
            assert (call.group, call.continues) == (before.group, True)
    prompt = first_prompt(workload.calls[0])
    grown = next_prompt(workload.calls[1], prompt, "ignored", [8, 9])
    assert grown.token_ids == (*workload.calls[0].token_ids, 8, 9, *workload.calls[1].token_ids)
    thinking = {call.think for call in workload.calls if call.parent is not None}
    assert thinking == {0.0} if text == "chat" else min(thinking) >= 0.02 and max(thinking) <= 0.1 and len(thinking) > 9


def test_conversations_of_text_are_messages():
    first, second = made("{kind: chat, conversations: 1, turns: 2, content: text, user: 5}").calls
    assert [message["role"] for message in first.messages] == ["system", "user"]
    grown = next_prompt(second, first_prompt(first), "an answer", None)
    assert [message["role"] for message in grown.messages] == ["system", "user", "assistant", "user"]
    assert grown.messages[2]["content"] == "an answer"
    tokenizer = Tokenizer.from_dir(locate("tiny"))
    assert "an answer" in tokenizer.decode(encoded(grown, tokenizer))
    assert len(second.messages[0]["content"].removeprefix("Copy the following: ").split()) == 5


def test_json_calls_have_schemas_that_can_be_met():
    calls = made("{kind: json, count: 30, schemas: 3}").calls
    schemas = {json.dumps(call.json_schema) for call in calls}
    assert len(schemas) == 3
    sheet = {"name": "Ada", "role": "rogue", "level": 3, "hp": 10, "items": ["axe"]}
    for text in schemas:
        schema = json.loads(text)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate({key: sheet[key] for key in schema["required"]}, schema)


def test_the_vocabulary_of_the_embedded_model_has_no_special_tokens():
    tokenizer = Tokenizer.from_dir(locate("tiny"))
    vocabulary = PromptVocabulary.of(tokenizer)
    assert len(vocabulary.ids) == 4096 - 10
    assert not set(vocabulary.ids) & set(tokenizer.special_token_ids)
    with pytest.raises(ConfigError, match="need a vocabulary"):
        make_workload(parse_workload("random"))
    assert make_workload(parse_workload("{kind: random, content: text}")).calls


LINES = """
"One two"
{"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": true, "arrival": 1.5}
{"id": "a", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5, "seed": 3, "json_schema": {"type": "object"}}

{"messages": [{"role": "user", "content": "And?"}], "parent": "a", "think": 2, "continues": true, "stop": ["."]}
"""


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text(LINES)
    workload = make_workload(JsonlSpec(path=file, output=9))
    assert workload.name == "mine"
    text, ids, chat, more = workload.calls
    assert (text.text, text.max_tokens, text.id, text.group) == ("One two", 9, "line2", "line2")
    assert (ids.token_ids, ids.max_tokens, ids.sampling.ignore_eos, ids.arrival) == ((5, 6, 7), 3, True, 1.5)
    assert (chat.sampling.temperature, chat.sampling.seed, chat.json_schema) == (0.5, 3, {"type": "object"})
    assert (more.parent, more.group, more.think, more.continues, more.sampling.stop) == ("a", "a", 2.0, True, (".",))
    assert len(make_workload(JsonlSpec(path=file, count=2)).calls) == 2
    assert parse_workload(str(file)) == JsonlSpec(path=file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "allowed: a string, or an object"),
        ('{"text": 1}', "'text' is not a field of a call; allowed: prompt, messages"),
        ("{}", "it has no prompt; give one of prompt and messages"),
        ('""', "it has no prompt"),
        ('{"prompt": "x", "messages": [{"role": "user"}]}', "give one of token_ids, text and messages"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens is 0: Input should be greater than or equal to 1"),
        ('{"prompt": "x", "parent": "y"}', "its parent 'y' is not the id of a line before it"),
        ('{"prompt": "x", "id": "line1"}', "the id 'line1' is already used by a line before it"),
        ('{"prompt": "x", "continues": true}', "needs a parent"),
        ('{"prompt": "x", "arrival": -1}', "arrival is -1: Input should be greater"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text(f'"fine"\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        make_workload(JsonlSpec(path=file))
    assert message in str(raised.value)
    assert "bad.jsonl, line 2" in str(raised.value)


def test_a_file_without_calls_and_one_that_is_not_there(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no calls"):
        make_workload(JsonlSpec(path=tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match="cannot be read"):
        make_workload(JsonlSpec(path=tmp_path / "absent.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poems", "does not match any of the expected tags"),
        ("{kind: random, input: [9, 3]}", "the first bound is above the second"),
        ("{kind: random, inputs: 3}", "random.inputs: Extra inputs"),
        ("{kind: chat, turns: 0}", "chat.turns"),
        ("{kind: [", "is not valid YAML"),
        ("3", "docs/bench.md"),
    ],
)
def test_wrong_specs_are_named(text, message):
    with pytest.raises(ConfigError) as raised:
        parse_workload(text)
    assert message in str(raised.value)


def test_a_workload_refuses_what_cannot_be_run():
    one = LoadCall(id="a", group="a", text="x")
    for calls, message in (
        ((one, one), "two calls have the id 'a'"),
        ((LoadCall(id="b", group="a", text="y", parent="a"), one), "does not come before it"),
        (
            (one, LoadCall(id="b", group="a", token_ids=(1,), parent="a", continues=True)),
            "prompt of token_ids, and the call that it continues has one of text",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            Workload(name="w", calls=calls)


def test_workloads_of_a_length(tmp_path):
    for text in PINNED:
        workload = make_workload(with_roots(parse_workload(text), 24), 0, VOCABULARY)
        assert 24 <= sum(call.parent is None for call in workload.calls) < 32
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "b", "parent": "a", "continues": true}\n')
    workload = repeated(make_workload(with_roots(JsonlSpec(path=file), 3)), 3)
    assert [(call.id, call.parent, call.group) for call in workload.calls] == [
        ("a", None, "a"),
        ("b", "a", "a"),
        ("a~2", None, "a~2"),
        ("b~2", "a~2", "a~2"),
        ("a~3", None, "a~3"),
        ("b~3", "a~3", "a~3"),
    ]
    Workload.model_validate(workload.model_dump())
