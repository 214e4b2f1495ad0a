"""Test latent attention of the triton backend on CUDA with the sizes of DeepSeek: every tile, long rows, graphs, and expanded
prompts.

Run on a GPU machine: python -m pytest tests/gpu/test_latent_gpu.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.testing.attention import AttentionSuite
from dovetail.testing.attention_cases import GRAPH_ROWS, SHARED_STEPS, STEPS
from dovetail.testing.attention_graphs import (
    VERIFY_REPLAYS,
    VERIFY_TOKENS,
    VERIFY_WIDTH,
    CapturedVerifyForward,
    verify_step,
)
from dovetail.testing.attention_reference import TOLERANCES, AttentionCase, AttentionStep
from dovetail_attention.triton.expanded import ExpandedPrompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LATENT: dict[str, Any] = {"head_dim": 576, "value_dim": 512, "kv_heads": 1, "scale": 192**-0.5, "page_size": 16}


class Latent(AttentionSuite):
    """The functions of the suite, without its cases: its name does not begin with Test."""

    name = "triton"
    device = "cuda"


SUITE = Latent()


def latent(base: AttentionCase, **changes: Any) -> AttentionCase:
    """Return ``base`` over latents, in bfloat16."""
    return replace(base, **LATENT | {"dtype": torch.bfloat16} | changes)


@pytest.mark.parametrize(
    ("heads", "kv_dtype", "dtype"),
    [
        (16, None, torch.bfloat16),
        (128, None, torch.bfloat16),
        (20, None, torch.float16),
        (16, torch.float8_e4m3fn, torch.bfloat16),
        (128, torch.float8_e5m2, torch.bfloat16),
        (16, None, torch.float32),
    ],
    ids=str,
)
def test_heads_and_pools(heads: int, kv_dtype: torch.dtype | None, dtype: torch.dtype):
    """Few cases, because each compiles kernels of its own: the suite has more."""
    for step in ("decode", "mixed", "trees and extend"):
        SUITE.compare(latent(STEPS[step][0], heads=heads, kv_dtype=kv_dtype, dtype=dtype))


@pytest.mark.parametrize("step", SHARED_STEPS)
@pytest.mark.parametrize("heads", [16, 128])
def test_shared_prefixes(step: str, heads: int):
    SUITE.compare(latent(SHARED_STEPS[step], heads=heads))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 64])
def test_long_rows(heads: int, page_size: int):
    """Keys are cut into spans that end anywhere; one row is much longer than the others."""
    for prefix in ([9000, 3, 700, 0, 64, 1100, 255, 30], [33_000], [600 + 7 * row for row in range(200)]):
        SUITE.compare(latent(AttentionCase(prefix, [1] * len(prefix)), heads=heads, page_size=page_size))


def test_tokens_beyond_two_to_the_31_numbers():
    """Places times the size of a latent do not fit into 32 bits."""
    case = AttentionCase([40, 700], [1, 1], num_layers=1, layer_id=0, min_pages=260_000)
    SUITE.compare(latent(case, heads=16))


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("heads", [16, 128])
def test_graphs(heads: int, shared: bool):
    SUITE.replay(latent(AttentionCase([300] * GRAPH_ROWS, [1] * GRAPH_ROWS), heads=heads), shared)


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("heads", [4, 16, 128])
@torch.inference_mode()
def test_graphs_of_verify_rows(heads: int, tree: bool):
    base = latent(AttentionCase([200] * VERIFY_TOKENS, [VERIFY_WIDTH] * VERIFY_TOKENS), heads=heads)
    whole = AttentionStep(base, torch.device("cuda"))
    graph = CapturedVerifyForward(SUITE.make(whole.context()), whole, tree=tree)
    for prefix, trees in VERIFY_REPLAYS:
        step = verify_step(base, whole, prefix, trees, VERIFY_TOKENS)
        assert step.drafts is not None
        if tree or step.drafts.is_chain:
            SUITE.compare_output(step, graph.replay(step))


@pytest.mark.parametrize("heads", [16, 128])
@torch.inference_mode()
def test_a_row_has_the_same_bits_alone_and_with_others(heads: int):
    base = latent(AttentionCase([900, 33, 1500], [9, 1, 1], num_extend=1, batch_invariant=True), heads=heads)
    whole = AttentionStep(base, torch.device("cuda"))
    built = SUITE.make(whole.context())
    built.plan(whole.batch)
    together = built.forward(whole.q, whole.layer, whole.batch)
    SUITE.compare_output(whole, together)
    alone = AttentionStep(replace(base, prefix=[900], extend=[9]), torch.device("cuda"), whole)
    alone.q.copy_(whole.q[:9])
    built.plan(alone.batch)
    assert torch.equal(built.forward(alone.q, alone.layer, alone.batch), together[:9])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [2, 16])
@torch.inference_mode()
def test_expanded_prompts(heads: int, dtype: torch.dtype):
    """Keys of 192 and values of 128 numbers; queries are the last of each row's keys."""
    device = torch.device("cuda")
    case = AttentionCase([0, 700, 3000, 64], [1000, 300, 1, 129], num_extend=4, heads=heads, kv_heads=1, head_dim=192)
    step = AttentionStep(replace(case, dtype=dtype), device)
    k = torch.randn(sum(step.lens), heads, 192, device=device).to(dtype)
    v = torch.randn(sum(step.lens), heads, 256, device=device).to(dtype)[..., 128:]
    indptr = torch.tensor([0, *step.lens]).cumsum(0).int().to(device)
    out = ExpandedPrompts(step.batch, indptr, 132, large_memory=True).forward(step.q, k, v, 192**-0.5)
    token = key = 0
    for length, count in zip(step.lens, case.extend, strict=True):
        q, rows = step.q[token : token + count].double(), slice(key, key + length)
        scores = torch.einsum("qhd,khd->hqk", q, k[rows].double()) * 192**-0.5
        later = torch.ones(count, length, dtype=torch.bool, device=device).triu(length - count + 1)
        wanted = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v[rows].double())
        assert ((out[token : token + count] - wanted).abs() / (1 + wanted.abs())).max() <= TOLERANCES[dtype]
        token, key = token + count, key + length
