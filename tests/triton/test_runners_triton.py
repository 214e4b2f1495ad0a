"""Test what ``Runner.launch`` promises of a batch, for each runner, against the definition, and that all of them
count the tokens of experts alike. Graphs are replaced by the steps themselves.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_runners_triton.py
"""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3MoeConfig

from dovetail import LLM
from dovetail.engine.adapter_files import AdapterImage
from dovetail.engine.adapters import EngineAdapters
from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, NO_UPDATES, STEPS_BETWEEN_CAPTURES, Staging
from dovetail.engine.dry_run import first_layers
from dovetail.engine.expert_load import ExpertLoad
from dovetail.engine.graphs import DecodeGraphs
from dovetail.engine.grouped import grouped_attention, pools_of
from dovetail.engine.penalties import TokenCounts
from dovetail.engine.pieces import PiecewiseGraphs
from dovetail.engine.runners import DecodeGraphRunner, EagerRunner, EagerSampler, VerifyGraphRunner
from dovetail.engine.sampler import Sampler
from dovetail.engine.sharing import NO_SHARING
from dovetail.engine.verify_graphs import VerifyGraphs, VerifySizes
from dovetail.interfaces.attention import AttentionContext
from dovetail.layers.base import prepare_layers
from dovetail.ops.adapter_weights import AdapterCount
from dovetail.sampling_params import SamplingParams
from dovetail.testing.batches import make_page_table
from dovetail.types import AdmittedRequest, Batch, DraftTree, PageUpdates
from dovetail_attention.triton.backend import TritonAttention

PAGE, ROWS, WIDTH, TOKENS = 4, 8, 4, 16
WATCHED = (0, 2)
versions = itertools.count(1)


class Replayed:
    """Stand in for a recorder of CUDA graphs on a CPU: a replay runs the step again."""

    def __init__(self, device, mesh):
        pass

    def wait(self):
        pass

    def record(self, step, load=None, *, loaded=False):
        (load or step)()
        result = step()
        return SimpleNamespace(replay=lambda: result.copy_(step())), result


class Unpinned(Staging):
    """Stand in for a buffer that is filled at once."""

    def __init__(self, size, device):
        self.size = size + 4096
        self.buffer = torch.zeros(self.size, dtype=torch.uint8)

    def send(self, packed):
        self.buffer[: len(packed)].copy_(torch.from_numpy(packed))


def fix_hidden(static, graph):
    """Leave hidden states where they were captured, as a graph does."""
    kept, replay = static.hidden, graph.replay

    def replayed():
        replay()
        kept.copy_(static.hidden)
        static.hidden = kept

    graph.replay = replayed


@pytest.fixture(scope="module")
def engine():
    memory = {"num_pages": 96, "page_size": PAGE}
    return LLM(
        "tiny", device="cpu", model={"dtype": "float32"}, grammar="none", memory=memory
    ).loop.executor.rank.engine


def attention(engine):
    """Return a backend for one runner: a step that stands in for its graph runs with the backend's last plan."""
    info, shape = engine.info, {"max_rows": TOKENS, "max_context": engine.context_len}
    heads = {"num_heads": info.num_heads, "num_kv_heads": info.num_kv_heads, "head_dim": info.head_dim}
    shared = {"device": engine.device, "dtype": torch.float32, **heads, **shape}
    return grouped_attention(
        [TritonAttention(None, AttentionContext(pool=pool, **shared)) for pool in pools_of(engine.pool)]
    )


def stand_in(monkeypatch):
    """Replace graphs by the steps themselves."""
    for module in ("graphs", "verify_graphs"):
        monkeypatch.setattr(f"dovetail.engine.{module}.GraphRecorder", Replayed)
    monkeypatch.setattr("dovetail.engine.graphs.Staging", Unpinned)


