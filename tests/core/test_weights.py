"""Test the weight loader: which checkpoints it reads, and its error for every defect of a checkpoint.

Run: python -m pytest tests/core/test_weights.py
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

from dovetail.engine.build import WeightFiller, as_module
from dovetail.engine.progress import bytes_progress
from dovetail.engine.shards import StoredTensor, stored_tensors
from dovetail.engine.weights import build_model, load_weights
from dovetail.errors import PluginLoadError, WeightsError
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.embedding import Embedding
from dovetail.layers.linear import ColumnLinear
from dovetail.layers.norm import RMSNorm
from dovetail.types import Batch

INFO = ModelInfo("Toy", 6, 4, 1, 1, 1, 4, 16, (CacheGroup(1, 1, 4),))
CPU = torch.device("cpu")


class Toy(nn.Module, ModelArchitecture):
    """Have an embedding, two projections fused into one, and a norm."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.embed = Embedding(6, 4, mesh)
        self.pair = ColumnLinear(4, {"a": 3, "b": 2}, mesh, bias=True)
        self.norm = RMSNorm(4, 1e-5)

    def forward(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def weights_map(self) -> Mapping[str, WeightTarget]:
        parts = {
            f"{part}.{field}": self.pair.target(f"pair.{field}", part) for part in "ab" for field in ("weight", "bias")
        }
        return {"tokens": self.embed.target("embed.weight"), "norm": WeightTarget("norm.weight"), **parts}

    def ignored_weights(self) -> Iterable[str]:
        return (r"old\..*",)


def make_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"tokens": (6, 4), "norm": (4,), "a.weight": (3, 4), "b.weight": (2, 4), "a.bias": (3,), "b.bias": (2,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def new_model(dtype: torch.dtype = torch.float32, cls: type[ModelArchitecture] = Toy) -> ModelArchitecture:
    return build_model(cls, INFO, CPU, dtype)


def write_single(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors")


def write_shards(directory: Path, *shards: dict[str, torch.Tensor]) -> None:
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(shard, directory / file)
        weight_map |= dict.fromkeys(shard, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def split(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    names = list(tensors)
    return {n: tensors[n] for n in names[::2]}, {n: tensors[n] for n in names[1::2]}


def assert_filled(model: ModelArchitecture, tensors: dict[str, torch.Tensor]) -> None:
    state = dict(as_module(model).named_parameters())
    dtype = state["norm.weight"].dtype
    given = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    assert state["embed.weight"].equal(given["tokens"])
    assert state["norm.weight"].equal(given["norm"])
    assert state["pair.weight"].equal(torch.cat((given["a.weight"], given["b.weight"])))
    assert state["pair.bias"].equal(torch.cat((given["a.bias"], given["b.bias"])))


@pytest.mark.parametrize(
    ("constants", "feature"),
    [
        ({"window": 8}, Feature.ATTN_SLIDING_WINDOW),
        ({"soft_cap": 30.0}, Feature.ATTN_SOFT_CAP),
        ({"sinks": torch.zeros(1)}, Feature.ATTN_SINKS),
    ],
)
def test_a_layer_that_needs_what_its_model_does_not_declare_is_refused(constants: dict, feature: Feature) -> None:
    class Needy(Toy):
        def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
            super().__init__(info, mesh)
            self.inner = nn.Module()
            self.inner.layers = [AttentionLayer(0, 1.0), AttentionLayer(1, 1.0, **constants)]

    with pytest.raises(
        PluginLoadError, match=rf"Needy \(Toy\) .*{feature}, which its layer inner.layers \(layer_id 1\)"
    ):
        build_model(Needy, INFO, CPU, torch.float32)
    assert build_model(Needy, replace(INFO, needs=frozenset({feature})), CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_one_file_fills_every_parameter_in_the_models_dtype(
    tmp_path: Path, dtype: torch.dtype, stored: torch.dtype
) -> None:
    tensors = make_tensors(stored)
    write_single(tmp_path, tensors)
    model = new_model(dtype)
    load_weights(model, tmp_path)
    assert all(p.dtype == dtype and not p.requires_grad for p in as_module(model).parameters())
    assert not as_module(model).training
    assert_filled(model, tensors)


def test_shards_are_found_through_their_index_and_progress_is_reported(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_shards(tmp_path, *split(tensors))
    model, seen = new_model(), []
    load_weights(model, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert_filled(model, tensors)
    assert seen == [(i, 6) for i in range(1, 7)]


def test_layers_compute_with_the_new_weights_after_a_second_load(tmp_path: Path) -> None:
    model, x = new_model(), torch.randn(2, 4)
    assert isinstance(model, Toy)
    load_weights(model, tmp_path, "dummy")
    assert model.norm.forward(x).isfinite().all()
    tensors = make_tensors()
    write_single(tmp_path, tensors)
    load_weights(model, tmp_path)
    expected = nn.functional.rms_norm(x, (4,), tensors["norm"], 1e-5)
    torch.testing.assert_close(model.norm.forward(x), expected)


def test_ignored_tensors_may_be_there(tmp_path: Path) -> None:
    write_single(tmp_path, {**make_tensors(), "old.buffer": torch.zeros(3)})
    load_weights(new_model(), tmp_path)


def refused(directory: Path, *parts: str, cls: type[ModelArchitecture] = Toy) -> None:
    with pytest.raises(WeightsError) as caught:
        load_weights(new_model(cls=cls), directory)
    for part in parts:
        assert part in str(caught.value)


def test_a_wrong_shape_names_tensor_expected_and_given(tmp_path: Path) -> None:
    write_single(tmp_path, {**make_tensors(), "b.weight": torch.zeros(4, 2)})
    refused(tmp_path, "b.weight", "[4, 2]", "[2, 4]", "pair.weight")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["a.bias"]
    write_single(tmp_path, tensors)
    refused(tmp_path, "lacks 1 tensor", "a.bias")


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    write_single(tmp_path, {**make_tensors(), "c.weight": torch.zeros(2)})
    refused(tmp_path, "c.weight", "does not know")


def test_ignoring_takes_the_whole_name(tmp_path: Path) -> None:
    write_single(tmp_path, {**make_tensors(), "bold.buffer": torch.zeros(3)})
    refused(tmp_path, "bold.buffer")


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    write_single(tmp_path, {**make_tensors(), "norm": torch.ones(4, dtype=torch.int8)})
    refused(tmp_path, "norm", "int8", "bfloat16")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_shards(tmp_path, tensors, {"norm": tensors["norm"]})
    refused(tmp_path, "norm", "model-0.safetensors", "model-1.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, *split(make_tensors()))
    (tmp_path / "model-1.safetensors").unlink()
    refused(tmp_path, "model-1.safetensors")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["../other.safetensors", "/tmp/other.safetensors", ".."])
def test_an_index_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    write_single(inside, make_tensors())
    (inside / "model.safetensors").rename(tmp_path / "other.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm": name}}))
    refused(inside, "index.json")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_single(tmp_path, make_tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    refused(tmp_path, "model.safetensors", "not a valid safetensors")


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    torch.save(make_tensors(), tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "convert")


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "load_format: dummy")


class Overlapping(Toy):
    """Send two tensors to the same rows."""

    def weights_map(self) -> Mapping[str, WeightTarget]:
        return {**super().weights_map(), "b.weight": WeightTarget("pair.weight", 0, 5)}


class Forgetful(Toy):
    """Send nothing to some rows."""

    def weights_map(self) -> Mapping[str, WeightTarget]:
        return {name: target for name, target in super().weights_map().items() if name != "b.bias"}


class Elsewhere(Toy):
    """Send a tensor to a parameter that does not exist."""

    def weights_map(self) -> Mapping[str, WeightTarget]:
        return {**super().weights_map(), "norm": WeightTarget("norms.weight")}


@pytest.mark.parametrize(
    ("cls", "parameter"), [(Overlapping, "pair.weight"), (Forgetful, "pair.bias"), (Elsewhere, "norms.weight")]
)
def test_a_faulty_weights_map_is_named(tmp_path: Path, cls: type[ModelArchitecture], parameter: str) -> None:
    write_single(tmp_path, make_tensors())
    refused(tmp_path, "weights_map", parameter, cls=cls)


def test_dummy_weights_are_small_and_the_same_for_one_seed(tmp_path: Path) -> None:
    models = [new_model(dtype) for dtype in (torch.float32, torch.float32, torch.float32)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        load_weights(model, tmp_path, "dummy", seed)
    first, again, other = (dict(as_module(m).named_parameters()) for m in models)
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["embed.weight"].equal(other["embed.weight"])
    assert first["norm.weight"].equal(torch.ones(4))
    assert 0 < first["embed.weight"].std() < 0.05


def test_building_leaves_torchs_defaults_alone() -> None:
    class Failing(Toy):
        def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        new_model(torch.bfloat16, Failing)
    assert torch.get_default_dtype() == torch.float32
    assert new_model(torch.bfloat16).embed.weight.dtype == torch.bfloat16  # type: ignore[attr-defined]
    assert torch.get_default_dtype() == torch.float32


class Wide(nn.Module, ModelArchitecture):
    """Have many tensors, some of them longer than what is read at a time."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.layers = nn.ModuleList(ColumnLinear(5, {"a": 3 + i, "b": 70}, mesh) for i in range(20))

    forward = logits = Toy.forward

    def weights_map(self) -> Mapping[str, WeightTarget]:
        return {
            f"{i}.{part}": layer.target(f"layers.{i}.weight", part)  # type: ignore[operator]
            for i, layer in enumerate(self.layers)
            for part in "ab"
        }


@pytest.fixture
def several_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as for a GPU: with several threads, and with tensors that do not fit into a buffer."""
    monkeypatch.setattr("dovetail.engine.weights._num_readers", lambda device: 4)
    monkeypatch.setattr("dovetail.engine.shards.CHUNK_BYTES", 64)


@pytest.mark.usefixtures("several_readers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_several_threads_fill_what_one_would(tmp_path: Path, dtype: torch.dtype, stored: torch.dtype) -> None:
    model, seen = new_model(dtype, Wide), list[tuple[int, int]]()
    tensors = {name: torch.randn(WeightFiller(model).whole_shape(name)).to(stored) for name in model.weights_map()}
    write_shards(tmp_path, *split(tensors))
    for parameter in as_module(model).parameters():
        parameter.fill_(float("nan"))
    load_weights(model, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 40) for i in range(1, 41)]
    for i in range(20):
        given = torch.cat((tensors[f"{i}.a"], tensors[f"{i}.b"])).to(dtype)
        assert as_module(model).get_parameter(f"layers.{i}.weight").equal(given)


def test_reading_for_a_cpu_does_not_initialize_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_single(tmp_path, make_tensors())
    for name in ("stream", "current_stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, name=name: pytest.fail(f"torch.cuda.{name} was called"))
    load_weights(new_model(), tmp_path)


@pytest.mark.usefixtures("several_readers")
def test_an_error_in_a_thread_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_single(tmp_path, make_tensors())

    def shorter(file: Path) -> list[StoredTensor]:
        return [replace(t, offset=t.offset + 10**6) if t.name == "norm" else t for t in stored_tensors(file)]

    monkeypatch.setattr("dovetail.engine.weights.stored_tensors", shorter)
    refused(tmp_path, "model.safetensors", "ended within tensor norm")


def test_nothing_is_written_where_something_does_not_fit(tmp_path: Path) -> None:
    write_shards(tmp_path, {"tokens": torch.ones(6, 4)}, {"norm": torch.zeros(5)})
    model = new_model()
    as_module(model).get_parameter("embed.weight").fill_(7.0)
    with pytest.raises(WeightsError, match="norm"):
        load_weights(model, tmp_path)
    assert as_module(model).get_parameter("embed.weight").eq(7.0).all()


def test_stored_tensors_say_where_their_bytes_are(tmp_path: Path) -> None:
    tensors = make_tensors(torch.float16)
    write_single(tmp_path, tensors)
    found = stored_tensors(tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    assert {t.name for t in found} == set(tensors)
    for t in found:
        given = tensors[t.name]
        assert (t.shape, t.dtype) == (tuple(given.shape), given.dtype)
        assert data[t.offset : t.offset + t.nbytes] == given.numpy().tobytes()


def test_a_dtype_that_the_parameter_cannot_take_is_named(tmp_path: Path) -> None:
    write_single(tmp_path, {**make_tensors(), "norm": torch.ones(4, dtype=torch.float8_e4m3fn)})
    refused(tmp_path, "norm", "float8_e4m3fn", "bfloat16")


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    screen = io.StringIO()
    with bytes_progress("weights", 3 << 30, Console(file=screen, force_terminal=True)) as advance:
        advance(1 << 30)
    assert "weights" in screen.getvalue()
    assert [r.message.partition(" in ")[0] for r in caplog.records] == ["weights: 3.0 GiB"]
    caplog.clear()
    monkeypatch.setattr("dovetail.engine.progress.LOG_SECONDS", 0.0)
    with bytes_progress("weights", 3 << 30, Console(file=io.StringIO())) as advance:
        advance(1 << 20)
        advance(2 << 30)
    first, second, last = (r.message for r in caplog.records)
    assert (first, second) == ("weights: 1.0 MiB of 3.0 GiB", "weights: 2.0 GiB of 3.0 GiB")
    assert "GiB/s" in last
