"""Test backends of programs against real models: this process, a server, and the official clients of OpenAI and
Anthropic.

Run: python -m pytest tests/e2e/test_lang_backends.py
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import dovetail as sgl
from dovetail import LLM, EngineDeadError, EngineError, ProgramError, RequestError, SamplingParams
from dovetail.lang.backends.base import Backend, ReuseHints
from dovetail.lang.conversation import Conversation
from dovetail.lang.ir import SamplingOptions

CHOICES = ["Paris", "Rome", "a small town in the north", "Par"]
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def runtime() -> Iterator[sgl.Runtime]:
    with sgl.Runtime("tiny", device="cpu", threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def server(tiny_url: str) -> Iterator[sgl.RuntimeEndpoint]:
    with sgl.RuntimeEndpoint(tiny_url) as found:
        yield found


@pytest.fixture(scope="module")
def chat_model(tiny_url: str) -> Iterator[sgl.OpenAI]:
    with sgl.OpenAI("tiny", base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def completions(tiny_url: str) -> Iterator[sgl.OpenAI]:
    with sgl.OpenAI("tiny", False, base_url=f"{tiny_url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def claude(tiny_url: str) -> Iterator[sgl.Anthropic]:
    pytest.importorskip("anthropic")
    with sgl.Anthropic("tiny", base_url=tiny_url, api_key="none", max_retries=0) as found:
        yield found


@sgl.function
def ask(s, question, **settings):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0, **settings))


# -- the same answers, whatever way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["server", "chat_model", "claude"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_way_to_the_model_gives_its_answer(
    name: str, stream: bool, runtime: sgl.Runtime, request: pytest.FixtureRequest
):
    backend: Backend = request.getfixturevalue(name)
    want = ask.run("What is the capital of France?", backend=runtime)
    state = ask.run("What is the capital of France?", backend=backend, stream=stream)
    pieces = list(state.text_iter("answer"))
    assert state["answer"] == want["answer"] == "".join(pieces)
    assert (len(pieces) > 1) == stream
    mine, theirs = want.get_meta_info("answer"), state.get_meta_info("answer")
    for key in ("prompt_tokens", "completion_tokens"):
        assert mine[key] == theirs[key]


@pytest.mark.parametrize("name", ["server", "chat_model", "claude"])
def test_outputs_keep_to_schemas(name: str, request: pytest.FixtureRequest):
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    state = ask.run("Give me x.", backend=request.getfixturevalue(name), json_schema=schema)
    assert json.loads(state["answer"])["x"] in (1, 2)


@pytest.mark.parametrize("name", ["runtime", "server"])
def test_outputs_keep_to_types(name: str, request: pytest.FixtureRequest):
    backend = request.getfixturevalue(name)
    for dtype, read in ((int, int), (float, float), (bool, ["True", "False"].index), ("str", json.loads)):
        read(ask.run("How many?", backend=backend, dtype=dtype)["answer"])


def test_text_without_messages_is_what_a_user_says(runtime: sgl.Runtime, chat_model: sgl.OpenAI, claude: sgl.Anthropic):
    @sgl.function
    def plain(s):
        s += "What is the capital of Italy?" + sgl.gen("a", max_tokens=12, temperature=0)

    @sgl.function
    def said(s):
        s += sgl.user("What is the capital of Italy?") + sgl.assistant(sgl.gen("a", max_tokens=12, temperature=0))

    want = said.run(backend=runtime)["a"]
    assert plain.run(backend=chat_model)["a"] == plain.run(backend=claude)["a"] == want


def test_settings_reach_the_model(runtime: sgl.Runtime, server: sgl.RuntimeEndpoint):
    found = []
    for backend in (runtime, server):
        settings = {"n": 2, "seed": 3, "stop": "zq", "top_logprobs_num": 2, "return_logprob": True}
        state = ask.run("Hello", backend=backend, session="talk", **settings)
        metas = state.get_meta_info("answer")
        assert len(state["answer"]) == 2
        assert all(len(top) == 2 for top in metas[0]["output_top_logprobs"])
        found.append([[(t, round(p, 3)) for p, t, _ in meta["output_token_logprobs"]] for meta in metas])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["runtime", "server"])
def test_the_next_token_has_log_probabilities_without_being_generated(name: str, request: pytest.FixtureRequest):
    @sgl.function
    def looks(s):
        s += PROMPT + sgl.gen(
            "next", max_tokens=0, return_logprob=True, top_logprobs_num=3, return_text_in_logprobs=True
        )

    state = looks.run(backend=request.getfixturevalue(name))
    assert state.text() == PROMPT
    (top,) = state.get_meta_info("next")["output_top_logprobs"]
    assert len({text for _, _, text in top}) == 3
    assert all(isinstance(text, str) and logprob <= 0 for logprob, _, text in top)


# -- select ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def true_scores() -> dict[str, list[float]]:
    """Return the log-probabilities of each choice after the prompt, by an engine that computes all of it at once."""
    llm = LLM("tiny", device="cpu", threads=1, cache="none")
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    texts = [f"{PROMPT} {choice}" for choice in CHOICES]
    begin = len(llm.tokenizer.encode(PROMPT)) if llm.tokenizer else 0
    outputs = llm.generate(texts, params)
    llm.close()
    return {
        choice: [entry.logprob or 0.0 for entry in (output.prompt_logprobs or [])[begin:]]
        for choice, output in zip(CHOICES, outputs, strict=True)
    }


@pytest.mark.parametrize("name", ["runtime", "server", "completions"])
def test_scores_are_those_of_the_whole_text(
    name: str, true_scores: dict[str, list[float]], request: pytest.FixtureRequest
):
    backend: Backend = request.getfixturevalue(name)
    conversation = Conversation().plus(PROMPT, backend.template)
    choices = [f" {choice}" for choice in CHOICES]
    scored, _ = backend.score(conversation, choices, False, ReuseHints())
    for choice, each in zip(CHOICES, scored, strict=True):
        assert each.logprobs == pytest.approx(true_scores[choice], abs=0.03), choice


@pytest.mark.parametrize("name", ["runtime", "server", "completions"])
def test_scores_without_the_prompt(name: str, runtime: sgl.Runtime, request: pytest.FixtureRequest):
    backend: Backend = request.getfixturevalue(name)
    choices = [" Paris", " a small town"]
    scored, _ = backend.score(Conversation().plus(PROMPT, backend.template), choices, True, ReuseHints())
    assert all(each.unconditional[0] is None and len(each.unconditional) == len(each.logprobs) for each in scored)
    alone, _ = runtime.score(Conversation().plus(" a", runtime.template), [" small town"], False, ReuseHints())
    assert scored[1].unconditional[1:] == pytest.approx(alone[0].logprobs, abs=0.03)


@pytest.mark.parametrize(
    "method",
    [sgl.token_length_normalized, sgl.greedy_token_selection, sgl.unconditional_likelihood_normalized],
    ids=repr,
)
def test_every_rule_chooses_on_both_ways(method: Any, runtime: sgl.Runtime, server: sgl.RuntimeEndpoint):
    @sgl.function
    def choose(s):
        s += PROMPT + " " + sgl.gen("city", choices=CHOICES, choices_method=method) + "."

    states = [choose.run(backend=backend) for backend in (runtime, server)]
    assert states[0]["city"] == states[1]["city"]
    assert states[0].text() == f"{PROMPT} {states[0]['city']}."
    metas = [state.get_meta_info("city") for state in states]
    assert metas[0]["scores"] == pytest.approx(metas[1]["scores"], abs=0.03)
    assert len(metas[0]["normalized_prompt_logprobs"]) == len(CHOICES)


def test_select_computes_its_prompt_once(runtime: sgl.Runtime):
    prefix = " ".join(f"Fact {i}: {i} is a number." for i in range(40))

    @sgl.function
    def choose(s):
        s += prefix + " The best number is" + sgl.select("x", choices=[f" {i}" for i in range(10)])

    runtime.flush_cache()
    before = runtime.stats()
    choose.run(backend=runtime).sync()
    after = runtime.stats()
    tokens = len(runtime.tokenizer.encode(prefix))
    computed = (after.prompt_tokens - after.cached_tokens) - (before.prompt_tokens - before.cached_tokens)
    assert computed < tokens + 12 * 40, "the prompt is computed once, and for each choice the tokens on its last page"


# -- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["runtime", "server"])
def test_what_forks_share_is_computed_once(name: str, request: pytest.FixtureRequest):
    backend = request.getfixturevalue(name)
    backend.flush_cache()

    @sgl.function
    def program(s):
        s += " ".join(f"Fact {i}: {i} is a number." for i in range(30))
        forks = s.fork(8)
        forks += lambda i: f" Number {i} is" + sgl.gen("x", max_tokens=2, temperature=0)
        forks.join()
        s["metas"] = [fork.get_meta_info("x") for fork in forks]

    metas = program.run(backend=backend)["metas"]
    cached = sorted(meta["cached_tokens"] for meta in metas)
    assert cached[0] == 0
    assert all(count > metas[0]["prompt_tokens"] - 32 for count in cached[1:])


# -- the thread that owns the engine ---------------------------------------------------------------------------------


def test_every_call_is_answered_also_when_the_runtime_is_closed():
    """Threads call continuously while the runtime is closed: each call ends, and the engine is left empty and
    usable."""
    llm = LLM("tiny", device="cpu", threads=1, scheduler={"max_waiting": 3})
    runtime = sgl.Runtime(llm)
    good, refused, wrong = [], [], list[BaseException]()
    busy = threading.Barrier(13, timeout=60)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        busy.wait()
        while True:
            text = "word " * rng.randint(1, 60)
            conversation = Conversation().plus(text, runtime.template)
            try:
                sampling = SamplingOptions(max_tokens=rng.randint(1, 12), n=rng.randint(1, 3), temperature=1.0)
                good.append(runtime.generate(conversation, sampling, ReuseHints()))
            except EngineError as error:
                refused.append(error)
                return
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(12)]
    for thread in threads:
        thread.start()
    busy.wait()
    while len(good) < 20:
        threads[0].join(0.01)
    runtime.close()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert len(refused) == 12
    assert all("closed" in str(error) for error in refused)
    assert not llm.loop.has_work
    sgl.Runtime(llm).close()
    assert llm.generate("again", SamplingParams(max_new_tokens=1))[0].finish
    llm.close()


def test_an_engine_that_dies_is_everybodys_error(monkeypatch: pytest.MonkeyPatch):
    runtime = sgl.Runtime("tiny", device="cpu", threads=1)
    scheduler, schedule, calls = runtime.llm.loop.scheduler, runtime.llm.loop.scheduler.schedule, []

    def dies() -> Any:
        calls.append(1)
        if len(calls) > 5:
            raise ZeroDivisionError("ledger")
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", dies)

    @sgl.function
    def program(s):
        forks = s.fork(4)
        forks += "x" + sgl.gen("a", max_tokens=50, ignore_eos=True)
        return forks

    for fork in program.run(backend=runtime).ret_value:
        error = fork.error()
        assert isinstance(error, ProgramError)
        assert isinstance(error.__cause__, EngineDeadError)
        assert "ledger" in str(error)
    with pytest.raises(EngineDeadError, match="ledger"):
        runtime.stats()
    runtime.close()


def test_refusals_of_the_engine_are_errors_of_their_call_alone(runtime: sgl.Runtime, server: sgl.RuntimeEndpoint):
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks[0] += "word " * 3000 + sgl.gen("x", max_tokens=2)
        forks[1] += "word" + sgl.gen("x", max_tokens=2)
        return forks

    for backend in (runtime, server):
        long, short = program.run(backend=backend).ret_value
        assert isinstance(long.error().__cause__, RequestError)
        assert "context" in str(long.error())
        assert short.error() is None


def test_wrong_settings_say_so(runtime: sgl.Runtime, server: sgl.RuntimeEndpoint):
    for backend in (runtime, server):
        with pytest.raises(ProgramError, match=r"temperature"):
            _ = sgl.function(lambda s: s.append("x" + sgl.gen("a", temperature=-1))).run(backend=backend)["a"]
        with pytest.raises(ProgramError, match=r"the prompt is empty"):
            _ = sgl.function(lambda s: s.append(sgl.gen("a"))).run(backend=backend)["a"]


# -- what an API does not have ---------------------------------------------------------------------------------------


def test_apis_refuse_what_they_do_not_have(chat_model: sgl.OpenAI, claude: sgl.Anthropic):
    def error(backend: Backend, part: Any) -> str:
        return str(sgl.function(lambda s: s.append(part)).run(backend=backend).error())

    begun = sgl.user("q") + sgl.assistant("So" + sgl.gen("a"))
    assert "cannot continue a message that has begun" in error(chat_model, begun)
    assert "cannot constrain an output with regex" in error(chat_model, sgl.user("q") + sgl.gen("a", regex="a"))
    assert "has no top_k" in error(chat_model, sgl.user("q") + sgl.gen("a", top_k=3))
    assert "returns no log-probabilities of a given text" in error(chat_model, "q" + sgl.select("a", choices=["x"]))
    assert "returns no log-probabilities of a given text" in error(claude, "q" + sgl.select("a", choices=["x"]))
    assert "n is 2" in error(claude, sgl.user("q") + sgl.gen("a", n=2))
    assert "outside of messages" in error(claude, sgl.user("q") + "text" + sgl.gen("a"))
    assert "None" in error(chat_model, sgl.user("q") + sgl.assistant(sgl.gen("a", top_k=-1, min_p=0.0, max_tokens=1)))


def test_failures_of_the_official_clients_are_dovetails_errors(tiny_url: str):
    for backend in (
        sgl.OpenAI("absent", base_url=f"{tiny_url}/v1", api_key="none", max_retries=0),
        sgl.Anthropic("absent", base_url=tiny_url, api_key="none", max_retries=0),
    ):
        cause = ask.run("q", backend=backend).error().__cause__
        assert isinstance(cause, RequestError)
        assert "answered 404" in str(cause)
    nowhere = "http://127.0.0.1:9"
    for backend in (
        sgl.OpenAI("m", base_url=nowhere, api_key="none", max_retries=0),
        sgl.Anthropic("m", base_url=nowhere, api_key="none", max_retries=0),
        sgl.RuntimeEndpoint(nowhere),
    ):
        with backend:
            cause = ask.run("q", backend=backend).error().__cause__
            assert isinstance(cause, EngineError)
            assert "did not answer" in str(cause)


# -- the server's side -----------------------------------------------------------------------------------------------


def test_a_bos_that_the_template_writes_is_not_added_again(server: sgl.RuntimeEndpoint):
    endpoint = sgl.RuntimeEndpoint(server.base_url)
    endpoint.__dict__["model_info"] = {"special_tokens": {"bos_token": "<s>"}, "adds_bos": True}
    assert endpoint._without_bos("<s>hi", chat=True) == "hi"
    assert endpoint._without_bos("<s>hi", chat=False) == "<s>hi"
    endpoint.close()


def test_a_closed_endpoint_says_so(server: sgl.RuntimeEndpoint):
    endpoint = sgl.RuntimeEndpoint(server.base_url)
    assert sgl.get_server_info(endpoint)["status"] == "ready"
    endpoint.close()
    with pytest.raises(EngineError, match="was closed"):
        endpoint.flush_cache()


def test_programs_need_a_backend(runtime: sgl.Runtime):
    with pytest.raises(RuntimeError, match="a program needs a backend"):
        ask.run("q")
    with pytest.raises(RequestError, match="belongs to another Runtime"):
        sgl.Runtime(runtime.llm)
    with pytest.raises(TypeError, match=r"Runtime\(llm\) makes a backend"):
        ask.run("q", backend=runtime.llm)
    sgl.set_default_backend(runtime)
    try:
        assert math.isfinite(len(ask.run("q")["answer"]))
        assert sgl.get_server_info()["context_len"] == 2048
    finally:
        sgl.set_default_backend(None)
