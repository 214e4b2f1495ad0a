"""Test the layer of latent attention against attention over expanded keys and values in float64, from the same weights.

Run: python -m pytest tests/plugins/test_latent_attention.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dovetail.engine.build import WeightFiller, as_list, build_model
from dovetail.engine.expansion import Expansion
from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo
from dovetail.interfaces.quantization import LinearMethod, Quantization, QuantizationContext
from dovetail.layers.decoder import attention_targets
from dovetail.layers.latent import LatentAttention, LatentShape
from dovetail.layers.linear import Linear
from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import Rotary
from dovetail.memory.pool import PagedKVPool, make_pool
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.eager import EagerAttention
from dovetail.testing.ranks import run_ranks, thread_meshes
from dovetail.types import Batch, DraftTree
from dovetail_attention.config import TorchNativeConfig
from dovetail_attention.torch_native import TorchNativeAttention
from dovetail_quantization.config import Fp8Config
from dovetail_quantization.fp8 import Fp8, Fp8Linear

HIDDEN, HEADS, LATENT, NOPE, ROPE, VALUE = 20, 4, 16, 6, 8, 10
HEAD = NOPE + ROPE
SHAPE = LatentShape(HIDDEN, HEADS, 12, LATENT, NOPE, ROPE, VALUE, 1e-5)
SHAPES = {
    "q_lora": SHAPE,
    "no q_lora": replace(SHAPE, q_lora_rank=None),
    "biases, halves": replace(SHAPE, bias=True, interleaved=False),
}
GROUP = CacheGroup(1, 1, LATENT + ROPE, CacheGroupKind.LATENT, value_dim=LATENT)
LENS = [23, 9, 6]
SCALE, THETA = 0.4, 100.0
Tensors = dict[str, torch.Tensor]
Make = Callable[[PagedKVPool, int, torch.dtype], AttentionBackend]


class OneLayer(nn.Module, ModelArchitecture):
    """Have one layer of latent attention."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.attn = LatentAttention(info.config, AttentionLayer(0, SCALE), mesh)
        self.rotary = Rotary(RopeConfig(ROPE, THETA, 64, 64))

    def forward(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weights_map(self):
        return dict(attention_targets(self.attn, "theirs", "attn"))


def random_tensors(shape: LatentShape) -> Tensors:
    torch.manual_seed(0)
    rank = shape.q_lora_rank
    sizes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (LATENT + ROPE, HIDDEN),
        "kv_a_layernorm.weight": (LATENT,),
        "kv_b_proj.weight": (HEADS * (NOPE + VALUE), LATENT),
        "o_proj.weight": (HIDDEN, HEADS * VALUE),
    }
    if rank is None:
        sizes["q_proj.weight"] = (HEADS * HEAD, HIDDEN)
    else:
        sizes |= {
            "q_a_proj.weight": (rank, HIDDEN),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (HEADS * HEAD, rank),
        }
    if shape.bias:
        sizes |= {"kv_a_proj_with_mqa.bias": (LATENT + ROPE,), "q_a_proj.bias": (12,), "o_proj.bias": (HIDDEN,)}
    return {f"theirs.{name}": torch.randn(size) * 0.4 for name, size in sizes.items()}


