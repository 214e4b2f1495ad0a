"""Test weights of bitsandbytes: the conformance suite, models against transformers with the dequantized weights, refusals, and, where it
is installed, the functions of bitsandbytes itself.

Run: python -m pytest tests/plugins/test_bitsandbytes.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.bnb_checkpoints import MAPS, config, store

from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.interfaces.quantization import LinearShape, QuantizationContext
from dovetail.testing.quantization import QuantizationSuite
from dovetail_quantization.bnb import Bitsandbytes
from dovetail_quantization.bnb_formats import describe
from dovetail_quantization.bnb_tensors import TABLES, MatrixPart, PackedCodes, QuantState
from dovetail_quantization.config import BitsandbytesConfig
from dovetail_quantization.table_weights import code_bytes

FORMATS: dict[str, dict[str, Any]] = {
    "nf4, double": config("nf4", double=True),
    "fp4": config("fp4", llm_int8_skip_modules=["lm_head"]),
    "int8": config("int8"),
}


class TestBitsandbytes(QuantizationSuite):
    name = "bitsandbytes"
    checkpoints: ClassVar = FORMATS
    optional = ("weight_format",)

    def store(self, checkpoint: Mapping[str, Any], module: str, weight: torch.Tensor) -> Any:
        return store(dict(checkpoint), module, weight)


def shape_of(columns: int = 128, **more: Any) -> LinearShape:
    return LinearShape(("body.q_proj", "body.k_proj"), (64, 32), columns, **more)


def method(given: dict[str, Any], shape: LinearShape) -> Any:
    return Bitsandbytes(BitsandbytesConfig(), QuantizationContext(given, torch.float32, torch.device("cpu"))).method(
        shape
    )


def test_what_is_left_out_and_what_is_refused() -> None:
    given = config("nf4", llm_int8_skip_modules=["q_proj", "k_proj"])
    assert method(given, shape_of()) is None
    assert method(config("nf4"), LinearShape(("lm_head",), (64,), 128)) is None
    with pytest.raises(ConfigError, match=r"leaves out body\.q_proj, but not .*body\.k_proj"):
        method(config("nf4", llm_int8_skip_modules=["q_proj"]), shape_of())
    with pytest.raises(
        ConfigError, match=r"body\.q_proj has 96 columns on this rank, which blocks of 64 do not divide"
    ):
        method(config("nf4"), shape_of(96))
    for wrong, reason in (
        (None, "not quantized"),
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        (config("nf4", bnb_4bit_quant_type="af4"), "bnb_4bit_quant_type is 'af4'"),
        (config("nf4", load_in_8bit=True), "load_in_4bit is True and load_in_8bit is True"),
        (config("int8", llm_int8_has_fp16_weight=True), "llm_int8_has_fp16_weight is True"),
    ):
        assert reason in str(describe(wrong, BitsandbytesConfig()))


SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1}  # fmt: skip


EVERY = r".*_proj\.weight|.*\.mlp\.gate\.weight"
"""The weights of linear layers; in version 4 of transformers routers and experts consist of such layers."""
LATER = r".*self_attn.*_proj\.weight"
"""Those of a model with experts in version 5."""


def write(directory: Path, form: str, quantized: str = EVERY, *, experts: bool = False) -> Any:
    """Write a random model in a format, and return transformers' model with the weights that the checkpoint stands for."""
    import transformers

    torch.manual_seed(0)
    shape = transformers.LlamaConfig(**SIZES)
    if experts:
        own: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
        shape = transformers.Qwen3MoeConfig(**SIZES, **own, norm_topk_prob=True)
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    model.save_pretrained(directory / "exact")
    tensors = load_file(directory / "exact" / "model.safetensors")
    stored = dict(tensors)
    for key in [key for key in tensors if re.fullmatch(quantized, key)]:
        del stored[key]
        made, tensors[key] = store(FORMATS[form], key.removesuffix(".weight"), tensors[key])
        stored |= made
    save_file(tensors, directory / "exact" / "model.safetensors", {"format": "pt"})
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
    text = json.loads((directory / "exact" / "config.json").read_text()) | {"quantization_config": FORMATS[form]}
    (directory / "config.json").write_text(json.dumps(text))
    return transformers.AutoModelForCausalLM.from_pretrained(directory / "exact", attn_implementation="eager").eval()


@torch.inference_mode()
def compare(directory: Path, model: Any, **sections: Any) -> None:
    """Compare the log-probabilities of greedy outputs with those of transformers."""
    from dovetail import LLM, SamplingParams

    memory = {"page_size": 8, "num_pages": 60}
    llm = LLM(str(directory), memory=memory, threads=1, device="cpu", grammar="none", **sections)
    try:
        prompts = [[5, 17, 3], list(range(40))]
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=6, temperature=0, logprobs=1, ignore_eos=True))
    finally:
        llm.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = (
            model(torch.tensor([prompt + list(output.token_ids)])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        )
        assert list(output.token_ids) == expected.argmax(-1).tolist()
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "form", ["nf4, double", *(pytest.param(form, marks=pytest.mark.full) for form in ("fp4", "int8"))]
)
def test_models_compute_with_the_weights_of_the_checkpoint(tmp_path: Path, form: str) -> None:
    compare(tmp_path, write(tmp_path, form))


