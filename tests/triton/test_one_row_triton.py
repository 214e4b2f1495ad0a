"""Kernels of layers of one token, interpreted, against torch in float32.

TRITON_INTERPRET=1 python -m pytest -q tests/triton/test_one_row_triton.py
"""

import pytest
import torch
from torch.nn import functional

from dovetail.interfaces.attention import ProjectedRows
from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import rotary_table
from dovetail.ops.activation import Activation
from dovetail.ops.triton import decode_projected, experts_one, one_row

EPS = 1e-6
NAN = float("nan")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()


@pytest.mark.parametrize("size", one_row.NORMED)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_products_compute_the_norm_before_them(size: int, activation: Activation | None) -> None:
    x, norm, weight = randn(1, size) * 3, randn(size), randn(36, size) / 32
    expected = normed(x, norm) @ weight.float().T
    if activation is not None:
        opens, up = expected.chunk(2, 1)
        expected = (functional.silu(opens) if activation == "silu" else functional.gelu(opens, approximate="tanh")) * up
    got = one_row.normed_product(x, (norm, EPS), weight, activation)
    torch.testing.assert_close(got.float(), expected, atol=2e-3, rtol=2e-3)


def test_a_router_gets_logits_and_experts_the_norm() -> None:
    x, norm, weight = randn(1, 1024) * 3, randn(1024), randn(10, 1024) / 32
    row, logits = one_row.normed_logits(x, (norm, EPS), weight)
    expected = normed(x, norm)
    torch.testing.assert_close(row.float(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(logits.float(), row.float() @ weight.float().T, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("k", [1024, 2048, 3072, 4096])
def test_products_are_added_to_the_residual_stream(k: int) -> None:
    x, weight, stream = randn(1, k), randn(7, k) / 32, randn(1, 7)
    before = stream.clone()
    got = one_row.added_product(x, weight, stream)
    torch.testing.assert_close(got.float(), stream.float() + x.float() @ weight.float().T, atol=4e-3, rtol=2e-3)
    assert torch.equal(stream, before)


@pytest.mark.parametrize(
    ("hidden", "size", "top_k", "scaled"),
    [(24, 256, 2, False), (24, 512, 1, True), (24, 768, 4, False), (24, 1280, 2, False), (2048, 256, 2, False)],
)
def test_experts_are_added_to_the_residual_stream(hidden: int, size: int, top_k: int, scaled: bool) -> None:
    count, divisor = 5, (16 if hidden < 1024 else 256) ** 0.5
    weights = ExpertWeights(
        randn(count, 2 * size, hidden) / divisor, randn(count, hidden, size) / 16, whole=count, scaled_input=scaled
    )
    assert experts_one.adds_one_token(weights)
    routing = Routing(torch.randperm(count)[:top_k].int().view(1, -1), torch.rand(1, top_k))
    x, stream = randn(1, hidden), randn(1, hidden)
    expected = stream.float()
    for expert, factor in zip(routing.ids[0].tolist(), routing.weights[0], strict=True):
        gate, up = ((x.float() * (factor if scaled else 1)) @ weights.gate_up[expert].float().T).chunk(2, 1)
        expected = expected + functional.silu(gate) * up @ weights.down[expert].float().T * (1 if scaled else factor)
    got = experts_one.one_token_added(x, routing, weights, stream)
    torch.testing.assert_close(got.float(), expected, atol=1e-2, rtol=4e-3)


def test_experts_that_the_kernel_cannot_add_are_known() -> None:
    gate_up, down = randn(2, 512, 16), randn(2, 16, 256)
    assert experts_one.adds_one_token(ExpertWeights(gate_up, down, whole=2))
    assert not experts_one.adds_one_token(ExpertWeights(gate_up, down, whole=4)), "other ranks have experts"
    assert not experts_one.adds_one_token(ExpertWeights(gate_up, down, down_bias=randn(2, 16), whole=2))
    assert not experts_one.adds_one_token(ExpertWeights(randn(2, 400, 16), randn(2, 16, 200), whole=2))


LENGTHS = [
    (1,),
    (33,),
    (64,),
    (1050,),
    (2, 600),
    (700, 1, 33, 65),
    (1, 300, 32, 129, 2, 31),
    (600, 257, 1, 256, 2, 130, 33, 500),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size", "norm"), [(8, 1, 64, True), (8, 4, 128, False)])
def test_projected_rows_attend_and_are_stored(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, norm: bool
) -> None:
    rows, page_size = len(lengths), 16
    width = -(-max(lengths) // page_size) + 1
    keys, values = (randn(rows * width + 3, page_size, kv_heads, size) for _ in range(2))
    table = torch.randperm(rows * width + 3)[: rows * width].int().view(rows, width)
    tokens = (table.long()[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    positions = torch.tensor(lengths) - 1
    places = tokens.gather(1, positions[:, None])[:, 0]
    used = torch.cat([tokens[r, :position] for r, position in enumerate(positions)])
    unused = torch.ones(keys.shape[0] * page_size, dtype=torch.bool).index_fill_(0, used, False)
    flat = (keys.view(-1, kv_heads, size), values.view(-1, kv_heads, size))
    for each in flat:
        each[unused] = NAN  # the places of the tokens, and what belongs to no row
    before = keys.clone(), values.clone()
    qkv = randn(rows, heads + 2 * kv_heads + 1, size)[:, :-1]
    weights = (randn(size), randn(size), EPS) if norm else None
    rope = RopeConfig(head_dim=size, theta=1e4, original_len=2048, context_len=2048)
    angles = rotary_table(rope, torch.device("cpu"))
    projected = ProjectedRows(qkv, angles, positions, weights, places)

    q, k, v = qkv.float().split((heads, kv_heads, kv_heads), 1)
    if weights is not None:
        q, k = normed(q, weights[0]), normed(k, weights[1])
    cos, sin = angles[positions][:, :, None].unbind(1)
    q, k = (x * cos + x.roll(size // 2, 2) * sin for x in (q, k))
    expected = torch.empty(rows, heads, size)
    for r, position in enumerate(positions):
        past = [each[tokens[r, :position]].float() for each in flat]
        all_k, all_v = torch.cat((past[0], k[r, None])), torch.cat((past[1], v[r, None]))
        scores = torch.einsum("hgd,thd->hgt", q[r].view(kv_heads, -1, size), all_k) * size**-0.5
        expected[r] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), all_v).reshape(heads, size)

    lens, empty = torch.tensor(lengths, dtype=torch.int32), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: empty(*shape, **kind).fill_(NAN))
    for leads in (True, False):
        got = decode_projected.attend_rows(projected, keys, values, table, lens, size**-0.5, leads=leads)
        torch.testing.assert_close(got.float(), expected, atol=4e-3, rtol=4e-3)
    for now, then, new in zip((keys, values), before, (k, v), strict=True):
        stored = now.view(-1, kv_heads, size)[places]
        torch.testing.assert_close(stored.float(), new, atol=2e-3, rtol=2e-3)
        then.view(-1, kv_heads, size)[places] = stored
        assert torch.equal(now.isnan(), then.isnan())
        assert torch.equal(now.nan_to_num(), then.nan_to_num())


def test_shapes_that_the_kernels_cannot_attend_with_are_known() -> None:
    assert decode_projected.fits(32, 4, 128)
    assert not decode_projected.fits(32, 1, 128)
    assert not decode_projected.fits(8, 8, 96)
