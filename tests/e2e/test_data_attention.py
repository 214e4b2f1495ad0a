"""Test data-parallel attention through the whole engine (two ranks, gloo, on the CPU): tokens and log-probabilities equal those
of one rank, however the work is cut into steps and whichever rank keeps a request; and the ranks hold twice the latents.

.venv/bin/python -m pytest -q tests/e2e/test_data_attention.py
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import engine_models as models
import pytest
from engine_runs import Traffic, check_idle, check_with_aborts, make_llm, paged, prompts_of, results, varied_params
from transformers import DeepseekV2Config, Qwen3MoeConfig

from dovetail import LLM, SamplingParams
from dovetail.cli import main
from dovetail.errors import ConfigError, ResolutionError
from dovetail.memory.table import pool_of
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission, scheduler

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek": (
        DeepseekV2Config,
        EXPERTS
        | {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
        }
        | {"q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
        | {"tie_word_embeddings": False},
    ),
    "qwen3": (Qwen3MoeConfig, EXPERTS | {"num_experts": 8, "head_dim": 32, "num_key_value_heads": 2}),
}
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
LONG = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: models.save(tmp_path_factory.mktemp(name), config, **settings)
        for name, (config, settings) in MODELS.items()
    }


def two_ranks(checkpoint: Path, experts: str = "auto", **sections: Any) -> LLM:
    return make_llm(checkpoint, parallel={"tp": 2, "attention": "data", "experts": experts}, threads=1, **sections)


def jobs(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, half of which share a prefix, and parameters of every sort."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 40) for _ in range(count)]
    prompts = prompts_of(lengths[: count // 2], seed) + prompts_of(lengths[count // 2 :], seed + 1, shared=37)
    return prompts, [varied_params(rng) for _ in prompts]


def check_same(got: list[Any], expected: list[Any]) -> None:
    assert results(got) == results(expected)
    for a, b in zip(got, expected, strict=True):
        found, wanted = ([entry.logprob for entry in output.logprobs] for output in (a, b))
        assert found == pytest.approx(wanted, abs=1e-4)
        found, wanted = ([entry.logprob or 0 for entry in output.prompt_logprobs or ()] for output in (a, b))
        assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "experts", "sections"),
    [
        ("deepseek", "ep", paged(16, scheduler={"overlap": True, "chunk_size": 20, "max_running": 6})),
        ("qwen3", "tp", paged(4, 110, scheduler={"overlap": True, "chunk_size": 50, "max_running": 8})),
        pytest.param("deepseek", "tp", paged(1, 110, scheduler={"overlap": False}), marks=pytest.mark.full),
        pytest.param("qwen3", "ep", paged(16, scheduler={"mixed": False}), marks=pytest.mark.full),
    ],
)
def test_two_ranks_generate_what_one_does(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, experts: str, sections: dict[str, Any]
) -> None:
    """Chunks, prefix hits (in the second round with this seed), penalties, log-probabilities, n > 1, and retraction where
    the pools are small. First there is one request, so that the other rank has no rows."""
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    whole = {key: value for key, value in sections.items() if key != "memory"}
    one, two = make_llm(checkpoints[name], threads=1, **whole), two_ranks(checkpoints[name], experts, **sections)
    try:
        for seed, count in ((0, 1), (1, 13), (1, 13)):
            prompts, params = jobs(count, seed)
            params[-1] = replace(params[-1], n=3)
            check_same(two.generate(prompts, params), one.generate(prompts, params))
        check_idle(two)
        assert two.loop.stats().cached_tokens > 0
        assert (two.loop.stats().retractions > 0) == (sections["memory"]["num_pages"] < 120)
    finally:
        two.close()
        one.close()


@pytest.mark.parametrize(
    ("name", "experts", "sections"),
    [
        ("deepseek", "tp", paged(4, 110, scheduler={"draft": "always", "chunk_size": 20, "max_running": 8})),
        pytest.param("qwen3", "ep", paged(16, scheduler={"draft": "always", "mixed": False}), marks=pytest.mark.full),
        pytest.param("qwen3", "tp", paged(1, 110, scheduler={"draft": "always"}), marks=pytest.mark.full),
    ],
)
def test_each_rank_verifies_the_drafts_of_its_requests(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, experts: str, sections: dict[str, Any]
) -> None:
    """What ngram drafts is accepted in the second round, which repeats the first, by requests of both ranks. Outputs are those of
    one rank without drafts."""
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    one, two = (
        make_llm(checkpoints[name], threads=1),
        two_ranks(checkpoints[name], experts, speculative="ngram", **sections),
    )
    accepted, settle = [0, 0], scheduler.settle_drafts

    def counted(plan: Any, sampled: list[Any], tokens: list[list[int]], *others: Any) -> None:
        for req, new in zip(sampled, tokens, strict=True):
            accepted[pool_of(req.slot, 2)] += len(new) - 1
        settle(plan, sampled, tokens, *others)

    monkeypatch.setattr(scheduler, "settle_drafts", counted)
    try:
        for seed, count in ((0, 1), (1, 13), (1, 13)):
            prompts, params = jobs(count, seed)
            check_same(two.generate(prompts, params), one.generate(prompts, params))
        check_idle(two)
        stats = two.loop.stats()
        assert min(accepted) > 20
        assert stats.drafter_errors == 0
        assert (stats.retractions > 0) == (sections["memory"]["num_pages"] < 120)
    finally:
        two.close()
        one.close()


def test_grammars_reach_the_rows_of_all_ranks(tmp_path: Path) -> None:
    """A model with the tokenizer of the embedded one generates what one rank does, of which some follow a regular expression."""
    config, settings = MODELS["qwen3"]
    models.save(tmp_path, config, **settings | {"vocab_size": 4096})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(files("dovetail") / "assets" / "tiny" / name, tmp_path)  # pyright: ignore[reportArgumentType]
    grammar = GrammarSpec(GrammarKind.REGEX, "(yes|no)[0-9]{3,9}!")
    params = [SamplingParams(max_new_tokens=14, temperature=0.8, seed=seed, grammar=grammar) for seed in range(3)]
    params += [GREEDY, replace(GREEDY, temperature=1.0, seed=9, logprobs=2)]
    outputs = []
    for parallel in ({"tp": 1}, {"tp": 2, "attention": "data"}):
        llm = LLM(str(tmp_path), device="cpu", threads=1, parallel=parallel, scheduler={"overlap": True})
        outputs.append(llm.generate(["One", "Two", "Three", "Four", "Five"], params))
        check_idle(llm)
        llm.close()
    check_same(outputs[1], outputs[0])
    assert all(output.text.startswith(("yes", "no")) for output in outputs[1][:3])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tiny", {}, "parallel.attention data needs model.data_attention"),
    ("qwen3", {"parallel": {"tp": 1, "attention": "data"}}, "parallel.attention data needs parallel.tp 2 or more"),
    ("qwen3", {"graphs": {"piecewise_tokens": 64}}, "parallel.attention is data and graphs.piecewise_tokens is 64"),
    ("qwen3", {"executor": "local"}, "parallel.tp 2 needs executor.ranks"),
]


@pytest.mark.parametrize(("name", "sections", "message"), REFUSED)
def test_what_does_not_work_is_refused_by_name(
    checkpoints: dict[str, Path], name: str, sections: dict[str, Any], message: str
) -> None:
    model = name if name == "tiny" else str(checkpoints[name])
    with pytest.raises((ConfigError, ResolutionError), match=message):
        LLM(model, device="cpu", grammar="none", **({"parallel": {"tp": 2, "attention": "data"}} | sections))


def test_explain_shows_what_all_ranks_hold(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["explain", str(checkpoints["deepseek"]), "--set", "memory.num_pages=50", "--set", "grammar=none"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--tp", "2", "--set", "parallel.attention=data", "--set", "device=cpu"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "x 2 (tensor parallel, experts tp, attention data)" in shown
    assert "hold 784 tokens on each of 2 ranks, 1,568 together" in shown
    assert "each has 4 of 4 heads" in shown


def test_requests_that_come_and_are_aborted(checkpoints: dict[str, Path]) -> None:
    """They end once, with a beginning of what one rank generates alone, and both ranks keep some of them."""
    prompts, params = jobs(16, seed=3)
    one = make_llm(checkpoints["deepseek"], threads=1)
    alone = [output.token_ids for output in one.generate(prompts, params)]
    one.close()
    two = two_ranks(checkpoints["deepseek"], **paged(4, 300, scheduler={"chunk_size": 11, "max_running": 8}))
    try:
        assert check_with_aborts(two, prompts, params, alone, 0.2) == {0, 1}
    finally:
        two.close()


@pytest.mark.parametrize("attention", ["heads", "data"])
def test_the_ranks_together_hold_twice_the_latents(checkpoints: dict[str, Path], attention: str) -> None:
    """With the same memory on each rank, requests of twice the tokens run at once: MLA keeps the latents of a token on every
    rank, unless each rank keeps those of its own requests."""
    parallel = {"tp": 2, "attention": attention}
    two = make_llm(checkpoints["deepseek"], **paged(16, 800), parallel=parallel, threads=1, cache="none")
    try:
        traffic = Traffic(two)
        for number, prompt in enumerate(prompts_of([100] * 16)):
            traffic.add(f"r{number}", prompt, replace(GREEDY, max_new_tokens=28))
        most = 0
        while two.loop.has_work:
            traffic.step()
            most = max(most, len(two.loop.scheduler.running))
        assert most == (6 if attention == "heads" else 12)
        assert two.loop.stats().pages_total == (50 if attention == "heads" else 100)
        check_idle(two)
    finally:
        two.close()