def expected(x: torch.Tensor, tensors: Tensors, shape: LatentShape) -> torch.Tensor:
    """Compute one text ``x [tokens, HIDDEN]`` by the definition: every latent is expanded to keys and values."""
    w = {name.removeprefix("theirs."): tensor.double() for name, tensor in tensors.items()}
    x, count = x.double(), len(x)

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    def product(y: torch.Tensor, name: str) -> torch.Tensor:
        return y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def rotate(y: torch.Tensor) -> torch.Tensor:  # [tokens, heads, ROPE], as complex numbers
        pairs = y.unflatten(-1, (-1, 2)) if shape.interleaved else y.unflatten(-1, (2, -1)).transpose(-1, -2)
        angles = torch.arange(count)[:, None] * THETA ** -(torch.arange(0, ROPE, 2).double() / ROPE)
        turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    q = (
        product(x, "q_proj")
        if shape.q_lora_rank is None
        else product(norm(product(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    )
    q = q.view(count, HEADS, HEAD)
    q = torch.cat((q[..., :NOPE], rotate(q[..., NOPE:])), -1)
    latent, rotated = product(x, "kv_a_proj_with_mqa").split((LATENT, ROPE), -1)
    kv = product(norm(latent, "kv_a_layernorm"), "kv_b_proj").view(count, HEADS, NOPE + VALUE)
    k = torch.cat((kv[..., :NOPE], rotate(rotated[:, None]).expand(-1, HEADS, -1)), -1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE + torch.full((count, count), -torch.inf).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[..., NOPE:])
    return product(attended.flatten(1), "o_proj")


def loaded(
    mesh: Mesh,
    tensors: Tensors,
    shape: LatentShape,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
) -> OneLayer:
    info = ModelInfo("Latent", 9, HIDDEN, 1, HEADS, 1, LATENT + ROPE, 64, (GROUP,), config=shape)
    filler = WeightFiller(build_model(OneLayer, info, torch.device("cpu"), dtype, mesh, quantization))
    for name, tensor in tensors.items():
        filler.fill(name, lambda tensor=tensor: tensor)
    filler.finish()
    assert isinstance(filler.model, OneLayer)
    return filler.model


def eager(pool: PagedKVPool, heads: int, dtype: torch.dtype) -> AttentionBackend:
    return EagerAttention(pool)


def native(pool: PagedKVPool, heads: int, dtype: torch.dtype) -> AttentionBackend:
    device = torch.device("cpu")
    context = AttentionContext(device, dtype, heads, 1, LATENT + ROPE, pool, 8, 64, value_dim=LATENT)
    return TorchNativeAttention(TorchNativeConfig(kind="torch_native"), context)


class Rows:
    """Hold rows of texts in a pool, which enter the layer piece by piece."""

    def __init__(self, model: OneLayer, texts: list[torch.Tensor], make: Make) -> None:
        self.model, self.texts, self.done = model, texts, [0] * len(texts)
        dtype = texts[0].dtype
        self.table = make_page_table([len(text) for text in texts], 4, 16)
        self.pool = make_pool(GROUP, 16, 4, dtype, "cpu")
        self.pool.k.fill_(torch.nan)
        self.backend = self.decode = make(self.pool, model.attn.num_heads, dtype)
        self.expansion: Expansion | None = None
        self.expanded: list[tuple[int, bool]] = []  # the number of tokens of prompts, and whether there were other rows

    def enter(self, counts: list[int]) -> list[torch.Tensor]:
        """Let the next ``counts`` tokens of each row enter, and return their outputs."""
        x = torch.cat([text[at : at + n] for text, at, n in zip(self.texts, self.done, counts, strict=True)])
        batch = make_batch(4, self.table, self.done, counts, attn=(self.backend,), kv=(self.pool,))
        if self.expansion is not None and batch.num_extend and self.expansion.pays(batch):
            self.expansion.plan(batch, self.backend, self.decode, 4)
            self.expanded.append((batch.expanded.num_tokens, batch.expanded.rest is not None))
        else:
            self.backend.plan(batch)
        out = self.model.attn.forward(x, self.model.rotary.forward(batch.positions), batch)
        self.done = [at + n for at, n in zip(self.done, counts, strict=True)]
        return list(out.split(counts))


STEPS = [[9, 5, 1], [7, 1, 1], [1, 1, 1], [1, 1, 1], [5, 1, 2]]
"""Chunks over cached latents, mixed steps and decode steps; together ``LENS``."""


def run(model: OneLayer, texts: list[torch.Tensor], make: Make) -> list[torch.Tensor]:
    rows = Rows(model, texts, make)
    pieces = [rows.enter(counts) for counts in STEPS]
    return [torch.cat([piece[row] for piece in pieces]) for row in range(len(texts))]


@torch.inference_mode()
def test_latents_may_be_in_another_group_than_the_first() -> None:
    tensors, text = random_tensors(SHAPE), torch.randn(8, HIDDEN)
    model = loaded(thread_meshes(1)[0], tensors, SHAPE)
    model.attn.set_place(1, 0)
    pool = make_pool(GROUP, 4, 4, torch.float32, "cpu")
    pool.k.zero_()
    backend = native(pool, HEADS, torch.float32)
    first, second = np.array([[3, 1]], np.int32), np.array([[2, 3]], np.int32)
    batch = make_batch(4, first, [0], [8], attn=(backend,) * 2, kv=(pool,) * 2, other_tables=[second])
    backend.plan(batch.view(1))
    got = model.attn.forward(text, model.rotary.forward(batch.positions), batch)
    torch.testing.assert_close(got.double(), expected(text, tensors, SHAPE), atol=2e-5, rtol=2e-5)
    assert pool.keys(0)[[2, 3]].abs().sum(-1).min() > 0
    assert pool.keys(0)[1].abs().max() == 0, "pages of the first group are not written"


@pytest.mark.parametrize("make", [eager, native])
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_absorbed_attention_is_attention_over_expanded_keys(name: str, make: Make) -> None:
    shape = SHAPES[name]
    tensors = random_tensors(shape)
    texts = [torch.randn(n, HIDDEN) for n in LENS]
    for got, text in zip(run(loaded(thread_meshes(1)[0], tensors, shape), texts, make), texts, strict=True):
        torch.testing.assert_close(got.double(), expected(text, tensors, shape), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_ranks_divide_the_heads_and_store_whole_latents(name: str, count: int) -> None:
    shape = SHAPES[name]
    tensors = random_tensors(shape)
    texts = [torch.randn(n, HIDDEN) for n in LENS]
    meshes = thread_meshes(count)
    models = [loaded(mesh, tensors, shape) for mesh in meshes]
    assert {model.attn.num_heads for model in models} == {HEADS // count}
    for results in run_ranks(meshes, lambda model: run(model, texts, native), models):
        for got, text in zip(results, texts, strict=True):
            torch.testing.assert_close(got.double(), expected(text, tensors, shape), atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_only_the_rows_that_are_sampled_attend_in_the_last_layer() -> None:
    tensors, text = random_tensors(SHAPE), torch.randn(7, HIDDEN)
    rows = Rows(loaded(thread_meshes(1)[0], tensors, SHAPE), [text], eager)
    batch = make_batch(4, rows.table, [0], [7], attn=(rows.backend,), kv=(rows.pool,))
    batch.logit_rows = torch.tensor([6])
    last = make_batch(4, rows.table, [6], [1], attn=(rows.backend,), kv=(rows.pool,))
    got = rows.model.attn.forward(text, rows.model.rotary.forward(batch.positions), batch, last)
    torch.testing.assert_close(got.double(), expected(text, tensors, SHAPE)[6:], atol=2e-5, rtol=2e-5)
    batch.logit_rows = torch.tensor([], dtype=torch.int64)
    assert rows.model.attn.forward(text, rows.model.rotary.forward(batch.positions), batch, last).shape == (0, HIDDEN)


@torch.inference_mode()
def test_bfloat16_stays_close() -> None:
    tensors, texts = random_tensors(SHAPE), [torch.randn(n, HIDDEN) for n in LENS]
    model = loaded(thread_meshes(1)[0], tensors, SHAPE, torch.bfloat16)
    for got, text in zip(run(model, [t.bfloat16() for t in texts], native), texts, strict=True):
        wanted = expected(text, tensors, SHAPE)
        assert (got.double() - wanted).norm() / wanted.norm() < 0.03


class Always(Expansion):
    """Expand in every step with prompts."""

    def pays(self, batch: Batch, *, in_pieces: bool = False) -> bool:
        return True


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_prompts_that_expand_latents_give_the_same(name: str) -> None:
    """Chunks over cached latents expand them again; decode rows and verify rows of the same step attend over latents."""
    shape = SHAPES[name]
    tensors, texts = random_tensors(shape), [torch.randn(n, HIDDEN) for n in LENS]
    model = loaded(thread_meshes(1)[0], tensors, shape)
    rows = Rows(model, texts, native)
    rows.decode = native(rows.pool, HEADS, torch.float32)
    rows.expansion = Always(shape, HEADS, 4)
    pieces = [rows.enter(counts) for counts in STEPS]
    assert rows.expanded == [(14, True), (7, True), (8, False)], "prompts and other rows were not divided as expected"
    for row, text in enumerate(texts):
        got = torch.cat([piece[row] for piece in pieces])
        torch.testing.assert_close(got.double(), expected(text, tensors, shape), atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_trees_beside_prompts_that_expand_latents() -> None:
    """Verify rows keep their tree mask."""
    model, lens = loaded(thread_meshes(1)[0], random_tensors(SHAPE), SHAPE), [12, 9, 7]
    rows = Rows(model, [torch.randn(n, HIDDEN) for n in lens], native)
    rows.enter([5, 5, 2])
    parents = np.array([[-1, -1, -1], [-1, -1, 0], [-1, 0, -1]], np.int32)
    drafts = DraftTree(np.zeros((3, 3), np.int32), parents, np.array([0, 3, 2], np.int32))
    x, outputs = torch.randn(14, HIDDEN), list[torch.Tensor]()
    for expand in (False, True):
        attn, kv = (rows.backend,), (rows.pool,)
        batch = make_batch(4, rows.table, [5, 5, 2], [7, 4, 3], num_extend=1, drafts=drafts, attn=attn, kv=kv)
        assert batch.tree_mask is not None
        if expand:
            Always(SHAPE, HEADS, 4).plan(batch, native(rows.pool, HEADS, torch.float32), rows.backend, 4)
        else:
            rows.backend.plan(batch)
        outputs.append(model.attn.forward(x, model.rotary.forward(batch.positions), batch))
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=2e-5)


def test_expansion_pays_where_it_takes_fewer_operations() -> None:
    """In DeepSeek-V3 from about 170 queries after a long prefix on, and always without one; not if memory is short, and
    in a step that could run in captured pieces only if it saves much."""
    shape = LatentShape(7168, 128, 1536, 512, 128, 64, 128, 1e-6)
    choice, table = Expansion(shape, 16, 2), np.zeros((3, 8192), np.int32)

    def pays(prefix: list[int], extend: list[int], split: int, *, in_pieces: bool = False) -> bool:
        batch = make_batch(16, table, prefix, extend, num_extend=split)
        return choice.pays(batch, in_pieces=in_pieces)

    assert pays([0], [2], 1)
    assert pays([20_000], [200], 1)
    assert not pays([20_000], [150], 1)
    assert pays([20_000, 0], [150, 4000], 2)
    assert not pays([20_000, 20_000], [1, 1], 0)
    assert pays([0, 25_000], [512, 1], 1), "decode rows do not matter"
    assert not pays([choice.most_keys - 100], [101], 1)
    assert not pays([0], [1000], 1, in_pieces=True)
    assert pays([20_000], [1000], 1, in_pieces=True)
    assert choice.needed_bytes(10) == 10 * 2 * (2 * 576 + 16 * (256 + 192))
    assert choice.needed_bytes(1 << 30) <= 1 << 30


@torch.inference_mode()
def test_latents_of_quantized_layers() -> None:
    """With weights in FP8, absorbed and expanded attention compute with the weights that the codes stand for."""
    shape, texts = SHAPES["no q_lora"], [torch.randn(n, HIDDEN) for n in LENS]
    fp8 = Fp8(Fp8Config(), QuantizationContext(None, torch.float32, torch.device("cpu")))
    model = loaded(thread_meshes(1)[0], random_tensors(shape), shape, quantization=fp8)
    tensors = random_tensors(shape)
    for name, entry in model.weights_map().items():
        (target,) = as_list(entry)
        layer = getattr(model.attn, target.parameter.split(".")[1])
        if isinstance(layer, Linear):
            assert layer.method is not None
            weight, start = layer.dense_weight(), target.start or 0
            tensors[name] = weight if target.size is None else weight[start : start + target.size]
    for got, text in zip(run(model, texts, native), texts, strict=True):
        torch.testing.assert_close(got.double(), expected(text, tensors, shape), atol=2e-5, rtol=2e-5)


def test_weights_that_cannot_be_absorbed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8Linear, "dequantized", LinearMethod.dequantized)
    fp8 = Fp8(Fp8Config(), QuantizationContext(None, torch.float32, torch.device("cpu")))
    with pytest.raises(ConfigError, match="Fp8Linear cannot convert a weight back, which latent attention needs"):
        loaded(thread_meshes(1)[0], random_tensors(SHAPE), SHAPE, quantization=fp8)
