"""Test drafters that run a model with data-parallel attention (two ranks, gloo, on the CPU): tokens are those of one rank without
drafts, and drafts are those that one rank makes of the same text, whichever rank keeps a request.

.venv/bin/python -m pytest -q tests/e2e/test_data_attention_drafters.py
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafter_checkpoints as heads
import engine_models as models
import mtp_dflash_checkpoints as checkpoints
import pytest
from engine_runs import check_idle, check_with_aborts, make_llm, paged, prompts_of, results, varied_params
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from dovetail import LLM, SamplingParams
from dovetail.cli import main
from dovetail.config.checkpoint import EMBEDDED
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission

VOCAB = 4096
"""The vocabulary of the embedded model, whose tokenizer the targets have, for grammars."""
GENERATED = 3
"""The number of tokens that the targets generate without a grammar: drafts of random weights are right now and then."""
HEAD: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 256}
QWEN: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}


def save_target(directory: Path, save: Callable[[Path], Any]) -> Path:
    """Save a model by ``save``, with a tokenizer, and drafters of all kinds beside it."""
    save(directory)
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith(("lm_head.weight", "shared_head.head.weight"))]:
        weights[name][GENERATED:] = 0
        weights[name][:GENERATED] *= 4
    save_file(weights, directory / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED["tiny"] / name, directory)
    heads.save_eagle(directory / "eagle", **HEAD)
    heads.save_eagle3(directory / "eagle3", **HEAD, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    heads.draft_first_tokens(directory / "eagle3", GENERATED)
    checkpoints.save_dflash(directory / "dflash", hidden=64, head_dim=16, mask=VOCAB - 1)
    if (directory / "draft_model").exists():  # the first layers of the target
        kept = {
            name: weight
            for name, weight in weights.items()
            if not name.startswith(("model.layers.2", "model.layers.3"))
        }
        save_file(kept, directory / "draft_model" / "model.safetensors")
    return directory


def save_qwen3(directory: Path) -> None:
    for own, layers in ((directory, 4), (directory / "draft_model", 2)):
        models.save(own, Qwen3MoeConfig, **QWEN, vocab_size=VOCAB, tie_word_embeddings=False, num_hidden_layers=layers)


TARGETS: dict[str, Callable[[Path], Any]] = {
    "deepseek": lambda directory: checkpoints.save_deepseek(directory, vocab_size=VOCAB),
    "glm": lambda directory: checkpoints.save_glm(directory, vocab_size=VOCAB),
    "qwen3": save_qwen3,
}
LONG = SamplingParams(max_new_tokens=32, temperature=0, ignore_eos=True)
DRAFTERS: dict[str, dict[str, Any]] = {
    "mtp": {"kind": "mtp", "num_draft_tokens": 4},
    "eagle": {"kind": "eagle", "topk": 3, "depth": 3, "num_draft_tokens": 6},
    "eagle3": {"kind": "eagle3"},
    "eagle3_tree": {"kind": "eagle3_tree", "topk": 2, "depth": 3, "num_draft_tokens": 5},
    "dflash": {"kind": "dflash"},
    "draft_model": {"kind": "draft_model", "chunk_size": 32},
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the checkpoint of a target."""
    made: dict[str, Path] = {}

    def target(name: str) -> Path:
        if name not in made:
            made[name] = save_target(tmp_path_factory.mktemp(name), TARGETS[name])
        return made[name]

    return target


def with_drafts(checkpoint: Path, ranks: int, drafter: str, experts: str = "auto", **sections: Any) -> LLM:
    parallel = {"tp": 2, "attention": "data", "experts": experts} if ranks == 2 else {"tp": 1}
    sections["scheduler"] = {"draft": "always"} | sections.get("scheduler", {})
    sections = {"grammar": "xgrammar", "threads": 1} | sections
    return make_llm(checkpoint, parallel=parallel, speculative=DRAFTERS[drafter], **sections)


def note_drafts(llm: LLM) -> dict[tuple[int, ...], list[int]]:
    """Return a dictionary that will have all drafts, by the text behind which they are made, with parents."""
    found: dict[tuple[int, ...], list[int]] = {}
    executor: Any = llm.loop.executor
    propose = executor.propose

    def noted(plan: Any) -> Any:
        tree = propose(plan)
        if tree is not None:
            reqs = {req.slot: req for req in llm.loop.scheduler.running}
            for row in range(plan.num_extend, len(plan.slots)):
                text = tuple(reqs[int(plan.slots[row])].token_ids[: plan.prefix_lens[row] + 1].tolist())
                count = int(tree.lens[row])
                found[text] = [*tree.token_ids[row, :count].tolist(), *tree.parents[row, :count].tolist()]
        return tree

    executor.propose = noted
    return found


