"""Test a verify step at fixed addresses, padded to a number of tokens, against the same rows without padding.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_verify_triton.py
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dovetail import LLM
from dovetail.engine.captures import NO_UPDATES
from dovetail.engine.verify_graphs import VerifyGraphs, VerifyKey, VerifySizes, VerifyStep
from dovetail.engine.verify_inputs import VerifyMemory, VerifyShape, empty_batch
from dovetail.interfaces.attention import AttentionContext
from dovetail.interfaces.speculative import Drafter
from dovetail.ops.triton.verify import walk
from dovetail.sampling_params import SamplingParams
from dovetail.testing.batches import make_page_table
from dovetail.types import AdmittedRequest, Batch, DraftTree
from dovetail_attention.triton.backend import TritonAttention

WIDTH, TOKENS = 5, 16
CHAINS = [
    ([3, 9, 30], [[-1, 0, 1, 2], [], [-1, 0]]),
    ([17], [[-1]]),
    ([1, 33, 4, 16], [[-1, 0, 1, 2], [-1, 0, 1], [-1, 0, 1, 2], [-1]]),
]
TREES = [
    ([12, 31, 8], [[-1, -1, 0, 1], [-1], []]),
    ([15, 2, 29, 1], [[-1, 0, 0, 2], [-1, -1, 1, 1], [-1, -1, -1], [-1]]),
    ([20], [[-1, 0, 1, 2]]),
]


@pytest.fixture(scope="module")
def engine():
    memory = {"num_pages": 64, "page_size": 4}
    llm = LLM("tiny", device="cpu", model={"dtype": "float32"}, grammar="none", attention="torch_native", memory=memory)
    return llm.loop.executor.rank.engine


def triton_attention(engine):
    info = engine.info
    return TritonAttention(
        None,
        AttentionContext(
            device=engine.device,
            dtype=torch.float32,
            num_heads=info.num_heads,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            pool=engine.pool,
            max_rows=TOKENS,
            max_context=engine.context_len,
        ),
    )


def verify_batch(engine, prefix, trees, seed):
    """Return rows of random slots, drafts, last tokens and pages; pages of the pool that no row owns hold NaN."""
    rng = np.random.default_rng(seed)
    rows, k = len(prefix), max(len(tree) for tree in trees)
    lens = np.array([len(tree) for tree in trees], np.int32)
    ids, parents = rng.integers(0, engine.info.vocab_size, (rows, k)).astype(np.int32), np.full((rows, k), -1, np.int32)
    for row, tree in enumerate(trees):
        parents[row, : len(tree)] = tree
    slots = rng.permutation(np.arange(1, 9))[:rows].astype(np.int32)
    prefix_lens, extend_lens = np.array(prefix, np.int32), 1 + lens
    inputs, pool = engine.inputs, engine.pool
    inputs.page_table[1:] = 63  # a page that no row owns
    pages = make_page_table(prefix_lens + extend_lens, 4, 63, seed=seed)
    for row, slot in enumerate(slots):
        own = pages[row][pages[row] > 0]
        inputs.page_table[slot, : len(own)] = own
    inputs.last_token[:] = torch.from_numpy(rng.integers(0, engine.info.vocab_size, len(inputs.last_token)))
    pool.k.fill_(torch.nan), pool.v.fill_(torch.nan)
    pool.k[:, 0], pool.v[:, 0] = 0, 0
    for row in range(rows):
        at = torch.arange(int(prefix_lens[row]))
        table = torch.from_numpy(pages[row]).long()
        for memory in (pool.k, pool.v):
            memory[:, table[at // 4], at % 4] = torch.randn(memory.shape[0], len(at), *memory.shape[3:])
    reqs = [AdmittedRequest(row + 1, row, SamplingParams(), 0, 1, np.zeros(1, np.int32), 1) for row in range(rows)]
    ones = np.ones(rows, np.bool_)
    return Batch(reqs, 0, slots, prefix_lens, extend_lens, ones, NO_UPDATES, drafts=DraftTree(ids, parents, lens))


def in_pool(engine):
    return [memory[:, 1:].clone() for memory in (engine.pool.k, engine.pool.v)]


@torch.inference_mode()
def run_ragged(engine, batch):
    engine.inputs.prepare(batch)
    batch.attn, batch.kv = (engine.eager_runner.decode,), (engine.pool,)
    engine.eager_runner.decode.plan(batch)
    fields = batch.input_ids, batch.positions, batch.out_loc, batch.qo_indptr, batch.kv_lens, batch.tree_mask
    return engine.model.logits(engine.model.forward(batch)), fields


def make_step(engine, backend, tree):
    shape = VerifyShape(TOKENS, WIDTH, tree)
    memory = VerifyMemory(shape._replace(tokens=TOKENS + 3), engine.inputs.pages.shape[1], engine.device)
    step = VerifyStep(shape, engine.inputs, memory, engine.context_len)
    step.batch.attn, step.batch.kv = (backend,), (engine.pool,)
    return step


@torch.inference_mode()
def run_static(engine, step, batch):
    step.write(batch, batch.num_tokens)
    if step.batch.attn[0] is engine.eager_runner.decode:
        step.tensors.compute(engine.inputs)  # torch_native plans with the pages
        engine.eager_runner.decode.plan(step.batch)
    else:
        step.batch.attn[0].plan_replay(step.batch)
    logits = step.run(engine.model)[: batch.num_tokens]
    step.give(batch, batch.num_tokens)
    return logits


@pytest.mark.parametrize("attention", ["torch_native", "triton"])
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
def test_a_step_that_is_filled_up_equals_the_ragged_one(engine, attention, tree):
    backend = engine.eager_runner.decode if attention == "torch_native" else triton_attention(engine)
    step = make_step(engine, backend, tree)
    if attention == "triton":
        backend.plan_capture(step.batch)
    for seed, (prefix, trees) in enumerate(TREES if tree else CHAINS):
        batch = verify_batch(engine, prefix, trees, seed)
        before = engine.pool.k.clone(), engine.pool.v.clone()
        expected, fields = run_ragged(engine, batch)
        written = in_pool(engine)
        engine.pool.k.copy_(before[0]), engine.pool.v.copy_(before[1])
        logits = run_static(engine, step, batch)
        assert not logits.isnan().any()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(in_pool(engine), written, strict=True):  # NaN where nothing was written
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
        *columns, mask = fields
        found = batch.input_ids, batch.positions, batch.out_loc, batch.qo_indptr, batch.kv_lens
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, columns, strict=True))
        if mask is not None:
            assert torch.equal(batch.tree_mask[:, : mask.shape[1]], mask)
            assert not batch.tree_mask[:, mask.shape[1] :].any()
        assert engine.pool.k[:, 0].isfinite().all()


@torch.inference_mode()
def test_a_step_without_rows_touches_page_0_alone(engine):
    verify_batch(engine, [3], [[-1]], 0)
    backend = triton_attention(engine)
    for tree in (False, True):
        step = make_step(engine, backend, tree)
        backend.plan_capture(step.batch)
        before = in_pool(engine)
        step.tensors.write(empty_batch(), engine.inputs)
        assert step.run(engine.model).isfinite().all()
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(in_pool(engine), before, strict=True))


class Replayed:
    """Stand in for a CUDA graph on a CPU by running the step itself."""

    def __init__(self, device, mesh):
        pass

    def wait(self):
        pass

    def record(self, step, *, loaded=False):
        kept = step()
        return SimpleNamespace(replay=lambda: kept.copy_(step())), kept


@pytest.mark.parametrize(("chain", "temperature"), [(True, 0), (False, 0.8)], ids=["chains, greedy", "trees, sampled"])
def test_an_engine_that_replays_steps_says_what_it_says_without_drafts(monkeypatch, chain, temperature):
    monkeypatch.setattr("dovetail.engine.verify_graphs.GraphRecorder", Replayed)
    sections = {"memory": {"num_pages": 64, "page_size": 4}, "model": {"dtype": "float32"}}
    llm = LLM("tiny", device="cpu", grammar="none", attention="torch_native", **sections)
    prompts = [llm.tokenizer.encode(text) for text in ("What is 7 plus 5?", "What colour is grass?")]
    params = SamplingParams(temperature=temperature, top_k=20, seed=3, max_new_tokens=8, ignore_eos=True)
    expected = [o.token_ids for o in llm.generate(prompts, params)]

    loop, engine = llm.loop, llm.loop.executor.rank.engine
    futures = dict(zip(map(tuple, prompts), expected, strict=True))
    loop.executor.rank.drafter = Guesser(chain, futures)
    loop.scheduler.limits = replace(loop.scheduler.limits, draft_width=WIDTH - 1)
    engine.eager_runner.decode = triton_attention(engine)
    sizes = VerifySizes(TOKENS, WIDTH, trees=not chain, context_len=engine.context_len)
    graphs = VerifyGraphs(engine.model, engine.inputs, engine.pool, engine.eager_runner.decode, sizes)
    engine.use_verify_graphs(graphs)
    for module in ("captures", "sampler_graphs"):
        monkeypatch.setattr(f"dovetail.engine.{module}.NEEDED_BEFORE_CAPTURE", 1)
    assert [o.token_ids for o in llm.generate(prompts, params)] == expected
    assert graphs.num_captured > 0
    assert len(graphs._samplers._graphs) > 0
    assert any(key.tree for key in graphs._graphs) == (not chain)
    totals = loop.scheduler.totals
    assert 0 < totals.accepted_tokens < totals.drafted_tokens
    loop.scheduler.check_integrity()


class Guesser(Drafter):
    """Draft three right tokens and a wrong one; in a tree the wrong one comes first."""

    max_draft_tokens = WIDTH - 1

    def __init__(self, chain, futures):
        self.chain, self.futures = chain, futures

    def propose(self, batch):
        rows = len(batch.slots)
        ids, lens = np.zeros((rows, 4), np.int32), np.zeros(rows, np.int32)
        for row in range(batch.num_extend, rows):
            req = batch.reqs[row]
            done = batch.prefix_lens[row] + 1 - req.prompt_len
            future = self.futures[tuple(req.token_ids[: req.prompt_len].tolist())][done:]
            right = future[: min(3, batch.draft_limits[row] - 1)]
            drafts = [*right, 0] if self.chain else [0, *right]
            lens[row] = len(drafts) if right else 0
            ids[row, : len(drafts)] = drafts
        parents = np.tile(np.array([-1, 0, 1, 2] if self.chain else [-1, -1, 1, 2], np.int32), (rows, 1))
        return DraftTree(ids, parents, lens)


def test_what_the_device_may_not_have_read_is_waited_for(engine):
    graphs, waits = VerifyGraphs.__new__(VerifyGraphs), []
    graphs._recorder = SimpleNamespace(wait=lambda: waits.append(graphs._unread))
    first, second = (verify_batch(engine, [3], [[-1]], seed) for seed in range(2))
    graphs._unread = None
    graphs._wait_until_read()
    graphs._unread = first
    graphs.computed(first)
    graphs._wait_until_read()
    assert not waits, "the host has waited for that step itself"
    graphs._unread = second
    graphs.computed(first)
    graphs._wait_until_read()
    assert waits == [second]


def test_steps_go_to_the_smallest_graph_that_holds_them(engine):
    graphs = VerifyGraphs.__new__(VerifyGraphs)
    graphs.sizes, graphs._limits = [1, 2, 4, 8, 16], VerifySizes(16, WIDTH, trees=False, context_len=100)
    graphs._graphs, graphs.refused, graphs._own, graphs._own_levels = {}, set(), None, [0]
    assert graphs.key_for(verify_batch(engine, [3, 9], [[-1, 0], [-1]], 0)) == VerifyKey(8, False)
    assert graphs.key_for(verify_batch(engine, [3, 9], [[-1, 0], [-1, -1]], 0)) is None, "trees are not captured"
    assert graphs.key_for(verify_batch(engine, [3], [[-1, 0, 1, 2, 3]], 0)) is None, "more drafts than were announced"
    assert graphs.key_for(verify_batch(engine, [3] * 6, [[-1, 0]] * 6, 0)) is None, "more tokens than any graph holds"
    assert list(graphs.missing()) == [VerifyKey(tokens, False) for tokens in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_rows_without_a_graph_are_rehearsed(engine, monkeypatch, trees):
    """A rehearsal walks and attends as a step does whose graph is not captured yet."""
    graphs, backend, launched = VerifyGraphs.__new__(VerifyGraphs), triton_attention(engine), []
    graphs._limits = VerifySizes(16, WIDTH, trees=trees, context_len=100)
    graphs._model, graphs._pool, graphs._backend, graphs._inputs = engine.model, engine.pool, backend, engine.inputs
    ragged = backend._ragged_step
    monkeypatch.setattr(backend, "_ragged_step", lambda batch, part: launched.append(batch) or ragged(batch, part))
    walked = []
    monkeypatch.setattr("dovetail.ops.triton.verify.walk", lambda *given: walked.append(given) or walk(*given))
    graphs.rehearse_uncaptured(1)
    assert [batch.tree_mask is not None for batch in launched] == ([True, False] if trees else [False])
    assert all((batch.num_extend, batch.extend_lens.tolist()) == (0, [WIDTH]) for batch in launched)
    assert [given[3] is not None for given in walked] == ([True, False] if trees else [False])
    graphs.rehearse_uncaptured(1, attend=False)
    assert len(launched) == len(walked) // 2
