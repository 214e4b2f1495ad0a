"""Save small random models whose layers keep states, and compare what engines answer with transformers. The tests of states
share this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from dovetail import LLM
from dovetail.engine.grouped import pools_of, states_of

VOCAB = 199
TOLERANCE = 2e-4
"""The largest error of a logit in float32: long recurrences add up more rounding than attention."""

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 24, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN = ATTENTION | DELTA | {"num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 16}
ONE_OF_THREE = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3_next": ("qwen3_next", QWEN | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_5": ("qwen3_5_text", QWEN | {"initializer_range": 0.1}),
    "mamba2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 16, "state_size": 24, "n_groups": 2, "chunk_size": 16},
    ),
    "bamba": ("bamba", ATTENTION | MAMBA2 | {"attn_layer_indices": [1]}),
    "kimi_linear": (
        "kimi_linear",
        ONE_OF_THREE
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 40, "kv_lora_rank": 16}
        | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10, "linear_head_dim": 8, "linear_num_heads": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
    "falcon_h1": ("falcon_h1", ATTENTION | MAMBA2 | {"mamba_d_ssm": 64, "num_hidden_layers": 2}),
    "granite_hybrid": (
        "granitemoehybrid",
        ATTENTION | MAMBA2 | ONE_OF_THREE | {"num_local_experts": 0, "shared_intermediate_size": 24},
    ),
    "jamba": (
        "jamba",
        ATTENTION
        | {"num_hidden_layers": 4, "mamba_d_state": 8, "mamba_dt_rank": 6, "num_experts": 4}
        | {"attn_layer_period": 3, "attn_layer_offset": 1},
    ),
    "lfm2": (
        "lfm2",
        ATTENTION | {"block_multiple_of": 8, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "nemotron_3": (
        "nemotron_h",
        ATTENTION
        | {"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2}
        | {"chunk_size": 16, "layers_block_type": ["linear_attention", "moe", "full_attention"], "n_routed_experts": 4}
        | {"moe_latent_size": 16, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24},
    ),
    "nemotron_h": (
        "nemotron_h",
        ATTENTION
        | {"head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2}
        | {"chunk_size": 16, "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"]},
    ),
}
"""The model type in transformers and the settings of each model."""


def save(name: str, directory: Path, **changes: Any) -> Path:
    """Save the model ``name`` of ``MODELS`` with random weights that are large enough for distinct logits. ``changes`` are
    other settings."""
    torch.manual_seed(9)
    model_type, settings = MODELS[name]
    given = {**COMMON, **settings, **changes}
    if "layers_block_type" in given:
        del given["num_hidden_layers"]
    built = transformers.AutoConfig.for_model(model_type, **given)
    model = transformers.AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    return directory


class StateReference:
    """Compute log-probabilities with transformers in float32, of whole texts, so that no cache of theirs is needed."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return log-probabilities ``[len(tokens), VOCAB]`` after each token."""
        return self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0].log_softmax(-1)

    def check(self, prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float]) -> None:
        """Assert that ``output`` is the greedy continuation of ``prompt``, with these log-probabilities. Where two tokens
        are equally likely within the tolerance, either is right."""
        expected = self.logprobs([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = expected[torch.arange(len(output)), torch.tensor(list(output))]
        assert (expected.max(1).values - chosen).max() <= TOLERANCE, "another token is more likely"
        error = (chosen - torch.tensor(list(logprobs))).abs().max()
        assert error <= TOLERANCE, f"log-probabilities differ by {error:.2e}"


def engine_of(llm: LLM) -> Any:
    """Return the engine of the only rank."""
    executor: Any = llm.loop.executor
    return executor.rank.engine


def poison(llm: LLM) -> LLM:
    """Fill pages and states that no request and no cache holds with NaN, now and when they are given back."""
    pool = engine_of(llm).pool
    allocator, layout = llm.loop.scheduler.ledger.allocator, engine_of(llm).budget.arena
    assert layout is not None
    free, paged, states = allocator.free, layout.paged, layout.states
    for own in states_of(pool):
        own.fill(float("nan"), slice(1, None))

    def freed(pages: Any) -> None:
        free(pages)
        for group, own in zip(paged, pools_of(pool), strict=True):
            index = torch.from_numpy(pages[group][pages[group] > 0]).long()
            for layer in range(own.group.num_layers):
                own.keys(layer)[index] = own.values(layer)[index] = float("nan")
        for group, own in zip(states, states_of(pool), strict=True):
            slots = pages[group][pages[group] > 0].tolist()
            if slots:
                own.fill(float("nan"), slots)

    allocator.free = freed
    return llm
