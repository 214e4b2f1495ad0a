"""Test on a CUDA device that engines of models with states answer as on a CPU, with captured steps and without them.

.venv/bin/python -m pytest -q tests/gpu/test_state_models_gpu.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from engine_runs import check_idle, prompts_of
from state_drafter_checkpoints import DRAFTERS
from state_models import MODELS, save

from dovetail import LLM, SamplingParams
from dovetail.engine.grouped import states_of
from dovetail.llm import Output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOLERANCE = 5e-3
"""The largest error of a log-probability: products on a GPU round in another order, and recurrences add that up."""
GRAPHS: dict[str, dict[str, Any]] = {
    "captured": {"capture": "start", "piecewise_tokens": 64},
    "kernel by kernel": {"decode": False, "piecewise_tokens": 0},
}


def poison(llm: LLM) -> None:
    """Fill slots that are given back with large numbers from now on."""
    executor: Any = llm.loop.executor
    engine, allocator = executor.rank.engine, llm.loop.scheduler.ledger.allocator
    free = allocator.free

    def freed(pages: Any) -> None:
        free(pages)
        with executor.rank.stream:  # steps in flight may still use these slots
            for group, pool in zip(engine.budget.arena.states, states_of(engine.pool), strict=True):
                slots = pages[group][pages[group] > 0].tolist()
                if slots:
                    pool.fill(50.0, slots)

    allocator.free = freed


@pytest.mark.parametrize("speculative", ["none", "ngram"])
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_a_cpu(tmp_path: Path, name: str, graphs: str, speculative: str) -> None:
    """Two rounds: chunks and mixed steps first, then prompts that resume from snapshots, and drafts of earlier answers."""
    outputs = answers(save(name, tmp_path), graphs, speculative)
    if speculative == "ngram":
        assert sum(output.acceptance.accepted for output in outputs) > 0


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_with_a_drafter_that_keeps_keys_and_values(tmp_path: Path, name: str, graphs: str) -> None:
    build, speculative = DRAFTERS[name]
    build(tmp_path / "model")
    outputs = answers(tmp_path / "model", graphs, speculative)
    counts = [(output.acceptance.drafted, output.acceptance.accepted) for output in outputs]
    drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted > accepted > 0


def likelihoods(llm: LLM, text: list[int], begin: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest log-probability and that of the token in ``text``, at each position from ``begin`` on."""
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=1, prompt_logprobs_start=begin)
    (output,) = llm.generate([text], params)
    entries = output.prompt_logprobs
    assert entries is not None
    return torch.tensor([entry.top[0][1] for entry in entries]), torch.tensor([entry.logprob for entry in entries])


def answers(directory: Path, graphs: str, speculative: str | dict[str, Any]) -> list[Output]:
    """Assert that two rounds of outputs are those of an engine on a CPU without a prefix cache, and return the second.

    That engine is compared with transformers in tests/e2e; transformers 5.17 without the kernels of Mamba-2 computes other numbers.
    """
    reference = LLM(
        str(directory), device="cpu", grammar="none", cache="none", mixer="torch_native", model={"dtype": "float32"}
    )
    llm = LLM(
        str(directory),
        device="cuda",
        grammar="none",
        model={"dtype": "float32"},
        memory={"page_size": 16, "num_pages": 200, "state_snapshot_tokens": 16},
        scheduler={"max_running": 6, "chunk_size": 29, "draft": "always"},
        graphs=GRAPHS[graphs],
        speculative=speculative,
    )
    poison(llm)
    prompts = prompts_of([3, 40, 21, 1, 90, 33], shared=20)
    params = SamplingParams(max_new_tokens=40, temperature=0, logprobs=0)
    outputs = []
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        check_idle(llm)
        for prompt, output in zip(prompts, outputs, strict=True):
            text = [*prompt, *output.token_ids]
            largest, likely = likelihoods(reference, text, len(prompt))
            found = torch.tensor([entry.logprob for entry in output.logprobs])
            assert (largest - likely).max() <= TOLERANCE
            assert (likely - found).abs().max() <= TOLERANCE
    assert any(output.cached_tokens > 0 for output in outputs)
    executor: Any = llm.loop.executor
    assert not llm.loop.drafter_errors
    for graph in executor.rank.engine._draft_runtime.graphs:
        assert graph.num_captured > 0
    llm.close()
    reference.close()
    return outputs
