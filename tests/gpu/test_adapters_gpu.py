"""Test adapters (LoRA) on a GPU: the kernels against float32 mathematics, and steps in graphs against steps launched kernel by kernel.

Run: python -m pytest tests/gpu/test_adapters_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.config.checkpoint import locate
from dovetail.ops.adapter_weights import AdapterCount, LowRankWeights, TokenSlots
from dovetail.ops.low_rank import (
    LARGE_TILE,
    SMALL_TILE,
    adapter_count,
    add_low_rank,
    kernel_count,
    packed_tiles,
    unpacked_tiles,
)
from lora_adapters import module_shapes, write_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
NAMES = ["a", "b", None, "c", "a", "b"]
PROMPTS = ["The capital of France is", "Alice walks beside", "Hello", "Sort the numbers", "A list of", "Once"]


@pytest.mark.parametrize(
    ("tokens", "tile", "count"),
    [
        (1, SMALL_TILE, AdapterCount.FEW),
        (64, SMALL_TILE, AdapterCount.FEW),
        (64, SMALL_TILE, AdapterCount.MANY),
        (2048, LARGE_TILE, AdapterCount.MANY),
    ],
)
@pytest.mark.parametrize("rank", [16, 64, 256])
def test_products_are_those_of_the_numbers(tokens: int, tile: int, count: AdapterCount, rank: int) -> None:
    from dovetail.ops.triton.low_rank import row_blocks
    from dovetail.ops.triton.low_rank_few import arrivals

    torch.manual_seed(0)
    slots, parts, inputs = 5, ((0, 4096), (4096, 1024), (5120, 1000)), 4096
    random = np.random.default_rng(0)
    ranks = random.integers(0, rank + 1, (slots, len(parts))).astype(np.int32)
    a = torch.randn(slots, len(parts), rank, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
    b = torch.randn(slots, 6120, rank, device="cuda", dtype=torch.bfloat16)
    device = torch.device("cuda")
    weights = LowRankWeights(
        a, b, parts, ranks, torch.from_numpy(ranks).cuda(), row_blocks(parts, device), arrivals(device)
    )
    own = random.integers(-1, slots, tokens).astype(np.int32)
    packed = torch.from_numpy(packed_tiles(own, tile, tokens, tokens + 2)).cuda()
    tiles = unpacked_tiles(packed, tile, tokens, tokens, count=count)
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.randn(tokens, 6120, device="cuda", dtype=torch.bfloat16)
    exact = out.float()
    for token, slot in enumerate(own.tolist()):
        for part, (start, size) in enumerate(parts) if slot >= 0 else ():
            r = int(ranks[slot, part])
            low = a[slot, part, :r].float() @ x[token].float()
            exact[token, start : start + size] += b[slot, start : start + size, :r].float() @ low
    got = add_low_rank(out, x, weights, TokenSlots(tokens, (), tiles))
    assert ((got.float() - exact).square().mean() / exact.square().mean()).sqrt() < 6e-3


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts", "form"),
    [
        (6144, 4096, ((0, 4096), (4096, 1024), (5120, 1024)), "whole"),
        (4096, 4096, ((0, 4096),), "parts"),
        (28672, 4096, ((0, 14336), (14336, 14336)), "gated"),
        (4096, 14336, ((0, 4096),), "parts"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "own_slots"), [(1, 1), (16, 3), (64, 1), (64, 8), (64, 12), (64, 24), (64, 64)])
def test_products_add_adapters_beside_the_kernel_that_multiplies_first(outputs, inputs, parts, form, tokens, own_slots):
    """Each input is written just before it is read, and differs from the one before at the same address."""
    from dovetail.ops.activation import GATES
    from dovetail.ops.triton.adapted_rows import AdaptedRows
    from dovetail.ops.triton.low_rank import row_blocks
    from dovetail.ops.triton.low_rank_few import arrivals
    from dovetail.ops.triton.norm import rms_norm

    torch.manual_seed(0)
    device, rank, random = torch.device("cuda"), 16, np.random.default_rng(0)
    ranks = random.integers(0, rank + 1, (own_slots, len(parts))).astype(np.int32)
    kind = {"device": device, "dtype": torch.bfloat16}
    a = torch.randn(own_slots, len(parts), rank, inputs, **kind) / inputs**0.5
    b = torch.randn(own_slots, outputs, rank, **kind) / 4
    weights = LowRankWeights(
        a, b, parts, ranks, torch.from_numpy(ranks).cuda(), row_blocks(parts, device), arrivals(device)
    )
    weight = torch.randn(outputs, inputs, **kind) / inputs**0.5
    slots = random.integers(-1, own_slots, tokens) if own_slots < tokens else np.arange(tokens)
    packed = torch.from_numpy(packed_tiles(slots.astype(np.int32), SMALL_TILE, tokens, tokens)).cuda()
    count = kernel_count(adapter_count(own_slots), tokens)
    tiles = unpacked_tiles(packed, SMALL_TILE, tokens, tokens, count=count)
    product = AdaptedRows(weight, weights)
    gated, in_parts = form == "gated", form == "parts"
    if not product.can(tiles, tokens, gated=gated, parts=in_parts):
        pytest.skip("no kernel for these rows")
    merged = torch.zeros(own_slots + 1, outputs, rank * len(parts), device=device)
    for slot in range(own_slots):
        for part, (start, size) in enumerate(parts):
            r = int(ranks[slot, part])
            merged[slot, start : start + size, part * rank : part * rank + r] = b[
                slot, start : start + size, :r
            ].float()
    ones, inputs_made, results = torch.ones(inputs, **kind), torch.randn(20, tokens, inputs, **kind), []
    for given in inputs_made:
        x = rms_norm(given, ones, 1e-6)
        results.append(product(x, None, tiles, "silu" if gated else None, in_parts=in_parts))
        del x  # the next input gets its memory
    for given, result in zip(inputs_made, results, strict=True):
        x = rms_norm(given, ones, 1e-6).float()
        low = torch.einsum("tk,tprk->tpr", x, a.float()[np.maximum(slots, 0)]).flatten(1)
        exact = x @ weight.float().T + torch.einsum("tr,tnr->tn", low, merged[slots])
        exact, got = GATES["silu"](exact) if gated else exact, result.sum(0) if in_parts else result
        assert ((got.float() - exact).square().mean() / exact.square().mean()).sqrt() < 1e-2


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory: Path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        write_adapter(directory / name, module_shapes(locate("tiny")), rank=4 * (seed + 1), seed=seed, size=0.1)
    return {name: str(directory / name) for name in "abc"}


def test_graphs_add_the_adapters_that_steps_launched_kernel_by_kernel_add(adapters: dict[str, str]) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0, logprobs=0, ignore_eos=True)
    answers = []
    for decode in (True, False):
        section = {"enabled": True, "load": adapters, "max_resident": 3}
        settings = {"model": {"dtype": "float32"}, "memory": {"kv_gib": 0.5}, "graphs": {"decode": decode}}
        with LLM("tiny", device="cuda", adapters=section, **settings) as llm:
            for _ in range(3):  # graphs are captured on demand
                outputs = llm.generate(PROMPTS, params, adapter=NAMES)
            if decode:
                graphs = llm.loop.executor.rank.engine.graphs
                assert any(key.adapters for key in graphs._graphs)
            answers.append([[entry.logprob for entry in output.logprobs] for output in outputs])
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-2)