def built(engine, load=None, adapters=None):
    """Return one runner of each kind, over the same model and pool."""
    model, inputs, pool = engine.model, engine.inputs, engine.pool
    counts = TokenCounts(len(inputs.pages), engine.info.vocab_size, engine.device)
    sampler = EagerSampler(Sampler(engine.info.vocab_size, frozenset(), engine.device, counts), inputs)
    shape = ROWS, engine.context_len, NO_SHARING, WATCHED
    decode = DecodeGraphs(model, inputs, pool, attention(engine), *shape, counts=counts, load=load, adapters=adapters)
    sizes = VerifySizes(TOKENS, WIDTH, True, engine.context_len)
    verify = VerifyGraphs(model, inputs, pool, attention(engine), sizes, WATCHED, load=load)
    backends = attention(engine), attention(engine)
    eager = EagerRunner(model, inputs, pool, *backends, sampler, watched=WATCHED, load=load)
    return {
        "decode graph": (DecodeGraphRunner(decode, sampler), decode),
        "verify graph": (VerifyGraphRunner(verify, sampler), verify),
        "eager": (eager, None),
    }


@pytest.fixture
def runners(engine, monkeypatch):
    stand_in(monkeypatch)
    return built(engine)


def can_run(runner, graphs, batch):
    """Prepare what ``launch`` needs; a graph is captured once it was needed often enough."""
    found = runner.can_run(batch)
    if graphs is None:
        return found
    for _ in range(NEEDED_BEFORE_CAPTURE + STEPS_BETWEEN_CAPTURES):
        if found is None:
            found = runner.can_run(batch)
    captured = [(g.batch, g.forward) for g in graphs._graphs.values() if hasattr(g, "forward")]
    captured += [(g.step.batch, g.graph) for g in graphs._graphs.values() if hasattr(g, "step")]
    for static, graph in captured:
        if not hasattr(graph, "fixed"):
            fix_hidden(static, graph)
            graph.fixed = True
    return found


def make_batch(engine, prefix, counts, trees=None, num_extend=0, seed=0):
    """Return rows of random slots and tokens; the pages of their last tokens are new to the engine, whose pool is filled."""
    pool = pools_of(engine.pool)[0]
    for layer in range(engine.info.cache_groups[0].num_layers):
        pool.keys(layer).normal_(), pool.values(layer).normal_()
    rng, rows = np.random.default_rng(seed), len(prefix)
    vocab, inputs = engine.info.vocab_size, engine.inputs
    slots = rng.permutation(np.arange(1, ROWS + 1))[:rows].astype(np.int32)
    prefix, counts = np.array(prefix, np.int32), np.array(counts, np.int32)
    pages = make_page_table((prefix + counts).tolist(), PAGE, 96, seed=seed)
    inputs.page_table[1:] = 95
    for row, slot in enumerate(slots):
        inputs.page_table[slot, : len(pages[row])] = pages[row]
    columns = (prefix + counts - 1) // PAGE
    updates = PageUpdates(slots, columns.astype(np.int32), pages[np.arange(rows), columns][None], next(versions))
    inputs.last_token[:] = torch.from_numpy(rng.integers(0, vocab, len(inputs.last_token)))
    texts = [rng.integers(0, vocab, p + c + 1).astype(np.int32) for p, c in zip(prefix, counts, strict=True)]
    params = SamplingParams(temperature=0)
    reqs = [AdmittedRequest(int(slots[i]), i, params, 0, len(text), text, len(text)) for i, text in enumerate(texts)]
    batch = Batch(reqs, num_extend, slots, prefix, counts, np.ones(rows, np.bool_), updates)
    if trees is not None:
        ids, parents = np.zeros((2, rows, max(map(len, trees))), np.int32)
        for row, tree in enumerate(trees):
            parents[row, : len(tree)] = tree
            ids[row] = rng.integers(0, vocab, ids.shape[1])
        batch.drafts = DraftTree(ids, parents, np.array([len(tree) for tree in trees], np.int32))
    return batch


