"""Save small random models of every family that keeps keys and values, windows or latents, and compare what engines answer
with transformers. Models whose layers keep states are in ``state_models``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import engine_models as models
import torch
import transformers

WINDOW = 24
TOLERANCE = 1e-4
"""The largest error of a log-probability in float32."""

TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW, "num_key_value_heads": 2}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}
GEMMA = TYPES | {"head_dim": 24, "query_pre_attn_scalar": 20, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.15}

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": WINDOW, "tie_word_embeddings": False}),
    "gemma2": ("gemma2", GEMMA | CAPS),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3n": (
        "gemma3n_text",
        {"layer_types": TYPES["layer_types"] * 2, "sliding_window": WINDOW, "num_hidden_layers": 4, "head_dim": 24}
        | {"num_key_value_heads": 2, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 90, "laurel_rank": 6}
        | {"hidden_size_per_layer_input": 10, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    "gpt_oss": ("gpt_oss", TYPES | EXPERTS | {"head_dim": 24, "intermediate_size": 40, "rope_parameters": YARN}),
    "deepseek_v2_lite": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "n_shared_experts": 2} | {"rope_parameters": YARN | {"mscale_all_dim": 0.707}},
    ),
    "deepseek_v2": ("deepseek_v2", LATENT | GROUPS | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", LATENT | GROUPS | {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}),
    "kimi_k2": ("deepseek_v3", LATENT | {"n_routed_experts": 12, "routed_scaling_factor": 2.8}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
}
"""The model type in transformers and the settings of each model, by a name of its own."""


def save(name: str, directory: Path) -> Path:
    """Save the model ``name`` of ``MODELS``. Vectors such as biases, sinks and corrections of routers are not zero."""
    model_type, settings = MODELS[name]
    config = type(transformers.AutoConfig.for_model(model_type))
    given = dict(settings)
    if model_type == "glm4_moe_lite":
        del given["first_k_dense_replace"]
    return models.save(directory, config, vectors=0.2, **given)


class GroupReference:
    """Compute log-probabilities with transformers in float32, of whole texts."""

    def __init__(self, directory: Path) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(directory, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def check(self, prompt: Sequence[int], output: Sequence[int], logprobs: torch.Tensor) -> None:
        """Assert that ``output`` is the greedy continuation of ``prompt``, with these log-probabilities. Where two tokens
        are equally likely within the tolerance, either is right."""
        text = torch.tensor([[*prompt, *output]])
        expected = self._model(text, use_cache=False).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        chosen = expected[torch.arange(len(output)), torch.tensor(list(output))]
        assert (expected.max(1).values - chosen).max() <= TOLERANCE, "another token is more likely"
        error = (chosen - logprobs).abs().max()
        assert error <= TOLERANCE, f"log-probabilities differ by {error:.2e}"
