"""Test that adapters of PEFT are read, and that what is wrong or not implemented is refused by name.

.venv/bin/python -m pytest -q tests/core/test_peft_adapters.py
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.engine.peft import read_adapter
from dovetail.errors import WeightsError
from lora_adapters import write_adapter, write_tensors

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SHAPES = {Q: (12, 8), DOWN: (8, 20)}


def test_ranks_and_scales_follow_the_config(tmp_path):
    write_adapter(tmp_path, SHAPES, rank=4, alpha=6, ranks={"q_proj": 2}, alphas={r"model\.layers\.\d+\.mlp\..*": 10})
    adapter = read_adapter(tmp_path)
    assert adapter.rank == 4
    assert {name: (pair.rank, pair.scale) for name, pair in adapter.modules.items()} == {Q: (2, 3.0), DOWN: (4, 2.5)}
    assert adapter.modules[Q].a.shape == (2, 8)
    assert adapter.modules[Q].b.shape == (12, 2)


def test_rslora_divides_by_the_root_of_the_rank(tmp_path):
    write_adapter(tmp_path, SHAPES, rank=4, alpha=6, use_rslora=True)
    assert read_adapter(tmp_path).modules[Q].scale == 6 / math.sqrt(4)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("q_proj", {Q}),
        ("proj", set()),  # a key is the end of a name from a dot on
        ("^model.*", {Q, DOWN}),
        ("^layers.*", set()),
        ("self_attn.q_proj", {Q}),
        (r"layers\.(1|2)\..*", set()),
        (r"(q|down)_proj", {Q, DOWN}),
    ],
)
def test_keys_of_patterns_mean_what_they_mean_in_peft(tmp_path, key, names):
    write_adapter(tmp_path, SHAPES, rank=4, alpha=4, alpha_pattern={key: 12})
    scales = {name: pair.scale for name, pair in read_adapter(tmp_path).modules.items()}
    assert scales == {name: 3.0 if name in names else 1.0 for name in SHAPES}


@pytest.mark.parametrize("targets", [r".*\.(q_proj|down_proj)", "all-linear", None, [Q, "down_proj"]])
def test_target_modules_have_all_forms_of_peft(tmp_path, targets):
    write_adapter(tmp_path, SHAPES, target_modules=targets)
    assert set(read_adapter(tmp_path).modules) == set(SHAPES)


@pytest.mark.parametrize("rank", [1, 256])
def test_ranks_from_1_to_256_are_read(tmp_path, rank):
    write_adapter(tmp_path, SHAPES, rank=rank, dtype=torch.bfloat16)
    assert read_adapter(tmp_path).rank == rank


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("use_dora", True, "DoRA"),
        ("lora_bias", True, "lora_bias"),
        ("bias", "all", "bias 'all'"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("layer_replication", [[0, 2]], "layer_replication"),
        ("trainable_token_indices", [1], "trainable_token_indices"),
        ("target_parameters", [1], "target_parameters"),
        ("init_lora_weights", "pissa_niter_16", "path_initial_model_for_weight_conversion"),
        ("peft_type", "LOHA", "peft_type 'LOHA'"),
        ("peft_type", None, "peft_type None"),
        ("r", 0, "r is 0"),
        ("r", 257, "from 1 to 256"),
        ("r", "8", "r is '8'"),
        ("r", True, "r is True"),
        ("r", 8, r"matrices of .* and .*; the rank in adapter_config.json is 8"),
        ("lora_alpha", 1e300, "lora_alpha is 1e\\+300"),
        ("lora_alpha", [], "lora_alpha"),
        ("use_rslora", "yes", "use_rslora"),
        ("target_modules", ["k_proj"], "target_modules in adapter_config.json does not name"),
        ("target_modules", {"q_proj": 1}, "target_modules"),
        ("rank_pattern", [1], "rank_pattern"),
        ("rank_pattern", {"q_proj": 1000}, "rank_pattern"),
        ("alpha_pattern", {"(?=q)_proj": 1}, "look-ahead"),
        ("alpha_pattern", {"(": 1}, "alpha_pattern"),
        ("alpha_pattern", {f"(a|{i})": 1 for i in range(40)}, "more than 32 regular expressions"),
        ("alpha_pattern", {str(i): 1 for i in range(2000)}, "at most 1024"),
    ],
)
def test_what_is_wrong_or_not_implemented_is_refused_by_name(tmp_path, field, value, text):
    write_adapter(tmp_path, SHAPES, **{field: value} if field not in ("r", "lora_alpha") else {})
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {field: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=text):
        read_adapter(tmp_path)


def test_expressions_cannot_take_long(tmp_path):
    write_adapter(
        tmp_path, {"a" * 200 + ".q_proj": (4, 4)}, alphas={"(a*)*(a*)*(a*)*b": 1}, target_modules="all-linear"
    )
    assert read_adapter(tmp_path).rank == 4  # a backtracking matcher would not end


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight.*whole module"),
        (
            lambda t: t.update({"base_model.model.embed.lora_embedding_A": torch.ones(2, 2)}),
            "lacks the other matrix of embed",
        ),
        (lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(2, 2)}), "no matrices of it"),
        (lambda t: t.update({f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(2)}), "DoRA"),
        (lambda t: t.pop(f"base_model.model.{Q}.lora_B.weight"), "lacks the other matrix of"),
        (lambda t: t.update({f"base_model.model.{Q}.lora_A.weight": torch.ones(4, 8, dtype=torch.int32)}), "int32"),
        (lambda t: t.update({f"base_model.model.{Q}.lora_A.weight": torch.ones(4)}), "two dimensions"),
        (lambda t: t.update({f"base_model.model.{Q}.lora_A.weight": torch.ones(0, 8)}), "two dimensions"),
        (lambda t: t.update({f"base_model.model.{Q}.lora_A.default.weight": torch.ones(4, 8)}), "twice"),
        (lambda t: t.clear(), "no tensors"),
    ],
)
def test_tensors_that_are_wrong_are_refused_by_name(tmp_path, change, text):
    write_adapter(tmp_path, SHAPES)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=text):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("adapter_config.json", b"[1]", "instead of an object"),
        ("adapter_config.json", b"[" * 100_000, "not valid JSON"),
        ("adapter_config.json", b"\xff\xfe", "cannot be read"),
        ("adapter_config.json", None, "an adapter saved by PEFT is expected"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors"),
        ("adapter_model.safetensors", b"", "not a valid safetensors file"),
        ("adapter_model.safetensors", b"\xff" * 64, "not a valid safetensors file"),
        ("adapter_model.safetensors", (1 << 62).to_bytes(8, "little") + b"{}", "not a valid safetensors file"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, content, text):
    write_adapter(tmp_path, SHAPES)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=text):
        read_adapter(tmp_path)


def test_a_config_of_any_size_is_not_read(tmp_path):
    write_adapter(tmp_path, SHAPES)
    with (tmp_path / "adapter_config.json").open("r+b") as opened:
        opened.truncate(1 << 40)  # a sparse file
    with pytest.raises(WeightsError, match="has 1099511627776 bytes; allowed: at most"):
        read_adapter(tmp_path)


def test_pickled_adapters_are_not_read(tmp_path):
    write_adapter(tmp_path, SHAPES)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(WeightsError, match="could run code"):
        read_adapter(tmp_path)


def test_names_of_early_versions_are_read(tmp_path):
    write_adapter(tmp_path, SHAPES)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    renamed = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "adapter_model.safetensors")
    assert set(read_adapter(tmp_path).modules) == set(SHAPES)


def test_parameters_of_experts_are_distinguished_from_modules(tmp_path):
    tensors = {
        "m.experts.base_layer.lora_A.weight": torch.ones(12, 5),
        "m.experts.base_layer.lora_B.weight": torch.ones(8, 12),
        "m.experts.lora_A.weight": torch.ones(6, 4),
        "m.experts.lora_B.weight": torch.ones(5, 6),
        "m.gate.lora_A.weight": torch.ones(2, 5),
        "m.gate.lora_B.weight": torch.ones(3, 2),
        "embed.lora_embedding_A": torch.ones(2, 9),
        "embed.lora_embedding_B": torch.ones(5, 2),
        "embed.base_layer.weight": torch.ones(9, 5),
    }
    names = ["down_proj", "gate.weight", "gate_up_proj"]
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {"gate.weight": 6}}
    write_tensors(tmp_path, tensors, r=2, lora_alpha=2, target_parameters=names, target_modules=["embed"], **patterns)
    adapter = read_adapter(tmp_path)
    assert {name: (pair.rank, pair.scale) for name, pair in adapter.modules.items()} == {
        "m.gate": (2, 3.0),
        "embed": (2, 1.0),
    }
    assert {name: [pair.a.shape for pair in pairs] for name, pairs in adapter.stacked.items()} == {
        "m.experts": [(12, 5), (6, 4)]
    }
    assert list(adapter.copies) == ["embed"]
    assert adapter.rank == 4
    assert adapter.config.version == (0, 21)
