"""Test that a model that is divided among ranks (gloo, on the CPU) gives the outputs of one rank, and that the end of a
rank ends requests, and the engine, with an error.

.venv/bin/python -m pytest -q tests/e2e/test_tensor_parallel.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import contextmanager

import engine_models as models
import httpx
import pytest
from engine_runs import check_idle, check_with_aborts, make_llm, paged, prompts_of, results, varied_params
from troubled import PATIENCE, client_of, eventually, is_gone, run

from dovetail import LLM, SamplingParams
from dovetail.errors import EngineDeadError, ResolutionError, WeightsError
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission

STORY = SamplingParams(max_new_tokens=400, temperature=0, ignore_eos=True)
CONFIGS = {
    "plain": paged(16, 3200, scheduler={"overlap": False}),
    "overlapped chunks": paged(16, 3200, scheduler={"overlap": True, "chunk_size": 20, "max_running": 6}),
    "retraction": paged(4, 200, scheduler={"overlap": True, "chunk_size": 50, "max_running": 8}),
    "ngram": paged(16, 3200, speculative="ngram", scheduler={"draft": "always", "overlap": False}),
    "ngram overlapped": paged(4, 400, speculative="ngram", scheduler={"draft": "always", "overlap": True}),
}
MORE = (
    ("plain", 2),
    ("overlapped chunks", 2),
    ("ngram", 2),
    ("ngram overlapped", 2),
    ("retraction", 3),
    ("retraction", 4),
)
"""Names of configs and numbers of ranks for the full run."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def checkpoint_of_three(tmp_path_factory):
    """A checkpoint that three ranks can divide."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    return models.save_llama(tmp_path_factory.mktemp("of_three"), **sizes)


@contextmanager
def opened(checkpoint, tp, **sections):
    llm = make_llm(checkpoint, parallel={"tp": tp}, threads=1, **sections)
    try:
        yield llm
    finally:
        llm.close()


def jobs(count=14, seed=0):
    """Return prompts, half of which share a prefix, and parameters of every sort."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 40) for _ in range(count)]
    prompts = prompts_of(lengths[: count // 2], seed) + prompts_of(lengths[count // 2 :], seed + 1, shared=37)
    return prompts, [varied_params(rng) for _ in prompts]


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("plain", 4),
        ("retraction", 2),
        ("ngram overlapped", 3),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MORE),
    ],
)
def test_several_ranks_generate_what_one_does(checkpoint, checkpoint_of_three, monkeypatch, name, tp):
    """Prompts in chunks, prefix hits, penalties, drafts, retraction: the tokens are the same, and log-probabilities differ
    by rounding only. The second round reuses prefixes. The model has two KV heads, so with four ranks two of them hold the
    same one."""
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    sections = CONFIGS[name]
    if tp == 3:
        checkpoint = checkpoint_of_three
    with opened(checkpoint, 1, **sections) as one, opened(checkpoint, tp, **sections) as several:
        assert [entry["rank"] for entry in several.loop.executor.describe()["ranks"]] == list(range(tp))
        for seed in (0, 1, 0):
            prompts, params = jobs(seed=seed)
            expected, got = one.generate(prompts, params), several.generate(prompts, params)
            assert results(got) == results(expected)
            for a, b in zip(got, expected, strict=True):
                found, wanted = ([e.logprob for e in o.logprobs] for o in (a, b))
                assert found == pytest.approx(wanted, abs=1e-4)
        for llm in (one, several):
            check_idle(llm)
        stats = several.loop.stats()
        assert stats.retractions > 0 or name != "retraction"
        assert (stats.drafted_tokens > 0) == name.startswith("ngram")


DRAFTERS = {"none": True, "draft_model": False, "eagle3_tree": True, "mtp": False, "dflash": True}
"""Whether steps overlap in the usual run, by drafter."""


@pytest.mark.parametrize(
    ("drafter", "overlap"),
    [
        *DRAFTERS.items(),
        *(pytest.param(name, not overlap, marks=pytest.mark.full) for name, overlap in DRAFTERS.items()),
    ],
)
def test_the_embedded_model_with_grammars_and_drafters(drafter, overlap):
    """Drafters that run a model are divided too. Grammars reach the ranks as masks."""
    outputs = []
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    params = [
        SamplingParams(max_new_tokens=40, temperature=0.8, seed=4, grammar=grammar),
        SamplingParams(max_new_tokens=30, temperature=0, n=2),
        SamplingParams(max_new_tokens=30, temperature=1.0, seed=9, logprobs=2),
    ]
    for tp in (1, 2):
        llm = LLM(
            "tiny",
            device="cpu",
            threads=1,
            speculative=drafter,
            parallel={"tp": tp},
            scheduler={"overlap": overlap, "draft": "always"},
            model={"dtype": "float32"},
        )
        outputs.append(llm.generate(["A person as JSON:", "Once upon a time", "The capital of France"], params))
        assert drafter == "none" or llm.loop.stats().accepted_tokens > 0
        assert llm.loop.drafter_errors == 0
        check_idle(llm)
        llm.close()
    assert results(outputs[0]) == results(outputs[1])
    assert isinstance(json.loads(outputs[1][0].text), dict)


