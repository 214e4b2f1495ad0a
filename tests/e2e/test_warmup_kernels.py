"""Test that the kernels of decode steps with Triton's attention are found by running the steps, and that other processes
compile them: for compute capability 9.0, without a GPU. The other operations of the steps run on the CPU.

Run: python -m pytest tests/e2e/test_warmup_kernels.py
"""

from __future__ import annotations

import pytest
import torch
from triton import knobs
from triton.runtime import driver

from dovetail import LLM
from dovetail.engine.draft_graphs import DraftGraphs, DraftLimits
from dovetail.engine.dry_run import ZeroedMemory
from dovetail.engine.graphs import DecodeGraphs
from dovetail.engine.sharing import PrefixSharing
from dovetail.engine.warmup import WarmUp, likely_keys
from dovetail.interfaces.attention import AttentionContext
from dovetail.interfaces.mesh import SINGLE
from dovetail.ops.triton import launch
from dovetail.ops.triton.ahead import KernelsAhead
from dovetail.ops.triton.compile_worker import AbsentDevice
from dovetail.ops.triton.launch import INTERPRETED
from dovetail_attention.triton.backend import TritonAttention

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

ROWS = 4


class NoRecorder:
    """Stand in for a recorder of CUDA graphs: nothing is captured."""

    def __init__(self, device, mesh):
        pass


class NoStaging:
    """Stand in for a buffer on the device."""

    def __init__(self, size, device):
        self.buffer = torch.zeros(size, dtype=torch.uint8)


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """Have kernels compiled for a device that this machine need not have, into an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = {"PDL": True, "launch_pdl": True}
    monkeypatch.setattr(
        launch, "_options", lambda warps, stages, *_: {**options, "num_warps": warps, "num_stages": stages}
    )
    monkeypatch.setattr("dovetail.engine.graphs.GraphRecorder", NoRecorder)
    monkeypatch.setattr("dovetail.engine.graphs.Staging", NoStaging)
    monkeypatch.setattr("dovetail.engine.draft_graphs.GraphRecorder", NoRecorder)
    before = driver._active
    driver.set_active(AbsentDevice(90))
    yield
    driver._active = before


def built(**sections):
    """Return the runner of an engine on the CPU."""
    memory = {"num_pages": 32, "page_size": 4}
    llm = LLM("tiny", device="cpu", model={"dtype": "bfloat16"}, grammar="none", memory=memory, **sections)
    return llm.loop.executor.rank


def attention(info, pool, max_context):
    """Return Triton's attention over ``pool``."""
    context = AttentionContext(
        device=pool.device, dtype=torch.bfloat16, num_heads=info.num_heads, num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim, pool=pool, max_rows=ROWS, max_context=max_context,
    )  # fmt: skip
    return TritonAttention(None, context)


@pytest.fixture
def graphs(absent):
    engine = built().engine
    backend = attention(engine.info, engine.pool, engine.context_len)
    counts = engine.counts
    return DecodeGraphs(
        engine.model,
        engine.inputs,
        engine.pool,
        backend,
        ROWS,
        engine.context_len,
        PrefixSharing([None], [0]),
        counts=counts,
    )


def test_the_kernels_of_a_step_are_found_and_compiled(graphs, monkeypatch):
    warm_up = WarmUp(torch.device("cpu"), graphs._model.info, SINGLE)
    warm_up._kernels = ahead = KernelsAhead(90, "tiny", processes=2)
    monkeypatch.setattr(
        "dovetail.engine.warmup.draw", lambda logits: None
    )  # sampling on a CPU has no kernels of Triton
    hits = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: hits.append((src.name, cache_hit))
    )
    before = graphs._inputs.last_token.clone()
    try:
        warm_up.note_decode(graphs)
        warm_up.release()
        assert ahead.counts.noted > 5
        assert ahead.wait(300)
        assert ahead.counts.failed == 0
        assert warm_up.progress([]) == (ahead.counts.noted, ahead.counts.noted, 0, 0, 0)
        assert hits == []
        with ahead._instead("compile"):
            for key in likely_keys(graphs):
                graphs.rehearse(key, 2)
        names = {name for name, _ in hits}
        assert {"_decode_inputs", "_decode", "_combine"} <= names
        assert all(hit for _, hit in hits), "a kernel of the steps was not found before"
    finally:
        ahead.close()
    assert torch.equal(graphs._inputs.last_token, before)


def test_the_kernels_of_a_drafters_passes_are_found_and_compiled(absent, monkeypatch):
    """Its passes with trees attend by masks, which decode steps do not."""
    rank = built(speculative="eagle3_tree")
    cache, engine = rank.drafter.cache, rank.engine
    limits = DraftLimits(ROWS, 8 * ROWS, engine.context_len, wide=True)
    backend = attention(cache.info, cache._pool, engine.context_len)
    drafts = DraftGraphs(cache._steps, engine.inputs, cache._pool, backend, limits, pages=cache._pages)
    warm_up = WarmUp(torch.device("cpu"), engine.info, SINGLE)
    warm_up._kernels = ahead = KernelsAhead(90, "tiny drafts", processes=2)
    hits = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, src, cache_hit, **_: hits.append((src.name, cache_hit))
    )
    try:
        warm_up.note_drafts(drafts)
        warm_up.release()
        assert warm_up._positions.keys() == set(drafts.likely((0, 1)))
        assert ahead.wait(300)
        assert ahead.counts.noted > 1
        assert ahead.counts.failed == 0
        assert hits == []
        with ahead._instead("compile"), ZeroedMemory():
            for key in drafts.missing():
                drafts.rehearse(key)
        assert hits, "no kernel was launched"
        assert all(hit for _, hit in hits), "a kernel of the passes was not found before"
    finally:
        ahead.close()


def test_attention_that_reads_what_triton_writes_is_left_out(graphs, monkeypatch):
    """A backend without attention.rehearsal would read memory that no kernel has written."""
    warm_up = WarmUp(torch.device("cpu"), graphs._model.info, SINGLE, attend_decode=False)
    warm_up._kernels = ahead = KernelsAhead(90, "tiny without attention", processes=1)
    monkeypatch.setattr("dovetail.engine.warmup.draw", lambda logits: None)
    calls, steps, forward = [], [], graphs._model.forward
    for name in ("plan_capture", "forward"):
        monkeypatch.setattr(graphs._backend, name, lambda *_, name=name: calls.append(name))
    monkeypatch.setattr(graphs._model, "forward", lambda batch: steps.append(batch) or forward(batch))
    try:
        warm_up.note_decode(graphs)
        assert len(steps) > 5
        assert calls == []
    finally:
        ahead.close()
