"""Test flashinfer without the library: what its wrappers get, with wrappers that do what FlashInfer's documentation
describes.

Run: python -m pytest tests/plugins/test_attention_flashinfer.py
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from dovetail.errors import ConfigError, EngineError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import STEPS
from dovetail.testing.attention_latents import over_latents
from dovetail.testing.attention_reference import AttentionCase, AttentionStep

MODULES = "dovetail_attention.flashinfer."
plans: list[str] = []


class Wrapper:
    """Attend with the arguments of ``plan``, in float64, so that results do not depend on the batch."""

    suffix: str  # the end of the names of a graph's buffers

    def __init__(self, workspace, layout, *, backend, use_tensor_cores=None, use_cuda_graph=False, **buffers):
        assert layout == "NHD"
        self.backend, self.tensor_cores, self.graph, self.buffers = backend, use_tensor_cores, use_cuda_graph, buffers
        self.workspace = workspace

    def reset_workspace_buffer(self, floats, ints):
        assert floats is self.workspace

    def _plan(self, queries, indptr, indices, last_page_len, head_dim, page_size, *, num_qo_heads, num_kv_heads,
              q_data_type, kv_data_type, causal, custom_mask=None, window_left=-1, logits_soft_cap=None, sm_scale):  # fmt: skip
        for tensor in (queries, indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32
        self.shape = num_qo_heads, num_kv_heads, head_dim
        self.dtypes, self.page_size = (q_data_type, kv_data_type), page_size
        assert len(indices) == indptr[-1]
        assert 1 <= int(last_page_len.min()) <= int(last_page_len.max()) <= page_size
        self.queries, self.causal, self.mask = queries, causal, custom_mask
        self.window_left, self.cap, self.scale = window_left, logits_soft_cap or 0.0, sm_scale
        if self.graph:
            self.indptr, self.last_page_len, self.indices = (
                self.buffers[f"paged_kv_{name}_{self.suffix}"] for name in ("indptr", "last_page_len", "indices")
            )
            assert len(self.indptr) == len(indptr)
            self.indptr.copy_(indptr)
            self.last_page_len.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.indptr, self.indices, self.last_page_len = indptr, indices, last_page_len

    def run(self, q, memory, out):
        keys, values = memory
        assert tuple(q.shape[1:]) == (self.shape[0], self.shape[2])
        assert tuple(keys.shape[1:]) == (self.page_size, *self.shape[1:])
        assert (q.dtype, keys.dtype) == self.dtypes
        assert len(q) == self.queries[-1]
        done = 0
        for row in range(len(self.indptr) - 1):
            begin, end = self.indptr[row : row + 2].tolist()
            count = (end - begin - 1) * self.page_size + int(self.last_page_len[row])
            pages = self.indices[begin:end].long()
            tokens = slice(*self.queries[row : row + 2].tolist())
            own = tokens.stop - tokens.start
            seen = self._seen(own, count, done)
            done += own * count
            group = q.shape[1] // keys.shape[2]
            k, v = (x[pages].flatten(0, 1)[:count].double().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[tokens].double(), k) * self.scale
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[tokens] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out

    def _seen(self, queries, keys, done):
        distance = (torch.arange(queries)[:, None] + keys - queries) - torch.arange(keys)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if self.mask is not None:
            assert self.backend == "fa2"
            assert len(self.mask) >= done + queries * keys
            seen = self.mask[done : done + queries * keys].view(queries, keys)
        elif self.causal:
            seen = distance >= 0
        return seen & (distance <= self.window_left) if self.window_left >= 0 else seen


class Prefill(Wrapper):
    suffix = "buf"

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *, head_dim_qk, page_size,
             seq_lens, max_token_per_sequence, **rest):  # fmt: skip
        plans.append(f"prefill {self.backend}")
        assert max_token_per_sequence == int(qo_indptr.diff().max())
        if self.graph:
            assert torch.equal(self.buffers["qo_indptr_buf"], qo_indptr)
        check_lens(paged_kv_indptr, paged_kv_last_page_len, seq_lens, page_size)
        self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, head_dim_qk, page_size, **rest)


class Decode(Wrapper):
    suffix = "buffer"

    def plan(self, indptr, indices, last_page_len, *, head_dim, page_size, seq_lens, **rest):
        plans.append("decode")
        check_lens(indptr, last_page_len, seq_lens, page_size)
        one_each = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(one_each, indptr, indices, last_page_len, head_dim, page_size, causal=False, **rest)


class Latents:
    """Attend over latents with the arguments of ``plan``, by the definition, in float64."""

    def __init__(self, workspace, *, backend):
        self.backend = backend

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal,
             sm_scale, q_data_type, kv_data_type):  # fmt: skip
        plans.append("latents")
        assert (head_dim_ckv, head_dim_kpe, causal) == (512, 64, True)
        for tensor in (qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            assert tensor.dtype == torch.int32
        assert torch.equal(-(-kv_len_arr // page_size), kv_indptr.diff())
        self.rows = qo_indptr.tolist(), kv_indptr.tolist(), kv_indices.long(), kv_len_arr.tolist()
        self.sizes, self.dtypes = (num_heads, page_size, sm_scale), (q_data_type, kv_data_type)

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        (heads, page_size, scale), (queries, indptr, indices, lens) = self.sizes, self.rows
        assert (q_nope.shape[1:], q_pe.shape[1:]) == ((heads, 512), (heads, 64))
        assert (ckv_cache.shape[1:], kpe_cache.shape[1:]) == ((page_size, 512), (page_size, 64))
        assert (q_nope.dtype, ckv_cache.dtype) == self.dtypes
        out = torch.full_like(q_nope, torch.nan)
        for row, count in enumerate(lens):
            pages, tokens = indices[slice(*indptr[row : row + 2])], slice(*queries[row : row + 2])
            c, k = (x[pages].flatten(0, 1)[:count].double() for x in (ckv_cache, kpe_cache))
            scores = torch.einsum("qhd,kd->hqk", q_nope[tokens].double(), c)
            scores = (scores + torch.einsum("qhd,kd->hqk", q_pe[tokens].double(), k)) * scale
            own = tokens.stop - tokens.start
            later = torch.ones(own, count, dtype=torch.bool).triu(count - own + 1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            out[tokens] = torch.einsum("hqk,kd->qhd", weights, c).to(out.dtype)
        return out


class Ragged:
    """Attend causally over keys that are not in pages."""

    def __init__(self, workspace, layout, *, backend):
        assert layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, *, head_dim_vo, causal, sm_scale,
             q_data_type, kv_data_type):  # fmt: skip
        plans.append("ragged")
        assert causal
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.rows, self.scale = (qo_indptr.tolist(), kv_indptr.tolist()), sm_scale
        self.sizes, self.dtype = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo), q_data_type
        assert kv_data_type is q_data_type

    def run(self, q, k, v):
        assert (q.shape[1], k.shape[1], k.shape[2], v.shape[2]) == self.sizes
        assert q.dtype is k.dtype is v.dtype is self.dtype
        assert v.is_contiguous()
        out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
        queries, keys = self.rows
        for row in range(len(queries) - 1):
            tokens, own = slice(*queries[row : row + 2]), slice(*keys[row : row + 2])
            count, length = tokens.stop - tokens.start, own.stop - own.start
            scores = torch.einsum("qhd,khd->hqk", q[tokens].double(), k[own].double()) * self.scale
            later = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            out[tokens] = torch.einsum("hqk,khd->qhd", weights, v[own].double()).to(out.dtype)
        return out


def check_lens(indptr, last_page_len, kv_lens, page_size):
    assert torch.equal((indptr.diff() - 1) * page_size + last_page_len, kv_lens)


def fast_decode_plan(
    wrapper, indptr, indices, last_page_len, *, global_override_indptr_cpu, head_dim, page_size, **rest
):
    """Plan a graph's wrapper, whose buffers must already hold everything."""
    plans.append("again")
    assert wrapper.graph
    assert global_override_indptr_cpu is indptr
    assert torch.equal(wrapper.indptr, indptr)
    assert torch.equal(wrapper.last_page_len, last_page_len)
    assert indices.data_ptr() == wrapper.indices.data_ptr()
    one_each = torch.arange(len(indptr), dtype=torch.int32)
    wrapper._plan(one_each, indptr, indices, last_page_len, head_dim, page_size, causal=False, **rest)


