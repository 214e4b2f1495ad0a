"""Test the kernels of adapters of experts and of embeddings, interpreted on the CPU, and the torch path beside them, against float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_expert_low_rank_triton.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dovetail.gguf.block_types import TYPES
from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, SwiGLU
from dovetail.ops.adapter_weights import EmbeddingLowRank, ExpertLowRank, ExpertPairLowRank, TokenSlots
from dovetail.ops.experts import adapted_experts
from dovetail.ops.low_rank import SMALL_TILE, add_embedding, packed_tiles, token_slots, unpacked_tiles
from dovetail.ops.packed_blocks import pack
from dovetail.ops.triton import expert_low_rank, mxfp4_plain, packed_plain
from dovetail.ops.triton.low_rank import row_blocks
from dovetail.testing.experts_cases import ExpertsCase, ExpertsStep

HIDDEN, SIZE, HELD, WHOLE, FIRST, SLOTS, RANK = 40, 24, 3, 4, 1, 3, 32
CPU = torch.device("cpu")


def matrices(parts: tuple[tuple[int, int], ...], inputs: int, random: np.random.Generator) -> ExpertLowRank:
    """Return random matrices, of which those beyond the ranks are not numbers up to the block that is read."""
    outputs = sum(size for _, size in parts)
    ranks = random.choice([0, 1, 5, 16, 17, 32], (SLOTS, HELD * len(parts))).astype(np.int32)
    a = torch.randn(SLOTS, HELD, len(parts), RANK, inputs) / inputs**0.5
    b = torch.randn(SLOTS, HELD, outputs, RANK) / 2
    for slot in range(SLOTS):
        for expert in range(HELD):
            for part, (start, size) in enumerate(parts):
                rank = int(ranks[slot, expert * len(parts) + part])
                a[slot, expert, part, rank:] = b[slot, expert, start : start + size, rank:] = float(
                    "nan"
                )  # is not read
    return ExpertLowRank(a, b, parts, ranks, torch.from_numpy(ranks), row_blocks(parts, CPU))


def delta(weights: ExpertLowRank, slot: int, expert: int) -> torch.Tensor:
    """Return what an adapter adds to the weight ``[out, in]`` of an expert."""
    found = torch.zeros(weights.b.shape[2], weights.a.shape[4], dtype=torch.float64)
    for part, (start, size) in enumerate(weights.parts):
        rank = int(weights.ranks[slot, expert * len(weights.parts) + part])
        rows = slice(start, start + size)
        found[rows] = weights.b[slot, expert, rows, :rank].double() @ weights.a[slot, expert, part, :rank].double()
    return found


def unquantized(row):
    return row


def by_definition(x, routing, weights, low_rank, slots, shared, quantized=(unquantized, unquantized)):
    """Return the result in float64. ``quantized`` are functions that quantize the inputs of both products with weights, but not those of
    products with adapters."""
    out = shared.double().clone()
    for token, slot in enumerate(slots):
        for expert, factor in zip(routing.ids[token].tolist(), routing.weights[token].double(), strict=True):
            if not FIRST <= expert < FIRST + HELD:
                continue
            own = expert - FIRST
            given = x[token].double()
            inner = weights.gate_up[own].double() @ quantized[0](given)
            if slot >= 0:
                inner = inner + delta(low_rank.gate_up, slot, own) @ given
            inner = inner * (factor if weights.scaled_input else 1)
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[own].double()
            if weights.ungated:
                inner = inner.clamp(min=0) ** 2
            else:
                form, (gate, linear) = weights.activation, inner.chunk(2)
                if form.limit is not None:
                    gate, linear = gate.clamp(max=form.limit), linear.clamp(-form.limit, form.limit)
                inner = gate * torch.sigmoid(form.alpha * gate) * (linear + form.offset)
            result = weights.down[own].double() @ quantized[1](inner)
            if slot >= 0:
                result = result + delta(low_rank.down, slot, own) @ inner
            if weights.down_bias is not None:
                result = result + weights.down_bias[own].double()
            out[token] += result * (1 if weights.scaled_input else factor)
    return out


FORMS = {
    "gated": {},
    "ungated": {"ungated": True},
    "gpt-oss": {"activation": SwiGLU(1.702, 7.0, 1.0), "bias": True},
    "scaled inputs": {"scaled_input": True},
}


SLOTS_OF_TOKENS = [[-1, 2, -1, 0], [2], [2] * 20 + [-1, 0]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("path", "slots"),
    [
        *[("torch", slots) for slots in SLOTS_OF_TOKENS],
        *[pytest.param("triton", slots, marks=[pytest.mark.full] * (i > 0)) for i, slots in enumerate(SLOTS_OF_TOKENS)],
    ],
    ids=str,
)
def test_every_pair_gets_what_the_adapter_of_its_token_adds(monkeypatch, path, slots, form):
    monkeypatch.setattr(expert_low_rank, "INPUT_BLOCK", 16)
    torch.manual_seed(0)
    random, tokens, kind = np.random.default_rng(0), len(slots), FORMS[form]
    rows = SIZE if kind.get("ungated") else 2 * SIZE
    biases = (torch.randn(HELD, rows), torch.randn(HELD, HIDDEN)) if kind.get("bias") else (None, None)
    weights = ExpertWeights(
        torch.randn(HELD, rows, HIDDEN) / HIDDEN**0.5, torch.randn(HELD, HIDDEN, SIZE) / SIZE**0.5, kind.get("activation", SILU),
        *biases, first=FIRST, whole=WHOLE, scaled_input=kind.get("scaled_input", False), ungated=kind.get("ungated", False),
    )  # fmt: skip
    parts = ((0, SIZE),) if kind.get("ungated") else ((0, SIZE), (SIZE, SIZE))
    low_rank = ExpertPairLowRank(matrices(parts, HIDDEN, random), matrices(((0, HIDDEN),), SIZE, random))
    ids = torch.from_numpy(np.stack([random.permutation(WHOLE)[:2] for _ in slots]).astype(np.int32))
    routing, given = Routing(ids, torch.rand(tokens, 2)), np.array(slots, np.int32)
    x, shared = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    expected = by_definition(x, routing, weights, low_rank, slots, shared)
    own = token_slots(given)
    if path == "triton":
        packed = torch.from_numpy(packed_tiles(given, SMALL_TILE, tokens + 3, tokens + 2))
        own = TokenSlots(tokens, (), unpacked_tiles(packed, SMALL_TILE, tokens + 3, tokens, tokens + 2))
    got = adapted_experts(x, routing, weights, shared, low_rank, own)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def rounded(group):
    """Return a function that returns what a row stands for once each ``group`` columns are quantized to FP8 (E4M3)."""

    def of_row(row):
        groups = row.float().unflatten(0, (-1, group))
        scale = groups.abs().amax(1, keepdim=True) / 448
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten().double()

    return of_row


def packed_on_cuda(weights):
    """Return weights in blocks of GGUF as they are packed on CUDA, and others as they are."""
    if weights.blocks is None:
        return weights
    pairs = ((weights.gate_up, weights.blocks.gate_up), (weights.down, weights.blocks.down))
    up, down = (pack(rows.flatten(0, 1), TYPES[kind]).view(*rows.shape[:2], -1) for rows, kind in pairs)
    return replace(weights, gate_up=up, down=down, blocks=weights.blocks._replace(packed=True))


GPT_OSS, SCALED = {"activation": SwiGLU(1.702, 7.0, 1.0), "bias": True}, {"scaled_input": True}
QUANTIZED = {"int4": SCALED, "int8": {}, "mxfp4": GPT_OSS, "gguf": {}, "fp8_rows": SCALED, "fp8_blocks": GPT_OSS}
QUICK = {("int4", 0), ("int8", 1), ("mxfp4", 0), ("gguf", 1), ("fp8_rows", 2), ("fp8_blocks", 1)}


# pairs of other ranks' experts have rows that were never written, which are quantized, and not multiplied
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("format", "slots"),
    [
        pytest.param(name, slots, marks=[pytest.mark.full] * ((name, i) not in QUICK))
        for name in QUANTIZED
        for i, slots in enumerate(SLOTS_OF_TOKENS)
    ],
    ids=str,
)
def test_quantized_experts_get_what_adapters_add(monkeypatch, format, slots):
    for kernels in (mxfp4_plain, packed_plain):
        monkeypatch.setattr(kernels, "pays", lambda *_: True)  # adapters are not implemented there
    torch.manual_seed(0)
    random, tokens, fp8 = np.random.default_rng(0), len(slots), format.startswith("fp8")
    hidden, size = 128, 128 if fp8 else 64
    case = ExpertsCase(
        tokens, WHOLE, 2, hidden, size, first=FIRST, held=HELD, shared=True, format=format, **QUANTIZED[format]
    )
    step = ExpertsStep(case, CPU)
    low_rank = ExpertPairLowRank(
        matrices(((0, size), (size, size)), hidden, random), matrices(((0, hidden),), size, random)
    )
    given = np.array(slots, np.int32)
    packed = torch.from_numpy(packed_tiles(given, SMALL_TILE, tokens + 3, tokens + 2))
    own = TokenSlots(tokens, (), unpacked_tiles(packed, SMALL_TILE, tokens + 3, tokens, tokens + 2))
    got = adapted_experts(step.x, step.routing, packed_on_cuda(step.weights), step.shared, low_rank, own)
    gate_up, down = step.exact
    exact, how = replace(step.weights, gate_up=gate_up, down=down), (rounded(128),) * 2 if fp8 else (unquantized,) * 2
    expected = by_definition(step.x, step.routing, exact, low_rank, slots, step.shared, how)
    # a number that differs in its last bit may be rounded to the next FP8 number
    assert (got.double() - expected).norm() / expected.norm() < (2e-3 if fp8 else 1e-5)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("slots", [[-1, 2, -1, 0, 2, 1, 0], [0] * 17, [-1]], ids=str)
def test_embeddings_get_what_their_adapters_add(path, slots):
    torch.manual_seed(0)
    parts, vocabulary = ((0, HIDDEN),), 50
    ranks = np.array([[5], [32], [0]], np.int32)
    a, b = torch.randn(SLOTS, vocabulary, RANK), torch.randn(SLOTS, HIDDEN, RANK)
    for slot in range(SLOTS):
        a[slot, :, int(ranks[slot, 0]) :] = float("nan")  # is not read
    weights = EmbeddingLowRank(a, b, parts, ranks, torch.from_numpy(ranks), row_blocks(parts, CPU))
    given, ids = np.array(slots, np.int32), torch.randint(vocabulary, (len(slots),))
    out = torch.randn(len(slots), HIDDEN)
    expected = out.double().clone()
    for token, slot in enumerate(slots):
        rank = int(ranks[slot, 0]) if slot >= 0 else 0
        expected[token] += b[slot, :, :rank].double() @ a[slot, ids[token], :rank].double()
    own = token_slots(given)
    if path == "triton":
        packed = torch.from_numpy(packed_tiles(given, SMALL_TILE, len(slots), len(slots)))
        own = TokenSlots(len(slots), (), unpacked_tiles(packed, SMALL_TILE, len(slots), len(slots)))
    torch.testing.assert_close(add_embedding(out, ids, weights, own).double(), expected, rtol=1e-5, atol=1e-4)