def defined(engine, batch):
    """Compute the promised fields, one token at a time."""
    ids, positions, out_loc, sees = [], [], [], []
    for row, (slot, prefix, count) in enumerate(zip(batch.slots, batch.prefix_lens, batch.extend_lens, strict=True)):
        depth = [0]
        for i in range(count):
            verified = i > 0 and row >= batch.num_extend
            parent = int(batch.drafts.parents[row, i - 1]) if verified else None
            if row < batch.num_extend:
                token, deep, seen = batch.reqs[row].token_ids[prefix + i], i, set(range(i + 1))
            elif i == 0:
                token, deep, seen = int(engine.inputs.last_token[slot]), 0, {0}
            else:
                token, deep = batch.drafts.token_ids[row, i - 1], depth[parent + 1] + 1
                depth.append(deep)
                seen = sees[len(sees) - i + parent + 1] | {i}
            place = int(prefix) + i
            ids.append(int(token))
            positions.append(int(prefix) + deep)
            out_loc.append(int(engine.inputs.page_table[slot, place // PAGE]) * PAGE + place % PAGE)
            sees.append(seen)
    return ids, positions, out_loc, sees


def check(engine, batch, launched, tree):
    ids, positions, out_loc, sees = defined(engine, batch)
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.out_loc.tolist() == out_loc
    assert [t.dtype for t in (batch.input_ids, batch.positions, batch.out_loc)] == [torch.int64] * 3
    assert batch.qo_indptr.tolist() == [0, *np.cumsum(batch.extend_lens).tolist()]
    assert batch.kv_lens.tolist() == (batch.prefix_lens + batch.extend_lens).tolist()
    assert [t.dtype for t in (batch.qo_indptr, batch.kv_lens, batch.page_table)] == [torch.int32] * 3
    assert len(batch.page_table) == len(batch.slots)
    for row, (slot, length) in enumerate(zip(batch.slots, batch.kv_lens.tolist(), strict=True)):
        count = -(-length // PAGE)
        assert batch.page_table[row, :count].tolist() == engine.inputs.page_table[slot, :count].tolist()
    if tree:
        assert [set(row.nonzero()[:, 0].tolist()) for row in batch.tree_mask] == sees
    else:
        assert batch.tree_mask is None
    assert batch.kv == (engine.pool,)
    assert batch.watch == WATCHED
    (attends,) = batch.attn
    assert hasattr(attends, "forward")
    assert batch.hidden.shape == (len(ids), len(WATCHED) * engine.info.hidden_size)
    tokens = launched.runner.sample(batch, launched, None)
    assert len(tokens.token_ids) == len(batch.slots)
    assert engine.inputs.last_token[torch.from_numpy(batch.slots).long()].tolist() == tokens.token_ids[:, -1].tolist()
    return launched.logits


STEPS = {
    "decode": ([3, 30, 8], [1, 1, 1], None, 0),
    "chains": ([3, 9, 20], [4, 1, 3], [[-1, 0, 1], [], [-1, 0]], 0),
    "trees": ([12, 21], [4, 3], [[-1, -1, 0], [-1, -1]], 0),
    "prompts": ([0, 17], [9, 6], None, 2),
    "prompts and decode": ([0, 17, 5], [9, 6, 1], None, 2),
    "prompts and trees": ([6, 17, 5], [9, 4, 3], [[], [-1, -1, 0], [-1, -1]], 1),
}
RUNS = [(name, "eager") for name in STEPS]
RUNS += [("decode", "decode graph"), ("chains", "verify graph"), ("trees", "verify graph")]


@pytest.mark.parametrize(("name", "kind"), RUNS)
@torch.inference_mode()
def test_every_runner_keeps_the_promise(engine, runners, name, kind):
    prefix, counts, trees, num_extend = STEPS[name]
    (runner, graphs), (eager, _) = runners[kind], runners["eager"]
    for seed in range(2):
        batch = make_batch(engine, prefix, counts, trees, num_extend, seed)
        memory = engine.pool.k.clone(), engine.pool.v.clone()
        found = can_run(runner, graphs, batch)
        assert found is not None
        engine.pool.k.copy_(memory[0]), engine.pool.v.copy_(memory[1])
        last = engine.inputs.last_token.clone()
        launched = runner.launch(batch, found)
        hidden, logits = batch.hidden.clone(), launched.logits.clone()
        check(engine, batch, launched, name.endswith("trees"))

        again = make_batch(engine, prefix, counts, trees, num_extend, seed)
        engine.pool.k.copy_(memory[0]), engine.pool.v.copy_(memory[1])
        engine.inputs.last_token.copy_(last)
        expected = eager.launch(again, eager.can_run(again))
        torch.testing.assert_close(hidden, again.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_each_graph_runs_its_own_kind_of_step_and_eager_runs_all(engine, runners):
    for name, (prefix, counts, trees, num_extend) in STEPS.items():
        batch = make_batch(engine, prefix, counts, trees, num_extend)
        batch.page_updates = NO_UPDATES
        able = {kind for kind, (runner, graphs) in runners.items() if can_run(runner, graphs, batch) is not None}
        graph = {"decode": {"decode graph"}, "chains": {"verify graph"}, "trees": {"verify graph"}}.get(name, set())
        assert able == {"eager"} | graph


TOP_K = 2


@pytest.fixture(scope="module")
def moe_engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    Qwen3MoeConfig(
        vocab_size=199,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=16,
        eos_token_id=None,
        max_position_embeddings=128,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(directory)
    memory = {"num_pages": 96, "page_size": PAGE}
    model = {"dtype": "float32", "load_format": "dummy"}
    llm = LLM(str(directory), device="cpu", model=model, grammar="none", memory=memory)
    return llm.loop.executor.rank.engine


@pytest.fixture
def counting(moe_engine, monkeypatch):
    stand_in(monkeypatch)
    load = ExpertLoad(moe_engine.model, PAGE, moe_engine.device)
    return built(moe_engine, load), load


@pytest.mark.parametrize(
    ("name", "kind"), [("decode", "decode graph"), ("chains", "verify graph"), ("trees", "verify graph")]
)
@torch.inference_mode()
def test_a_captured_step_counts_what_the_step_counts_without_a_graph(moe_engine, counting, name, kind):
    """Three decode rows run in a graph of four, and seven tokens of trees in one of eight."""
    found, load = counting
    prefix, counts, trees, num_extend = STEPS[name]
    totals = []
    for chosen in (kind, "eager"):
        runner, graphs = found[chosen]
        batch = make_batch(moe_engine, prefix, counts, trees, num_extend)
        moe_engine.pool.k.fill_(0.5), moe_engine.pool.v.fill_(0.25)
        ready = can_run(runner, graphs, batch)
        before = load.read()
        for _ in range(2):
            runner.launch(batch, ready)
        after = load.read()
        totals.append({layer: [b - a for a, b in zip(before[layer], after[layer], strict=True)] for layer in after})
    assert totals[0] == totals[1]
    assert [sum(tokens) for tokens in totals[0].values()] == [2 * sum(counts) * TOP_K] * 2


@torch.inference_mode()
def test_captures_and_rehearsals_count_nothing(moe_engine, counting):
    found, load = counting
    decode = found["decode graph"][1]
    batch = make_batch(moe_engine, [3, 30, 8], [1, 1, 1])
    can_run(*found["decode graph"], batch)
    assert not any(map(any, load.read().values()))
    found["decode graph"][0].launch(batch, decode.get(decode.key_for(batch)))
    counted = load.read()
    decode.rehearse(decode.key_for(batch), 9)
    first_layers(moe_engine.model, decode.get(decode.key_for(batch)).batch, 9)
    assert load.read() == counted
    assert any(map(any, counted.values()))


@torch.inference_mode()
def test_pieces_count_the_tokens_that_are_not_padding(moe_engine, monkeypatch):
    """The graphs of a pass in pieces are replaced by the whole pass, which the last of them replays."""
    load = ExpertLoad(moe_engine.model, PAGE, moe_engine.device)
    monkeypatch.setattr("dovetail.engine.pieces.GraphRecorder", lambda device: SimpleNamespace())
    pieces = PiecewiseGraphs(moe_engine.model, 2, moe_engine.pool, 16, torch.float32, load=load)
    batch = pieces._static_batch(8)
    batch.attn = (SimpleNamespace(forward=lambda q, layer, batch: torch.zeros_like(q)),)
    pieces._forward(batch)
    assert not any(map(any, load.read().values())), "every token is padding before the first step"
    pieces._places[0][:3] = torch.arange(3) + PAGE
    pieces._forward(batch)
    assert [sum(tokens) for tokens in load.read().values()] == [3 * TOP_K] * 2


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Return the engine of a model with two cache groups. Its device tables are not the host's, as on CUDA."""
    directory = tmp_path_factory.mktemp("windows")
    Gemma3TextConfig(
        vocab_size=199,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=128,
        architectures=["Gemma3ForCausalLM"],
    ).save_pretrained(directory)
    memory, model = {"num_pages": 96, "page_size": PAGE}, {"dtype": "float32", "load_format": "dummy"}
    loop = LLM(str(directory), device="cpu", model=model, grammar="none", memory=memory).loop
    engine, pages = loop.executor.rank.engine, loop.scheduler.ledger.allocator.alloc(48)
    for parameter in engine.model.parameters():
        parameter.normal_(std=0.3)
    inputs = engine.inputs
    inputs.all_pages = inputs.all_pages.clone()
    inputs.pages, *inputs.other_pages = inputs.all_pages.unbind(0)
    inputs._flat_pages = inputs.all_pages.view(-1)
    return engine, np.concatenate((np.zeros((2, 1), np.int32), pages), 1)


@pytest.mark.parametrize(
    ("name", "kind"), [("decode", "decode graph"), ("chains", "verify graph"), ("trees", "verify graph")]
)
@torch.inference_mode()
def test_captured_steps_of_models_with_several_cache_groups(windowed, monkeypatch, name, kind):
    """They read each group's own pages, of which they hear by the updates."""
    stand_in(monkeypatch)
    (engine, pages), (prefix, counts, trees, num_extend) = windowed, STEPS[name]
    inputs, (first, _) = engine.inputs, pools_of(engine.pool)
    memory = first.keys(0)._base
    runners = built(engine)
    (runner, graphs), (eager, _) = runners[kind], runners["eager"]
    rng = np.random.default_rng(0)
    for seed in range(2):
        batch = grouped_batch(engine, pages, prefix, counts, trees, num_extend, seed)
        last = torch.from_numpy(rng.integers(0, engine.info.vocab_size, len(inputs.last_token)))
        kept = torch.randn_like(memory)
        found = can_run(runner, graphs, batch)
        assert found is not None
        hidden: list[torch.Tensor] = []
        for run, own, use in ((runner, found, batch), (eager, None, None)):
            use = use or grouped_batch(engine, pages, prefix, counts, trees, num_extend, seed)
            inputs.last_token.copy_(last)
            memory.copy_(kept)
            run.launch(use, own if own is not None else run.can_run(use))
            hidden.append(use.hidden.clone())
        torch.testing.assert_close(*hidden, rtol=1e-4, atol=1e-4)


def grouped_batch(engine, numbers, prefix, counts, trees, num_extend, seed):
    """Return a batch whose requests have other pages in each group, of those in ``numbers [groups, pages]``. The device has all
    but the last of each."""
    inputs = engine.inputs
    batch = make_batch(engine, prefix, counts, trees, num_extend, seed)
    unused = numbers[:, -1]
    for group, table in enumerate((inputs.page_table, inputs.other_tables[0])):
        table[1:] = unused[group]
        length = (batch.prefix_lens + batch.extend_lens).tolist()
        pages = make_page_table(length, PAGE, len(numbers[0]) - 1, seed=seed + 100 * group)
        for row, slot in enumerate(batch.slots):
            table[slot, : len(pages[row])] = numbers[group][pages[row]]
        device = inputs.all_pages[group]
        device.copy_(torch.from_numpy(table))
        device[batch.slots, batch.page_updates.columns] = int(unused[group])
    own = np.stack([inputs.page_table, inputs.other_tables[0]])[:, batch.slots, batch.page_updates.columns]
    batch.page_updates = batch.page_updates._replace(pages=own)
    return batch


class WithTokens(Replayed):
    """Replay a step with the slots of tokens with which it was captured, as a graph does."""

    def __init__(self, tokens, device, mesh):
        self.tokens = tokens

    def record(self, step, load=None, *, loaded=False):
        captured = self.tokens.current, self.tokens.own

        def again():
            before = self.tokens.current, self.tokens.own
            self.tokens.current, self.tokens.own = captured
            result = step()
            self.tokens.current, self.tokens.own = before
            return result

        return super().record(again, load, loaded=loaded)


@pytest.mark.full
@torch.inference_mode()
def test_captured_steps_add_the_adapters_of_their_rows(monkeypatch):
    """Graphs are replayed with other adapters in other rows, and with fewer rows than they have."""
    monkeypatch.setattr("dovetail.ops.triton.low_rank_few.INPUT_BLOCK", {True: 64, False: 64})
    monkeypatch.setattr("dovetail.ops.low_rank.FEW_SLOTS", 1)  # steps of two adapters have the kernels of many
    stand_in(monkeypatch)
    memory = {"num_pages": 96, "page_size": PAGE}
    settings = {"device": "cpu", "model": {"dtype": "float32"}, "grammar": "none", "memory": memory}
    engine = LLM("tiny", **settings).loop.executor.rank.engine
    adapters = EngineAdapters(engine.model, 3, 16, engine.device, torch.float32, kernels=True, max_rows=ROWS)
    random = torch.Generator().manual_seed(0)
    for slot in (1, 2, 3):
        elements = torch.randn(adapters.slot_bytes // 4, generator=random) * 0.05
        ranks = np.random.default_rng(slot).integers(0, 17, adapters._regions.num_ranks).astype(np.int32)
        adapters.install(AdapterImage([elements], ranks), slot)
    prepare_layers(engine.model)
    monkeypatch.setattr("dovetail.engine.graphs.GraphRecorder", partial(WithTokens, adapters.tokens))
    runners = built(engine, adapters=adapters)
    graphs = runners["decode graph"][1]
    for version, slots in enumerate([[1, 0, 2], [0, 3, 3, 1], [2]], 1):
        logits, kept = [], ()
        for chosen, own in (runners["decode graph"], runners["eager"], runners["eager"]):
            batch = make_batch(engine, [3, 30, 8, 5, 7][: len(slots)], [1] * len(slots), seed=version)
            batch.adapters, batch.rows_version = np.array(slots, np.int32), version
            memory = engine.inputs.last_token, engine.pool.k, engine.pool.v
            kept = kept or tuple(tensor.clone() for tensor in memory)
            with adapters.active(batch):
                found = can_run(chosen, own, batch)
                assert found is not None
                for tensor, before in zip(memory, kept, strict=True):
                    tensor.copy_(before)
                if len(logits) == 2:  # the last time without adapters
                    adapters.tokens.current = None
                logits.append(chosen.launch(batch, found).logits.clone())
        *adapted, plain = logits
        torch.testing.assert_close(*adapted, rtol=1e-4, atol=1e-4)
        changed = (plain - logits[0]).abs().amax(1) > 1e-2
        assert changed.tolist() == [slot > 0 for slot in slots]
    assert {key.adapters for key in graphs._graphs} == {AdapterCount.ONE, AdapterCount.MANY}
