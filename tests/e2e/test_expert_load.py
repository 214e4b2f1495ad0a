"""Test the tokens that are counted for each expert against the choices of transformers' routers.

.venv/bin/python -m pytest -q tests/e2e/test_expert_load.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import engine_models as models
import pytest
import torch
from engine_runs import make_llm, prompts_of
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError
from dovetail.messages import ExpertLoadMsg

EXPERTS, TOP_K, NEW = 8, 2, 12
MOE_LAYERS = (0, 2)  # of three; the last layer computes only the rows that are sampled, if that spares enough tokens
PROMPTS = prompts_of([40, 9, 5])
GREEDY = SamplingParams(max_new_tokens=NEW, temperature=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(
        tmp_path_factory.mktemp("moe"),
        Qwen3MoeConfig,
        num_hidden_layers=3,
        mlp_only_layers=[1],
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=48,
        head_dim=32,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    """Count what transformers' routers choose. Each prompt is a step of its own; the last generated token enters none."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    chosen = {layer: Counter[int]() for layer in MOE_LAYERS}
    for prompt in PROMPTS:
        with torch.no_grad():
            texts = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            logits = model(texts[:, :-1], output_router_logits=True).router_logits
        assert len(logits) == len(MOE_LAYERS)
        for layer, scores in zip(MOE_LAYERS, logits, strict=True):
            best = scores.topk(TOP_K, dim=1).indices
            if layer == MOE_LAYERS[-1] and len(prompt) > 16:
                best = best[len(prompt) - 1 :]  # the tokens before it have nothing to add to an output
            chosen[layer].update(best.flatten().tolist())
    return {layer: [counts[expert] for expert in range(EXPERTS)] for layer, counts in chosen.items()}


def counted(llm: LLM) -> dict[int, list[int]]:
    llm.loop.handle(ExpertLoadMsg("call"))
    (reply,) = llm.loop.step()
    assert (reply.call_id, reply.ok) == ("call", True), reply.message
    return reply.expert_tokens


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"executor": "workers"}, id="worker", marks=pytest.mark.full),
        pytest.param({"parallel": {"tp": 2, "experts": "ep"}}, id="two ranks by ep"),
        pytest.param({"parallel": {"tp": 2, "experts": "tp"}}, id="two ranks by tp", marks=pytest.mark.full),
    ],
)
def test_the_counts_are_those_of_transformers(checkpoint, expected, sections: dict) -> None:
    llm = make_llm(
        checkpoint,
        metrics={"expert_load": "experts"},
        scheduler={"overlap": False},
        cache="none",
        threads=1,
        **sections,
    )
    try:
        assert counted(llm) == {layer: [0] * EXPERTS for layer in MOE_LAYERS}
        for prompt in PROMPTS:
            llm.generate([prompt], GREEDY)
        assert counted(llm) == expected
    finally:
        llm.close()


def test_drafts_count_whether_they_are_accepted_or_not(checkpoint) -> None:
    """A layer's sum is that of the tokens that entered: those of prompts and outputs, and drafts."""
    llm = make_llm(
        checkpoint,
        metrics={"expert_load": "layers"},
        scheduler={"overlap": False, "draft": "always"},
        speculative="ngram",
        cache="none",
        threads=1,
    )
    llm.generate([PROMPTS[0] * 2], GREEDY)
    stats, load = llm.loop.stats(), counted(llm)
    assert stats.drafted_tokens > stats.accepted_tokens
    entered = 2 * len(PROMPTS[0]) + NEW - 1 - stats.accepted_tokens + stats.drafted_tokens
    assert sum(load[0]) == TOP_K * entered
    llm.close()


def test_without_the_setting_nothing_is_counted(checkpoint) -> None:
    llm = make_llm(checkpoint, threads=1)
    llm.loop.handle(ExpertLoadMsg("call"))
    (reply,) = llm.loop.step()
    assert not reply.ok
    assert "metrics.expert_load" in reply.message
    assert llm.loop.executor.rank.engine.expert_load is None
    llm.close()


def test_a_model_without_experts_refuses_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"metrics.expert_load is layers, and LlamaForCausalLM has no experts"):
        make_llm("tiny", metrics={"expert_load": "layers"})
