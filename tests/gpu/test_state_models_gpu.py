"""Test on a CUDA device that engines of models with states answer as on a CPU, with captured steps and without them.

.venv/bin/python -m pytest -q tests/gpu/test_state_models_gpu.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
        with executor.rank.context:  # steps in flight may still use these slots
            for group, pool in zip(engine.budget.arena.states, states_of(engine.pool), strict=True):
                slots = pages[group][pages[group] > 0].tolist()
                if slots:
                    pool.fill(50.0, slots)

    allocator.free = freed


class Reference:
    """Compute log-probabilities with an engine on a CPU without a prefix cache, of each text once.

    That engine is compared with transformers in tests/e2e; transformers 5.17 without the kernels of Mamba-2 computes other numbers.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.llm = LLM(
            str(directory), device="cpu", grammar="none", cache="none", mixer="torch_native", model={"dtype": "float32"}
        )
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def likelihoods(self, text: list[int], begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest log-probability and that of the token in ``text``, at each position from ``begin`` on."""
        if (key := (begin, *text)) not in self._known:
            params = SamplingParams(max_new_tokens=1, prompt_logprobs=1, prompt_logprobs_start=begin)
            (output,) = self.llm.generate([text], params)
            entries = output.prompt_logprobs
            assert entries is not None
            tops, own = [entry.top[0][1] for entry in entries], [entry.logprob for entry in entries]
            self._known[key] = torch.tensor(tops), torch.tensor(own)
        return self._known[key]


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Save the model of this name, or the one for a drafter, and build its reference."""
    directory = tmp_path_factory.mktemp("model") / "model"
    if request.param in MODELS:
        save(request.param, directory)
    else:
        DRAFTERS[request.param][0](directory)
    made = Reference(directory)
    yield made
    made.llm.close()


@pytest.mark.parametrize(
    ("graphs", "speculative"), [("captured", "none"), ("captured", "ngram"), ("kernel by kernel", "none")]
)
@pytest.mark.parametrize("reference", MODELS, indirect=True)
def test_answers_are_those_of_a_cpu(reference: Reference, graphs: str, speculative: str) -> None:
    """Two rounds: chunks and mixed steps first, then prompts that resume from snapshots, and drafts of earlier answers."""
    outputs = answers(reference, graphs, speculative)
    if speculative == "ngram":
        assert sum(output.acceptance.accepted for output in outputs) > 0


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(
    ("reference", "speculative"),
    [(name, speculative) for name, (_, speculative) in DRAFTERS.items()],
    ids=DRAFTERS,
    indirect=["reference"],
)
def test_answers_with_a_drafter_that_keeps_keys_and_values(
    reference: Reference, speculative: dict[str, Any], graphs: str
) -> None:
    outputs = answers(reference, graphs, speculative)
    counts = [(output.acceptance.drafted, output.acceptance.accepted) for output in outputs]
    drafted, accepted = map(sum, zip(*counts, strict=True))
    assert drafted > accepted > 0


def answers(reference: Reference, graphs: str, speculative: str | dict[str, Any]) -> list[Output]:
    """Assert that two rounds of outputs are those of the reference, and return the second."""
    llm = LLM(
        str(reference.directory),
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
            largest, likely = reference.likelihoods(text, len(prompt))
            found = torch.tensor([entry.logprob for entry in output.logprobs])
            assert (largest - likely).max() <= TOLERANCE
            assert (likely - found).abs().max() <= TOLERANCE
    assert any(output.cached_tokens > 0 for output in outputs)
    executor: Any = llm.loop.executor
    assert not llm.loop.drafter_errors
    for graph in executor.rank.engine._draft_runtime.graphs:
        assert graph.num_captured > 0
    llm.close()
    return outputs
