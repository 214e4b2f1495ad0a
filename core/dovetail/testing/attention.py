"""Test attention backends: compare every declared feature with a reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.features import Feature
from dovetail.memory.pool import pool_dtype
from dovetail.testing.attention_cases import (
    DECODE,
    EXTEND,
    GRAPH,
    GRAPH_ROWS,
    LATENT,
    MIXED,
    REPLAYS,
    SHARED_PREFIX,
    SHARED_STEPS,
    SINKS,
    SOFT_CAP,
    STEPS,
    TREE,
    VERIFY,
    WINDOW,
    only_phase,
)
from dovetail.testing.attention_graphs import (
    VERIFY_REPLAYS,
    VERIFY_TOKENS,
    VERIFY_WIDTH,
    CapturedDecodeForward,
    CapturedVerifyForward,
    verify_step,
)
from dovetail.testing.attention_invariance import InvarianceCases
from dovetail.testing.attention_latents import LatentCases, over_latents
from dovetail.testing.attention_projected import ProjectedCases
from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail.testing.attention_scales import ScaleCases, over_scales

each_step = pytest.mark.parametrize("step", STEPS)
each_kv_dtype = pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
each_shared_step = pytest.mark.parametrize("step", SHARED_STEPS)


LONG = 1900
"""The number of keys of long rows, unless a suite lowers ``longest``."""


IN_WINDOWS = DECODE, SHARED_PREFIX, WINDOW, Feature.ATTN_SHARED_WINDOW


VERIFY_LENS = [200] * VERIFY_TOKENS, [VERIFY_WIDTH] * VERIFY_TOKENS
"""The largest prefixes and numbers of queries of the rows of graphs of verify steps."""


def in_large_pool(case: AttentionCase) -> AttentionCase:
    """Return ``case`` with page ids above 4,096 in the last of four layers."""
    return replace(case, num_layers=4, layer_id=3, min_pages=6000)


class AttentionSuite(InvarianceCases, LatentCases, ProjectedCases, ScaleCases):
    """Test an attention backend. ``class TestMine(AttentionSuite): name = "mine"`` is a complete test file.

    Cases run on the first device and in the first dtype that the spec allows and this machine has, unless ``device``
    and ``dtypes`` select others. A case whose features are all declared must pass. A case with a feature that is not
    declared is run too: if it passes, the reason of its skip reports that, and ``undeclared`` collects the feature.
    """

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize(
        ("prefix", "extend", "features"),
        [
            ([64, 70, 130, 64, 99, 30], [1] * 6, (DECODE,)),
            ([70, 64, 130, 64, 7], [5, 5, 5, 19, 5], (EXTEND,)),
            ([64, 90, 64, 65], [9, 1, 1, 1], (MIXED,)),
        ],
        ids=["decode", "extend", "mixed"],
    )
    @pytest.mark.parametrize("kv_heads", [1, 4])
    def test_rows_that_share_pages(
        self, page_size: int, prefix: list[int], extend: list[int], features: tuple[Feature, ...], kv_heads: int
    ) -> None:
        """Several rows read the same pages at their beginning, as with a prefix cache."""
        self.skip_page_size(page_size)
        split = sum(n > 1 for n in extend)
        case = AttentionCase(prefix, extend, num_extend=split, shared=64, page_size=page_size, kv_heads=kv_heads)
        self.check(case, *features)
        self.check(replace(case, dtype=torch.bfloat16, ordered_pages=True), *features)

    @each_step
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_phases_and_page_sizes(self, step: str, page_size: int) -> None:
        """Every kind of row, alone and together, with lengths around page boundaries."""
        self.skip_page_size(page_size)
        case, features = STEPS[step]
        self.check(replace(case, page_size=page_size), *features)

    @each_step
    def test_consecutive_pages(self, step: str) -> None:
        """A backend may have a faster path for consecutive pages, which must be correct."""
        case, features = STEPS[step]
        self.check(replace(case, ordered_pages=True), *features)

    @each_step
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_dtypes(self, step: str, dtype: torch.dtype) -> None:
        """Outputs in every dtype are within ``TOLERANCES``."""
        self.skip_dtype(dtype)
        case, features = STEPS[step]
        self.check(replace(case, dtype=dtype), *features)

    @each_step
    @each_kv_dtype
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_fp8_pools(self, step: str, kv_dtype: str, dtype: torch.dtype) -> None:
        """Keys and values of 8 bits are exact in every dtype of queries, so only the usual rounding is allowed."""
        self.skip_dtype(dtype)
        self.skip_kv_dtype(kv_dtype)
        case, features = STEPS[step]
        case = replace(case, dtype=dtype, kv_dtype=pool_dtype(kv_dtype), page_size=16)
        self.check(case, *features)
        self.check(replace(case, ordered_pages=True, heads=8), *features)

    @each_kv_dtype
    def test_long_rows_of_fp8_pools(self, kv_dtype: str) -> None:
        """Rows long enough that every backend splits or groups them."""
        self.skip_kv_dtype(kv_dtype)
        prefix, longer, extend = (
            [n * self.longest // 1900 for n in lens]
            for lens in ([1900, 3, 700, 0, 64, 1100, 255, 30], [900, 0, 130], [230, 300, 70])
        )
        case = AttentionCase(prefix, [1] * len(prefix), page_size=16, kv_dtype=pool_dtype(kv_dtype), heads=8)
        self.check(case, DECODE)
        self.check(replace(case, prefix=longer, extend=extend, num_extend=3), EXTEND)

    @each_shared_step
    @each_kv_dtype
    def test_shared_prefixes_of_fp8_pools(self, step: str, kv_dtype: str) -> None:
        """Shared keys and own keys are both read from a pool of 8 bits."""
        self.skip_kv_dtype(kv_dtype)
        case = replace(SHARED_STEPS[step], kv_dtype=pool_dtype(kv_dtype), page_size=16)
        self.check(case, DECODE, SHARED_PREFIX)

    @each_step
    @pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 4), (8, 4), (8, 2), (8, 1), (7, 1)])
    def test_grouped_heads(self, step: str, heads: int, kv_heads: int) -> None:
        """Query head h reads key head h * kv_heads // heads."""
        case, features = STEPS[step]
        self.check(replace(case, heads=heads, kv_heads=kv_heads), *features)

    @each_step
    @pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
    def test_head_dims(self, step: str, head_dim: int) -> None:
        """Each head_dim, also with a scale other than the default."""
        if self.constraints.head_dims and head_dim not in self.constraints.head_dims:
            pytest.skip(f"{self.name} does not allow head_dim {head_dim}")
        case, features = STEPS[step]
        self.check(replace(case, head_dim=head_dim, scale=0.3 * head_dim**-0.5), *features)

    @each_step
    @pytest.mark.parametrize("window", [1, 3, 16, 1000])
    def test_sliding_window(self, step: str, window: int) -> None:
        """Position i sees (i - window, i]; in a tree, positions are depths."""
        case, features = STEPS[step]
        self.check(replace(case, window=window), *features, WINDOW)

    @each_step
    def test_soft_cap(self, step: str) -> None:
        """Logits s become c * tanh(s / c)."""
        case, features = STEPS[step]
        self.check(replace(case, soft_cap=1.5, scale=0.5), *features, SOFT_CAP)

    @each_step
    def test_sinks(self, step: str) -> None:
        """A key without a value takes part in the softmax."""
        case, features = STEPS[step]
        self.check(replace(case, sinks=True), *features, SINKS)

    @each_step
    def test_window_soft_cap_and_sinks_together(self, step: str) -> None:
        """Features that are correct alone can be wrong together."""
        case, features = STEPS[step]
        case = replace(case, window=7, soft_cap=2.0, sinks=True, scale=0.5, heads=6, kv_heads=2)
        self.check(case, *features, WINDOW, SOFT_CAP, SINKS)

    @each_step
    @pytest.mark.parametrize(("dtype", "key_scale"), [(torch.float32, 50.0), (torch.bfloat16, 6.0)], ids=str)
    def test_softmax_in_float32(self, step: str, dtype: torch.dtype, key_scale: float) -> None:
        """Logits so large that they overflow if no maximum is subtracted, or lose their value in 16 bits."""
        self.skip_dtype(dtype)
        case, features = STEPS[step]
        self.check(replace(case, key_scale=key_scale, dtype=dtype), *features)

    @each_step
    def test_padding_rows_change_no_other_row(self, step: str) -> None:
        """Rows of padding that point at page 0, as in a graph of fixed size, change no other row."""
        case, features = STEPS[step]
        trees = None if case.trees is None else [*case.trees, [], []]
        padded = replace(case, prefix=[*case.prefix, 0, 0], extend=[*case.extend, 1, 1], trees=trees, padding=2)
        num_extend = case.num_extend or 0
        only_extend = num_extend == len(case.extend)
        self.check(replace(padded, num_extend=num_extend), *features, *([MIXED] if only_extend else []))

    @each_shared_step
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_shared_prefixes(self, step: str, page_size: int) -> None:
        """Rows and groups of every size, where shared keys are read separately from own keys."""
        self.skip_page_size(page_size)
        self.check(replace(SHARED_STEPS[step], page_size=page_size), DECODE, SHARED_PREFIX)

    @each_shared_step
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (7, 1)])
    def test_shared_prefixes_of_grouped_heads(self, step: str, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
        """The results of both parts are weighted by their sums, in each dtype."""
        self.skip_dtype(dtype)
        case = replace(SHARED_STEPS[step], dtype=dtype, heads=heads, kv_heads=kv_heads)
        self.check(case, DECODE, SHARED_PREFIX)

    @each_shared_step
    def test_shared_prefixes_with_soft_cap_and_sinks(self, step: str) -> None:
        """The sink counts once, not once per part."""
        case = replace(SHARED_STEPS[step], soft_cap=2.0, sinks=True, scale=0.5, heads=6)
        self.check(case, DECODE, SHARED_PREFIX, SOFT_CAP, SINKS)

    @each_shared_step
    def test_shared_prefixes_of_large_logits(self, step: str) -> None:
        """One part may outweigh the other by any factor."""
        self.check(replace(SHARED_STEPS[step], key_scale=50.0), DECODE, SHARED_PREFIX)

    def test_long_shared_prefixes(self) -> None:
        """Prefixes long enough that every backend splits them."""
        prefix = [1900, 1030, 1024, 1100, 1500, 600, 513, 512, 700, 3, 40]
        case = AttentionCase(prefix, [1] * len(prefix), page_size=16, groups=[(5, 1024), (4, 512)])
        self.check(case, DECODE, SHARED_PREFIX)

    @each_shared_step
    @pytest.mark.parametrize("window", [7, 20, 60])
    def test_shared_prefixes_in_windows(self, step: str, window: int) -> None:
        """Windows begin before, in or behind what is shared, and only the shortest row of a group has all pages that rows see."""
        self.check(replace(SHARED_STEPS[step], window=window, page_size=4), *IN_WINDOWS)

    @pytest.mark.parametrize("window", [650, 1200])
    def test_long_shared_prefixes_in_windows(self, window: int) -> None:
        """Prefixes long enough that every backend splits them, with many keys that all rows see, or some, or none."""
        prefix = [1100, 1030, 1024, 1900, 1500, 600, 513, 512, 700, 3, 40]
        case = AttentionCase(prefix, [1] * len(prefix), page_size=16, groups=[(5, 1024), (4, 512)], window=window)
        self.check(case, *IN_WINDOWS)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("page_size", [1, 16])
    @pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
    def test_graphs(self, dtype: torch.dtype, page_size: int, shared: bool) -> None:
        """Graphs of two sizes replay steps of other lengths in turns, with steps that run without a graph between
        them."""
        for feature in (DECODE, GRAPH, *([SHARED_PREFIX] if shared else [])):
            self.require(feature)
        self.skip_dtype(dtype)
        self.skip_page_size(page_size)
        self.replay(AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS, dtype=dtype, page_size=page_size), shared)

    @each_kv_dtype
    @pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
    def test_graphs_over_fp8_pools(self, kv_dtype: str, shared: bool) -> None:
        """Graphs over pools of 8 bits, in the first dtype that is allowed."""
        for feature in (DECODE, GRAPH, *([SHARED_PREFIX] if shared else [])):
            self.require(feature)
        self.skip_kv_dtype(kv_dtype)
        self.replay(
            AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS, kv_dtype=pool_dtype(kv_dtype), page_size=16), shared
        )

    def test_graphs_of_shared_prefixes_in_windows(self) -> None:
        """Graphs of layers with a window, in the first dtype that is allowed."""
        for feature in (*IN_WINDOWS, GRAPH):
            self.require(feature)
        case = AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS, page_size=16, window=150)
        self.replay(case, shared=True)

    @pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
    def test_graphs_over_latents(self, shared: bool) -> None:
        """Graphs over pools of latents, in the first dtype that is allowed."""
        for feature in (DECODE, GRAPH, LATENT, *([SHARED_PREFIX] if shared else [])):
            self.require(feature)
        self.replay(over_latents(AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS, page_size=16)), shared)

    @pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
    def test_graphs_with_scales(self, shared: bool) -> None:
        """Graphs over keys and values with scales, in the first dtype that is allowed."""
        for feature in (DECODE, GRAPH, Feature.ATTN_SCALES, *([SHARED_PREFIX] if shared else [])):
            self.require(feature)
        self.skip_kv_dtype("fp8_e4m3")
        self.replay(over_scales(AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS), "token_head"), shared)

    @torch.inference_mode()
    def replay(self, case: AttentionCase, shared: bool) -> None:
        """Capture decode steps over the pool of ``case`` and compare ``REPLAYS`` with the reference."""
        device = self.find_device()
        if device.type != "cuda":
            pytest.skip("graphs need CUDA")
        base = self.fit(case)
        whole = AttentionStep(base, device)
        backend = self.make(whole.context())
        graphs = [CapturedDecodeForward(backend, whole, rows, shared=shared) for rows in (GRAPH_ROWS, GRAPH_ROWS - 1)]
        for seed, (prefix, groups) in enumerate(REPLAYS):
            for graph in graphs:
                step = graph.step(replace(base, seed=seed), prefix, groups if shared else None)
                self.compare_output(step, graph.replay(step))
                backend.plan(step.batch)
                self.compare_output(step, backend.forward(step.q, step.layer, step.batch))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("window", [None, 30])
    def test_graphs_of_verify_rows(self, dtype: torch.dtype, window: int | None) -> None:
        """Two graphs replay steps whose tokens are divided among rows in different ways, with steps that run without a
        graph between them."""
        for feature in (VERIFY, Feature.ATTN_VERIFY_GRAPH, *([WINDOW] if window else [])):
            self.require(feature)
        self.skip_dtype(dtype)
        self.replay_verify(AttentionCase(*VERIFY_LENS, dtype=dtype, page_size=16, window=window))

    def test_graphs_of_verify_rows_over_latents(self) -> None:
        """The same over a pool of latents, in the first dtype that is allowed."""
        for feature in (VERIFY, Feature.ATTN_VERIFY_GRAPH, LATENT):
            self.require(feature)
        self.replay_verify(over_latents(AttentionCase(*VERIFY_LENS, page_size=16)))

    @torch.inference_mode()
    def replay_verify(self, case: AttentionCase) -> None:
        """Capture verify steps over the pool of ``case`` and compare ``VERIFY_REPLAYS`` with the reference."""
        device = self.find_device()
        if device.type != "cuda":
            pytest.skip("graphs need CUDA")
        base = self.fit(case)
        whole = AttentionStep(base, device)
        backend = self.make(whole.context())
        graphs = [
            CapturedVerifyForward(backend, whole, tree=tree)
            for tree in ((False, True) if self.offers(TREE) else (False,))
        ]
        for prefix, trees in VERIFY_REPLAYS:
            step = verify_step(base, whole, prefix, trees, VERIFY_TOKENS)
            assert step.drafts is not None
            for graph in graphs if step.drafts.is_chain else graphs[1:]:
                self.compare_output(step, graph.replay(step))
            if step.drafts.is_chain or self.offers(TREE):
                extend = [1 + len(tree) for tree in trees]
                alone = AttentionStep(replace(base, prefix=prefix, extend=extend, trees=trees), device, whole)
                backend.plan(alone.batch)
                self.compare_output(alone, backend.forward(alone.q, alone.layer, alone.batch))

    @pytest.mark.parametrize("window", [None, 100])
    @pytest.mark.parametrize("ordered_pages", [True, False])
    def test_chunk_after_a_large_prefix(self, window: int | None, ordered_pages: bool) -> None:
        """Rows long enough that every backend works in blocks."""
        case = AttentionCase(
            [900, 0, 130], [230, 300, 70], num_extend=3, window=window, ordered_pages=ordered_pages, page_size=16
        )
        self.check(case, EXTEND, *([WINDOW] if window else []))

    @pytest.mark.parametrize("ordered_pages", [True, False])
    def test_decode_rows_of_very_different_lengths(self, ordered_pages: bool) -> None:
        """Rows long enough that every backend splits or groups them."""
        prefix = [1900, 3, 700, 0, 64, 1100, 255, 30, 31, 2, 1899, 500]
        case = AttentionCase(prefix, [1] * len(prefix), page_size=16, ordered_pages=ordered_pages)
        self.check(case, DECODE)

    @pytest.mark.parametrize("window", [None, 700])
    def test_many_rows_of_a_large_pool(self, window: int | None) -> None:
        """More than 64 rows, one of which has more than 4,000 tokens, with page ids above 4,096, in the last of four
        layers."""
        prefix = [3 + row % 29 for row in range(70)]
        prefix[67] = 4100 if self.longest >= LONG else self.longest
        case = AttentionCase(prefix, [1] * 70, heads=2, kv_heads=1, head_dim=16, window=window)
        self.check(in_large_pool(case), DECODE, *([WINDOW] if window else []))

    def test_a_chunk_of_512_tokens(self) -> None:
        """A chunk as long prompts are cut into, after a prefix that makes more than 4,000 tokens with it, and beside
        it the first chunk of another prompt, in the last of four layers."""
        chunk = 512 if self.longest >= LONG else self.longest // 4
        case = AttentionCase([7 * chunk + 5, 0], [chunk, chunk], num_extend=2, heads=2, kv_heads=1, head_dim=16)
        self.check(in_large_pool(case), EXTEND)

    @torch.inference_mode()
    def test_plans_leave_nothing_behind(self) -> None:
        """One backend over one pool runs extend, decode over a page boundary, extend of other rows, and decode
        again."""
        for feature in (EXTEND, DECODE):
            self.require(feature)
        base = self.fit(AttentionCase([0, 0], [60, 45], num_extend=2))
        whole = AttentionStep(base, self.find_device())
        backend = self.make(whole.context())
        for prefix, extend in (([0, 0], [20, 7]), *(([20 + i, 7 + i], [1, 1]) for i in range(9)), ([29, 16], [5, 29])):
            case = replace(base, prefix=prefix, extend=extend, num_extend=2 * (extend[0] > 1))
            step = AttentionStep(case, self.find_device(), whole)
            backend.plan(step.batch)
            self.compare_output(step, backend.forward(step.q, step.layer, step.batch))

    @torch.inference_mode()
    def test_layers_of_one_step_may_differ(self) -> None:
        """One plan serves layers with and without window, and the pool of each."""
        for feature in (MIXED, WINDOW):
            self.require(feature)
        step = AttentionStep(self.fit(STEPS["mixed"][0]), self.find_device())
        step.pool.k[0], step.pool.v[0] = -step.pool.k[1], 0.5 * step.pool.v[1]
        backend = self.make(step.context())
        backend.plan(step.batch)
        for window, layer_id in ((None, 1), (4, 0), (None, 0), (9, 1), (4, 1)):
            step.case = replace(step.case, window=window, layer_id=layer_id)
            step.layer = AttentionLayer(layer_id, step.layer.scale, window)
            self.compare_output(step, backend.forward(step.q, step.layer, step.batch))

    @torch.inference_mode()
    def test_queries_may_be_a_slice_of_a_fused_projection(self) -> None:
        """Models pass views whose rows are not contiguous."""
        for phase in (EXTEND, DECODE, MIXED):
            for case, _ in only_phase(phase).values() if self.offers(phase) else ():
                step = AttentionStep(self.fit(case), self.find_device())
                backend = self.make(step.context())
                backend.plan(step.batch)
                fused = torch.cat([step.q, step.q], 1)[:, : step.case.heads]
                self.compare_output(step, backend.forward(fused, step.layer, step.batch))
