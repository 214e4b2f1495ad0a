"""Test grammars whose masks cost more with each token, on the real engines: which requests end with an error, and
which do not.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_mask_budget_engine.py
"""

import re
import time

import pytest
from engine_runs import Traffic, check_idle

from dovetail import LLM, SamplingParams
from dovetail.constraints.backend_choice import GrammarRecipe
from dovetail.constraints.compilers import ProcessCompiler
from dovetail.constraints.service import GrammarService
from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import GrammarContext
from dovetail.messages import RequestFailed
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.types import FinishReason

AMBIGUOUS = 'root ::= s\ns ::= "a" s s | "a" s | "a" s s s | "a"'
"""After n tokens there are more than n squared ways to have come there."""
FREE = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)


def spec(backend):
    return GrammarSpec(GrammarKind.EBNF, AMBIGUOUS, backend)


@pytest.fixture(scope="module")
def llm():
    """Allow masks 2 ms a token and 200 ms beyond that; compiled grammars are not probed."""
    budget = {"mask_ms": 2.0, "mask_burst_ms": 200.0}
    engine = LLM(
        "tiny",
        device="cpu",
        threads=1,
        memory={"page_size": 16, "num_pages": 400},
        grammar={"isolation": "thread", **budget},
    )
    yield engine
    engine.close()


def hostile(backend):
    return SamplingParams(max_new_tokens=900, temperature=0, min_new_tokens=900, grammar=spec(backend))


def test_a_request_whose_masks_grow_ends_and_its_constraint_is_refused_while_others_go_on(llm):
    prompts = {f"f{i}": llm.tokenizer.encode(f"Once upon {i} ") for i in range(3)}
    quiet = Traffic(llm)
    for rid, prompt in prompts.items():
        quiet.add(rid, prompt, FREE)
    quiet.finish()

    traffic = Traffic(llm)
    for i in range(3):
        traffic.add(f"h{i}", llm.tokenizer.encode("Say"), hostile("xgrammar"))
    steps, end = [], time.monotonic() + 60
    added = False
    while len(traffic.ends) < 3 + 3 * added or not added:
        assert time.monotonic() < end
        start = time.process_time()
        traffic.step()
        steps.append(time.process_time() - start)
        if not added and any(traffic.tokens.values()):
            added = True
            for rid, prompt in prompts.items():
                traffic.add(rid, prompt, FREE)
    assert max(steps) < 3.0, "three masks, each of which was known to be slow before it took long"
    for i in range(3):
        finish = traffic.ends[f"h{i}"]
        assert isinstance(finish, FinishReason)
        assert "the masks of this ebnf take too long with grammar backend xgrammar" in str(finish.message)
        assert 10 < len(traffic.tokens[f"h{i}"]) < 900
    assert {rid: traffic.tokens[rid] for rid in prompts} == {rid: quiet.tokens[rid] for rid in prompts}

    again = Traffic(llm)
    again.add("again", llm.tokenizer.encode("Say"), hostile("xgrammar"))
    again.finish()
    failed = again.ends["again"]
    assert isinstance(failed, RequestFailed)
    assert (failed.status, failed.param) == (400, "ebnf")
    assert "take too long" in failed.message
    assert llm.loop.stats().grammar_overruns == 3
    check_idle(llm)


@pytest.fixture(scope="module")
def service(llm):
    """Compile with real engines in real processes, under the default budget."""
    tokenizer, registry = llm.tokenizer, llm.resolved.grammars
    context = GrammarContext(
        llm.resolved.model_info.vocab_size, tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.json
    )
    recipes = [
        GrammarRecipe(chosen.name, chosen.component.label, chosen.spec.target, chosen.config, chosen.spec.offers)
        for chosen in registry
    ]
    service = GrammarService(ProcessCompiler(recipes, context, seconds=20, memory=2**30))
    yield service
    service.close()


def outcome(service, asked):
    """Return the engine that accepted the constraint, or the refusal."""
    ticket, end = service.submit(asked), time.monotonic() + 180
    while not ticket.ready:
        assert time.monotonic() < end
        time.sleep(0.01)
    try:
        ticket.matcher()
    except GrammarError as error:
        return str(error)
    return ticket.backend


@pytest.mark.parametrize(
    ("kind", "text", "engine", "words"),
    [
        (GrammarKind.EBNF, AMBIGUOUS, "xgrammar", "the masks of this ebnf take too long with grammar backend xgrammar"),
        (
            GrammarKind.REGEX,
            r"(.*[\u0400-\u04ff].{30}|.*x.{40}|.*[0-9].{50}|.*\w.{60})",
            "lm_format_enforcer",
            "(take too long with|gives up on texts of this regex)",
        ),
        (GrammarKind.REGEX, ".*a.{200}", "lm_format_enforcer", "(take too long with|gives up on texts of this regex)"),
        (GrammarKind.REGEX, "(a|b)*a(a|b){400}", "outlines", "too large for grammar backend outlines"),
    ],
)
def test_hostile_constraints_are_found_out_before_a_request_runs(service, kind, text, engine, words):

    assert re.search(words, outcome(service, GrammarSpec(kind, text, engine)))


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance", "outlines", "lm_format_enforcer"])
def test_ordinary_constraints_keep_the_budget(service, engine):
    schema = (
        '{"type":"object","properties":{"name":{"type":"string"},"n":{"type":"integer"},'
        '"tags":{"type":"array","items":{"enum":["a","b"]}}},"required":["name"],"additionalProperties":false}'
    )
    assert outcome(service, GrammarSpec(GrammarKind.JSON_SCHEMA, schema, engine)) == engine
    assert outcome(service, GrammarSpec(GrammarKind.REGEX, r"[A-Z][a-z]{2,30}( \w+){0,8}\.", engine)) == engine
