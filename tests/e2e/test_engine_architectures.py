"""Test every architecture through the whole engine: the log-probabilities of outputs equal those of transformers for
prompts in chunks beside decode rows, prefixes in the cache and drafts, on one rank and on two.

.venv/bin/python -m pytest -q tests/e2e/test_engine_architectures.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import architectures
import pytest
import torch
from engine_runs import check_idle, make_llm, prompts_of
from transformers import AutoModelForCausalLM

from dovetail import LLM, SamplingParams

STEPS, TOP = 20, 20
TOLERANCE = 1e-4
PROMPTS = prompts_of([3, 40, 21, 34], shared=20)
LogProbs = Callable[[list[int]], torch.Tensor]


def reference(directory: Path) -> LogProbs:
    """Return a function of a text: the log-probabilities after each of its tokens in transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logprobs(text: list[int]) -> torch.Tensor:
        return model(torch.tensor([text])).logits[0].log_softmax(-1)

    return logprobs


def check(llm: LLM, expected: LogProbs) -> None:
    """Generate twice, so that prefixes are in the cache the second time, and compare all log-probabilities that are
    returned."""
    wanted = SamplingParams(max_new_tokens=STEPS, temperature=0, logprobs=TOP)
    for again in (False, True):
        outputs = llm.generate(PROMPTS, wanted)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert len(output.token_ids) == STEPS
            rows = expected([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
            assert output.logprobs is not None
            for row, token, got in zip(rows, output.token_ids, output.logprobs, strict=True):
                assert row.max() - row[token] < TOLERANCE
                assert len(got.top) == TOP
                for other, value in got.top:
                    assert abs(value - float(row[other])) < TOLERANCE
        if again:
            assert min(output.cached_tokens for output in outputs) >= 16
    stats = llm.loop.stats()
    assert stats.drafted_tokens > 0
    check_idle(llm)


@pytest.mark.parametrize("model_type", [*architectures.WITH_EXPERTS, *architectures.DENSE])
def test_chunks_prefixes_and_drafts(tmp_path: Path, model_type: str) -> None:
    directory = architectures.save(tmp_path, model_type)
    llm = make_llm(directory, speculative="ngram", scheduler={"chunk_size": 16, "draft": "always"}, threads=1)
    check(llm, reference(directory))
    llm.close()


RANKS = [("tp", name) for name in [*architectures.WITH_EXPERTS, *architectures.DENSE]]
RANKS += [("ep", name) for name in architectures.WITH_EXPERTS]


@pytest.mark.full
@pytest.mark.parametrize(("experts", "model_type"), RANKS)
def test_two_ranks(tmp_path: Path, experts: str, model_type: str) -> None:
    """Two processes, connected by gloo, have a share of every expert, or half of the experts each."""
    directory = architectures.save(tmp_path, model_type)
    llm = make_llm(
        directory,
        parallel={"tp": 2, "experts": experts},
        speculative="ngram",
        scheduler={"chunk_size": 16, "draft": "always"},
        threads=1,
    )
    try:
        assert len(llm.loop.executor.describe()["ranks"]) == 2
        check(llm, reference(directory))
    finally:
        llm.close()
