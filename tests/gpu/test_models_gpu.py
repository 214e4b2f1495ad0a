"""Test the dense family on CUDA against the same weights on the CPU, eager attention, float32 and bfloat16.

Run on a GPU machine: python -m pytest tests/gpu/test_models_gpu.py
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.engine.build import ModelClass, WeightFiller, as_module
from dovetail.engine.weights import build_model, load_weights
from dovetail.interfaces.model import ModelArchitecture, ModelInfo
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail.testing.model import random_tokens
from dovetail.testing.model_rows import ModelRows
from dovetail_models.cohere import CohereModel
from dovetail_models.cohere_describe import describe_cohere2
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama, describe_mistral, describe_qwen2, describe_qwen3
from dovetail_models.gemma import GemmaModel
from dovetail_models.gemma3n import Gemma3nModel
from dovetail_models.gemma3n_describe import describe_gemma3n
from dovetail_models.gemma_describe import describe_gemma, describe_gemma2, describe_gemma3
from dovetail_models.glm import GlmModel
from dovetail_models.glm_describe import describe_glm4
from dovetail_models.olmo import OlmoModel
from dovetail_models.olmo_describe import describe_olmo2, describe_olmo3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
VARIANTS = {
    "gemma": (GemmaModel, describe_gemma(SMALL)),
    "gemma2": (GemmaModel, describe_gemma2({**SMALL, **SLIDING, **CAPS})),
    "gemma3": (GemmaModel, describe_gemma3({**SMALL, **SLIDING})),
    "gemma3n": (Gemma3nModel, describe_gemma3n({**SMALL, **GEMMA3N})),
    "olmo2": (OlmoModel, describe_olmo2(SMALL)),
    "olmo3": (OlmoModel, describe_olmo3({**SMALL, **SLIDING})),
    "glm4": (GlmModel, describe_glm4(SMALL)),
    "cohere2": (CohereModel, describe_cohere2({**SMALL, **SLIDING, "logit_scale": 0.5})),
}
INFOS = {
    "llama": describe_llama({**SMALL, "tie_word_embeddings": True}),
    "mistral": describe_mistral({**SMALL, "sliding_window": 6}),
    "qwen2": describe_qwen2(SMALL),
    "qwen3": describe_qwen3({**SMALL, "rope_scaling": YARN}),
}
WIDE = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 128}
FAMILIES = {
    "phi3": {**SMALL, "partial_rotary_factor": 0.5, "sliding_window": 6},
    "smollm3": {**SMALL, "no_rope_layers": [1, 0]},
    "granite": {**SMALL, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 2.0},
    "starcoder2": {**SMALL, "sliding_window": 6},
    "gpt2": WIDE,
    "gpt_neox": SMALL,
    "opt": {**SMALL, "ffn_dim": 96},
    "phi": SMALL,
    "gptj": {**WIDE, "rotary_dim": 8},
    "stablelm": SMALL,
    "falcon": {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2},
}
"""Map components of other families to the settings with which they are tested."""
EXPERTS = {**SMALL, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {**SMALL, "num_local_experts": 6, "num_experts_per_tok": 2}
LATENT = {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")} | {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MIXTURES = {
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v3": {**LATENT, "q_lora_rank": 48, "n_group": 4, "topk_group": 2},
    "mixtral": {**LOCAL, "sliding_window": 6},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "olmoe": {**SMALL, "num_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {
        **SMALL,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "minimax_m2": {**LOCAL, "rotary_dim": 8},
    "ernie_moe": {**SMALL, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
    "gpt_oss": {**LOCAL, "sliding_window": 6, "swiglu_limit": 0.5, "rope_scaling": YARN},
    "phi_moe": {**LOCAL, "lm_head_bias": True},
    "granite_moe": {**LOCAL, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "embedding_multiplier": 2.0},
    "llama4": {**LOCAL, "no_rope_layers": [1, 0], "floor_scale": 8, "intermediate_size_mlp": 80},
}
"""Map components of models with experts to the settings with which they are tested."""


def make_model(
    info: ModelInfo, device: str, dtype: torch.dtype, model_class: ModelClass = DenseModel
) -> ModelArchitecture:
    """Return a model with the same random weights on every device."""
    model = build_model(model_class, info, torch.device(device), dtype)
    filler = WeightFiller(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in filler.targets:
            tensor = torch.randn(filler.whole_shape(name), generator=generator) * 0.2
            filler.fill(name, lambda tensor=tensor: tensor)
    filler.finish()
    return model


@torch.inference_mode()
def run(model: ModelArchitecture, texts: Sequence[Sequence[int]], prefix: int) -> torch.Tensor:
    """Return logits of the tokens after ``prefix``: a prefill of all rows, then the last tokens one by one."""
    lens, found = [len(text) for text in texts], []
    rows = ModelRows(model, lens)
    for start, end in [(0, prefix), *((i, i + 1) for i in range(prefix, max(lens)))]:
        logits = rows.enter({r: text[start:end] for r, text in enumerate(texts) if lens[r] >= end})
        found += [logits[r] for r in sorted(logits)]
    return torch.cat(found).float().cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", [*INFOS, *VARIANTS])
def test_cuda_agrees_with_the_cpu(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model_class, info = VARIANTS.get(name) or (DenseModel, INFOS[name])
    texts = [random_tokens(info, 24, seed) for seed in range(3)]
    expected = run(make_model(info, "cpu", torch.float32, model_class), texts, 17)
    got = run(make_model(info, "cuda", dtype, model_class), texts, 17)
    assert (got - expected).pow(2).mean().sqrt() < tolerance * expected.pow(2).mean().sqrt()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES])
def test_families_on_cuda_agree_with_the_cpu(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """In bfloat16, rounding changes the choice of experts for some tokens."""
    spec = installed().get(ComponentKind.MODEL, name).spec
    assert spec.describe is not None
    if name in MIXTURES and dtype == torch.bfloat16:
        tolerance = 0.5
    info = load_attribute(spec.describe, name)({**FAMILIES, **MIXTURES}[name])
    model_class = load_attribute(spec.target, name)
    texts = [random_tokens(info, 24, seed) for seed in range(3)]
    expected = run(make_model(info, "cpu", torch.float32, model_class), texts, 17)
    got = run(make_model(info, "cuda", dtype, model_class), texts, 17)
    assert (got - expected).pow(2).mean().sqrt() < tolerance * expected.pow(2).mean().sqrt()


def test_dummy_weights_are_made_on_the_device(tmp_path: Path) -> None:
    first, second = (build_model(DenseModel, INFOS["llama"], torch.device("cuda"), torch.bfloat16) for _ in range(2))
    for model in (first, second):
        load_weights(model, tmp_path, "dummy", 7)
    pairs = zip(as_module(first).parameters(), as_module(second).parameters(), strict=True)
    assert all(a.is_cuda and a.equal(b) for a, b in pairs)


def test_weights_load_straight_to_the_device(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model: Any = build_model(DenseModel, INFOS["qwen3"], torch.device("cuda"), torch.bfloat16)
    filler = WeightFiller(model)
    tensors = {name: torch.randn(filler.whole_shape(name)) for name in filler.targets}
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(model, tmp_path)
    assert model.head.weight.is_cuda
    assert model.head.weight.cpu().equal(tensors["lm_head.weight"].bfloat16())
