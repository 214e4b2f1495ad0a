"""Test that ``memory.kv_dtype: auto`` is FP8 where a checkpoint has scales of keys and values, and says so.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_checkpoint_kv_scales.py
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from engine_runs import make_llm
from safetensors.torch import load_file, save_file

import dovetail
from dovetail import SamplingParams
from dovetail.cli.sources import load_registry
from dovetail.config import Config, read, validate
from dovetail.config.kv_scales import has_kv_scales
from dovetail.engine.grouped import pools_of
from dovetail.errors import ConfigError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.registry.kv_dtype import with_fp8
from dovetail.registry.machine import Machine
from dovetail.registry.resolver import resolve

sys.path.insert(0, str(Path(__file__).parents[1]))

from fp8_checkpoints import by_block

if TYPE_CHECKING:
    from dovetail.registry.model_choice import ModelChoice

TINY = Path(dovetail.__file__).parent / "assets" / "tiny"
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
WEIGHTS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
LAYERS = 4


def save(directory: Path, quantization: dict[str, Any], *, scales: bool = True) -> Path:
    """Save the embedded model in FP8, with scales of keys and values of which each layer has others."""
    directory.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / file, directory)
    config = json.loads((TINY / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": WEIGHTS | quantization}))
    stored, _ = by_block(load_file(TINY / "model.safetensors"), 64)
    for layer in range(LAYERS if scales else 0):
        for name, scale in (("k", 0.05 + layer / 100), ("v", 0.02 + layer / 100)):
            stored[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor(scale)
    save_file(stored, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("scaled") / "model", {"kv_cache_scheme": STATIC})


def chosen(path: Path, machine: str = "sm90", **sections: Any) -> tuple[str, str, str]:
    """Return the dtype of keys and values, the store, and the note on it."""
    here = Machine("cpu", None, "cpu", "cpu") if machine == "cpu" else Machine.assume(machine)
    registry = load_registry(None, None)
    config = validate(read((), (), {}, {"model": {"path": str(path)}, "grammar": "none", **sections}), registry)
    resolved = resolve(config, registry, here, tuning={})
    note = next(one.note for one in resolved.resolutions if one.slot == "store")
    return resolved.config.memory.kv_dtype, resolved.store.name, note


@pytest.mark.parametrize("machine", ["sm90", "cpu"])
def test_auto_takes_the_scales_and_says_so(checkpoint: Path, machine: str) -> None:
    kv_dtype, store, note = chosen(checkpoint, machine)
    assert (kv_dtype, store) == ("fp8_e4m3", "scaled")
    assert note == "memory.kv_dtype auto is fp8_e4m3, because the checkpoint has scales of keys and values"


def test_config_decides_otherwise(checkpoint: Path) -> None:
    assert chosen(checkpoint, memory={"kv_dtype": "bfloat16"}) == ("bfloat16", "paged", "")
    assert chosen(checkpoint, memory={"kv_dtype": "fp8_e4m3"}) == ("fp8_e4m3", "scaled", "")
    assert chosen(checkpoint, memory={"kv_dtype": "fp8_e5m2"}) == ("fp8_e5m2", "paged", "")


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"store": "paged"}, "store paged keeps keys and values without scales"),
        ({"attention": "flash_attn"}, "attention 'flash_attn'"),
    ],
)
def test_a_component_that_uses_no_scales_leaves_the_dtype_of_the_model(
    checkpoint: Path, sections: dict[str, Any], why: str
) -> None:
    kv_dtype, store, note = chosen(checkpoint, **sections)
    assert (kv_dtype, store) == ("bfloat16", "paged")
    assert note.startswith(
        "memory.kv_dtype auto is the model's dtype; the checkpoint's scales of keys and values are not used: "
    )
    assert why in note


def test_a_checkpoint_without_the_tensors_keeps_the_dtype_of_the_model(tmp_path: Path) -> None:
    path = save(tmp_path / "model", {"kv_cache_scheme": "static"}, scales=False)
    kv_dtype, store, note = chosen(path)
    assert (kv_dtype, store) == ("bfloat16", "paged")
    assert note.endswith("config.json declares them, and no file has a tensor k_scale or v_scale")
    assert chosen(path, model={"path": str(path), "load_format": "dummy"})[0] == "fp8_e4m3"


def test_a_checkpoint_that_declares_nothing_is_not_searched(tmp_path: Path) -> None:
    path = save(tmp_path / "model", {})
    (path / "model.safetensors").write_bytes(b"damaged")
    assert chosen(path) == ("bfloat16", "paged", "")
    with pytest.raises(ConfigError, match="is not a valid safetensors file"):
        has_kv_scales(path)


def test_the_engine_answers_as_with_the_dtype_named(checkpoint: Path) -> None:
    prompts, params = ["The capital of France is", "Monday Tuesday"], SamplingParams(max_new_tokens=24, temperature=0)
    texts = []
    for memory in ({}, {"kv_dtype": "fp8_e4m3"}):
        with make_llm(checkpoint, memory=memory, threads=1) as llm:
            executor: Any = llm.loop.executor
            (store,) = pools_of(executor.rank.engine.pool)
            assert store.dtype is torch.float8_e4m3fn
            for layer in range(LAYERS):
                scales = store.tensors(layer).scales
                assert scales is not None
                assert scales[0].unique().item() == pytest.approx(0.05 + layer / 100)
                assert scales[1].unique().item() == pytest.approx(0.02 + layer / 100)
            texts.append([output.token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_scales_of_keys_and_values_are_not_for_latents() -> None:
    """Latents in 8 bits get scales computed when they are stored, and only where config asks for them."""
    latents = CacheGroup(2, 1, 576, CacheGroupKind.LATENT, value_dim=512)
    info = SimpleNamespace(quantization={"kv_cache_quant_algo": "FP8"}, cache_groups=(latents,))
    found = with_fp8(Config(), Machine("cpu", None, "cpu", "cpu"), cast("ModelChoice", SimpleNamespace(info=info)))
    assert isinstance(found, str)
    assert found.startswith("a latent (MLA) gets a scale computed when it is stored")
