"""Test that each rank reads its share of a checkpoint, and nothing else.

.venv/bin/python -m pytest -q tests/core/test_rank_weights.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from dovetail.engine.build import WeightFiller, as_module, build_model, check_complete
from dovetail.engine.shards import StoredTensor, cut
from dovetail.engine.weights import load_weights
from dovetail.errors import WeightsError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, TensorShare, WeightTarget
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.norm import RMSNorm
from dovetail.testing.ranks import thread_meshes

INFO = ModelInfo("Divided", 23, 12, 1, 4, 2, 6, 16, (CacheGroup(1, 2, 6),))
CPU = torch.device("cpu")
WIDTHS = {"q": 24, "k": 12}


class Divided(nn.Module, ModelArchitecture):
    """Have one layer of each sort that is divided, and a norm, which is not."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.embed = Embedding(23, 12, mesh)
        self.head = LMHead(12, 23, mesh)
        self.qk = ColumnLinear(12, WIDTHS, mesh, bias=True, unit=6)
        self.out = row_linear(24, 12, mesh, bias=True)
        self.norm = RMSNorm(12, 1e-5)

    def forward(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weights_map(self) -> Mapping[str, WeightTarget]:
        fields = ("weight", "bias")
        return {
            "embed": self.embed.target("embed.weight"),
            "head": self.head.target("head.weight"),
            "norm": WeightTarget("norm.weight"),
            **{f"{part}.{f}": self.qk.target(f"qk.{f}", part) for part in WIDTHS for f in fields},
            **{f"out.{f}": self.out.target(f"out.{f}") for f in fields},
        }


def built(mesh: Mesh = SINGLE, dtype: torch.dtype = torch.float32) -> ModelArchitecture:
    model = build_model(Divided, INFO, CPU, dtype, mesh)
    for parameter in as_module(model).parameters():
        parameter.fill_(float("nan"))
    return model


def make_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    filler = WeightFiller(built())
    return {name: torch.randn(filler.whole_shape(name)).to(dtype) for name in filler.targets}


def expected_of(tensors: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return the parameters of a rank, computed from whole tensors without the code under test."""
    rows = -(-23 // size)
    heads = {"q": 4, "k": 2}
    own = {}
    for part, count in heads.items():
        first, n = (rank * count // size, max(1, count // size))
        own[part] = slice(first * 6, (first + n) * 6)
    return {
        "embed.weight": tensors["embed"][rank * rows : (rank + 1) * rows],
        "head.weight": tensors["head"][rank * rows : (rank + 1) * rows],
        "norm.weight": tensors["norm"],
        "qk.weight": torch.cat([tensors[f"{part}.weight"][own[part]] for part in "qk"]),
        "qk.bias": torch.cat([tensors[f"{part}.bias"][own[part]] for part in "qk"]),
        "out.weight": tensors["out.weight"].tensor_split(size, 1)[rank],
        "out.bias": tensors["out.bias"],
    }


@pytest.mark.parametrize("chunk", [16 << 20, 64, 40])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_its_share_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, stored: torch.dtype, chunk: int
) -> None:
    tensors = make_tensors(stored)
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr("dovetail.engine.shards.CHUNK_BYTES", chunk)
    read, count = os.preadv, list[int]()

    def counting(file: int, buffers: Any, offset: int) -> int:
        assert sum(len(buffer) for buffer in buffers) <= chunk
        count.append(read(file, buffers, offset))
        return count[-1]

    monkeypatch.setattr("dovetail.engine.shards.os.preadv", counting)
    for rank, mesh in enumerate(thread_meshes(size) if size > 1 else [SINGLE]):
        count.clear()
        model = built(mesh)
        load_weights(model, tmp_path)
        for name, value in expected_of(tensors, rank, size).items():
            assert as_module(model).get_parameter(name).equal(value.float()), name
        held = sum(p.numel() for p in as_module(model).parameters())
        assert sum(count) == held * stored.itemsize
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(count) < whole or size == 1


def test_a_read_that_returns_less_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    read = os.preadv
    monkeypatch.setattr(
        "dovetail.engine.shards.os.preadv", lambda file, buffers, offset: read(file, [buffers[0][:7]], offset)
    )
    model = built(thread_meshes(2)[1])
    load_weights(model, tmp_path)
    for name, value in expected_of(tensors, 1, 2).items():
        assert as_module(model).get_parameter(name).equal(value), name


def test_a_filler_takes_whole_tensors(tmp_path: Path) -> None:
    tensors = make_tensors()
    for rank, mesh in enumerate(thread_meshes(4)):
        filler = WeightFiller(built(mesh))
        for name, tensor in tensors.items():
            filler.fill(name, lambda tensor=tensor: tensor)
        filler.finish()
        for name, value in expected_of(tensors, rank, 4).items():
            assert as_module(filler.model).get_parameter(name).equal(value), name


def test_a_tensor_of_the_wrong_whole_shape_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    share = tensors["out.weight"][:, :12].clone()
    save_file({**tensors, "out.weight": share}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"out\.weight has shape \[12, 12\]; the model expects \[12, 24\]"):
        load_weights(built(thread_meshes(2)[0]), tmp_path)


@pytest.mark.parametrize(
    "share",
    [TensorShare(1, 0, 3, 8), TensorShare(0, 6, 4, 8), TensorShare(0, -1, 4, 8), TensorShare(2, 0, 4, 8)],
)
def test_a_share_outside_its_tensor_or_of_another_size_is_refused(share: TensorShare) -> None:
    with pytest.raises(WeightsError, match="weights_map sends TensorShare"):
        check_complete({"w": torch.empty(4, 5)}, {"theirs": WeightTarget("w", share=share)})


def test_dummy_weights_of_ranks_are_shares_of_the_same_tensors(tmp_path: Path) -> None:
    whole = built()
    load_weights(whole, tmp_path, "dummy", 5)
    filler = WeightFiller(whole)
    tensors = {name: filler.place(name).clone() for name in filler.targets}
    for size in (2, 4):
        for rank, mesh in enumerate(thread_meshes(size)):
            model = built(mesh)
            load_weights(model, tmp_path, "dummy", 5)
            for name, value in expected_of(tensors, rank, size).items():
                assert as_module(model).get_parameter(name).equal(value), name


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_the_bytes_of_any_share_are_those_of_a_slice(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.int16).view(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[dim] - 1))
    size = data.draw(st.integers(1, shape[dim] - start))
    stored = StoredTensor(Path("x"), "x", tuple(shape), torch.int16, 3, whole.nbytes)
    part = cut(stored, TensorShare(dim, start, size, shape[dim]))
    expected = whole.narrow(dim, start, size).contiguous()
    assert (part.shape, part.nbytes) == (tuple(expected.shape), expected.nbytes)
    bytes_, at = whole.numpy().tobytes(), data.draw(st.integers(0, expected.nbytes - 1))
    count = data.draw(st.integers(1, expected.nbytes - at))
    found = b"".join(bytes_[offset - 3 : offset - 3 + n] for offset, n in part.spans(at, count))
    assert found == expected.numpy().tobytes()[at : at + count]
