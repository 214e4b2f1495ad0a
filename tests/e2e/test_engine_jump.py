"""Test jump-forward through the whole engine: greedy outputs equal those without it, in fewer forward passes, together
with every other feature.

.venv/bin/python -m pytest -q tests/e2e/test_engine_jump.py
"""

import functools
import json
import random
import re

import pytest
from engine_runs import Traffic, check_idle

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission

SHEET = (
    r'\{"name": "[A-Za-z ]{1,20}", "class": "[a-z]{1,12}", "level": [0-9]{1,2}, "hp": [0-9]{1,3}, '
    r'"items": \["[a-z ]{1,15}"(, "[a-z ]{1,15}"){0,3}\]\}'
)
SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 9},
        "parameters": {"enum": ["alphabet", "alphabetic"]},
    },
    "required": ["description", "parameters"],
    "additionalProperties": False,
}
SPECS = [
    GrammarSpec(GrammarKind.REGEX, SHEET),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    GrammarSpec(GrammarKind.REGEX, "(yes, of course|no, of course not), my friend é字 number [0-9]+ of the alphabet"),
]
PROMPT = "Write a character sheet in JSON: Bella is a level {} wizard with 55 hp. She carries a staff and a map."


def tiny(jump, isolation="thread", **sections):
    sections.setdefault("memory", {"num_pages": 400})
    grammar = {"backend": "xgrammar", "jump_forward": jump, "isolation": isolation}
    return LLM("tiny", device="cpu", grammar=grammar, **sections)


@pytest.fixture(scope="module")
def plain():
    return tiny(False)


@pytest.fixture(scope="module", params=[False, True])
def jumping(request):
    return tiny(True, "process", scheduler={"overlap": request.param})


def jobs(count, **params):
    prompts = [PROMPT.format(i) for i in range(count)]
    return prompts, [SamplingParams(grammar=SPECS[i % 3], max_new_tokens=90, **params) for i in range(count)]


def counted(llm, prompts, params):
    before = llm.loop.stats()
    outputs = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    check_idle(llm)
    after = llm.loop.stats()
    return outputs, after.steps - before.steps, after.jumped_tokens - before.jumped_tokens


@pytest.fixture(scope="module")
def plainly(plain):
    """Return ``counted`` without jumps."""
    return functools.cache(lambda count, **params: counted(plain, *jobs(count, **params)))


def differ_by_tokens_alone(llm, ours, theirs):
    """Check that where two outputs differ, they write the same text with other tokens: a forced span that is tokenised
    differently."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        assert ours == theirs
        return
    a, b = (llm.tokenizer.token_bytes[ids[at]] for ids in (ours, theirs))
    assert a.startswith(b) or b.startswith(a), (a, b)


def test_greedy_text_is_as_without_in_fewer_steps(plain, plainly, jumping):
    expected, steps, none = plainly(12, temperature=0.0)
    outputs, fewer, jumped = counted(jumping, *jobs(12, temperature=0.0))
    assert none == 0
    for ours, theirs in zip(outputs, expected, strict=True):
        differ_by_tokens_alone(plain, ours.token_ids, theirs.token_ids)
    sheets = [(a.text, b.text) for a, b in zip(outputs[::3], expected[::3], strict=True)]
    assert all(a == b for a, b in sheets)
    assert jumped > 50
    assert sum(len(o.token_ids) for o in outputs) - jumped / 2 > fewer - len(outputs)
    assert fewer < steps


def test_random_numbers_belong_to_positions(plain, plainly, jumping):
    """The same tokens get the same random numbers, whether the model or a jump has written the tokens before."""
    expected, _, _ = plainly(9, temperature=0.7, seed=5)
    outputs, _, _ = counted(jumping, *jobs(9, temperature=0.7, seed=5))
    for ours, theirs in zip(outputs, expected, strict=True):
        differ_by_tokens_alone(plain, ours.token_ids, theirs.token_ids)
    again, _, _ = counted(jumping, *jobs(9, temperature=0.7, seed=5))
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]


def test_everything_ends_within_jumps_as_it_would_between_tokens(plain, jumping):
    prompt, spec = PROMPT.format(3), SPECS[0]
    for ends in ({"stop": ("class",)}, {"stop": ('l"',)}, {"max_new_tokens": 9}, {"max_new_tokens": 14}):
        params = SamplingParams(**({"grammar": spec, "temperature": 0.0, "max_new_tokens": 90} | ends))
        (want,), (got,) = plain.generate(prompt, params), jumping.generate(prompt, params)
        assert (got.text, got.token_ids, got.finish) == (want.text, want.token_ids, want.finish)
    check_idle(jumping)


def test_penalties_and_n_and_logprobs(plain, jumping):
    prompt = PROMPT.format(3)
    shared = {"grammar": SPECS[0], "max_new_tokens": 90, "temperature": 0.0}
    for more in ({"repetition_penalty": 1.2, "frequency_penalty": 0.3}, {"logprobs": 2}, {"prompt_logprobs": 0}):
        (want,), (got,) = (llm.generate(prompt, SamplingParams(**shared, **more)) for llm in (plain, jumping))
        assert got.text == want.text
        assert len(got.logprobs) == len(want.logprobs)
        assert len(got.prompt_logprobs or []) == len(want.prompt_logprobs or [])
    outputs = jumping.generate(prompt, SamplingParams(**(shared | {"temperature": 1.2, "n": 4, "seed": 3})))
    assert len(outputs) == 4
    assert all(re.fullmatch(SHEET, o.text) for o in outputs)
    check_idle(jumping)


@pytest.mark.parametrize(("overlap", "mixed", "seed"), [(False, True, 0), (True, True, 1), (True, False, 2)])
def test_random_traffic_in_little_memory(overlap, mixed, seed, monkeypatch):
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    rng = random.Random(seed)
    scheduler = {"overlap": overlap, "mixed": mixed, "chunk_size": 23, "max_running": 8}
    llm = tiny(True, scheduler=scheduler, memory={"page_size": 4, "num_pages": 90})
    traffic = Traffic(llm)
    for i in range(45):
        spec = rng.choice([*SPECS, None])
        prompt = llm.tokenizer.encode(PROMPT.format(i))
        traffic.add(f"r{i}", prompt, SamplingParams(grammar=spec, max_new_tokens=60, temperature=1.0), seed=i)
        for _ in range(rng.choice([0, 1, 3])):
            traffic.step()
        if rng.random() < 0.2:
            traffic.abort(f"r{rng.randrange(i + 1)}")
        llm.loop.scheduler.check_integrity()
    traffic.finish()
    stats = llm.loop.stats()
    assert stats.jumped_tokens > 0
    assert stats.retractions > 0
    assert {traffic.kind(rid) for rid in traffic.ends} <= {"stop", "length", "abort"}
    check_idle(llm)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="no grammar backend in use offers"):
        LLM("tiny", device="cpu", grammar={"backend": "outlines", "jump_forward": True})
    with pytest.raises(ConfigError, match="one of the two"):
        LLM("tiny", device="cpu", grammar={"jump_forward": True}, speculative="ngram", scheduler={"overlap": False})
