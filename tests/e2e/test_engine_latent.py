"""Test models with latent attention through the whole engine: greedy tokens equal those of transformers, however the work
is cut into steps and however ranks divide it.

.venv/bin/python -m pytest -q tests/e2e/test_engine_latent.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_models as models
import pytest
from engine_runs import check_idle, make_llm, paged, prompts_of
from transformers import DeepseekV2Config, DeepseekV3Config

from dovetail import SamplingParams
from dovetail.scheduler import admission

STEPS = 32
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0)
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
COMMON: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
V2 = (DeepseekV2Config, COMMON | {"q_lora_rank": None, "n_shared_experts": 2})
V3 = (DeepseekV3Config, COMMON | {"q_lora_rank": 40, "n_group": 4, "topk_group": 2})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, models.Reference]]:
    made = {}
    for name, (config, settings) in {"v2": V2, "v3": V3}.items():
        directory = models.save(tmp_path_factory.mktemp(name), config, **settings)
        made[name] = directory, models.Reference(directory)
    return made


def check(llm, reference: models.Reference, prompts: list[list[int]], rounds: int = 1) -> list:
    outputs = []
    for _ in range(rounds):
        outputs = llm.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == reference.greedy(tuple(prompt), STEPS)
    check_idle(llm)
    return outputs


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_chunks_prefixes_drafts_and_retraction(checkpoints, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts enter in chunks of an odd size beside decode rows, in the second round they hit the prefix cache, and
    drafts of repeated texts are verified."""
    directory, reference = checkpoints[name]
    llm = make_llm(directory, scheduler={"chunk_size": 13}, threads=1)
    outputs = check(llm, reference, prompts_of([3, 40, 21, 64], shared=20), rounds=2)
    assert min(output.cached_tokens for output in outputs) >= 16
    llm.close()
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    tight = make_llm(directory, **paged(1, 330), speculative="ngram", scheduler={"draft": "always"}, threads=1)
    check(tight, reference, [prompt * 2 for prompt in prompts_of([9, 13, 40, 33, 60])])
    stats = tight.loop.stats()
    assert stats.drafted_tokens > 0
    assert stats.retractions > 0
    tight.close()


@pytest.mark.full  # tests/plugins/test_mtp_experts.py runs two ranks always
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_two_ranks_divide_heads_and_experts_and_share_latents(checkpoints, experts: str) -> None:
    directory, reference = checkpoints["v3"]
    llm = make_llm(
        directory,
        parallel={"tp": 2, "experts": experts},
        threads=1,
        speculative="ngram",
        scheduler={"chunk_size": 24, "draft": "always"},
    )
    try:
        assert len(llm.loop.executor.describe()["ranks"]) == 2
        check(llm, reference, [prompt * 2 for prompt in prompts_of([3, 30, 17], shared=16)], rounds=2)
        assert llm.loop.stats().drafted_tokens > 0
    finally:
        llm.close()
