"""Test the kernels of layers of one token on CUDA, against float32, against the kernels of several rows, and in models.

Run on a GPU machine: python -m pytest tests/gpu/test_one_row_gpu.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from dovetail import LLM, SamplingParams
from dovetail.engine.build import ModelClass, WeightFiller
from dovetail.engine.weights import build_model
from dovetail.interfaces.attention import ProjectedRows
from dovetail.interfaces.expert_shapes import ExpertWeights, Routing
from dovetail.interfaces.model import ModelInfo
from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import rotary_table
from dovetail.ops.experts import expert_parts
from dovetail.ops.rotary import rotate_and_store
from dovetail.testing.model import random_tokens
from dovetail.testing.model_rows import ModelRows
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama, describe_qwen3
from dovetail_models.moe import MoeModel
from dovetail_models.moe_describe import describe_qwen3_moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EPS = 1e-6
CUDA = torch.device("cuda")
SIZES = {
    "vocab_size": 97,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
MODELS: dict[str, tuple[ModelClass, ModelInfo]] = {
    "llama": (DenseModel, describe_llama(SIZES)),
    "qwen3": (DenseModel, describe_qwen3(SIZES)),
    "qwen3_moe": (MoeModel, describe_qwen3_moe({**SIZES, **EXPERTS})),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).mul_(scale).bfloat16()


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("n", "size"), [(5120, 2048), (4096, 1024), (36, 1024)])
def test_products_with_norms_and_sums_equal_float32(n: int, size: int) -> None:
    from dovetail.ops.triton import one_row

    x, norm, weight = randn(1, size, scale=3), randn(size), randn(n, size, scale=size**-0.5)
    row = functional.rms_norm(x.float(), (size,), norm.float(), EPS)
    expected = row @ weight.float().T
    assert error(one_row.normed_product(x, (norm, EPS), weight), expected) < 4e-3
    opens, up = expected.chunk(2, 1)
    assert error(one_row.normed_product(x, (norm, EPS), weight, "silu"), functional.silu(opens) * up) < 4e-3
    normed, logits = one_row.normed_logits(x, (norm, EPS), weight)
    assert error(normed, row) < 4e-3
    assert error(logits, expected) < 6e-3
    for k in (1024, 3072, 4096):
        x, weight, stream = randn(1, k), randn(n, k, scale=k**-0.5), randn(1, n)
        assert error(one_row.added_product(x, weight, stream), stream.float() + x.float() @ weight.float().T) < 5e-3


@pytest.mark.parametrize(("hidden", "size", "count", "top_k"), [(2048, 768, 128, 8), (1024, 512, 4, 4)])
def test_added_experts_equal_their_parts(hidden: int, size: int, count: int, top_k: int) -> None:
    from dovetail.ops.triton.experts_one import one_token_added

    gate_up, down = randn(count, 2 * size, hidden, scale=hidden**-0.5), randn(count, hidden, size, scale=size**-0.5)
    weights = ExpertWeights(gate_up, down, whole=count)
    routing = Routing(torch.randperm(count, device=CUDA)[:top_k].int()[None], torch.rand(1, top_k, device=CUDA))
    x, stream = randn(1, hidden), randn(1, hidden)
    parts = expert_parts(x, routing, weights)
    assert parts is not None
    assert error(one_token_added(x, routing, weights, stream), stream.float() + parts.sum(0)) < 5e-3


@pytest.mark.parametrize(
    "lengths",
    [(1,), (31,), (600,), (3000,), (20000,), (600, 33), (3000, 1, 33, 64), (700, 1, 33, 64, 2000, 257, 2, 600)],
    ids=str,
)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 4, 128), (32, 8, 128), (16, 8, 64)])
def test_projected_rows_equal_the_kernels_one_by_one(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int
) -> None:
    from dovetail.ops.triton.decode import paged_decode
    from dovetail.ops.triton.decode_projected import MOST_TILES, attend_rows

    lengths = lengths[: MOST_TILES // kv_heads]
    rows, width = len(lengths), max(lengths) // 16 + 1
    keys, values = randn(2, rows * width, 16, kv_heads, size)
    table = torch.randperm(rows * width, device=CUDA).int().view(rows, width)
    lens = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
    positions = (lens - 1).long()
    places = table.long().gather(1, positions[:, None] // 16)[:, 0] * 16 + positions % 16
    for each in (keys, values):
        each.view(-1, kv_heads, size)[places] = torch.nan
    qkv, norm = randn(rows, heads + 2 * kv_heads, size), (randn(size), randn(size), EPS)
    rope = RopeConfig(head_dim=size, theta=1e4, original_len=32768, context_len=32768)
    angles = rotary_table(rope, CUDA)
    projected, scale = ProjectedRows(qkv, angles, positions, norm, places), size**-0.5
    theirs = keys.clone(), values.clone()
    for leads in (True, False):
        got = attend_rows(projected, keys, values, table, lens, scale, leads=leads)
        q = rotate_and_store(qkv, heads, kv_heads, angles, positions, norm, *theirs, places)
        expected = paged_decode(q, *theirs, table, lens, scale, splits=32)[0]
        assert error(got, expected.float()) < 6e-3
        for ours, other in zip((keys, values), theirs, strict=True):
            torch.testing.assert_close(ours, other, atol=2e-2, rtol=1e-2)


def make_model(model_class: ModelClass, info: ModelInfo, device: str, dtype: torch.dtype) -> Any:
    """Return a model with the same random weights on every device."""
    model = build_model(model_class, info, torch.device(device), dtype)
    filler = WeightFiller(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in filler.targets:
            shape = filler.whole_shape(name)
            tensor = torch.randn(shape, generator=generator) * (0.03 if len(shape) > 1 else 0.2) + (len(shape) == 1)
            filler.fill(name, lambda tensor=tensor: tensor)
    filler.finish()
    return model


@torch.inference_mode()
def run(model: Any, text: list[int], prefix: int) -> torch.Tensor:
    rows = ModelRows(model, [len(text)])
    steps = [(0, prefix), *((i, i + 1) for i in range(prefix, len(text)))]
    return torch.cat([rows.enter({0: text[start:end]})[0].float().cpu() for start, end in steps])


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_one_token_with_these_kernels_as_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.layers.one_row import OneRow

    model_class, info = MODELS[name]
    text, calls = random_tokens(info, 40, 0), list[torch.Tensor]()
    expected = run(make_model(model_class, info, "cpu", torch.float32), text, 30)
    forward = OneRow.forward

    def counted(self: OneRow, stream: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(stream)
        return forward(self, stream, *rest)

    monkeypatch.setattr(OneRow, "forward", counted)
    got = run(make_model(model_class, info, "cuda", torch.bfloat16), text, 30)
    assert len(calls) == 10 * info.num_layers
    assert error(got, expected) < 0.05
    calls.clear()
    run(make_model(model_class, info, "cuda", torch.float32), text, 30)
    assert not calls, "there are no such kernels for float32"


def test_the_engine_decodes_few_requests_with_the_kernels_of_projected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy tokens of one and of three requests at a time equal those of the same engine without these kernels."""
    from dovetail_attention.triton.backend import TritonAttention

    forward, found, taken = TritonAttention.forward_projected, [], [0, 0]
    for turn, projected in enumerate((forward, lambda *_: None)):

        def counted(*args: Any, projected: Any = projected, turn: int = turn) -> torch.Tensor | None:
            result = projected(*args)
            taken[turn] += result is not None
            return result

        monkeypatch.setattr(TritonAttention, "forward_projected", counted)
        llm = LLM("tiny", device="cuda", model={"dtype": "float32"}, attention="triton", grammar="none")
        params = SamplingParams(temperature=0, max_new_tokens=64, ignore_eos=True)
        prompts = [[i + 5 for i in range(40)], list(range(60, 300, 4)), list(range(7, 20))]
        found.append(
            [
                [output.token_ids for output in llm.generate(some, params)]
                for some in (prompts[:1], prompts[1:2], prompts)
                for _ in range(3)
            ]
        )
    assert taken[0] > 0
    assert taken[1] == 0
    assert found[0] == found[1]
