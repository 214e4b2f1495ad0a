"""Test the whole engine on a CUDA device against itself on the CPU.

.venv/bin/python -m pytest -q tests/gpu/test_engine_gpu.py
"""

import pytest
import torch

from dovetail import LLM, GrammarKind, GrammarSpec, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QUESTIONS = [
    "What is the capital of France?",
    "What is 7 plus 5?",
    "Sort these numbers: 9, 3, 7, 1",
    "What colour is grass?",
    "Which day comes after Monday?",
]


def chat_ids(llm, text):
    template = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return llm.tokenizer.encode(template, add_special_tokens=False)


def run(llm, params, repeats=1):
    prompts = [chat_ids(llm, text) for text in QUESTIONS] * repeats
    outputs = [o.token_ids for o in llm.generate(prompts, params)]
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0
    return outputs


@pytest.fixture(scope="module")
def expected():
    llm = LLM("tiny", device="cpu", model={"dtype": "float32"}, grammar="none")
    return run(llm, SamplingParams(temperature=0, max_new_tokens=48))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_float32_tokens_equal_those_of_the_cpu(expected, overlap, page_size):
    sections = {"memory": {"page_size": page_size, "kv_gib": 0.5}, "scheduler": {"overlap": overlap, "chunk_size": 24}}
    llm = LLM("tiny", device="cuda", model={"dtype": "float32"}, grammar="none", **sections)
    params = SamplingParams(temperature=0, max_new_tokens=48)
    assert run(llm, params) == expected
    assert run(llm, params, repeats=8) == expected * 8


@pytest.mark.parametrize("shared", [False, True], ids=["flat", "tree"])
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("graphs", ["none", "idle", "start"])
def test_graphs_overlap_and_shared_prefixes_change_no_token(expected, graphs, overlap, shared, monkeypatch):
    saved = []

    def always(self, batch):
        saved.append(batch.shared.saved)
        return True

    monkeypatch.setattr("dovetail_attention.triton.backend.TritonAttention.shares", always)
    llm = LLM(
        "tiny",
        device="cuda",
        model={"dtype": "float32"},
        grammar="none",
        attention="triton",
        memory={"page_size": 4, "kv_gib": 0.5},
        scheduler={"overlap": overlap, "shared_prefixes": shared, "max_running": 24, "chunk_size": 64},
        graphs={"decode": graphs != "none", "piecewise_tokens": 0 if graphs == "none" else 64, "max_rows": 16}
        | ({} if graphs == "none" else {"capture": graphs}),
    )
    params = SamplingParams(temperature=0, max_new_tokens=48)
    assert run(llm, params) == expected
    for _ in range(2):
        assert run(llm, params, repeats=8) == expected * 8
    assert bool(saved) == shared, "prefixes were to be read once, or never"
    assert all(tokens > 0 for tokens in saved)
    assert (llm.loop.executor.rank.engine.graphs is not None) == (graphs != "none")
    if graphs != "none":
        assert llm.loop.executor.rank.engine.graphs.num_captured > 0


def test_graphs_serve_requests_of_every_kind_together():
    """Requests with penalties, grammars, logprobs and seeds run together, and their outputs do not depend on graphs."""
    grammar = GrammarSpec(GrammarKind.REGEX, "(yes|no), [0-9]{3}")
    kinds = [
        SamplingParams(temperature=0, max_new_tokens=24, frequency_penalty=0.4, repetition_penalty=1.1),
        SamplingParams(temperature=0, max_new_tokens=24, grammar=grammar),
        SamplingParams(temperature=0, max_new_tokens=24, logprobs=3),
        SamplingParams(temperature=0.9, seed=5, top_k=40, min_p=0.02, max_new_tokens=24, min_new_tokens=20),
        SamplingParams(temperature=0, max_new_tokens=24, logit_bias={30: 4.0}),
    ]
    found = []
    for graphs in (False, "auto"):
        sections = {"graphs": {"decode": graphs}, "attention": "triton", "model": {"dtype": "float32"}}
        llm = LLM("tiny", device="cuda", memory={"kv_gib": 0.5}, **sections)
        prompts = [chat_ids(llm, text) for text in QUESTIONS]
        for _ in range(3):
            outputs = llm.generate(prompts, kinds)
        found.append([o.token_ids for o in outputs])
        assert len(outputs[2].logprobs) == len(outputs[2].token_ids)
        assert outputs[1].text.startswith(("yes, ", "no, "))
    assert found[0] == found[1]


def test_steps_in_graphs_wait_for_nothing():
    """With overlap the host waits for one event per step, and no kernel launch or copy of a decode step blocks it."""
    llm = LLM("tiny", device="cuda", grammar="none", memory={"kv_gib": 0.5}, scheduler={"overlap": True})
    prompts = [chat_ids(llm, text) for text in QUESTIONS]
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, ignore_eos=True, max_new_tokens=64)
    first = [o.token_ids for o in llm.generate(prompts, params)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert [o.token_ids for o in llm.generate(prompts, params)] == first
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_drafts_change_nothing(expected):
    llm = LLM(
        "tiny", device="cuda", model={"dtype": "float32"}, grammar="none", memory={"kv_gib": 0.5}, speculative="ngram"
    )
    assert run(llm, SamplingParams(temperature=0, max_new_tokens=48)) == expected


def test_seeded_sampling_does_not_depend_on_overlap():
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=3, max_new_tokens=32, frequency_penalty=0.2)
    sections = {"model": {"dtype": "float32"}, "grammar": "none", "memory": {"kv_gib": 0.5}}
    runs = [run(LLM("tiny", device="cuda", scheduler={"overlap": o}, **sections), params) for o in (False, True)]
    assert runs[0] == runs[1]


def test_grammar_and_logprobs_under_overlap():
    llm = LLM("tiny", device="cuda", memory={"kv_gib": 0.5}, scheduler={"overlap": True})
    grammar = GrammarSpec(GrammarKind.REGEX, "(yes|no), [0-9]{3}")
    params = SamplingParams(temperature=1.5, grammar=grammar, logprobs=2, max_new_tokens=32)
    for output in llm.generate([chat_ids(llm, q) for q in QUESTIONS], params):
        assert output.text.startswith(("yes, ", "no, "))
        assert len(output.logprobs) == len(output.token_ids)
    assert llm.loop.stats().pages_used == 0
