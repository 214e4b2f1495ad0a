"""What is replayed of a drafter's passes, on the CPU: graphs are the functions they would be captured from, called again with
what is then at their addresses. They draft what passes launched one by one do, and touch no page but their rows'.

.venv/bin/python -m pytest -q tests/e2e/test_draft_passes.py
"""

import shutil
from itertools import pairwise

import drafter_checkpoints as checkpoints
import mtp_dflash_checkpoints
import numpy as np
import pytest
import torch
from engine_runs import make_llm, paged, prompts_of

from dovetail import SamplingParams
from dovetail.engine import draft_graphs
from dovetail.engine.draft_graphs import DraftGraphs, DraftLimits
from dovetail.engine.dry_run import ZeroedMemory
from dovetail.interfaces.attention import AttentionBackend
from dovetail.testing.drafter import text_of

DRAFTERS = {
    "draft_model": {"kind": "draft_model", "chunk_size": 32},
    "eagle": {"kind": "eagle", "topk": 3, "depth": 4, "num_draft_tokens": 7},
    "eagle3": {"kind": "eagle3", "num_draft_tokens": 5},
    "eagle3_tree": {"kind": "eagle3_tree", "topk": 2, "depth": 3, "num_draft_tokens": 5},
    "mtp": {"kind": "mtp", "num_draft_tokens": 4},
    "dflash": {"kind": "dflash"},
}
ROWS, TOKENS = 6, 60


class Replay:
    """In place of a CUDA graph."""

    def __init__(self, function):
        self.replay = torch.inference_mode()(function)


class Repeats:
    """In place of ``GraphRecorder``."""

    def __init__(self, device, mesh):
        pass

    def record(self, step, *, loaded=False):
        for _ in range(3):
            result = step()
        return Replay(step), result