@pytest.mark.parametrize(
    ("form", "quantized"),
    [
        ("nf4, double", EVERY),
        ("nf4, double", LATER),
        *(pytest.param(form, EVERY, marks=pytest.mark.full) for form in ("fp4", "int8")),
    ],
)
def test_experts_are_what_the_checkpoint_has(tmp_path: Path, form: str, quantized: str) -> None:
    compare(tmp_path, write(tmp_path, form, quantized, experts=True))


@pytest.mark.full
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_two_ranks_divide_experts(tmp_path: Path, experts: str) -> None:
    kept = r".*_proj\.weight"  # with routers in 16 bits, which version 4 has for some models
    model = write(tmp_path, "int8" if experts == "tp" else "nf4, double", kept, experts=True)
    compare(tmp_path, model, parallel={"tp": 2, "experts": experts})


def test_a_layer_of_which_some_experts_are_quantized_is_refused(tmp_path: Path) -> None:
    from dovetail import LLM

    write(tmp_path, "int8", r".*_proj\.weight(?<!experts.3.down_proj.weight)", experts=True)
    with pytest.raises(ConfigError, match=r"some modules of a layer, but not for .*experts\.3\.down_proj"):
        LLM(str(tmp_path), device="cpu", grammar="none", memory={"num_pages": 8})


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
def test_two_ranks_divide_a_checkpoint(tmp_path: Path, form: str) -> None:
    compare(tmp_path, write(tmp_path, form), parallel={"tp": 2})


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    from dovetail import LLM

    write(tmp_path, "nf4, double")
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    bad = {
        f"{name}.quant_map": (MAPS["fp4"], "has other numbers than those of nf4"),
        f"{name}.nested_absmax": (tensors[f"{name}.nested_absmax"] / 0, "has scales that are infinite or NaN"),
        f"{name}.absmax": (
            tensors[f"{name}.absmax"][::2],
            r"has 256 numbers; a weight of 128 x 256 has 512.*quantization\.block_size",
        ),
        f"{name}.quant_state.bitsandbytes__nf4": (
            torch.tensor([123, 34], dtype=torch.uint8),
            "is no text that describes",
        ),
        name: (tensors[name][1:], r"has \d+ numbers; a weight of 128 x 256 has 16384"),
    }
    for key, (tensor, message) in bad.items():
        save_file(tensors | {key: tensor.contiguous()}, file)
        with pytest.raises(WeightsError, match=rf"{re.escape(key)} {message}"):
            LLM(str(tmp_path), device="cpu", grammar="none", threads=1)
    other, _ = store(FORMATS["nf4, double"], name.removesuffix(".weight"), torch.randn(128, 256), block=128)
    save_file(tensors | {key: tensor.contiguous() for key, tensor in other.items()}, file)
    with pytest.raises(WeightsError, match=r"quantization\.block_size"):
        LLM(str(tmp_path), device="cpu", grammar="none", threads=1)


def test_texts_and_codes_of_any_shape_are_checked_before_they_are_used() -> None:
    part = MatrixPart("w", TensorShare(0, 0, 2, 2), TensorShare(1, 0, 64, 64))
    given = {"quant_type": "nf4", "blocksize": 64, "shape": [2, 64], "nested_blocksize": 256, "nested_offset": 0.5}

    def read(state: Any) -> torch.Tensor:
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return QuantState(part, "nf4", 64, True).apply(text, (1, 1))

    assert read(given).item() == 0.5
    for offset in (1e300, -1e300, float("nan"), float("inf")):
        with pytest.raises(WeightsError, match="a finite number of float32"):
            read(given | {"nested_offset": offset})
    with pytest.raises(WeightsError, match="has at most 65536"):
        read(given | {"other": "x" * 70000})
    codes, size = torch.arange(64, dtype=torch.uint8), (2, code_bytes(64))
    expected = PackedCodes(part).apply(codes, size)
    for dtype in (torch.int8, torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(PackedCodes(part).apply(codes.view(dtype)[:, None], size), expected)
    with pytest.raises(WeightsError, match="has 4 numbers; a weight of 2 x 64 has 64"):
        PackedCodes(part).apply(torch.tensor(1.0), size)


def test_tables_and_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(96, 128) * 0.1
    for kind in ("nf4", "fp4"):
        assert torch.equal(functional.get_4bit_type(kind, device="cpu"), torch.tensor(TABLES[kind]))
        for double in (False, True):
            data, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=double)
            tensors = {"q.weight": data} | {
                f"q.weight.{name}": value for name, value in state.as_dict(packed=True).items()
            }
            shape = LinearShape(("q",), (96,), 128)
            own = method(config(kind, double=double, llm_int8_skip_modules=[]), shape)
            parameters = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in own.parameters().items()}
            for name, target in own.targets("q", WeightTarget("weight", 0, 96)):
                place = parameters[target.parameter][target.start : target.start + target.size]
                place.copy_(target.transform.apply(tensors[name], tuple(place.shape)))
            expected = functional.dequantize_4bit(data, state)
            torch.testing.assert_close(own.dequantized(parameters), expected, rtol=1e-6, atol=1e-8)