class Event:
    """Show that no plan is written while the copies of the previous one may still be in progress."""

    def record(self):
        pass

    def synchronize(self):
        plans.append("wait")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    fake = types.ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = Prefill
    fake.BatchDecodeWithPagedKVCacheWrapper = Decode
    fake.fast_decode_plan = fast_decode_plan
    fake.BatchPrefillWithRaggedKVCacheWrapper = Ragged
    fake.mla = types.SimpleNamespace(BatchMLAPagedAttentionWrapper=Latents)
    for name in [name for name in sys.modules if name.startswith(MODULES)]:
        del sys.modules[name]
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    plans.clear()
    yield
    for name in [name for name in sys.modules if name.startswith(MODULES)]:
        del sys.modules[name]


@pytest.mark.sample(3)
class TestFlashInfer(AttentionSuite):
    name = "flashinfer"
    not_invariant = ("kv_dtype",)
    device = "cpu"
    settings: ClassVar = {"workspace_mib": 16}


@pytest.mark.sample(3)
class TestLatents(AttentionSuite):
    name = "flashinfer_mla"
    device = "cpu"
    settings: ClassVar = {"workspace_mib": 16}

    def test_one_plan_a_step(self):
        """Each kind of call is planned before the first layer of a step, after the copies of the step before."""
        step = AttentionStep(self.fit(over_latents(STEPS["mixed"][0])), torch.device("cpu"))
        step.pool.k[0] = step.pool.k[1]
        backend = self.make(step.context())
        for _ in range(2):
            plans.clear()
            backend.plan(step.batch)
            for layer_id in (0, 1, 1):
                attend(backend, step, layer_id=layer_id)
            assert plans == ["wait", "latents"]
        attend(backend, step, scale=0.25)
        assert plans == ["wait", "latents", "latents"]
        with pytest.raises(ConfigError, match="neither windows nor soft caps nor sinks"):
            backend.forward(step.q, replace(step.layer, window=3), step.batch)

    def test_other_latents_are_refused_by_their_sizes(self):
        step = AttentionStep(over_latents(STEPS["decode"][0], 24, 16), torch.device("cpu"))
        with pytest.raises(ConfigError, match="head_dim 24 and value_dim 16"):
            self.make(step.context())