class PlainAttention(AttentionBackend):
    """Reads everything from tensors, when it attends."""

    def __init__(self, pool):
        self.pool = pool

    def plan(self, batch):
        raise AssertionError("what is replayed is planned for that")

    def plan_capture(self, batch):
        assert (batch.drafts is not None) == (int(batch.extend_lens.max()) > 1)

    def plan_replay(self, batch):
        assert batch.qo_indptr.diff().tolist() == batch.extend_lens.tolist()
        there = batch.extend_lens > 0
        assert batch.kv_lens.numpy()[there].tolist() == (batch.prefix_lens + batch.extend_lens)[there].tolist()

    def forward(self, q, layer, batch):
        out = torch.zeros_like(q)
        keys, values = self.pool.keys(layer.layer_id), self.pool.values(layer.layer_id)
        indptr, size = batch.qo_indptr.tolist(), keys.shape[1]
        for row, (start, end) in enumerate(pairwise(indptr)):
            count, length = end - start, int(batch.kv_lens[row])
            if not count:
                continue
            pages = batch.page_table[row, : -(-length // size)].long()
            k, v = (
                x[pages].flatten(0, 1)[:length].repeat_interleave(q.shape[1] // x.shape[2], 1) for x in (keys, values)
            )
            seen = torch.ones(count, length, dtype=torch.bool)
            own = torch.ones(count, count).tril().bool()
            seen[:, length - count :] = own if batch.tree_mask is None else batch.tree_mask[start:end, :count]
            scores = torch.einsum("ihd,jhd->hij", q[start:end], k) * layer.scale
            out[start:end] = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return out


class Guarded(DraftGraphs):
    """Pages that no row of a run owns hold NaN meanwhile: read, they would show; written to, they would change."""

    runs = 0

    def _replay(self, keys, slots, passes, stride):
        assert all((np.diff((one.counts > 0).astype(int)) <= 0).all() for one in passes)
        ends = np.max([np.where(one.counts > 0, one.starts + one.counts, 0) for one in passes], 0)
        pages = [
            self._inputs.page_table[slot, : -(-end // self._pool.page_size)]
            for slot, end in zip(slots, ends, strict=True)
        ]
        owned = np.unique(np.concatenate(pages))
        others = np.setdiff1d(np.arange(1, self._pool.num_pages), owned)
        memory = self._pool.k, self._pool.v
        kept = [tensor[:, others].clone() for tensor in memory]
        for tensor in memory:
            tensor[:, others] = torch.nan
        super()._replay(keys, slots, passes, stride)
        for tensor, before in zip(memory, kept, strict=True):
            assert tensor[:, others].isnan().all(), "a page that no row owns was written to"
            tensor[:, others] = before
        self.runs += 1


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = checkpoints.save_target(tmp_path_factory.mktemp("passes") / "target")
    checkpoints.save_eagle(directory / "eagle")
    checkpoints.save_eagle3(directory / "eagle3")
    checkpoints.save_target(directory / "draft_model", num_hidden_layers=6)
    mtp_dflash_checkpoints.save_dflash(directory / "dflash", hidden=48, head_dim=16, mask=9)
    return directory


@pytest.fixture
def model(target, tmp_path, request):
    name = request.node.callspec.params["name"]
    if name != "mtp":
        return target
    directory = tmp_path / "target"
    shutil.copytree(target, directory)
    mtp_dflash_checkpoints.add_mtp(directory, 1)
    return directory


def engine(model, speculative, page_size=4, **sections):
    sections["scheduler"] = {"draft": "always", "chunk_size": 20} | sections.get("scheduler", {})
    return make_llm(model, speculative=speculative, **paged(page_size, **sections))


def replaying(llm):
    """The drafter's passes are replayed from now on."""
    drafter = llm.loop.executor.rank.drafter
    cache = getattr(drafter, "cache", None) or drafter._cache
    inputs, pool = cache._inputs, cache._pool
    limits = DraftLimits(ROWS, TOKENS, llm.loop.executor.rank.engine.context_len, wide=True)
    cache.graphs = Guarded(cache._steps, inputs, pool, PlainAttention(pool), limits)
    return cache.graphs


def drafted(llm, prompts, params):
    """Texts, and what was drafted for each prefix of them."""
    seen, propose = {}, llm.loop.executor.rank.drafter.propose

    def recorded(batch):
        tree = propose(batch)
        for row in range(batch.num_extend, len(batch.slots)):
            count = 0 if tree is None else int(tree.lens[row])
            nodes = [] if tree is None else [tree.token_ids[row, :count].tolist(), tree.parents[row, :count].tolist()]
            seen[tuple(text_of(batch, row))] = int(batch.draft_limits[row]), nodes
        return tree

    llm.loop.executor.rank.drafter.propose = recorded
    texts = [output.token_ids for output in llm.generate(prompts, params)]
    assert llm.loop.drafter_errors == 0
    llm.loop.scheduler.check_integrity()
    return texts, seen


@pytest.mark.parametrize("page_size", [pytest.param(1, marks=pytest.mark.full), 16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_replayed_passes_draft_what_others_do(model, name, page_size, monkeypatch):
    """Of requests of many lengths, more at times than graphs have rows, limited to few drafts near their ends."""
    monkeypatch.setattr(draft_graphs, "GraphRecorder", Repeats)
    prompts = prompts_of((1, 5, 40, 9, 17, 3, 22, 30), seed=2)
    params = [SamplingParams(max_new_tokens=3 + 4 * i, temperature=0.5 * (i % 2), seed=i) for i in range(len(prompts))]
    texts, expected = drafted(engine(model, DRAFTERS[name], page_size), prompts, params)
    llm = engine(model, DRAFTERS[name], page_size)
    graphs = replaying(llm)
    again, found = drafted(llm, prompts, params)
    assert again == texts
    assert found == expected
    assert len({limit for limit, _ in found.values()}) > 2
    assert graphs.runs > 10
    assert graphs.num_captured > 3
    assert not graphs.refused


@pytest.mark.parametrize("name", DRAFTERS)
def test_passes_are_rehearsed_in_page_0_alone(model, name, monkeypatch):
    """As if every kernel wrote zeros. Drafts are the same afterwards."""
    monkeypatch.setattr(draft_graphs, "GraphRecorder", Repeats)
    prompts, params = prompts_of((4, 9), seed=1), SamplingParams(max_new_tokens=20, temperature=0)
    llm = engine(model, DRAFTERS[name])
    graphs = replaying(llm)
    texts, expected = drafted(llm, prompts, params)
    llm = engine(model, DRAFTERS[name])
    graphs = replaying(llm)
    memory = graphs._pool.k, graphs._pool.v
    before = [tensor.clone() for tensor in memory]
    keys = graphs.likely((0, 1))
    assert {(key.steps, key.kind) for key in keys} == {(key.steps, key.kind) for key in graphs.missing()}
    assert {key.rows for key in keys} == {1, 2, 4, ROWS}
    for key in keys:
        with ZeroedMemory():
            graphs.rehearse(key)
    assert all(tensor[:, 1:].equal(old[:, 1:]) for tensor, old in zip(memory, before, strict=True))
    assert graphs.num_captured == 0
    assert drafted(llm, prompts, params) == (texts, expected)


@pytest.mark.parametrize("name", DRAFTERS)
def test_all_that_is_missing_can_be_captured_at_once(model, name, monkeypatch):
    monkeypatch.setattr(draft_graphs, "GraphRecorder", Repeats)
    llm = engine(model, DRAFTERS[name])
    graphs = replaying(llm)
    missing = list(graphs.missing())
    assert len(missing) == len(set(missing)) >= 4
    for key in missing:
        graphs.capture(key)
    assert list(graphs.missing()) == []
    drafted(llm, prompts_of((4, 4), seed=1), SamplingParams(max_new_tokens=20, temperature=0))
    assert graphs.num_captured == len(missing)
    assert graphs.runs > 1
