"""Test that captured samplers choose the tokens that samplers launched kernel by kernel choose, with penalties and
log-probabilities, under overlap, retraction, slot reuse, jump-forward and drafts. Graphs are replaced by the steps
themselves.

.venv/bin/python -m pytest -q tests/e2e/test_captured_sampling.py
"""

import random
from dataclasses import replace
from types import SimpleNamespace

import engine_models as models
import numpy as np
import pytest
import torch
from engine_runs import TreeDrafter, check_idle, drafting, make_llm, paged, prompts_of, results, varied_params

from dovetail import LLM, SamplingParams
from dovetail.engine.graphs import DecodeGraph, DecodeGraphs
from dovetail.engine.runners import DecodeGraphRunner, Launched
from dovetail.engine.sampler import Sampler, decode_numbers
from dovetail.engine.sampler_graphs import SampleMode, SamplerGraphs
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission


class Replayed:
    """Stand in for a recorder of CUDA graphs on a CPU: a replay runs the step again."""

    def record(self, step, *, loaded=False):
        for _ in range(3):
            result = step()
        return SimpleNamespace(replay=lambda: result.copy_(step())), result


class CapturedSampling(DecodeGraphRunner):
    """Compute decode steps as the eager runner does, and sample from them as decode graphs do, with padding rows.
    ``modes`` are those of the steps whose samplers were replayed."""

    def __init__(self, engine):
        self.eager, self._sampler, vocab = engine.eager_runner, engine._eager_sampler, engine.info.vocab_size
        self._batch_invariant = False
        self._graphs = graphs = DecodeGraphs.__new__(DecodeGraphs)
        graphs._inputs, graphs._counts = engine.inputs, engine.counts
        graphs._samplers = SamplerGraphs(32, Replayed(), engine.device, engine.counts)
        self.sizes, self.modes = [1, 3, 8, 32], []
        self.graphs = {
            rows: DecodeGraph(
                rows,
                None,
                SimpleNamespace(
                    slots=torch.zeros(rows, dtype=torch.int64),
                    prefix_lens=torch.zeros(rows, dtype=torch.int32),
                    uniform=torch.zeros(rows).double(),
                ),
                None,
                torch.randn(rows, vocab),
            )
            for rows in self.sizes
        }

    def can_run(self, batch):
        if batch.num_extend or batch.drafts is not None:
            return None
        return self.graphs[next(size for size in self.sizes if size >= len(batch.slots))]

    def launch(self, batch, graph):
        rows, tensors = len(batch.slots), graph.tensors
        launched = self.eager.launch(batch, self.eager.can_run(batch))
        graph.logits[:rows].copy_(launched.logits)
        tensors.slots.zero_()
        tensors.slots[:rows] = torch.from_numpy(batch.slots).long()
        tensors.prefix_lens[:rows] = torch.from_numpy(batch.prefix_lens)
        numbers = decode_numbers(batch, self._sampler.settings_of(batch))
        if numbers is not None:
            tensors.uniform[:rows] = torch.from_numpy(numbers)
        return Launched(self, graph, graph.logits[:rows])

    def sample(self, batch, launched, masks):
        settings = self._sampler.settings_of(batch)
        output = super().sample(batch, launched, masks)
        mode = SampleMode.of(settings) if settings.capturable else None
        if (launched.graph, mode) in self._graphs._samplers._graphs:
            self.modes.append(mode)
        return replace(output, token_ids=output.token_ids.clone(), logprobs=copied(output.logprobs))


def copied(logprobs):
    """Return a copy, as the one on the host: the next replay writes to the same memory."""
    return None if logprobs is None else type(logprobs)(*(column.clone() for column in logprobs))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return models.save_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.12, eos_token_id=17)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr("dovetail.engine.sampler_graphs.NEEDED_BEFORE_CAPTURE", 3)


def captured(llm):
    engine = llm.loop.executor.rank.engine
    runner = CapturedSampling(engine)
    engine.runners = (runner, engine.eager_runner)
    return runner


def requests(count=16, seed=3, mixed=False):
    """Return prompts and parameters that captured samplers serve, and with ``mixed`` others too."""
    rng = random.Random(seed)
    params = [varied_params(rng, 60) for _ in range(count)]
    for i in range(count):
        if not mixed or i % 2:
            params[i] = replace(params[i], logit_bias=None, min_new_tokens=0)
    return prompts_of([rng.randrange(1, 40) for _ in range(count)], seed, shared=9), params


def assert_equal(outputs, expected):
    assert results(outputs) == results(expected)
    for one, other in zip(outputs, expected, strict=True):
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [x for _, x in a.top] == pytest.approx([x for _, x in b.top], abs=1e-4)


CUTS = {
    "plain": paged(16),
    "overlap": paged(16, scheduler={"overlap": True}),
    "few slots": paged(16, scheduler={"max_running": 3, "overlap": True, "chunk_size": 23}),
    "retraction": paged(1, 300, scheduler={"overlap": True}),
    "unmixed": paged(16, scheduler={"chunk_size": 40, "mixed": False, "overlap": True}),
}


