"""Test drafts verified in CUDA graphs: with every drafter, tokens are those of decoding without drafts and without
graphs.

.venv/bin/python -m pytest -q tests/gpu/test_verify_graphs_gpu.py
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail import LLM, GrammarKind, GrammarSpec, SamplingParams
from dovetail.engine.verify_graphs import VerifyGraphs
from dovetail.interfaces.speculative import Drafter
from dovetail.types import DraftTree

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
GREEDY = SamplingParams(temperature=0, max_new_tokens=48)
WIDTH = 6


class Guesser(Drafter):
    """Draft random trees, or chains, of random length. A node is the token after its parent with chance ``right``, and
    any other token otherwise; ``futures`` are the outputs of prompts."""

    def __init__(self, right, *, chain, futures, vocab):
        self.right, self.chain, self.vocab = right, chain, vocab
        self.futures = futures
        self.rng = np.random.default_rng(0)

    @property
    def max_draft_tokens(self):
        return WIDTH

    def propose(self, batch):
        rows = len(batch.slots)
        ids = self.rng.integers(0, self.vocab, (rows, WIDTH)).astype(np.int32)
        parents = np.tile(np.arange(-1, WIDTH - 1, dtype=np.int32), (rows, 1))
        lens = np.zeros(rows, np.int32)
        for row in range(batch.num_extend, rows):
            lens[row] = self.rng.integers(0, min(WIDTH, batch.draft_limits[row]) + 1)
            self.fill(batch.reqs[row], batch.prefix_lens[row] + 1, ids[row], parents[row], int(lens[row]))
        return DraftTree(ids, parents, lens)

    def fill(self, req, known_len, ids, parents, count):
        future = self.futures.get(tuple(req.token_ids[: req.prompt_len].tolist()), [])
        future, depth = future[known_len - req.prompt_len :], [0]
        for node in range(count):
            if not self.chain and self.rng.random() < 0.5:
                parents[node] = self.rng.integers(-1, node)
            depth.append(depth[parents[node] + 1] + 1)
            if depth[-1] <= len(future) and self.rng.random() < self.right:
                ids[node] = future[depth[-1] - 1]


def prompts_of(llm, repeats):
    template = [llm.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in template] * repeats


def run(llm, params, repeats=1):
    outputs = [o.token_ids for o in llm.generate(prompts_of(llm, repeats), params)]
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0
    return outputs


def make(graphs, **more):
    """Start an engine; ``graphs`` is none, idle or start."""
    section = {"decode": graphs != "none", "piecewise_tokens": 0, "max_rows": 64}
    sections = {
        "model": {"dtype": "float32"},
        "attention": "triton",
        "memory": {"page_size": 4, "kv_gib": 0.5},
        "scheduler": {"overlap": False, "shared_prefixes": False, "max_running": 12, "chunk_size": 64},
        "graphs": section if graphs == "none" else section | {"capture": graphs},
    }
    return LLM("tiny", device="cuda", **(sections | more))


def draft_with(llm, drafter):
    """Run the engine with this drafter in place of none."""
    llm.loop.executor.rank.drafter = drafter
    llm.loop.scheduler.limits = replace(llm.loop.scheduler.limits, draft_width=WIDTH)
    with llm.loop.executor.rank.context:
        llm.loop.executor.rank.engine.expect_drafts(WIDTH, trees=not drafter.chain)


@pytest.fixture(scope="module")
def expected():
    llm = LLM("tiny", device="cpu", model={"dtype": "float32"}, grammar="none")
    outputs = run(llm, GREEDY)
    return (
        outputs,
        dict(zip(map(tuple, prompts_of(llm, 1)), outputs, strict=True)),
        llm.loop.executor.rank.engine.info.vocab_size,
    )


@pytest.fixture
def launches(monkeypatch):
    """Record the keys of the graphs that ran. Sizes are captured without waiting long."""
    for module in ("captures", "sampler_graphs"):
        monkeypatch.setattr(f"dovetail.engine.{module}.NEEDED_BEFORE_CAPTURE", 1)
    keys, launch = [], VerifyGraphs.launch

    def noted(self, key, *rest):
        keys.append(key)
        return launch(self, key, *rest)

    monkeypatch.setattr(VerifyGraphs, "launch", noted)
    return keys


@pytest.mark.parametrize("graphs", ["none", "idle", "start"])
def test_ngram_drafts_change_no_token(expected, graphs, launches):
    llm = make(graphs, grammar="none", speculative="ngram")
    assert run(llm, GREEDY) == expected[0]
    for _ in range(3):
        assert run(llm, GREEDY, repeats=6) == expected[0] * 6
    verify = llm.loop.executor.rank.engine.verify_graphs
    assert (verify is not None) == (graphs != "none") == bool(launches)
    if verify is not None:
        assert verify.num_captured > 0
        assert not verify.refused
        assert not any(key.tree for key in launches)
        assert llm.loop.info["verify_graphs"] == verify.sizes


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0], ids=["wrong", "mostly right", "right"])
@pytest.mark.parametrize("chain", [True, False], ids=["chains", "trees"])
@pytest.mark.parametrize("graphs", ["none", "idle", "start"])
def test_tokens_are_the_same_with_every_drafter(expected, graphs, chain, right, launches):
    outputs, futures, vocab = expected
    llm = make(graphs, grammar="none")
    draft_with(llm, Guesser(right, chain=chain, futures=futures, vocab=vocab))
    assert run(llm, GREEDY) == outputs
    for _ in range(2):
        assert run(llm, GREEDY, repeats=6) == outputs * 6
    if graphs == "none":
        assert not launches
        return
    assert llm.loop.executor.rank.engine.verify_graphs.num_captured > 0
    assert not llm.loop.executor.rank.engine.verify_graphs.refused
    assert any(key.tree for key in launches) == (not chain)
    if graphs == "start":
        assert len({key.tokens for key in launches}) > 3, "rows of many lengths ran in few graphs"


@pytest.mark.parametrize("chain", [True, False], ids=["chains", "trees"])
def test_requests_of_every_kind_beside_each_other(expected, chain, launches):
    """Penalties, grammars, logprobs and seeds: the outputs do not depend on graphs, with drafts as without."""
    _, futures, vocab = expected
    kinds = [
        SamplingParams(temperature=0, max_new_tokens=24, frequency_penalty=0.4, repetition_penalty=1.1),
        SamplingParams(temperature=0, max_new_tokens=24, grammar=GrammarSpec(GrammarKind.REGEX, "(yes|no), [0-9]{3}")),
        SamplingParams(temperature=0, max_new_tokens=24, logprobs=3),
        SamplingParams(temperature=0.9, seed=5, top_k=40, min_p=0.02, max_new_tokens=24, min_new_tokens=20),
        SamplingParams(temperature=0, max_new_tokens=24, logit_bias={30: 4.0}),
    ]
    found = []
    for graphs in ("none", "start"):
        llm = make(graphs)
        if graphs == "start":
            draft_with(llm, Guesser(0.7, chain=chain, futures=futures, vocab=vocab))
        for _ in range(2):
            outputs = llm.generate(prompts_of(llm, 1), kinds)
        found.append([o.token_ids for o in outputs])
        assert len(outputs[2].logprobs) == len(outputs[2].token_ids)
    assert found[0] == found[1]
    assert launches


def test_a_graph_writes_to_no_page_but_its_rows_own(expected):
    """Pages that no row owns keep their content, NaN included, which reaches no result."""
    outputs, futures, vocab = expected
    llm = make("start", grammar="none", cache="none")
    draft_with(llm, Guesser(0.5, chain=False, futures=futures, vocab=vocab))
    pool = llm.loop.executor.rank.engine.pool
    with llm.loop.executor.rank.context:
        for memory in (pool.k, pool.v):
            memory[:, 1:] = torch.nan
    assert run(llm, GREEDY) == outputs
    assert pool.k[:, 0].isfinite().all()
    touched = ~pool.k[:, 1:].isnan().flatten(2).all(2).all(0)
    assert 0 < int(touched.sum()) <= 2 * sum(-(-(n + 48 + WIDTH) // 4) for n in map(len, prompts_of(llm, 1)))
