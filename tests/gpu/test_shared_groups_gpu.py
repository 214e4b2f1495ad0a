"""Test on a CUDA device that rows read shared prefixes once in the cache groups of models that have windows or states, with captured steps and without them, and that answers are those of transformers.

.venv/bin/python -m pytest -q tests/gpu/test_shared_groups_gpu.py
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import group_models
import state_models
from engine_runs import check_idle, prompts_of

from dovetail import LLM, SamplingParams
from dovetail.interfaces.attention import AttentionLayer
from dovetail.llm import Output
from dovetail.types import Batch
from dovetail_attention.triton.backend import TritonAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS: dict[str, Any] = {
    "mistral": group_models,
    "gemma3": group_models,
    "gpt_oss": group_models,
    "qwen3_next": state_models,
    "kimi_linear": state_models,
}
"""The module that saves each model."""
TOLERANCE = 5e-3
"""The largest error of a log-probability: products on a GPU round in another order, and recurrences add that up."""
GRAPHS: dict[str, dict[str, Any]] = {
    "captured": {"capture": "start", "piecewise_tokens": 0, "max_rows": 8},
    "kernel by kernel": {"decode": False, "piecewise_tokens": 0},
}


class Watched:
    """Read every prefix once. ``saved`` has the tokens that steps need not read, and ``shared`` maps the window of a layer to
    whether it was launched, or captured, with shared prefixes and without."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: set[int] = set()
        self.shared: dict[int | None, set[bool]] = {}
        forward = TritonAttention.forward

        def shares(backend: TritonAttention, batch: Batch) -> bool:
            assert batch.shared is not None
            self.saved.add(batch.shared.saved)
            return batch.shared.saved > 0

        def watched(backend: TritonAttention, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
            self.shared.setdefault(layer.window, set()).add(batch.shared is not None)
            return forward(backend, q, layer, batch)

        monkeypatch.setattr("dovetail.registry.sharing.LEAST_WINDOW", group_models.WINDOW)
        monkeypatch.setattr(TritonAttention, "shares", shares)
        monkeypatch.setattr(TritonAttention, "forward", watched)


class Reference:
    """Hold a model in ``path``, and compute its log-probabilities with transformers, of each text once."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.path = name, MODELS[name].save(name, directory)
        model = state_models.StateReference(self.path)
        self._logprobs = functools.cache(lambda text: model.logprobs(text))

    def logprobs(self, text: list[int]) -> torch.Tensor:
        return self._logprobs(tuple(text))


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp("model"))


def check(reference: Reference, outputs: list[Output], *, greedy: bool) -> None:
    """Compare the log-probabilities of outputs with transformers, and that greedy tokens are the most likely ones."""
    for output in outputs:
        text, count = [*output.prompt_ids, *output.token_ids], len(output.token_ids)
        expected = reference.logprobs(text)[-1 - count : -1]
        likely = expected[torch.arange(count), torch.tensor(output.token_ids)]
        found = torch.tensor([entry.logprob for entry in output.logprobs])
        torch.testing.assert_close(found, likely, rtol=0, atol=TOLERANCE)
        if greedy:
            assert (expected.max(1).values - likely).max() <= TOLERANCE


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("reference", MODELS, indirect=True)
def test_answers_are_those_of_transformers(reference: Reference, graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes fork at several lengths, a prompt has several outputs, rows end one by one, and windows move on meanwhile, until
    rows see nothing of what they share. The second round finds all prefixes in the cache."""
    watched, name = Watched(monkeypatch), reference.name
    llm = LLM(
        str(reference.path),
        device="cuda",
        attention="triton",
        grammar="none",
        model={"dtype": "float32"},
        memory={"page_size": 4, "num_pages": 300},
        scheduler={"max_running": 8, "chunk_size": 256},
        graphs=GRAPHS[graphs],
    )
    stem, (other, *_) = prompts_of([60], seed=4)[0], prompts_of([45], seed=5)
    prompts = [
        stem[:n] + own for n, own in zip([60, 60, 41, 23, 0], prompts_of([1, 7, 3, 12, 33], seed=6), strict=True)
    ]
    params = [SamplingParams(max_new_tokens=n, temperature=0, logprobs=0) for n in (60, 3, 30, 14, 40)]
    sampled = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, n=3, logprobs=0)
    for _ in range(2):
        outputs = llm.generate([*prompts, other], [*params, sampled])
        check(reference, outputs[: len(prompts)], greedy=True)
        check(reference, outputs[len(prompts) :], greedy=False)
        check_idle(llm)
    windows = [] if name == "mistral" else [None]
    if None in windows:
        assert max(watched.saved) >= 40 + 2 * 44, "both prefixes are shared, in groups of their own"
    if MODELS[name] is group_models:
        windows.append(group_models.WINDOW)
    assert watched.shared == {window: {False, True} for window in windows}
    if graphs == "captured":
        keys = state_models.engine_of(llm).graphs._graphs
        assert {key.shared for key in keys} == set(range(len(windows) + 1))
    llm.close()
