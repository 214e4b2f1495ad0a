"""Test engines whose rows read shared prefixes once, in the full or latent cache group of models that also have windows or
states, and in layers with windows. They attend with interpreted kernels and are compared with engines in which every row reads its own keys.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_shared_groups_triton.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

import group_models
import state_models
from engine_runs import check_idle, make_llm, prompts_of
from test_runners_triton import stand_in

from dovetail import LLM, SamplingParams
from dovetail.engine.graphs import DecodeGraph, DecodeGraphs
from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.features import Feature
from dovetail.llm import Output
from dovetail.types import Batch
from dovetail_attention.plugin import TRITON
from dovetail_attention.triton.backend import TritonAttention

PAGE = 4
MODELS: dict[str, Any] = {
    "mistral": group_models,
    "gemma3": group_models,
    "gpt_oss": group_models,
    "qwen3_next": state_models,
    "kimi_linear": state_models,
}
"""The module that saves each model: one with a sliding group, one with full and sliding groups, one that also has sinks, one
with full and state groups, and one with latent and state groups."""
USUAL = {("mistral", True), ("gpt_oss", True), ("kimi_linear", True)}
CASES = [
    pytest.param(name, graphs, marks=() if (name, graphs) in USUAL else pytest.mark.full)
    for name in MODELS
    for graphs in (False, True)
]


class Planned(DecodeGraphs):
    """Plan a graph again before it is replayed, because what stands in for a graph runs with the last plan."""

    def launch(self, graph: DecodeGraph, batch: Batch, uniform: Any) -> torch.Tensor:
        self._backend.plan_capture(graph.batch)
        return super().launch(graph, batch, uniform)


class Seen:
    """Record how many shared tokens rows read, by the window of the layer (None: no window)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: dict[int | None, set[int]] = {}
        forward = TritonAttention.forward

        def watched(backend: TritonAttention, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
            saved = 0 if batch.shared is None else batch.shared.saved
            self.saved.setdefault(layer.window, set()).add(saved)
            return forward(backend, q, layer, batch)

        monkeypatch.setattr(TritonAttention, "forward", watched)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Let the component ``triton`` run on a CPU, without graphs, and read every prefix once."""
    graphs = {Feature.ATTN_GRAPH, Feature.ATTN_VERIFY_GRAPH, Feature.ATTN_REHEARSAL}
    constraints = replace(TRITON.constraints, devices=("cpu",), min_compute_capability=None)
    spec = replace(TRITON, offers=TRITON.offers - graphs, constraints=constraints)
    monkeypatch.setattr("dovetail_attention.plugin.TRITON", spec)
    monkeypatch.setattr(TritonAttention, "shares", lambda self, batch: batch.shared.saved > 0)
    monkeypatch.setattr("dovetail.registry.sharing.LEAST_WINDOW", group_models.WINDOW)
    stand_in(monkeypatch)
    return Seen(monkeypatch)


def build(path: Path, graphs: bool) -> LLM:
    """Return an engine whose decode steps attend with interpreted kernels. With ``graphs``, they run in what stands in
    for graphs once they were needed often enough."""
    attention = {"prefill": "torch_native", "decode": "triton"}
    scheduler, memory = {"max_running": 8, "chunk_size": 256}, {"page_size": PAGE, "num_pages": 200}
    llm = make_llm(path, attention=attention, memory=memory, scheduler=scheduler, threads=1)
    engine = state_models.engine_of(llm)
    assert engine.shares_prefixes
    assert llm.loop.scheduler.limits.shared_prefixes
    if graphs:
        args = engine.model, engine.inputs, engine.pool, engine.eager_runner.decode, 8, engine.context_len
        engine.graphs = Planned(*args, engine.sharing, counts=engine.counts)
        engine._order_runners()
    return llm


def check(reference: state_models.StateReference, outputs: list[Output], *, greedy: bool = True) -> None:
    """Compare the log-probabilities of outputs with transformers, which computes whole texts, and greedy outputs too."""
    for output in outputs:
        found = [entry.logprob for entry in output.logprobs]
        if greedy:
            reference.check(output.prompt_ids, output.token_ids, found)
            continue
        text, count = [*output.prompt_ids, *output.token_ids], len(output.token_ids)
        expected = reference.logprobs(text)[-1 - count : -1][torch.arange(count), torch.tensor(output.token_ids)]
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=state_models.TOLERANCE)


@pytest.mark.parametrize(("name", "graphs"), CASES)
def test_rows_share_in_all_groups(name: str, graphs: bool, tmp_path: Path, seen: Seen) -> None:
    """Three of four rows share seven pages, then a row is alone. Windows begin before what rows have of their own, and leave
    what they share behind one after the other."""
    expected: dict[int | None, tuple[int, int]] = {} if name == "mistral" else {None: (0, 2 * 28)}
    if MODELS[name] is group_models:  # in a window, the rows see at first 18, 12 and 4 of the shared tokens
        expected[group_models.WINDOW] = 0, 12 + 4
    path = MODELS[name].save(name, tmp_path)
    llm, reference = build(path, graphs), state_models.StateReference(path)
    for steps, prompts in (
        (6, prompts_of([3, 9, 17], shared=30) + prompts_of([33], seed=1)),
        (4, prompts_of([21], seed=2)),
    ):
        check(reference, llm.generate(prompts, SamplingParams(max_new_tokens=steps, temperature=0, logprobs=0)))
    check_idle(llm)
    assert {window: (min(saved), max(saved)) for window, saved in seen.saved.items()} == expected
    if graphs:
        captured = {(key.rows, key.shared) for key in state_models.engine_of(llm).graphs._graphs}
        assert captured == {(4, len(expected)), (1, 0)}
    llm.close()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_forks_and_rows_that_come_and_go(name: str, tmp_path: Path, seen: Seen) -> None:
    """Prefixes fork at several lengths, prompts have several outputs, rows end one by one, and windows move on meanwhile.
    The second round finds all prefixes in the cache."""
    path = MODELS[name].save(name, tmp_path)
    llm, reference = build(path, name in ("gpt_oss", "kimi_linear")), state_models.StateReference(path)
    stem, (other, *_) = prompts_of([60], seed=4)[0], prompts_of([45], seed=5)
    prompts = [
        stem[:n] + own for n, own in zip([60, 60, 41, 23, 0], prompts_of([1, 7, 3, 12, 33], seed=6), strict=True)
    ]
    counts, sampled = [20, 3, 8, 12, 6], SamplingParams(max_new_tokens=8, temperature=1.0, seed=3, n=3, logprobs=0)
    params = [SamplingParams(max_new_tokens=n, temperature=0, logprobs=0) for n in counts]
    outputs: list[Output] = []
    for _ in range(2):
        outputs = llm.generate([*prompts, other], [*params, sampled])
        check(reference, outputs[: len(prompts)])
        check(reference, outputs[len(prompts) :], greedy=False)
        assert len({tuple(output.token_ids) for output in outputs[len(prompts) :]}) > 1
        check_idle(llm)
    assert any(output.cached_tokens > 0 for output in outputs)
    if name != "mistral":
        assert len(seen.saved[None]) > 4, "rows formed several groups"
        assert max(seen.saved[None]) == 2 * 40 + 2 * 44, "both prefixes are shared, in groups of their own"
    if MODELS[name] is group_models:
        assert len(seen.saved[group_models.WINDOW]) > 4, "rows saw different parts of what they share"
    llm.close()