suite = TestFlashInfer()


def prepare(case, **settings):
    """Return a step, and a backend for it."""
    step = AttentionStep(suite.fit(case), torch.device("cpu"))
    config = suite.config().model_copy(update=settings)
    from dovetail_attention.flashinfer.backend import FlashInfer

    return step, FlashInfer(config, step.context())


def attend(backend, step, **layer):
    step.case = replace(step.case, **layer)
    step.layer = replace(step.layer, **layer)
    suite.compare_output(step, backend.forward(step.q, step.layer, step.batch))


def test_one_plan_a_step_for_each_way_of_layer():
    step, backend = prepare(STEPS["mixed"][0])
    step.pool.k[0], step.pool.v[0] = step.pool.k[1], step.pool.v[1]
    for _ in range(2):
        plans.clear()
        backend.plan(step.batch)
        assert plans == ["wait"]
        for layer_id in (0, 1):
            for window in (None, 5):
                attend(backend, step, layer_id=layer_id, window=window)
        assert plans == ["wait", "prefill auto", "decode", "prefill auto", "decode"]
        attend(backend, step, window=None, soft_cap=3.0)
        attend(backend, step, soft_cap=None, scale=0.25)
        assert plans[5:] == ["prefill auto", "decode"] * 2
        step.case, step.layer = replace(step.case, scale=None), replace(step.layer, scale=64**-0.5)


def test_a_pool_of_8_bits_needs_fa2():
    case = replace(STEPS["mixed"][0], kv_dtype=torch.float8_e4m3fn)
    step, backend = prepare(case)
    backend.plan(step.batch)
    attend(backend, step)
    assert plans[1:] == ["prefill fa2", "decode"]
    with pytest.raises(ConfigError, match="kv_dtype auto"):
        prepare(case, variant="fa3")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("extend", ["prefill fa3"]),
        ("decode", ["decode"]),
        ("verify chains", ["prefill fa3"]),
        ("trees", ["prefill fa2"]),
        ("trees and extend", ["prefill fa3", "prefill fa2"]),
    ],
)
def test_kinds_of_rows_and_the_variant(name, expected):
    step, backend = prepare(STEPS[name][0], variant="fa3")
    backend.plan(step.batch)
    attend(backend, step)
    assert plans[1:] == expected


@pytest.mark.parametrize("name", [name for name in STEPS if "tree" not in name])
def test_all_rows_are_prompts_where_bits_must_not_depend_on_the_batch(name):
    step, backend = prepare(replace(STEPS[name][0], batch_invariant=True))
    backend.plan(step.batch)
    attend(backend, step)
    assert plans[1:] == ["prefill fa3"]


@pytest.mark.parametrize(
    ("changes", "settings", "capability", "reason"),
    [
        ({}, {"variant": "fa2"}, (9, 0), r"attention.variant is fa2, allowed here: auto, fa3"),
        ({"kv_dtype": torch.float8_e4m3fn}, {}, (9, 0), r"memory.kv_dtype to auto"),
        ({}, {}, (8, 9), r"compute capability 9\.0; this device has 8\.9"),
        ({}, {}, (10, 0), r"compute capability 9\.0; this device has 10\.0"),
    ],
    ids=["fa2", "a pool of 8 bits", "Ada", "Blackwell"],
)
def test_what_depends_on_the_batch_is_refused_where_bits_must_not(monkeypatch, changes, settings, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=f"batch_invariant is true.*{reason}"):
        prepare(replace(STEPS["decode"][0], batch_invariant=True, **changes), **settings)


