"""Test quantized models on two GPUs: each rank holds its share of codes and scales, and the log-probabilities of given texts
are those of one GPU up to the rounding of sums.

Run on a machine with two GPUs: python -m pytest tests/gpu/test_quantized_ranks_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from dovetail import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
VOCAB = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.04,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**COMMON),
    "qwen3_moe": Qwen3MoeConfig(**COMMON, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
}
INTEGERS = [{"kind": "integer", "bits": 8}, {"kind": "integer", "bits": 4, "group_size": 128}]


def scored(checkpoint: Path, quantization: Any, ranks: int) -> torch.Tensor:
    """Return the log-probabilities of the tokens of texts of many lengths, in one row of numbers."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (2, 9, 17, 70, 300, 700)]
    params = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=1)
    with LLM(
        model={"path": str(checkpoint), "dtype": "bfloat16"}, device="cuda:0", parallel={"tp": ranks},
        quantization=quantization, grammar="none", memory={"kv_gib": 1},
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, params)
        llm.loop.scheduler.check_integrity()
    return torch.tensor([one.logprob for output in outputs for one in (output.prompt_logprobs or [])[1:]])


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of random weights and return its directory."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(path)
    return path


@pytest.mark.parametrize("quantization", INTEGERS, ids=["int8", "int4"])
def test_integers_on_two_devices_score_what_one_does(checkpoint: Path, quantization: Any) -> None:
    """Each number of a weight has the same scale on two ranks, and only sums are rounded otherwise."""
    one, two = (scored(checkpoint, quantization, ranks) for ranks in (1, 2))
    assert one.std() > 0.3, "the texts tell nothing: all tokens are equally likely"
    assert (one - two).abs().mean() < 0.03 * one.std()


def test_fp8_on_two_devices_scores_what_one_does(checkpoint: Path) -> None:
    """Each rank quantizes its share of a row of a weight, and of activations, with scales of its own. Two such roundings differ by no
    more than each of them differs from the unquantized model, times the square root of 2; the limit is 1.5."""
    plain, one, two = (scored(checkpoint, *given) for given in (("none", 1), ("fp8", 1), ("fp8", 2)))
    assert (one - two).abs().mean() < 1.5 * (one - plain).abs().mean()
