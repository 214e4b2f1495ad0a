"""Test ``dovetail quantize``: what it writes is read back, by Dovetail and by rules of the format, and what it refuses.

Run: python -m pytest tests/core/test_quantize_command.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import dovetail.quantize.calibration as calibration
from dovetail import LLM, SamplingParams
from dovetail.cli.app import build_app
from dovetail.errors import ConfigError
from dovetail.gguf.directory import gguf_directory
from dovetail.ops.integers import Integers, dequantize, quantize
from dovetail.quantize.gptq import gptq
from dovetail.quantize.schemes import WritingScheme, packed
from dovetail.quantize.writer import QuantizeJob, write_quantized
from integer_checkpoints import pack
from moe_suite import SMALL
from tiny_gguf import write_tiny

SIZES: dict[str, Any] = SMALL | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
SCHEMES = {
    "fp8": WritingScheme("fp8", None),
    "int8": WritingScheme("int8", None),
    "w8a16": WritingScheme("w8a16", None),
    "int4": WritingScheme("int4", 32),
    "int4, asymmetric": WritingScheme("int4", 32, symmetric=False),
}
LOSSES = {"fp8": 0.03, "int8": 0.01, "w8a16": 0.01}
FEW = ("int4, asymmetric", "int8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Llama in bfloat16, in several files."""
    directory = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16()
    model.save_pretrained(directory, max_shard_size="60KB")
    (directory / "merges.txt").write_text("kept")
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def logprob(directory: Path, **sections: Any) -> Any:
    llm = LLM(
        str(directory), device="cpu", grammar="none", threads=1, model={"dtype": "float32"},
        memory={"page_size": 8, "num_pages": 20}, **sections,
    )  # fmt: skip
    try:
        (output,) = llm.generate(
            [[5, 17, 3]], SamplingParams(max_new_tokens=3, temperature=0, logprobs=1, ignore_eos=True)
        )
    finally:
        llm.close()
    return [entry.logprob for entry in output.logprobs]


def exact_weight(stored: dict[str, torch.Tensor], name: str, scheme: WritingScheme) -> torch.Tensor:
    """Return the weight that stored tensors stand for, by the rules of compressed-tensors."""
    scale = stored[f"{name}.weight_scale"].float()
    if not scheme.packed:
        return stored[f"{name}.weight"].float() * scale
    bits, middle = scheme.bits, 2 ** (scheme.bits - 1)

    def unpacked(tensor: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 32, bits)
        return ((tensor[..., None].long() >> shifts) & (2**bits - 1)).flatten(1).float()

    numbers = unpacked(stored[f"{name}.weight_packed"])
    zeros = torch.full_like(scale, middle)
    if not scheme.symmetric:
        zeros = unpacked(stored[f"{name}.weight_zero_point"].T).T
    repeat = numbers.shape[1] // scale.shape[1]
    return (numbers - zeros.repeat_interleave(repeat, 1)) * scale.repeat_interleave(repeat, 1)


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FEW else pytest.mark.full) for one in SCHEMES])
def test_what_is_written_is_read_back(source: Path, tmp_path: Path, name: str) -> None:
    """Weights are near the original ones, other tensors the same, and Dovetail computes with what is stored."""
    scheme, target = SCHEMES[name], tmp_path / "target"
    left_out = "model.layers.0.mlp.down_proj"
    errors = write_quantized(QuantizeJob(source, target, scheme, ("model\\.layers\\.0\\.mlp\\.down_proj",)))
    before, stored = tensors_of(source), tensors_of(target)
    assert len(errors) == 13
    exact = dict(before)
    for error in errors:
        weight = exact_weight(stored, error.name, scheme)
        exact[f"{error.name}.weight"] = weight
        whole = before[f"{error.name}.weight"].float()
        lost = float((weight - whole).square().mean().sqrt() / whole.square().mean().sqrt())
        assert error.relative == pytest.approx(lost, rel=1e-3)
        assert 0 < lost < LOSSES.get(name, 0.12)
    for kept in (f"{left_out}.weight", "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert stored[kept].equal(before[kept])
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {left_out, "lm_head"}
    assert (target / "merges.txt").read_text() == "kept"
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored.keys()
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert {key for key, own in index.items() if own == file.name} == set(opened.keys())
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text((source / "config.json").read_text())
    save_file({key: tensor.float().contiguous() for key, tensor in exact.items()}, dense / "model.safetensors")
    assert logprob(target) == pytest.approx(logprob(dense), abs=0.05 if name == "int8" else 1e-4)


def test_numbers_are_packed_as_by_the_format() -> None:
    for bits in (4, 8):
        numbers = torch.randint(0, 2**bits, (5, 44), dtype=torch.uint8)
        assert packed(numbers, bits).equal(pack(numbers.numpy(), bits))


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 32, True), (4, 64, False), (8, 96, True), (4, 192, True)])
def test_gptq_changes_outputs_less_than_rounding(bits: int, group: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 192), torch.randn(400, 192) @ (torch.randn(192, 192) / 4 + torch.eye(192))
    x[:, 7] = 0
    before = weight.clone()
    made = gptq(weight, x.T @ x, bits, group, symmetric=symmetric)
    assert weight.equal(before)
    assert (made.bits, made.group, made.zeros is None) == (bits, group, symmetric)
    nearest = quantize(weight, bits, group, symmetric=symmetric)

    def lost(found: Integers) -> float:
        return float((x @ (dequantize(found, torch.float32) - weight).T).square().mean())

    assert lost(made) < 0.7 * lost(nearest)