@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(4, 2, False), (8, 2, True), (7, 1, True), (4, 4, False)])
def test_tensor_cores_for_decode_where_groups_are_large(heads, kv_heads, expected):
    step, backend = prepare(AttentionCase([9], [1], heads=heads, kv_heads=kv_heads))
    backend.plan(step.batch)
    attend(backend, step)
    (wrapper,) = backend._wrappers.values()
    assert wrapper.tensor_cores is expected


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_are_counted_and_gathered(page_size):
    from dovetail_attention.flashinfer.pages import make_rows

    lens = np.array([1, page_size, page_size + 1, 3 * page_size - 1, 40], np.int32)
    most = -(-int(lens.max()) // page_size)
    table = torch.arange(5 * (most + 2), dtype=torch.int32).view(5, -1)[:, 1:]
    rows = make_rows(lens, table, page_size)
    expected = [table[r, : -(-int(n) // page_size)] for r, n in enumerate(lens)]
    assert rows.indices.tolist() == torch.cat(expected).tolist()
    assert rows.indptr.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert rows.last_page_len.tolist() == [int(n - 1) % page_size + 1 for n in lens]
    assert rows.kv_lens.tolist() == lens.tolist()


@pytest.mark.parametrize(
    ("batch_invariant", "first", "again"), [(False, "decode", "again"), (True, "prefill fa3", "prefill fa3")]
)
@torch.inference_mode()
def test_graphs_replay_with_the_lengths_and_pages_of_each_step(batch_invariant, first, again):
    case = suite.fit(AttentionCase([0, 30, 17, 0], [1, 1, 1, 1], padding=1, batch_invariant=batch_invariant))
    step, backend = prepare(case)
    backend.plan_capture(step.batch)
    for layer_id, window in enumerate((None, 5)):  # the captured code runs with the lengths of padding
        backend.forward(step.q, replace(step.layer, layer_id=layer_id, window=window), step.batch)
    wrappers = list(backend._graphs[4].wrappers.values())
    addresses = [w.indptr.data_ptr() for w in wrappers] + [w.indices.data_ptr() for w in wrappers]
    assert plans == ["wait", first, first]
    for prefix in ([0, 30, 17, 0], [1, 31, 3, 0], [2, 0, 19, 0]):
        later = AttentionStep(replace(case, prefix=prefix), step.device)
        later.pool.k[:], later.pool.v[:] = later.pool.k.nan_to_num(9.0), later.pool.v.nan_to_num(9.0)
        plans.clear()
        backend._pool, table = later.pool, later.batch.page_table
        later.batch.page_table = torch.full_like(table, -1)  # filled within the graph
        backend.plan_replay(later.batch)
        later.batch.page_table = table
        assert plans == ["wait", again, again]
        later.pool.k[0], later.pool.v[0] = later.pool.k[1], later.pool.v[1]
        for layer_id, window in enumerate((None, 5)):
            attend(backend, later, layer_id=layer_id, window=window)
        assert plans == ["wait", again, again], "forward is what was captured: it plans nothing"
    assert [w.indptr.data_ptr() for w in wrappers] + [w.indices.data_ptr() for w in wrappers] == addresses


def test_graphs_refuse_more_pages_than_they_support(monkeypatch):
    step, backend = prepare(AttentionCase([30, 17], [1, 1], page_size=1))
    from dovetail_attention.flashinfer.graph import GraphMemory

    monkeypatch.setattr("dovetail_attention.flashinfer.graph.MOST_PAGES", 0)
    backend._graph_memory = GraphMemory(replace(step.context(), max_rows=2, max_context=10))
    backend.plan_capture(step.batch)
    with pytest.raises(EngineError, match=r"48|49"):
        backend.plan_replay(step.batch)


def test_sinks_are_refused():
    step, backend = prepare(STEPS["decode"][0])
    backend.plan(step.batch)
    layer = AttentionLayer(0, 1.0, sinks=torch.zeros(4))
    with pytest.raises(ConfigError, match="sinks"):
        backend.forward(step.q, layer, step.batch)


def test_fa3_needs_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match=r"8\.9"):
        prepare(STEPS["decode"][0], variant="fa3")