@pytest.mark.parametrize("mixed", [False, True], ids=["served", "mixed"])
@pytest.mark.parametrize("cut", CUTS)
def test_captured_samplers_choose_the_same_tokens(checkpoint, cut, mixed, monkeypatch):
    prompts, params = requests(mixed=mixed)
    expected = make_llm(checkpoint, **paged(16, scheduler={"overlap": False})).generate(prompts, params)
    if cut == "retraction":
        monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm = make_llm(checkpoint, **CUTS[cut])
    runner = captured(llm)
    for _ in range(2):  # slots of the second run still have the counts of the first
        assert_equal(llm.generate(prompts, params), expected)
    modes = set(runner.modes)
    assert any(mode.penalties for mode in modes)
    assert any(mode.logprobs for mode in modes)
    assert any(mode.edits and mode.penalties for mode in modes) == mixed
    assert (cut == "retraction") == (llm.loop.stats().retractions > 0)
    check_idle(llm)


@pytest.mark.parametrize("stops", [60, 70], ids=["captured", "too many"])
def test_outputs_are_as_long_as_they_must_be(checkpoint, stops):
    prompts = prompts_of([5, 9, 30, 2, 17, 11, 3, 8], seed=2)
    ids = tuple(range(100, 100 + stops))
    likely = {100: 2.0, 3: -100.0}
    params = [
        SamplingParams(max_new_tokens=30, min_new_tokens=i * 2, stop_token_ids=ids, logit_bias=likely, seed=i)
        for i in range(8)
    ]
    params[3] = replace(params[3], logit_bias=None, presence_penalty=1.0, min_new_tokens=25)
    expected = make_llm(checkpoint).generate(prompts, params)
    llm = make_llm(checkpoint, scheduler={"overlap": True})
    runner = captured(llm)
    for _ in range(3):
        outputs = llm.generate(prompts, params)
        assert_equal(outputs, expected)
    for output, own in zip(outputs, params, strict=True):
        assert not {17, *ids} & set(output.token_ids[: own.min_new_tokens])
        assert len(output.token_ids) >= own.min_new_tokens
    assert any(len(o.token_ids) == p.min_new_tokens + 1 for o, p in zip(outputs, params, strict=True))
    assert bool(runner.modes) == (stops == 60)


def test_steps_with_drafts_and_captured_steps_share_their_counts(checkpoint):
    prompts, params = requests(seed=5)
    expected = make_llm(checkpoint, **paged(16)).generate(prompts, params)
    llm = make_llm(checkpoint, **paged(16))
    runner, drafter = captured(llm), TreeDrafter(right=0.6)
    drafter.learn(expected)
    propose, turns = drafter.propose, random.Random(1)
    drafter.propose = lambda batch: propose(batch) if turns.random() < 0.4 else None
    with drafting(llm, drafter):
        assert_equal(llm.generate(prompts, params), expected)
    assert llm.loop.stats().accepted_tokens > 50
    assert len(runner.modes) > 5


def counted_before(llm, monkeypatch):
    """Compare the counts that penalties read with the text that they follow. Return, for each slot that was compared,
    whether its row was an extend row."""
    penalise, checked = Sampler._penalise, []

    def compared(self, batch, logits, layout, settings, slots):
        replaced = {req.uid for req in llm.loop.scheduler.running if req.wasted}
        for i in settings.penalised:
            row, req = int(layout.rows[i]), batch.sampled_reqs[i]
            length = int(batch.prefix_lens[row] + batch.extend_lens[row]) - int(layout.spans[i]) + 1
            if req.uid in replaced and row >= batch.num_extend:
                continue  # a jump has meanwhile replaced what this row follows
            prompt, output = req.token_ids[: req.prompt_len], req.token_ids[req.prompt_len : length]
            expected = 2 * np.bincount(output, minlength=self.vocab_size)
            expected[np.unique(prompt)] += 1
            assert self.counts.table[batch.slots[row]].tolist() == expected.tolist()
            checked.append(row < batch.num_extend and length > req.prompt_len)
        penalise(self, batch, logits, layout, settings, slots)

    monkeypatch.setattr(Sampler, "_penalise", compared)
    return checked


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_that_a_jump_replaces_are_not_counted(overlap, monkeypatch):
    text = r'\{"name": "[A-Za-z ]{1,9}", "class": "[a-z]{1,6}", "level": [0-9]{1,2}, "items": \["[a-z ]{1,9}"\]\}'
    grammar = GrammarSpec(GrammarKind.REGEX, text)
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    free = SamplingParams(max_new_tokens=90, temperature=0, ignore_eos=True, **penalties)
    params = [replace(free, grammar=grammar, max_new_tokens=60) if i % 2 else free for i in range(6)]
    prompts = [f"Write a character sheet in JSON: Bella is a level {i} wizard." for i in range(6)]
    section = {"backend": "xgrammar", "jump_forward": True, "isolation": "thread"}
    llm = LLM("tiny", device="cpu", grammar=section, memory={"num_pages": 400}, scheduler={"overlap": overlap})
    runner, checked = captured(llm), counted_before(llm, monkeypatch)
    llm.generate(prompts, params)
    assert llm.loop.stats().jumped_tokens > 20
    assert checked.count(True) > 3
    assert checked.count(False) > 20
    assert len(runner.modes) > 5
    check_idle(llm)


def test_counts_follow_the_text_through_retraction_and_drafts(checkpoint, monkeypatch):
    prompts, params = requests(mixed=True)
    expected = make_llm(checkpoint, **paged(16)).generate(prompts, params)
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    llm, drafter = make_llm(checkpoint, **paged(1, 300)), TreeDrafter(right=0.5)
    checked = counted_before(llm, monkeypatch)
    drafter.learn(expected)
    with drafting(llm, drafter):
        assert_equal(llm.generate(prompts, params), expected)
    assert llm.loop.stats().retractions > 0
    assert len(checked) > 50
