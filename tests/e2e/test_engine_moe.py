"""Test models with experts through the whole engine: greedy tokens equal those of transformers, however the work is cut
into steps and however ranks divide the experts.

.venv/bin/python -m pytest -q tests/e2e/test_engine_moe.py
"""

from __future__ import annotations

from pathlib import Path

import engine_models as models
import pytest
from engine_runs import check_idle, make_llm, paged, prompts_of
from transformers import MixtralConfig, Qwen3MoeConfig

from dovetail import SamplingParams
from dovetail.layers.experts import layers_of_experts
from dovetail_experts.backends import TorchExperts

STEPS = 32
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0)
MIXTRAL = (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2})
QWEN3 = (
    Qwen3MoeConfig,
    {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "head_dim": 32,
        "mlp_only_layers": [1],
        "num_key_value_heads": 2,
    },
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, models.Reference]]:
    made = {}
    for name, (config, settings) in {"mixtral": MIXTRAL, "qwen3": QWEN3}.items():
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


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_chunks_prefixes_drafts_and_retraction(checkpoints, name: str) -> None:
    """Prompts enter in chunks beside decode rows, in the second round they hit the prefix cache, and drafts of repeated
    texts are verified."""
    directory, reference = checkpoints[name]
    llm = make_llm(directory, scheduler={"chunk_size": 16}, threads=1)
    outputs = check(llm, reference, prompts_of([3, 40, 21, 64], shared=20), rounds=2)
    assert min(output.cached_tokens for output in outputs) >= 16
    llm.close()
    tight = make_llm(directory, **paged(1, 300), speculative="ngram", scheduler={"draft": "always"}, threads=1)
    check(tight, reference, [prompt * 2 for prompt in prompts_of([9, 13, 40, 33, 60])])
    stats = tight.loop.stats()
    assert stats.drafted_tokens > 0
    assert stats.retractions > 0
    tight.close()


def test_a_drafter_with_experts_has_the_backend_of_the_target(checkpoints) -> None:
    directory, reference = checkpoints["qwen3"]
    drafter = {"kind": "draft_model", "path": str(directory)}
    llm = make_llm(directory, speculative=drafter, scheduler={"draft": "always"}, threads=1)
    engine = llm.loop.executor.rank.engine
    (model,) = engine._draft_runtime._models
    backends = {type(layer.backend) for one in (engine.model, model) for layer in layers_of_experts(one)}
    assert backends == {TorchExperts}
    check(llm, reference, prompts_of([3, 30]))
    stats = llm.loop.stats()
    assert stats.accepted_tokens > 0.95 * stats.drafted_tokens > 0
    llm.close()


@pytest.mark.parametrize("experts", [pytest.param("tp", marks=pytest.mark.full), "ep"])
def test_two_ranks_divide_the_experts(checkpoints, experts: str) -> None:
    """Workers of two ranks have a share of every expert, or half of the experts each."""
    directory, reference = checkpoints["qwen3"]
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
