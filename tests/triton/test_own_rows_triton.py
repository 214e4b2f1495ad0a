"""Test captured decode and verify steps with data-parallel attention: on each rank, they compute and write what steps do that are launched
kernel by kernel, however the requests are divided, and each row gets what its adapter (LoRA) adds. Graphs are replaced by the steps themselves, and the other rank adds
nothing.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_own_rows_triton.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

sys.path.append(str(Path(__file__).parent))

from test_runners_triton import WithTokens, attention, stand_in

from dovetail.engine.adapter_files import AdapterImage
from dovetail.engine.adapters import EngineAdapters
from dovetail.engine.build import as_module
from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, NO_UPDATES, STEPS_BETWEEN_CAPTURES
from dovetail.engine.engine import Engine
from dovetail.engine.graphs import DecodeGraphs, GraphKey
from dovetail.engine.own_rows import OwnRowsOfSteps
from dovetail.engine.penalties import TokenCounts
from dovetail.engine.runners import DecodeGraphRunner, EagerRunner, EagerSampler, VerifyGraphRunner
from dovetail.engine.sampler import Sampler
from dovetail.engine.sharing import NO_SHARING
from dovetail.engine.verify_graphs import VerifyGraphs, VerifySizes
from dovetail.layers.base import prepare_layers
from dovetail.layers.linear import Linear
from dovetail.ops.adapter_weights import AdapterCount
from dovetail.sampling_params import SamplingParams
from dovetail.types import AdmittedRequest, Batch, DraftTree
from rank_alone import ROWS, build_engine

VOCAB, PAGES = 199, 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    sizes: Any = {
        "head_dim": 16,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 1}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": VOCAB, "eos_token_id": None}
    Qwen3MoeConfig(**sizes, **experts, **names, max_position_embeddings=128).save_pretrained(directory)
    return directory


def batch_of(engine: Engine, slots: list[int], seed: int) -> Batch:
    """Return decode rows of ``slots``, with random tokens and pages."""
    rng, rows = np.random.default_rng(seed), len(slots)
    engine.inputs.page_table[1:] = rng.integers(1, PAGES, engine.inputs.page_table[1:].shape)
    engine.inputs.last_token.copy_(torch.from_numpy(rng.integers(0, VOCAB, ROWS + 1)))
    prefix = rng.integers(0, 9, rows).astype(np.int32)
    text, params = np.zeros(16, np.int32), SamplingParams(temperature=0)
    reqs = [AdmittedRequest(slot, slot, params, 0, 8, text, 9) for slot in slots]
    ones = np.ones(rows, np.int32)
    return Batch(reqs, 0, np.array(slots, np.int32), prefix, ones, ones > 0, NO_UPDATES)


STEPS = {
    "evenly": [3, 2, 1, 4, 6, 5, 8],
    "one rank has more": [1, 3, 5, 7, 9, 2, 4, 11, 13],
    "one rank has all": [1, 3, 5, 7],
    "the other rank has the only row": [2],
}


@pytest.mark.parametrize("rank", [0, 1])
@torch.inference_mode()
def test_captured_steps_attend_in_the_rows_of_the_rank(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    stand_in(monkeypatch)
    engine = build_engine(checkpoint, rank, PAGES, "dummy")
    model, inputs, mesh = engine.model, engine.inputs, engine.mesh
    pool: Any = engine.pool
    counts = TokenCounts(ROWS + 1, VOCAB, engine.device)
    sampler = EagerSampler(Sampler(VOCAB, frozenset(), engine.device, counts), inputs)
    graphs = DecodeGraphs(model, inputs, pool, attention(engine), ROWS, 64, NO_SHARING, counts=counts, mesh=mesh)
    own = OwnRowsOfSteps.of(mesh, inputs)
    backends = attention(engine), attention(engine)
    eager: Any = EagerRunner(model, inputs, pool, *backends, sampler, own_rows=own)
    runner: Any = DecodeGraphRunner(graphs, sampler)
    pool.k.normal_(), pool.v.normal_()
    for seed, slots in enumerate([*STEPS.values(), STEPS["evenly"]]):
        results = []
        before = pool.k.clone(), pool.v.clone()
        for run in (runner, eager):
            batch = batch_of(engine, slots, seed)
            found = run.can_run(batch)
            for _ in range(NEEDED_BEFORE_CAPTURE + STEPS_BETWEEN_CAPTURES):
                found = run.can_run(batch) if found is None else found
            pool.k.copy_(before[0]), pool.v.copy_(before[1])
            launched = run.launch(batch, found)
            logits = launched.logits.clone()
            tokens = run.sample(batch, launched, None).token_ids[:, 0].tolist()
            assert inputs.last_token[torch.tensor(slots)].tolist() == tokens
            results.append((logits, pool.k[:, 1:].clone(), pool.v[:, 1:].clone(), torch.tensor(tokens)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        changed = (before[0][:, 1:] != results[0][1]).flatten(2).any(2).any(0)
        assert bool(changed.any()) == any((slot - 1) % 2 == rank for slot in slots), "only own rows are written"
    keys = {(key.rows, graphs.get(key).own) for key in graphs._graphs}
    assert keys == {(8, 4), (16, 8), (1, 1)}, "four rows of one rank run in the graph of eight rows, four of each"
    assert next(graphs.larger(GraphKey(8, shared=False))) == GraphKey(8, shared=False, own=1)


ADAPTED_STEPS = {
    "one adapter": ([2, 1, 4], [0, 3, 3]),
    "both ranks have adapters": ([3, 2, 1, 4, 6, 5, 8], [2, 1, 0, 2, 3, 0, 1]),
    "only one rank has adapters, the same graph": ([3, 2, 1, 4, 6, 5, 8], [0, 3, 0, 0, 1, 0, 2]),
    "one rank has all rows": ([1, 3, 5, 7], [1, 0, 2, 1]),
}


def adapters_of(engine: Engine) -> EngineAdapters:
    """Return three random adapters of all linear layers, for Triton's kernels."""
    options: Any = {"kernels": True, "max_rows": ROWS, "mesh": engine.mesh}
    adapters = EngineAdapters(engine.model, 3, 16, engine.device, torch.float32, **options)
    for slot in (1, 2, 3):
        rng = np.random.default_rng(slot)
        ranks = rng.integers(1, 17, adapters._regions.num_ranks).astype(np.int32)
        elements = torch.from_numpy(rng.normal(0, 0.2, adapters.slot_bytes // 4).astype(np.float32))
        adapters.install(AdapterImage([elements], ranks), slot)
    prepare_layers(as_module(engine.model))
    return adapters


def row_of(batch: Batch, row: int) -> Batch:
    """Return one decode or verify row of a batch, without adapters."""
    arrays = (each[[row]] for each in (batch.slots, batch.prefix_lens, batch.extend_lens, batch.samples))
    alone = Batch([batch.reqs[row]], 0, *arrays, NO_UPDATES)
    if batch.drafts is not None:
        drafts, count = batch.drafts, int(batch.drafts.lens[row])
        parts = drafts.token_ids[[row], :count], drafts.parents[[row], :count]
        alone.drafts = DraftTree(*parts, drafts.lens[[row]])
    return alone


@contextmanager
def merged(engine: Engine, slot: int) -> Iterator[None]:
    """Add the matrices in ``slot`` to the weights of all linear layers, for rows without adapters."""
    layers = [layer for layer in as_module(engine.model).modules() if isinstance(layer, Linear) and layer.adapters]
    kept = [layer.weight.detach().clone() for layer in layers]
    for layer in layers if slot else ():
        weights = layer.adapters.weights  # pyright: ignore[reportOptionalMemberAccess]
        for part, (start, size) in enumerate(weights.parts):
            own, rank = slice(start, start + size), weights.ranks[slot - 1, part]
            layer.weight[own] += weights.b[slot - 1, own, :rank] @ weights.a[slot - 1, part, :rank]
    prepare_layers(as_module(engine.model))
    yield
    for layer, weight in zip(layers, kept, strict=True):
        layer.weight.copy_(weight)
    prepare_layers(as_module(engine.model))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
@torch.inference_mode()
def test_captured_steps_add_the_adapters_of_own_rows_in_attention_and_of_all_rows_elsewhere(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The reference runs each row alone, with weights into which its adapter is merged. Graphs are replayed with adapters in other
    rows, also when this rank has rows without adapters only."""
    monkeypatch.setattr("dovetail.ops.triton.low_rank_few.INPUT_BLOCK", {True: 32, False: 32})
    monkeypatch.setattr("dovetail.ops.low_rank.FEW_SLOTS", 1)  # steps of two adapters have the kernels of many
    stand_in(monkeypatch)
    engine = build_engine(checkpoint, rank, PAGES, "dummy")
    model, inputs, mesh = engine.model, engine.inputs, engine.mesh
    pool: Any = engine.pool
    adapters = adapters_of(engine)
    monkeypatch.setattr("dovetail.engine.graphs.GraphRecorder", partial(WithTokens, adapters.tokens))
    counts = TokenCounts(ROWS + 1, VOCAB, engine.device)
    sampler = EagerSampler(Sampler(VOCAB, frozenset(), engine.device, counts), inputs)
    shape: Any = ROWS, 64, NO_SHARING
    graphs = DecodeGraphs(model, inputs, pool, attention(engine), *shape, counts=counts, mesh=mesh, adapters=adapters)
    own = OwnRowsOfSteps.of(mesh, inputs)
    backends = attention(engine), attention(engine)
    eager: Any = EagerRunner(model, inputs, pool, *backends, sampler, adapters=adapters, own_rows=own)
    runner: Any = DecodeGraphRunner(graphs, sampler)
    pool.k.normal_(), pool.v.normal_()
    before = pool.k.clone(), pool.v.clone()

    def launched(run: Any, batch: Batch) -> torch.Tensor:
        """Return logits and what was written to the pool."""
        found = run.can_run(batch)
        for _ in range(NEEDED_BEFORE_CAPTURE + STEPS_BETWEEN_CAPTURES):
            found = run.can_run(batch) if found is None else found
        pool.k.copy_(before[0]), pool.v.copy_(before[1])
        return run.launch(batch, found).logits.clone()

    for version, (slots, names) in enumerate(ADAPTED_STEPS.values(), 1):
        batch = batch_of(engine, slots, version)
        pages = np.random.default_rng(version).permutation(np.arange(1, PAGES))
        inputs.page_table[1:, :3] = pages[: 3 * ROWS].reshape(ROWS, 3)  # no two rows share a page
        results = []
        for run in (runner, eager):
            batch.adapters, batch.rows_version = np.array(names, np.int32), version
            with adapters.active(batch):
                results.append((launched(run, batch), pool.k[:, 1:].clone(), pool.v[:, 1:].clone()))
        logits = torch.empty_like(results[0][0])
        written: Any = tuple(each[:, 1:].clone() for each in before)
        for row, name in enumerate(names):
            with merged(engine, name):
                logits[row] = launched(eager, row_of(batch, row))[0]
            for all_rows, found, kept in zip(written, (pool.k, pool.v), before, strict=True):
                all_rows += (found - kept)[:, 1:]
        for found in results:
            for own_result, expected in zip(found, (logits, *written), strict=True):
                torch.testing.assert_close(own_result, expected, rtol=1e-3, atol=1e-3)
    assert {key.adapters for key in graphs._graphs} == {AdapterCount.ONE, AdapterCount.MANY}


DRAFTED_STEPS = {  # slots, and the number of drafts of each row
    "few, evenly": ([3, 2], [1, 2]),
    "one rank has all rows": ([5, 1, 7], [1, 3, 0]),
    "evenly": ([3, 2, 1, 4], [2, 3, 0, 0]),
    "one rank has more, the same number of tokens": ([1, 3, 2], [3, 2, 0]),
    "the other rank has all rows": ([2, 6], [3, 2]),
    "no row of one rank has drafts": ([3, 2, 1, 4], [0, 2, 0, 3]),
}


@pytest.mark.parametrize(
    ("rank", "trees"),
    [
        (0, False),
        (1, True),
        pytest.param(1, False, marks=pytest.mark.full),
        pytest.param(0, True, marks=pytest.mark.full),
    ],
)
@torch.inference_mode()
def test_captured_verify_steps_attend_in_the_rows_of_the_rank(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int, trees: bool
) -> None:
    """The reference runs each row alone."""
    stand_in(monkeypatch)
    engine = build_engine(checkpoint, rank, PAGES, "dummy")
    model, inputs, mesh = engine.model, engine.inputs, engine.mesh
    pool: Any = engine.pool
    counts = TokenCounts(ROWS + 1, VOCAB, engine.device)
    sampler = EagerSampler(Sampler(VOCAB, frozenset(), engine.device, counts), inputs)
    graphs = VerifyGraphs(model, inputs, pool, attention(engine), VerifySizes(16, 4, trees, 64), mesh=mesh)
    backends = attention(engine), attention(engine)
    eager: Any = EagerRunner(model, inputs, pool, *backends, sampler, own_rows=OwnRowsOfSteps.of(mesh, inputs))
    runner: Any = VerifyGraphRunner(graphs, sampler)
    pool.k.normal_(), pool.v.normal_()
    before = pool.k.clone(), pool.v.clone()

    def launched(run: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        found = run.can_run(batch)
        for _ in range(NEEDED_BEFORE_CAPTURE + STEPS_BETWEEN_CAPTURES):
            found = run.can_run(batch) if found is None else found
        pool.k.copy_(before[0]), pool.v.copy_(before[1])
        result = run.launch(batch, found)
        return result.logits.clone(), result

    for seed, (slots, drafted) in enumerate(DRAFTED_STEPS.values()):
        batch = batch_of(engine, slots, seed)
        last, rng, lens = inputs.last_token.clone(), np.random.default_rng(seed), np.array(drafted, np.int32)
        batch.extend_lens = batch.extend_lens + lens
        ids = rng.integers(0, VOCAB, (len(slots), max(drafted))).astype(np.int32)
        batch.drafts = DraftTree.chains(ids, lens)
        if trees:
            parents = np.stack([rng.integers(-1, node, len(slots)) for node in range(max(drafted))], 1)
            batch.drafts = DraftTree(ids, parents.astype(np.int32), lens)
        inputs.page_table[1:, :3] = rng.permutation(np.arange(1, PAGES))[: 3 * ROWS].reshape(ROWS, 3)
        alone, written = [], [each[:, 1:].clone() for each in before]
        for row in range(len(slots)):
            alone.append(launched(eager, row_of(batch, row))[0])
            for all_rows, found, kept in zip(written, (pool.k, pool.v), before, strict=True):
                all_rows += (found - kept)[:, 1:]
        accepted = []
        for run in (runner, eager):
            inputs.last_token.copy_(last)
            logits, result = launched(run, batch)
            found = logits, pool.k[:, 1:].clone(), pool.v[:, 1:].clone()
            for own, expected in zip(found, (torch.cat(alone), *written), strict=True):
                torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
            output = run.sample(batch, result, None)
            accepted.append((output.accept_lens.tolist(), inputs.last_token[torch.tensor(slots)].tolist()))
        assert accepted[0] == accepted[1]
        planned, mine = (
            graphs._graphs[runner.can_run(batch)].step.attending,
            [row for row in range(len(slots)) if (slots[row] - 1) % 2 == rank],
        )
        for own, expected in ((planned.prefix_lens, batch.prefix_lens), (planned.extend_lens, batch.extend_lens)):
            assert own[: len(mine)].tolist() == expected[mine].tolist()
        assert planned.extend_lens.sum() == len(planned.input_ids)
    own = {(key.tokens, graphs._own_counts(key.tokens)[key.own]) for key in graphs._graphs}
    assert own == {(8, 4), (8, 8), (16, 8)}


def test_engines_share_no_counters_of_adapters(checkpoint: Path) -> None:
    """Kernels of two engines run at the same time, on streams of their own; those of the layers of one engine do not."""
    counters = [
        [
            layer.adapters.weights.arrived
            for layer in as_module(engine.model).modules()
            if isinstance(layer, Linear) and layer.adapters is not None
        ]
        for engine in [build_engine(checkpoint, 0, PAGES, "dummy") for _ in range(2)]
        if adapters_of(engine)
    ]
    first, second = ({each.data_ptr() for each in own if each is not None} for own in counters)
    assert len(first) == len(second) == 1
    assert first.isdisjoint(second)
