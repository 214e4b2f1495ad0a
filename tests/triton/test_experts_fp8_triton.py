"""Test the kernels of experts in FP8, interpreted on the CPU, against the same quantization in torch and float64.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_experts_fp8_triton.py
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from dovetail.interfaces.expert_shapes import SILU, ExpertWeights, Routing, SwiGLU
from dovetail.ops import experts as torch_experts
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.triton import expert_layers as layers
from dovetail.ops.triton import experts_fp8 as kernels
from dovetail.ops.triton.expert_tiles import ExpertTile, ExpertTiles
from dovetail.ops.triton.fp8_tiles import tiles_of

FP8 = torch.float8_e4m3fn
FORMATS = {"rows": None, "blocks": (32, 32), "narrow blocks": (16, 32)}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def groups_of(x: torch.Tensor, size: int) -> tuple[torch.Tensor, int]:
    """Return ``x [rows, columns]`` as ``[rows, groups, size]``, with zeros at the end, and the number of columns."""
    columns = x.shape[1]
    return torch.nn.functional.pad(x, (0, -columns % size)).unflatten(1, (-1, size)), columns


def rounded(x: torch.Tensor, size: int, bound: float = math.inf) -> torch.Tensor:
    """Return what ``x`` stands for once each ``size`` columns of a row are quantized."""
    groups, columns = groups_of(x.float(), size)
    largest = groups.abs().amax(2, keepdim=True).clamp(max=bound)
    scale = torch.where(largest > 0, largest / 448, 1.0)
    return ((groups / scale).clamp(-448, 448).to(FP8).float() * scale).flatten(1)[:, :columns]


def weights_of(
    format: str, experts: int, hidden: int, size: int, *, bias: bool, dtype: torch.dtype = torch.float32, **more: object
) -> ExpertWeights:
    block = FORMATS[format]

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * 100).clamp(-448, 448).to(FP8)

    def scales(out: int, columns: int) -> torch.Tensor:
        shape = (out,) if block is None else (-(-out // block[0]), -(-columns // block[1]))
        return (torch.rand(experts, *shape) + 0.5) / 400

    return ExpertWeights(
        gate_up=random(experts, 2 * size, hidden),
        down=random(experts, hidden, size),
        activation=SwiGLU(1.702, 0.8, 1.0) if bias else SILU,
        gate_up_bias=torch.randn(experts, 2 * size).to(dtype) if bias else None,
        down_bias=torch.randn(experts, hidden).to(dtype) if bias else None,
        format="fp8_rows" if block is None else "fp8_blocks",
        gate_up_scale=scales(2 * size, hidden),
        down_scale=scales(hidden, size),
        block=block or (128, 128),
        **{"whole": experts, **more},  # pyright: ignore[reportArgumentType]
    )


def exact(x: torch.Tensor, given: Routing, weights: ExpertWeights) -> torch.Tensor:
    """Compute the layer pair by pair in float64, with activations quantized as the kernels do."""
    plain = dequantized(weights, torch.float64)
    by_row, act, bound = weights.format == "fp8_rows", weights.activation, weights.input_bound or math.inf
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, place in ((t, p) for t in range(len(x)) for p in range(given.ids.shape[1])):
        expert = int(given.ids[token, place]) - weights.first
        if expert not in range(len(weights.gate_up)):
            continue
        row = rounded(x[token : token + 1], x.shape[1] if by_row else weights.block[1], bound).double()
        factor = given.weights[token, place].double()
        gate, up = (row @ plain.gate_up[expert].T * (factor if weights.scaled_input else 1)).chunk(2, 1)
        if weights.gate_up_bias is not None:
            own_gate, own_up = weights.gate_up_bias[expert].double().chunk(2)
            gate, up = gate + own_gate, up + own_up
        if act.limit is not None:
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
        inner = (gate * torch.sigmoid(act.alpha * gate) * (up + act.offset)).to(x.dtype)
        inner = rounded(inner, 128 if by_row else weights.block[1], bound).double()
        result = inner @ plain.down[expert].T
        result += 0 if weights.down_bias is None else weights.down_bias[expert].double()
        total[token] += (result * (1 if weights.scaled_input else factor))[0]
    return total


def choose(tokens: int, experts: int, top_k: int) -> Routing:
    return Routing(torch.rand(tokens, experts).topk(top_k, 1).indices.int(), torch.rand(tokens, top_k))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


KINDS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scaled_input": True},
    "some experts": {"first": 4, "whole": 16},
    "bound": {"input_bound": 0.7},
}


BLOCKS = {"one": (1, 16, torch.float32), "few": (5, 16, torch.float32), "many": (5, 64, torch.float32)}
LARGER = {"two": (2, 16, torch.float16), "several": (19, 32, torch.float16), "most": (150, 128, torch.float16)}
QUICK = {
    ("rows", "one", "plain"), ("rows", "one", "bias"), ("rows", "few", "some experts"), ("rows", "many", "bound"),
    ("blocks", "one", "some experts"), ("blocks", "one", "bound"), ("blocks", "few", "bias"), ("blocks", "many", "scaled"),
    ("narrow blocks", "many", "plain"),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
    for case in itertools.product(FORMATS, BLOCKS | LARGER, KINDS)
]


@pytest.mark.parametrize(("format", "blocks", "kind"), CASES)
def test_products_equal_those_of_quantized_activations_in_double_precision(
    monkeypatch: pytest.MonkeyPatch, format: str, blocks: str, kind: str
) -> None:
    tokens, block_m, dtype = (BLOCKS | LARGER)[blocks]
    group = 128 if format == "rows" else 32
    coded = ExpertTile(group if block_m > 16 else 16, group, 4, 2)
    monkeypatch.setattr(kernels, "tiles_of", lambda *_, **__: ExpertTiles(block_m, coded, coded))
    experts, hidden, size, top_k = 6, 48, 64, 2
    more = {"bias": False, **KINDS[kind]}
    weights = weights_of(format, experts, hidden, size, dtype=dtype, **more)  # pyright: ignore[reportArgumentType]
    given, x = choose(tokens, weights.whole, top_k), torch.randn(tokens, hidden).to(dtype)
    if kind == "some experts":
        given.ids[0] = torch.tensor([15, 5])
    shared = torch.randn(tokens, hidden).to(dtype) if kind == "plain" else None
    expected = exact(x, given, weights)
    got = layers.experts(x, given, weights, shared)
    assert got.dtype is dtype
    # a number that differs in its last bit may be rounded to the next FP8 number
    assert error(got.double() - (0 if shared is None else shared.double()), expected) < 2e-3
    if kind != "some experts":
        parts = layers.expert_parts(x, given, weights)
        assert parts.shape == (top_k, tokens, hidden)
        assert error(parts.sum(0), expected) < 2e-3


@pytest.mark.parametrize("format", FORMATS)
def test_results_are_near_those_of_activations_that_are_not_quantized(format: str) -> None:
    """Each of three roundings of E4M3 adds about 0.026 to the relative error."""
    weights = weights_of(format, 4, 96, 64, bias=False)
    plain = dequantized(weights, torch.float64)
    for tokens in (1, 6):
        given, x = choose(tokens, 4, 2), torch.randn(tokens, 96)
        assert error(layers.experts(x, given, weights), torch_experts.experts(x.double(), given, plain)) < 0.12
    empty = Routing(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    assert layers.experts(torch.empty(0, 96), empty, weights).shape == (0, 96)


def test_a_token_has_the_same_result_with_any_number_of_others() -> None:
    """Sums of the same numbers in another order differ in the last bits; quantized numbers do not differ."""
    for format in ("rows", "blocks"):
        weights = weights_of(format, 4, 64, 64, bias=False)
        given, x = choose(6, 4, 2), torch.randn(6, 64)
        whole = layers.experts(x, given, weights)
        for tokens in (1, 2):
            part = Routing(given.ids[:tokens].contiguous(), given.weights[:tokens].contiguous())
            torch.testing.assert_close(layers.experts(x[:tokens], part, weights), whole[:tokens], atol=2e-3, rtol=2e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_numbers_are_quantized_as_torch_does() -> None:
    x = torch.cat([torch.randn(3, 300) * 10.0 ** torch.arange(3)[:, None], torch.zeros(1, 300)])
    x[1, 5], x[2] = 448.0, torch.linspace(-0.02, 0.02, 300)
    for group in (None, 64):
        for bound in (math.inf, 5.0):
            codes, scales = kernels.quantize_rows(x, group, bound)
            size = 300 if group is None else group
            got = (groups_of(codes.float(), size)[0] * scales[:, :, None]).flatten(1)[:, :300]
            torch.testing.assert_close(got, rounded(x, size, bound), atol=0, rtol=1e-6)
    assert kernels.quantize_rows(torch.tensor([[1.0, math.nan]]), None, math.inf)[0].isnan().any()


@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (8, 2, 4096, 14336), (256, 8, 7168, 2048), (64, 8, 2048, 512)])
@pytest.mark.parametrize("by_block", [True, False])
def test_tiles_fit_into_shared_memory(sizes: tuple[int, int, int, int], by_block: bool) -> None:
    experts, top_k, hidden, size = sizes
    for tokens in (1, 2, 16, 17, 64, 256, 1024, 8192, 65536):
        tiles = tiles_of(tokens, experts, top_k, hidden, size, 1.0, 128, by_block)
        if tokens <= 16:
            assert tiles.block_m == 16, "an expert has one block, and its weight is read once"
        inner = 1 if tiles.gate_up.block_n == 128 else 2  # bytes of a number between the products
        for tile, columns, size_of in ((tiles.gate_up, 2, 1), (tiles.down, 1, inner)):
            held = (size_of * tiles.block_m + columns * tile.block_n) * tile.block_k * tile.stages
            assert held <= 224 << 10


def test_some_tiles_quantize_what_they_store() -> None:
    weights = dataclasses.replace(weights_of("rows", 4, 96, 64, bias=False), whole=4)
    tiles = [tiles_of(n, 4, 2, 96, 64, 1.0, 128, False) for n in (2, 70)]
    assert [tile.gate_up.block_n == 128 for tile in tiles] == [False, True]
    given, x = choose(70, 4, 2), torch.randn(70, 96)
    assert error(layers.experts(x, given, weights), exact(x, given, weights)) < 2e-3
