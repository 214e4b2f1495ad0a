"""Test what is replayed of a drafter's passes with data-parallel attention, on the CPU: graphs are the functions they would be captured
from. On each rank they draft and write what passes launched one by one do, however the requests are divided. The other rank adds nothing.

.venv/bin/python -m pytest -q tests/e2e/test_own_draft_passes.py
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import drafter_checkpoints as heads
import engine_models as models
import mtp_dflash_checkpoints as checkpoints
import numpy as np
import pytest
import torch
from test_draft_passes import PlainAttention, Repeats
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig

from dovetail.engine import draft_graphs
from dovetail.engine.draft_graphs import DraftGraphs, DraftLimits
from dovetail.interfaces.speculative import DraftPass
from dovetail_speculative.hidden import DraftRows
from rank_alone import ROWS, build_engine

VOCAB, PAGES, CONTEXT = 199, 200, 64
DRAFTERS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp", "num_draft_tokens": 4},
    "eagle3_tree": {"kind": "eagle3_tree", "topk": 2, "depth": 3, "num_draft_tokens": 5},
    "dflash": {"kind": "dflash"},
}


class Counted(DraftGraphs):
    """Count the times that passes are replayed."""

    runs = 0

    def _replay(self, keys: Any, slots: Any, passes: Any, stride: int) -> None:
        self.runs += 1
        super()._replay(keys, slots, passes, stride)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    qwen3, glm = (tmp_path_factory.mktemp(name) for name in ("qwen3", "glm"))
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    models.save(qwen3, Qwen3MoeConfig, **sizes, hidden_size=48, num_hidden_layers=4)
    heads.save_eagle3(qwen3 / "eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    checkpoints.save_dflash(qwen3 / "dflash", hidden=48, head_dim=16, mask=9)
    checkpoints.save_glm(glm)
    return {"mtp": glm, "eagle3_tree": qwen3, "dflash": qwen3}


STEPS = {
    "evenly": [3, 2, 1, 4, 6, 5, 8],
    "one rank has more": [1, 3, 5, 7, 9, 2, 4, 11, 13],
    "one rank has all": [1, 3, 5, 7],
    "the other rank has the only row": [2],
    "evenly, again": [4, 1, 2, 3, 5, 6, 7],
}


def read(drafter: Any, slots: Any, starts: Any, counts: Any, seed: int) -> list[Any]:
    """Return the outputs of the pass over texts that have got ``counts`` new tokens."""
    texts = drafter._texts
    generator = torch.Generator().manual_seed(seed)
    total, size = int(counts.sum()), texts._sizes[0]
    ids = torch.randint(0, VOCAB, (total,), generator=generator)
    hidden = torch.randn(total, size, generator=generator)
    return [
        texts.take(drafter._cache, (slots, starts, counts), torch.from_numpy(texts.places(counts)), ids, hidden).clone()
    ]


def drafted(drafter: Any, slots: Any, starts: Any, limits: Any, seed: int) -> list[Any]:
    """Return the drafts of rows that may get ``limits`` of them, in descending order."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(slots)
    if hasattr(drafter, "draft"):
        outputs = torch.randn(rows, drafter._outputs.shape[1], generator=generator)
        tree = drafter.draft(DraftRows(rows, range(rows), slots, starts, limits), outputs)
        assert tree is not None
        return [tree.row(row) for row in range(rows)]
    state = drafter._block.state(rows)
    state.ids[:, 0] = torch.randint(0, VOCAB, (rows,), generator=generator)
    found = drafter._cache.run(drafter._block, slots, [DraftPass(0, starts, limits + np.int32(1))], state)[1]
    return [found[row, 1 : 1 + count].tolist() for row, count in enumerate(limits.tolist())]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_replayed_passes_attend_in_the_rows_of_the_rank(
    targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, rank: int
) -> None:
    monkeypatch.setattr(draft_graphs, "GraphRecorder", Repeats)
    engine = build_engine(targets[name], rank, PAGES, speculative=DRAFTERS[name])
    drafter: Any = engine.drafter
    if hasattr(drafter, "cache"):
        drafter._cache = drafter.cache
    cache, inputs = drafter._cache, engine.inputs
    pool = cache._pool
    limits = DraftLimits(ROWS, 16 * ROWS, CONTEXT, wide=True)
    graphs = Counted(cache._steps, inputs, pool, PlainAttention(pool), limits, engine.mesh)
    pool.k.normal_(), pool.v.normal_()
    before = pool.k.clone(), pool.v.clone()
    most = drafter.max_draft_tokens
    for seed, slots in enumerate(STEPS.values()):
        rng, rows = np.random.default_rng(seed), len(slots)
        inputs.page_table[1:, :12] = rng.permutation(np.arange(1, PAGES))[: 12 * ROWS].reshape(ROWS, 12)
        at, starts = np.array(slots, np.int32), rng.integers(0, 30, rows).astype(np.int32)
        counts = np.sort(rng.integers(1, 1 + most, rows))[::-1].astype(np.int32)
        few = np.minimum(counts, drafter._texts.widths[-1] if seed % 2 else 1).astype(np.int32)
        for run, given in ((read, few), (drafted, counts)):
            results = []
            for replayed in (graphs, None):
                cache.graphs = replayed
                runs, found = 0, []
                for _ in range(1 if replayed is None else 12):
                    pool.k.copy_(before[0]), pool.v.copy_(before[1])
                    runs, found = graphs.runs, run(drafter, at, starts, given, seed)
                assert graphs.runs - runs == (replayed is not None), "the last time, passes are replayed"
                results.append((found, pool.k[:, 1:].clone(), pool.v[:, 1:].clone()))
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            changed = (before[0][:, 1:] != results[0][1]).flatten(2).any(2).any(0)
            if run is read:
                assert bool(changed.any()) == any((slot - 1) % 2 == rank for slot in slots), "only own rows are written"
    assert {key.own for key in graphs._captured} > {0}
    assert not graphs.refused