def jobs(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, half of which share a prefix, and parameters: every other row is greedy and long, others are of every sort or
    have a grammar."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 25) for _ in range(count)]
    prompts = prompts_of(lengths[: count // 2], seed) + prompts_of(lengths[count // 2 :], seed + 1, shared=21)
    grammar = GrammarSpec(GrammarKind.REGEX, "(yes|no)[0-9]{3,9}!")
    constrained = SamplingParams(max_new_tokens=14, temperature=0.8, seed=seed, grammar=grammar)
    others = [constrained if row % 4 == 3 else varied_params(rng, most=32) for row in range(count)]
    return prompts, [LONG if row % 2 == 0 else others[row] for row in range(count)]


CASES = [
    ("deepseek", "mtp", "ep", 4, 80),
    ("qwen3", "eagle3_tree", "tp", 16, 3200),
    pytest.param("deepseek", "mtp", "tp", 1, 3200, marks=pytest.mark.full),
    pytest.param("glm", "mtp", "tp", 4, 80, marks=pytest.mark.full),
    pytest.param("deepseek", "eagle", "tp", 4, 80, marks=pytest.mark.full),
    pytest.param("qwen3", "eagle3", "ep", 4, 3200, marks=pytest.mark.full),
    pytest.param("qwen3", "eagle3_tree", "tp", 1, 80, marks=pytest.mark.full),
    pytest.param("qwen3", "dflash", "ep", 4, 80, marks=pytest.mark.full),
    pytest.param("qwen3", "draft_model", "tp", 4, 80, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("target", "drafter", "experts", "page_size", "tokens"), CASES)
def test_two_ranks_draft_and_generate_what_one_does(
    targets: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    drafter: str,
    experts: str,
    page_size: int,
    tokens: int,
) -> None:
    """Chunks, prefix hits (in the second round with this seed), grammars, and retraction where the pools are small. First there is one
    request, so that the other rank has no rows."""
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    checkpoint, scheduler = targets(target), {"chunk_size": 20, "max_running": 8}
    one = with_drafts(checkpoint, 1, drafter)
    two = with_drafts(checkpoint, 2, drafter, experts, **paged(page_size, tokens, scheduler=scheduler))
    expected, found = note_drafts(one), note_drafts(two)
    try:
        for seed, count in ((0, 1), (1, 9), (1, 9)):
            prompts, params = jobs(count, seed)
            outputs = results(two.generate(prompts, params))
            assert results(one.generate(prompts, params)) == outputs
            assert results(one.generate(prompts, [replace(own, speculative=False) for own in params])) == outputs
        check_idle(two)
        stats = two.loop.stats()
        assert stats.drafter_errors == 0
        assert stats.drafted_tokens > stats.accepted_tokens > 10
        assert stats.cached_tokens > 0
        assert (stats.retractions > 0) == (tokens < 1000)
        both = found.keys() & expected.keys()
        assert len(both) > 0.6 * len(expected)
        alike = [text for text in both if len(found[text]) == len(expected[text]) > 0]  # otherwise pages were short
        assert all(found[text] == expected[text] for text in alike)
        assert len(alike) > 0.8 * len([text for text in both if found[text] and expected[text]])
    finally:
        for llm in (one, two):
            llm.close()


def test_requests_that_come_and_are_aborted(targets: Callable[[str], Path]) -> None:
    """They end once, with a beginning of what one rank generates alone, and leave nothing behind, whichever rank kept them."""
    prompts, params = jobs(14, seed=3)
    params = [replace(own, grammar=None) for own in params]
    one = make_llm(targets("deepseek"), threads=1)
    alone = [output.token_ids for output in one.generate(prompts, params)]
    one.close()
    two = with_drafts(targets("deepseek"), 2, "mtp", **paged(4, 200, scheduler={"chunk_size": 11, "max_running": 8}))
    try:
        assert check_with_aborts(two, prompts, params, alone, 0.3) == {0, 1}
        assert two.loop.stats().accepted_tokens > 0
        assert two.loop.stats().drafter_errors == 0
    finally:
        two.close()


def test_a_draft_model_whose_layers_cannot_divide_requests_is_refused_by_explain(
    targets: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is refused wherever it is, also for a machine that is assumed, and with heads it is not. A folder that the assumed
    machine may have is not needed here."""
    target = targets("qwen3")
    models.save_llama(tmp_path / "llama", vocab_size=VOCAB)
    shutil.copytree(target, tmp_path / "without", ignore=shutil.ignore_patterns("draft_model"))
    shutil.copytree(tmp_path / "without", tmp_path / "beside")
    shutil.copytree(tmp_path / "llama", tmp_path / "beside" / "draft_model")
    outside = ["--set", f"speculative={{kind: draft_model, path: {tmp_path / 'llama'}}}"]
    inside = ["--set", "speculative=draft_model"]
    for device in ("--assume=cpu", "--assume=sm90", "--set=device=cpu"):
        for directory, drafter, file in (
            (target, outside, tmp_path / "llama"),
            (tmp_path / "beside", inside, tmp_path / "beside" / "draft_model"),
        ):
            assert explained(directory, device, *drafter, attention="data") != 0
            shown = " ".join(capsys.readouterr().err.split())
            refused = "parallel.attention data needs a draft model that offers model.data_attention; LlamaForCausalLM does not"
            assert f"{file / 'config.json'}: {refused}" in shown
            assert explained(directory, device, *drafter, attention="heads") == 0
        assert explained(target, device, *inside, attention="data") == 0
    assert explained(tmp_path / "without", "--assume=sm90", *inside, attention="data") == 0


def explained(directory: Path, *words: str, attention: str) -> int | str | None:
    """Return the exit status of ``dovetail explain`` for two ranks."""
    given = ["--tp", "2", "--set", f"parallel.attention={attention}", "--set", "grammar=none"]
    with pytest.raises(SystemExit) as end:
        main(["explain", str(directory), *given, *words])
    return end.value.code
