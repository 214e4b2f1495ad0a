"""Test that a layer's attention sinks reach the attention backend: those of the rank's own heads, in float32.

Run: python -m pytest tests/plugins/test_attention_sinks.py

Backends with sinks are tested in their suites, and a whole model that has them in test_models_gpt_oss.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dovetail.engine.build import WeightFiller, build_model
from dovetail.errors import PluginLoadError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.decoder import attention_targets
from dovetail.layers.rope import RopeConfig
from dovetail.layers.rotary import Rotary
from dovetail.memory.pool import PagedKVPool
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.eager import EagerAttention
from dovetail.testing.ranks import run_ranks, thread_meshes
from dovetail.types import Batch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 20, 4, 2, 8, 9
INFO = ModelInfo(
    "Sinks", 9, HIDDEN, 1, HEADS, KV_HEADS, HEAD_DIM, 16, (CacheGroup(1, KV_HEADS, HEAD_DIM),),
    needs=frozenset({Feature.ATTN_SINKS}),
)  # fmt: skip


class WithSinks(nn.Module, ModelArchitecture):
    """Have one attention layer."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        shape = AttentionShape(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, sinks=True)
        self.attn = SelfAttention(shape, AttentionLayer(0, HEAD_DIM**-0.5), mesh)

    def forward(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weights_map(self) -> dict[str, WeightTarget]:
        return dict(attention_targets(self.attn, "theirs", "attn"))


def loaded(mesh: Mesh, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> SelfAttention:
    filler = WeightFiller(build_model(WithSinks, INFO, torch.device("cpu"), dtype, mesh))
    for name, tensor in tensors.items():
        filler.fill(name, lambda tensor=tensor: tensor)
    filler.finish()
    assert isinstance(filler.model, WithSinks)
    return filler.model.attn


def attended(layer: SelfAttention, x: torch.Tensor) -> torch.Tensor:
    pool = PagedKVPool(CacheGroup(1, layer.counts.keys, HEAD_DIM), 4, 4, torch.float32, "cpu")
    backend = EagerAttention(pool)
    table = make_page_table([TOKENS], 4, 4)
    batch = make_batch(4, table, [0], [TOKENS], input_ids=[0] * TOKENS, attn=(backend,), kv=(pool,))
    rotation = Rotary(RopeConfig(HEAD_DIM, 100.0, 32, 32)).forward(torch.zeros(TOKENS, dtype=torch.int64))
    return layer.forward(x, rotation, batch)


def random_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {"q": (queries, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN), "o": (HIDDEN, queries)}
    return {f"theirs.{part}_proj.weight": torch.randn(size) * 0.3 for part, size in sizes.items()} | {
        "theirs.sinks": torch.tensor([0.0, 2.0, -1.0, 4.0])
    }


def expected(x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Attend at position 0, where rotation changes nothing, with weights written out."""
    q, k, v = (x @ tensors[f"theirs.{part}_proj.weight"].T for part in "qkv")
    q, k, v = (part.view(TOKENS, -1, HEAD_DIM).transpose(0, 1) for part in (q, k, v))
    k, v = k.repeat_interleave(HEADS // KV_HEADS, 0), v.repeat_interleave(HEADS // KV_HEADS, 0)
    weights = (q @ k.transpose(1, 2) * HEAD_DIM**-0.5).exp().tril()
    total = weights.sum(2, keepdim=True) + tensors["theirs.sinks"].exp()[:, None, None]
    return (weights / total @ v).transpose(0, 1).reshape(TOKENS, -1) @ tensors["theirs.o_proj.weight"].T


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_rank_has_the_sinks_of_its_heads(count: int) -> None:
    """With four ranks, two of them have the same KV head, and each has a query head of its own."""
    tensors, x = random_tensors(), torch.randn(TOKENS, HIDDEN)
    meshes = thread_meshes(count)
    layers = [loaded(mesh, tensors) for mesh in meshes]
    for result in run_ranks(meshes, lambda layer: attended(layer, x.clone()), layers):
        torch.testing.assert_close(result, expected(x, tensors))


def test_sinks_stay_in_float32() -> None:
    """Backends expect this, and logits of keys are float32 too."""
    tensors = random_tensors() | {"theirs.sinks": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    layer = loaded(Mesh(thread_meshes(1)[0].tp), tensors, torch.bfloat16)
    assert layer.constants.sinks is layer.sinks
    assert layer.sinks is not None
    assert layer.sinks.equal(tensors["theirs.sinks"])
    assert layer.qkv.weight.dtype == torch.bfloat16


def test_sinks_must_be_declared() -> None:
    """Otherwise a backend without sinks could be chosen, which would ignore them."""
    with pytest.raises(PluginLoadError, match=r"attention\.sinks"):
        build_model(WithSinks, replace(INFO, needs=frozenset()), torch.device("cpu"), torch.float32)
