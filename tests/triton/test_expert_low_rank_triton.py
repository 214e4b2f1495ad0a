"""Test the kernels of adapters of experts and of embeddings, interpreted on the CPU, and the torch path beside them, against float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_expert_low_rank_triton.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, SwiGLU
from dovetail.ops.adapter_weights import EmbeddingLowRank, ExpertLowRank, ExpertPairLowRank, TokenSlots
from dovetail.ops.experts import adapted_experts
from dovetail.ops.low_rank import SMALL_TILE, add_embedding, packed_tiles, token_slots, unpacked_tiles
from dovetail.ops.triton import expert_low_rank
from dovetail.ops.triton.low_rank import row_blocks

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


def by_definition(x, routing, weights, low_rank, slots, shared):
    out = shared.double().clone()
    for token, slot in enumerate(slots):
        for expert, factor in zip(routing.ids[token].tolist(), routing.weights[token].double(), strict=True):
            if not FIRST <= expert < FIRST + HELD:
                continue
            own = expert - FIRST
            up, down = weights.gate_up[own].double(), weights.down[own].double()
            if slot >= 0:
                up, down = up + delta(low_rank.gate_up, slot, own), down + delta(low_rank.down, slot, own)
            given = x[token].double() * (factor if weights.scaled_input else 1)
            inner = up @ given
            if weights.gate_up_bias is not None:
                inner = inner + weights.gate_up_bias[own].double()
            if weights.ungated:
                inner = inner.clamp(min=0) ** 2
            else:
                form, (gate, linear) = weights.activation, inner.chunk(2)
                if form.limit is not None:
                    gate, linear = gate.clamp(max=form.limit), linear.clamp(-form.limit, form.limit)
                inner = gate * torch.sigmoid(form.alpha * gate) * (linear + form.offset)
            result = down @ inner
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


SLOTS_OF_TOKENS = [[-1, 2, -1, 0], [1], [2] * 20 + [-1, 0]]


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
