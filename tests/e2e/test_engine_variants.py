"""Test dense models with other layers than Llama's through the whole engine: greedy tokens equal those of transformers,
however the work is cut into steps.

.venv/bin/python -m pytest -q tests/e2e/test_engine_variants.py
"""

from __future__ import annotations

from pathlib import Path

import engine_models as models
import pytest
from engine_runs import check_idle, make_llm, paged, prompts_of
from transformers import Cohere2Config, Gemma2Config, Gemma3nTextConfig, Gemma3TextConfig, Olmo2Config

from dovetail import LLM, SamplingParams

STEPS = 24
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0)
TYPES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,  # tied, Gemma would repeat one token
}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0}
MADE = {
    "gemma2": (Gemma2Config, TYPES | CAPS | {"head_dim": 24, "query_pre_attn_scalar": 20}),
    "gemma3": (Gemma3TextConfig, TYPES | {"head_dim": 24, "query_pre_attn_scalar": 20}),
    "gemma3n": (
        Gemma3nTextConfig,
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24, "num_hidden_layers": 4}
        | {"head_dim": 24, "num_key_value_heads": 2, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 90}
        | {"hidden_size_per_layer_input": 10, "laurel_rank": 6, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    ),
    "cohere2": (Cohere2Config, TYPES),
    "olmo2": (Olmo2Config, {"num_key_value_heads": 2, "tie_word_embeddings": False}),
}


def check(llm: LLM, directory: Path, prompts: list[list[int]], rounds: int = 1) -> list:
    reference, outputs = models.Reference(directory), []
    for _ in range(rounds):
        outputs = llm.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == reference.greedy(tuple(prompt), STEPS)
    check_idle(llm)
    return outputs


@pytest.mark.parametrize("name", ["gemma2", "gemma3n", "cohere2"])
def test_chunks_prefixes_and_drafts(tmp_path: Path, name: str) -> None:
    """Prompts enter in chunks beside decode rows, in the second round they hit the prefix cache, and drafts of repeated
    texts are verified in a pool for few requests. Windows are shorter than the prompts. For retraction see
    ``test_sliding_groups``."""
    config, settings = MADE[name]
    directory = models.save(tmp_path, config, **settings)
    llm = make_llm(directory, scheduler={"chunk_size": 16}, threads=1)
    outputs = check(llm, directory, prompts_of([3, 40, 21, 64], shared=20), rounds=2)
    assert min(output.cached_tokens for output in outputs) >= 16
    llm.close()
    tight = make_llm(directory, **paged(1, 150), speculative="ngram", scheduler={"draft": "always"}, threads=1)
    check(tight, directory, [prompt * 2 for prompt in prompts_of([9, 13, 40, 33, 60])])
    stats = tight.loop.stats()
    assert stats.drafted_tokens > 0
    tight.close()


@pytest.mark.parametrize(
    "name", ["cohere2", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "gemma3n", "olmo2"))]
)
def test_two_ranks(tmp_path: Path, name: str) -> None:
    """Workers of two ranks have a share of every layer; the addends of attention and MLP are added up together."""
    config, settings = MADE[name]
    directory = models.save(tmp_path, config, **settings)
    llm = make_llm(directory, parallel={"tp": 2}, threads=1, scheduler={"chunk_size": 24})
    try:
        check(llm, directory, prompts_of([3, 30, 17], shared=16), rounds=2)
    finally:
        llm.close()