class ReadTensors(TorchDispatchMode):
    """Collect what operations read that none of them has allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()
        self.read: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in storages((args, kwargs)) if each.nbytes() and each.data_ptr() not in self.made]
        if func is not torch.ops.aten.lift_fresh.default:  # a new tensor of numbers of the host
            self.read += [StorageWeakRef(each) for each in given]
        result = func(*args, **(kwargs or {}))
        self.made |= {each.data_ptr() for each in storages(result)}
        return result


def storages(tree: Any) -> list[Any]:
    """Return the storages of the tensors in a tree, those without one left out."""
    found = (each for each in tree_leaves(tree) if isinstance(each, torch.Tensor) and not each.is_mkldnn)
    return [each.untyped_storage() for each in found]


class Forgets:
    """In place of ``GraphRecorder``: as a graph does, forget everything but the memory that a step reads."""

    read: tuple[StorageWeakRef, ...] = ()

    def __init__(self, device: Any, mesh: Any) -> None: ...

    def record(self, step: Any, *, loaded: bool = False) -> tuple[Any, torch.Tensor]:
        step()  # layers are prepared
        with ReadTensors() as reads:
            result = step()
        Forgets.read += tuple(reads.read)
        return None, result


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_what_a_captured_pass_reads_stays_allocated(
    targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(draft_graphs, "GraphRecorder", Forgets)
    monkeypatch.setattr(Forgets, "read", ())
    engine = build_engine(targets[name], 0, PAGES, speculative=DRAFTERS[name])
    drafter: Any = engine.drafter
    cache = drafter.cache if hasattr(drafter, "cache") else drafter._cache
    limits = DraftLimits(4, 64, CONTEXT, wide=True)
    graphs = DraftGraphs(cache._steps, engine.inputs, cache._pool, PlainAttention(cache._pool), limits, engine.mesh)
    keys = list(graphs.missing())
    for key in keys:
        graphs.capture(key)
    gc.collect()
    assert len(Forgets.read) > 10 * len(keys)
    assert not any(storage.expired() for storage in Forgets.read)
