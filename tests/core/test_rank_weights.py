"""Test that each rank reads its share of a checkpoint, and nothing else.

.venv/bin/python -m pytest -q tests/core/test_rank_weights.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
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
from dovetail.layers.base import parameter
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.norm import RMSNorm
from dovetail.layers.transforms import AddOne, Reshape, SplitHalves, Transpose
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
    for held in as_module(model).parameters():
        held.fill_(float("nan"))
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
        check_complete({"w": torch.empty(4, 5)}, {"theirs": WeightTarget("w", shares=(share,))})


def test_dummy_weights_of_ranks_are_shares_of_the_same_tensors(tmp_path: Path) -> None:
    whole = built()
    load_weights(whole, tmp_path, "dummy", 5)
    filler = WeightFiller(whole)
    tensors = {name: filler.place(target).clone() for name, (target,) in filler.targets.items()}
    for size in (2, 4):
        for rank, mesh in enumerate(thread_meshes(size)):
            model = built(mesh)
            load_weights(model, tmp_path, "dummy", 5)
            for name, value in expected_of(tensors, rank, size).items():
                assert as_module(model).get_parameter(name).equal(value), name


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_the_bytes_of_any_shares_are_those_of_a_slice(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.int16).view(shape)
    shares, expected = list[TensorShare](), whole
    for dim in data.draw(st.sets(st.integers(0, len(shape) - 1))):
        start = data.draw(st.integers(0, shape[dim] - 1))
        size = data.draw(st.integers(1, shape[dim] - start))
        shares.append(TensorShare(dim, start, size, shape[dim]))
        expected = expected.narrow(dim, start, size)
    expected = expected.contiguous()
    stored = StoredTensor(Path("x"), "x", tuple(shape), torch.int16, 3, whole.nbytes)
    part = cut(stored, shares)
    assert (part.shape, part.nbytes) == (tuple(expected.shape), expected.nbytes)
    bytes_, at = whole.numpy().tobytes(), data.draw(st.integers(0, expected.nbytes - 1))
    count = data.draw(st.integers(1, expected.nbytes - at))
    found = b"".join(bytes_[offset - 3 : offset - 3 + n] for offset, n in part.spans(at, count))
    assert found == expected.numpy().tobytes()[at : at + count]


class Fused(nn.Module, ModelArchitecture):
    """Have parameters that are filled from transformed tensors, from parts of one tensor, and by one of two ranks."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info, self.tp = info, mesh.tp
        self.start, self.size = mesh.tp.share(6)
        self.pair = parameter(4 * 2 * self.size, 5)  # of each of four experts the rows a, then the rows b
        self.flipped = parameter(3, 7)
        self.norm = parameter(7)
        self.rotated = parameter(12, 5)
        self.own = parameter(2, 5)

    forward = logits = Divided.forward

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        start, size = self.start, self.size
        parts = [
            WeightTarget(
                "pair",
                (2 * expert + half) * size,
                size,
                (TensorShare(0, expert, 1, 4), TensorShare(1, half * 6 + start, size, 12)),
                Reshape((1, size, 5)),
            )
            for expert in range(4)
            for half in range(2)
        ]
        return {
            "pair": parts,
            "flipped": WeightTarget("flipped", transform=Transpose()),
            "norm": WeightTarget("norm", transform=AddOne()),
            "rotated": WeightTarget("rotated", transform=SplitHalves(6, 4, pairs=True)),
            **{f"own.{rank}": WeightTarget("own") if rank == self.tp.rank else [] for rank in range(self.tp.size)},
        }


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensors_fill_several_places_and_are_transformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, streamed: bool
) -> None:
    monkeypatch.setattr("dovetail.engine.shards.CHUNK_BYTES", 40)
    torch.manual_seed(0)
    shapes = {"pair": (4, 12, 5), "flipped": (7, 3), "norm": (7,), "rotated": (12, 5)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {f"own.{rank}": torch.randn(2, 5) for rank in range(size)}
    save_file(tensors, tmp_path / "model.safetensors")
    order = [0, 2, 4, 1, 3, 5]  # of the rows of a head: pairs (0, 1) and (2, 3) become halves, the rest is divided
    for rank, mesh in enumerate(thread_meshes(size) if size > 1 else [SINGLE]):
        model = build_model(Fused, INFO, CPU, torch.float32, mesh)
        for held in as_module(model).parameters():
            held.fill_(float("nan"))
        if streamed:
            load_weights(model, tmp_path)
        else:
            filler = WeightFiller(model)
            assert {name: filler.whole_shape(name) for name in shapes} == shapes
            for name, tensor in tensors.items():
                filler.fill(name, lambda tensor=tensor: tensor)
            filler.finish()
        own = 6 // size
        rows = torch.tensor([half * 6 + rank * own + i for half in range(2) for i in range(own)])
        expected = {
            "pair": tensors["pair"][:, rows].flatten(0, 1),
            "flipped": tensors["flipped"].T,
            "norm": 1 + tensors["norm"],
            "rotated": tensors["rotated"].view(2, 6, 5)[:, order].flatten(0, 1),
            "own": tensors[f"own.{rank}"],
        }
        for name, value in expected.items():
            assert as_module(model).get_parameter(name).equal(value), name


def test_pairs_that_are_split_rotate_alike() -> None:
    """Rotating pairs and rotating halves of the reordered rows give the same products of queries and keys."""
    torch.manual_seed(0)
    head_dim, rotary_dim, inputs = 10, 6, 7
    weights, x = [torch.randn(head_dim, inputs) for _ in range(2)], torch.randn(2, inputs)
    angles = torch.rand(2, rotary_dim // 2) * 6
    plain, split = list[torch.Tensor](), list[torch.Tensor]()
    for weight, values, angle in zip(weights, x, angles, strict=True):
        head = weight @ values
        turned = torch.polar(torch.ones(rotary_dim // 2), angle) * torch.view_as_complex(head[:rotary_dim].view(-1, 2))
        plain.append(torch.cat((torch.view_as_real(turned).flatten(), head[rotary_dim:])))
        head = SplitHalves(head_dim, rotary_dim, pairs=True).apply(weight, (head_dim, inputs)) @ values
        still = torch.zeros(head_dim // 2 - rotary_dim // 2)
        cos, sin = torch.cat((angle, still)).cos(), torch.cat((angle, still)).sin()
        a, b = head.chunk(2)
        split.append(torch.cat((a * cos - b * sin, b * cos + a * sin)))
    assert torch.allclose(plain[0] @ plain[1], split[0] @ split[1], atol=1e-4)


def test_a_transform_of_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = build_model(Fused, INFO, CPU, torch.float32)
    with pytest.raises(WeightsError, match=r"flipped has shape \[3, 7\]; the model expects \[7, 3\]"):
        WeightFiller(model).fill("flipped", lambda: torch.zeros(3, 7))


def test_dummy_weights_fill_parameters_of_transformed_tensors(tmp_path: Path) -> None:
    for mesh in [SINGLE, *thread_meshes(2)]:
        model = build_model(Fused, INFO, CPU, torch.float32, mesh)
        for held in as_module(model).parameters():
            held.fill_(float("nan"))
        load_weights(model, tmp_path, "dummy")
        assert all(held.isfinite().all() for held in as_module(model).parameters())


@pytest.mark.parametrize("streamed", [False, True])
def test_a_transform_that_makes_another_shape_is_named(tmp_path: Path, streamed: bool) -> None:
    class Wrong(Fused):
        def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
            return {**super().weights_map(), "flipped": WeightTarget("flipped", transform=Untransposed())}

    class Untransposed(Transpose):
        def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            return tensor

    model = build_model(Wrong, INFO, CPU, torch.float32)
    filler = WeightFiller(model)
    tensors = {name: torch.zeros(filler.whole_shape(name)) for name in filler.targets}
    save_file(tensors, tmp_path / "model.safetensors")
    fill = (
        partial(load_weights, model, tmp_path)
        if streamed
        else partial(filler.fill, "flipped", lambda: tensors["flipped"])
    )
    with pytest.raises(WeightsError, match=r"tensor flipped: .*Untransposed.* made \[7, 3\].*expected \[3, 7\]"):
        fill()