def test_calibration_rounds_every_layer(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of the model, on the texts, change less than by rounding to the nearest."""
    torch.manual_seed(0)
    rows = [torch.randint(0, 100, (1, 64)) for _ in range(12)]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        exact = torch.cat([model(row).logits for row in rows])
    monkeypatch.setattr(calibration, "_model", lambda source, texts: (model, rows))
    scheme, changes = SCHEMES["int4"], []
    job = QuantizeJob(source, tmp_path / "gptq", scheme)
    write_quantized(job, calibration.calibrated(job, tmp_path / "texts"))
    write_quantized(QuantizeJob(source, tmp_path / "nearest", scheme))
    for found in ("gptq", "nearest"):
        stored = tensors_of(tmp_path / found)
        for name, module in model.named_modules():
            if f"{name}.weight_packed" in stored:
                module.weight.data = exact_weight(stored, name, scheme)
        with torch.no_grad():
            changes.append(float((torch.cat([model(row).logits for row in rows]) - exact).square().mean()))
    assert changes[0] < 0.8 * changes[1]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(arguments), list(arguments))


def test_the_command_reports_errors(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    found = run(
        "quantize", str(source), str(tmp_path / "out"), "--scheme", "w8a16", "--group-size", "32", "--report", str(file)
    )
    assert found.exit_code == 0, found.output
    assert "14 modules in w8a16" in found.output
    report = json.loads(file.read_text())
    assert report["scheme"] == {"kind": "w8a16", "group_size": 32, "symmetric": True}
    assert len(report["modules"]) == 14
    assert report["target_bytes"] < report["source_bytes"]


def test_what_is_not_possible_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = tmp_path / "target"

    def refused(scheme: WritingScheme, *ignore: str, place: Path = target, of: Path = source) -> str:
        with pytest.raises(ConfigError) as error:
            write_quantized(QuantizeJob(of, place, scheme, ignore))
        assert not target.exists()
        return str(error.value)

    assert "down_proj has 96 columns, which groups of 64" in refused(WritingScheme("int4", 64))
    assert "'layers' matches no module" in refused(SCHEMES["int4"], "layers")
    assert "no weight that is left" in refused(SCHEMES["int4"], ".*")
    assert "not an empty directory" in refused(SCHEMES["int4"], place=source)
    done = tmp_path / "done"
    write_quantized(QuantizeJob(source, done, SCHEMES["int8"]))
    assert "quantized already" in refused(SCHEMES["int4"], of=done)
    with pytest.raises(ConfigError, match="allowed: int8, w8a16, int4"):
        calibration.calibrated(QuantizeJob(source, target, SCHEMES["fp8"]), tmp_path / "texts")
    nowhere = str(tmp_path / "nowhere" / "report.json")
    wrong = (["--scheme", "fp8", "--asymmetric"], ["--group-size", "48"], ["--ignore", "("], ["--report", nowhere])
    for arguments in wrong:
        found = run("quantize", str(source), str(target), *arguments)
        assert isinstance(found.exception, ConfigError)
    assert "not a regular expression" in refused(SCHEMES["int4"], "(")
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot be written" in refused(SCHEMES["int4"], place=file / "target")
    assert "is a GGUF file" in refused(SCHEMES["int4"], of=gguf_directory(write_tiny(tmp_path / "tiny.gguf")))
    weight = torch.randn(32, 32)
    weight[3, 4] = torch.nan
    with pytest.raises(ConfigError, match=r"some\.weight has numbers that are infinite"):
        SCHEMES["int4"].quantized("some", weight)


def test_a_copy_that_fails_leaves_nothing(source: Path, tmp_path: Path) -> None:
    """The directory appears when it is complete, so that the same command can be given again."""

    def interrupt(error: object) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "target"
    with pytest.raises(KeyboardInterrupt):
        write_quantized(QuantizeJob(source, target, SCHEMES["int4"]), done=interrupt)
    assert not list(tmp_path.iterdir())
    target.mkdir()
    write_quantized(QuantizeJob(source, target, SCHEMES["int4"]))
    assert [file.name for file in tmp_path.iterdir()] == ["target"]
    assert target.stat().st_mode & 0o777 == 0o755


def test_calibration_without_tokens_is_refused(source: Path, tmp_path: Path) -> None:
    """Weights of layers that no token has reached would be rounded to 0."""
    texts, job = tmp_path / "texts", QuantizeJob(source, tmp_path / "target", SCHEMES["int4"])
    texts.write_text("some text\n")
    with pytest.raises(ConfigError, match="a checkpoint that transformers can load"):
        calibration.calibrated(job, texts)
    texts.write_text(" \n")
    with pytest.raises(ConfigError, match="has no text"):
        calibration.calibrated(job, texts)


def test_experts_are_quantized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64}
    source, target = tmp_path / "source", tmp_path / "target"
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).save_pretrained(source)
    errors = write_quantized(QuantizeJob(source, target, SCHEMES["int4"]))
    assert len(errors) == 2 * (4 + 4 * 3)
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.block_sparse_moe.gate" in config["ignore"]
    assert all(entry <= 0 for entry in logprob(target))
