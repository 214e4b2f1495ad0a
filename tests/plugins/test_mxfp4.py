"""Test MXFP4 experts: checkpoints as gpt-oss is published, quantization while loading, ranks, and refusals.

Run: python -m pytest tests/plugins/test_mxfp4.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.interfaces.quantization import ExpertWeightsShape, Quantization, QuantizationContext
from dovetail.layers.expert_targets import FusedLayout, OneExpert
from dovetail.layers.transforms import Reshape
from dovetail.registry.specs import ComponentKind
from dovetail.testing.quantized_experts import LayerOfExperts, QuantizedExpertsSuite
from dovetail_quantization.config import Mxfp4Config
from dovetail_quantization.mxfp4 import Mxfp4, Mxfp4Experts
from dovetail_quantization.mxfp4_formats import describe
from moe_suite import SMALL, randomise

CPU = torch.device("cpu")
PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 6, "num_experts_per_tok": 3}


def random_stored(experts: int, out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random blocks and scales as they are published."""
    blocks = torch.randint(256, (experts, out, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(121, 125, (experts, out, columns // 32), dtype=torch.uint8)


class TestMxfp4(QuantizedExpertsSuite):
    """The weights of checkpoints are random codes, which stand for the numbers that transformers makes of them."""

    kind: ClassVar[ComponentKind] = ComponentKind.QUANTIZATION
    name = "mxfp4"
    checkpoints: ClassVar = {"while loading": None, "published": PUBLISHED}
    fused_layout = FusedLayout(transposed=True, interleaved=True)
    loss = 0.2

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", list(self.checkpoints))

    def make(self, checkpoint: Mapping[str, Any] | None, dtype: torch.dtype = torch.float32) -> Quantization:
        return self.build(QuantizationContext(checkpoint, dtype, CPU))

    def store_experts(
        self, checkpoint: Mapping[str, Any], name: str, weight: torch.Tensor
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        blocks, scales = random_stored(*weight.shape)
        exact = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).mT
        if name.endswith("gate_up_proj"):
            exact = torch.cat((exact[:, 0::2], exact[:, 1::2]), 1)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, exact

    # published checkpoints have no tensors of their own for each expert
    def expert_layers(self, case: str, fused: bool = False, *args: Any, **more: Any) -> list[LayerOfExperts]:
        return super().expert_layers(case, fused or case == "published", *args, **more)

    def write_experts(self, case: str, directory: Path, fused: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return super().write_experts(case, directory, fused or case == "published", seed)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Write a checkpoint as gpt-oss is published, and return transformers' model with the same weights."""
    directory = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **SMALL | SIZES, sliding_window=7, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    model: Any = transformers.GptOssForCausalLM(config).eval()
    randomise(model)
    for layer in model.model.layers:
        for parameter in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            experts, columns, out = parameter.shape
            parameter.stored = random_stored(experts, out, columns)
            parameter.data = convert_moe_packed_tensors(*parameter.stored, dtype=torch.float32)
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "stored"):
            del tensors[name]
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = parameter.stored
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    whole = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": PUBLISHED}
    (directory / "config.json").write_text(json.dumps(whole))
    return directory, model


def engine(directory: Path, **sections: Any) -> LLM:
    return LLM(
        str(directory),
        memory={"page_size": 8, "num_pages": 60},
        device="cpu",
        grammar="none",
        **{"threads": 1} | sections,
    )


@torch.inference_mode()
def compare(llm: LLM, model: Any) -> None:
    """Compare the log-probabilities of greedy outputs with those of transformers."""
    prompts = [[5, 17, 3], list(range(40)), [7] * 20]
    outputs = llm.generate(prompts, SamplingParams(max_new_tokens=8, temperature=0, logprobs=3, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        given = prompt + list(output.token_ids)
        expected = model(torch.tensor([given])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert list(output.token_ids) == expected.argmax(-1).tolist()
        got = [entry.logprob for entry in output.logprobs]
        assert got == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)


def test_a_published_checkpoint_in_the_engine(published: tuple[Path, Any]) -> None:
    directory, model = published
    llm = engine(directory, scheduler={"chunk_size": 16})
    compare(llm, model)
    llm.close()


@pytest.mark.parametrize("experts", [pytest.param("tp", marks=pytest.mark.full), "ep"])
def test_two_ranks_divide_a_published_checkpoint(published: tuple[Path, Any], experts: str) -> None:
    directory, model = published
    llm = engine(directory, parallel={"tp": 2, "experts": experts})
    try:
        compare(llm, model)
    finally:
        llm.close()


def test_a_missing_or_wrong_tensor_is_named(published: tuple[Path, Any], tmp_path: Path) -> None:
    directory, _ = published
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(directory / "model.safetensors")
    scales = tensors.pop(name)
    for change, message in (
        ({}, name),
        ({name: scales.float()}, rf"{name} is torch.float32; supported: torch.uint8"),
        ({name: scales[:, :32].contiguous()}, name),
        ({name: scales.clone().index_fill_(1, torch.tensor([3]), 255)}, f"{name} has the MXFP4 scale no number"),
    ):
        save_file({**tensors, **change}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            engine(tmp_path)


def method(dtype: torch.dtype = torch.float32, size: int = 64, online: bool = False) -> Mxfp4Experts:
    checkpoint = None if online else PUBLISHED
    chosen = Mxfp4(Mxfp4Config(), QuantizationContext(checkpoint, dtype, CPU))
    found = chosen.experts_method(ExpertWeightsShape(("experts.gate_up_proj", "experts.down_proj"), 2, 64, size))
    assert isinstance(found, Mxfp4Experts)
    return found


def test_what_is_not_possible_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"48 intermediate values.*multiples of 32.*parallel\.experts: ep"):
        method(size=48)
    for transform in (None, Reshape((2, 128, 64)), OneExpert(FusedLayout())):
        with pytest.raises(ConfigError, match=r"experts\.gate_up_proj is stored otherwise than in gpt-oss"):
            list(method().targets("experts.gate_up_proj", WeightTarget("gate_up", transform=transform)))
    layout = OneExpert(FusedLayout(transposed=True))
    for dtype, largest in ((torch.bfloat16, 191), (torch.float16, 128)):
        (_, (_, target)) = method(dtype).targets("experts.down_proj", WeightTarget("down", transform=layout))
        assert target.transform is not None
        scales = torch.zeros(1, 64, 2, dtype=torch.uint8)
        scales[0, 5, 1] = largest
        target.transform.apply(scales, (64, 2))
        scales[0, 5, 1] += 1
        with pytest.raises(
            WeightsError, match=rf"experts\.down_proj_scales.* 2 \*\* {largest - 126}.* 2 \*\* {largest - 127}$"
        ):
            target.transform.apply(scales, (64, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_quantized(value: float) -> None:
    weight = torch.ones(128, 64)
    weight[5, 7] = value
    _, (name, target) = method(online=True).targets("experts.3.up_proj.weight", WeightTarget("gate_up", 0, 128))
    assert target.transform is not None
    with pytest.raises(WeightsError, match=rf"{name} has numbers that are infinite or NaN"):
        target.transform.apply(weight, (128, 2))


def test_layers_that_are_left_out() -> None:
    names = tuple(f"model.layers.3.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
    shape = ExpertWeightsShape(names, 2, 64, 64)
    context = QuantizationContext(None, torch.float32, CPU)
    assert Mxfp4(Mxfp4Config(ignore=(r"model\.layers\.3\..*",)), context).experts_method(shape) is None
    with pytest.raises(
        ConfigError, match=r"leaves out model\.layers\.3\.mlp\.experts\.down_proj, but not the other modules"
    ):
        Mxfp4(Mxfp4Config(ignore=(".*down_proj",)), context).experts_method(shape)
    listed = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.3"]}
    context = QuantizationContext(listed, torch.float32, CPU)
    assert Mxfp4(Mxfp4Config(), context).experts_method(shape) is None


def test_other_checkpoints_and_settings_are_refused() -> None:
    assert describe(PUBLISHED, Mxfp4Config()) is None
    for checkpoint, config, message in (
        ({"quant_method": "fp8"}, Mxfp4Config(), "quant_method is 'fp8'; implemented: 'mxfp4'"),
        ({**PUBLISHED, "modules_to_not_convert": "lm_head"}, Mxfp4Config(), "a list of names"),
        (PUBLISHED, Mxfp4Config(ignore=("a",)), "quantization.ignore is set"),
    ):
        assert message in str(describe(checkpoint, config))


def test_shares_of_ranks_follow_the_stored_dimensions() -> None:
    """The unquantized tensor is ``[experts, in, out]``, the stored ones ``[experts, out, in / 32]``."""
    layout = OneExpert(FusedLayout(transposed=True))
    weight = WeightTarget("down", 64, 64, (TensorShare(0, 1, 1, 6), TensorShare(1, 64, 64, 128)), layout)
    for _, target in method().targets("experts.down_proj", weight):
        assert target.shares == (TensorShare(0, 1, 1, 6), TensorShare(2, 2, 2, 4))
        assert (target.start, target.size) == (64, 64)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SMALL)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="quantization Mxfp4 leaves out every layer of LlamaForCausalLM"):
        engine(tmp_path, quantization="mxfp4")


def test_memory_that_nothing_has_filled_is_prepared() -> None:
    """The kernels of a step are noted before weights are loaded."""
    own = method()
    parameters = {name: torch.full(shape, 255, dtype=kind) for name, (shape, kind) in own.parameters().items()}
    assert own.prepare(parameters).format == "mxfp4"