def test_random_traffic_and_aborts(checkpoint):
    """Requests that come and are aborted at any time end once, with a beginning of what one rank generates alone."""
    prompts, params = jobs(24, seed=3)
    with opened(checkpoint, 1) as one:
        alone = [o.token_ids for o in one.generate(prompts, params)]
    with opened(checkpoint, 2, **paged(4, 300, scheduler={"chunk_size": 11, "max_running": 8, "overlap": True})) as llm:
        check_with_aborts(llm, prompts, params, alone, 0.2)


def test_an_executor_of_one_rank_is_refused():
    with pytest.raises(ResolutionError, match=r"parallel\.tp 2 needs executor\.ranks") as caught:
        LLM("tiny", device="cpu", parallel={"tp": 2}, executor="local")
    assert "executor: workers" in str(caught.value)


def test_an_error_in_the_process_of_a_rank_is_that_of_one_rank(checkpoint):
    """What is wrong with a checkpoint surfaces with the same class and text as in one process."""
    model = {"overrides": {"intermediate_size": 128}}
    with pytest.raises(WeightsError) as alone:
        make_llm(checkpoint, model=model, threads=1)
    with pytest.raises(WeightsError) as caught:
        make_llm(checkpoint, model=model, parallel={"tp": 2}, threads=1)
    assert str(caught.value) == str(alone.value)


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGTERM),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(0, signal.SIGTERM, marks=pytest.mark.full),
    ],
)
def test_a_killed_rank_ends_the_loop(checkpoint, rank, number):
    """SIGKILL ends a rank, and with it the requests and the loop; SIGTERM, which Ctrl-C-like tools send to all processes of
    a group, is for the parent to handle."""
    with opened(checkpoint, 2, scheduler={"overlap": True}) as llm:
        pids = [entry["pid"] for entry in llm.loop.executor.describe()["ranks"]]
        threading.Timer(0.3, os.kill, (pids[rank], number)).start()
        start = time.monotonic()
        if number == signal.SIGTERM:
            assert len(llm.generate([[5, 6, 7]], STORY)[0].token_ids) == 400
            return
        with pytest.raises(EngineDeadError, match=rf"the device was lost: rank {rank} \(pid {pids[rank]}\)"):
            llm.generate([[5, 6, 7]] * 50, STORY)
        assert time.monotonic() - start < 10
        eventually(lambda: all(map(is_gone, pids)))
        with pytest.raises(EngineDeadError):
            llm.generate([[5, 6, 7]], STORY)


def serve_two_ranks(tmp_path):
    """Start a server of the embedded model on two ranks. After the loss of a rank it starts no other engine for a
    while."""
    options = ["server.port=0", "threads=1", "grammar=none", "device=cpu", "parallel.tp=2"]
    options.append("supervision.backoff_seconds=300")
    sets = [word for text in options for word in ("--set", text)]
    return run(tmp_path, ["-c", "from dovetail.cli import main; main()", "serve", *sets])


def check_ended(server, pids):
    """Check that the ranks have ended, and that the server does so with the status of a lost device."""
    eventually(lambda: all(map(is_gone, pids)))
    eventually(lambda: "the engine process ended with status 70" in server.log)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 70


def test_a_rank_that_is_killed_while_there_is_no_request(tmp_path):
    """It is noticed before the next request: the server is not healthy any more, and says why."""
    server = serve_two_ranks(tmp_path)
    with client_of(server) as client:
        pids = [entry["pid"] for entry in client.get("/server_info").json()["engine"]["ranks"]]
        assert client.get("/health").status_code == 200
        os.kill(pids[1], signal.SIGKILL)
        eventually(lambda: client.get("/health").status_code == 503)
        answer = client.post("/generate", json={"text": "Hi", "sampling_params": {"max_new_tokens": 1}})
        assert answer.status_code == 503
        assert f"rank 1 (pid {pids[1]}) was ended by signal 9" in answer.text
        check_ended(server, pids)


def test_a_server_of_two_ranks(tmp_path):
    """The server answers as with one rank. A killed rank ends every waiting request with 503, and the process with exit
    code 70."""
    server = serve_two_ranks(tmp_path)
    body = {"text": "The quick brown", "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    llm = LLM("tiny", device="cpu", threads=1, grammar="none")
    expected = llm.generate("The quick brown", SamplingParams(max_new_tokens=24, temperature=0))[0].token_ids
    with client_of(server) as client:
        assert client.post("/generate", json=body).json()["output_ids"] == expected
        info = client.get("/server_info").json()
        pids = [entry["pid"] for entry in info["engine"]["ranks"]]
        assert len(set(pids)) == 2
        answers: list[httpx.Response] = []
        long = body | {"sampling_params": {"max_new_tokens": 1900, "temperature": 0, "ignore_eos": True}}
        waiting = [
            threading.Thread(target=lambda: answers.append(client.post("/generate", json=long))) for _ in range(3)
        ]
        for thread in waiting:
            thread.start()
        eventually(lambda: client.get("/server_info").json()["stats"]["running"] == 3)
        os.kill(pids[1], signal.SIGKILL)
        for thread in waiting:
            thread.join(PATIENCE)
        assert [answer.status_code for answer in answers] == [503] * 3
        assert all(f"rank 1 (pid {pids[1]}) was ended by signal 9" in answer.text for answer in answers)
        assert client.get("/health").status_code == 503
        check_ended(server, pids)
