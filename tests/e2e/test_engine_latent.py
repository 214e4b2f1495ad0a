"""Test models with latent attention through the whole engine: greedy tokens equal those of transformers, however the work
is cut into steps and however ranks divide it.

.venv/bin/python -m pytest -q tests/e2e/test_engine_latent.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_models as models
import pytest
import torch
from drafter_checkpoints import save_eagle3
from engine_runs import check_idle, make_llm, paged, prompts_of, results
from mtp_dflash_checkpoints import save_dflash
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config

from dovetail import LLM, SamplingParams
from dovetail.engine.expansion import Expansion
from dovetail.scheduler import admission
from dovetail.types import Batch

STEPS = 32
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0)
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
COMMON: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
V2 = (DeepseekV2Config, COMMON | {"q_lora_rank": None, "n_shared_experts": 2})
V3 = (DeepseekV3Config, COMMON | {"q_lora_rank": 40, "n_group": 4, "topk_group": 2})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, models.Reference]]:
    made = {}
    for name, (config, settings) in {"v2": V2, "v3": V3}.items():
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


@pytest.mark.parametrize("name", ["v2", "v3"])
def test_chunks_prefixes_drafts_and_retraction(checkpoints, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts enter in chunks of an odd size beside decode rows, in the second round they hit the prefix cache, and
    drafts of repeated texts are verified."""
    directory, reference = checkpoints[name]
    llm = make_llm(directory, scheduler={"chunk_size": 13}, threads=1)
    outputs = check(llm, reference, prompts_of([3, 40, 21, 64], shared=20), rounds=2)
    assert min(output.cached_tokens for output in outputs) >= 16
    llm.close()
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    tight = make_llm(directory, **paged(1, 330), speculative="ngram", scheduler={"draft": "always"}, threads=1)
    check(tight, reference, [prompt * 2 for prompt in prompts_of([9, 13, 40, 33, 60])])
    stats = tight.loop.stats()
    assert stats.drafted_tokens > 0
    assert stats.retractions > 0
    tight.close()


@pytest.mark.parametrize("always", [False, True])
def test_prompts_expand_latents_where_this_takes_fewer_operations(
    checkpoints, always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First chunks do. If all do, so do chunks over cached latents, beside decode rows and verify rows, which attend over
    latents."""
    steps: list[tuple[bool, bool]] = []  # of each step that expands: cached latents, other rows
    plan = Expansion.plan

    def noted(self: Expansion, batch: Batch, *rest: Any) -> None:
        plan(self, batch, *rest)
        steps.append((bool(batch.prefix_lens[: batch.num_extend].any()), batch.expanded.rest is not None))

    monkeypatch.setattr(Expansion, "plan", noted)
    if always:
        monkeypatch.setattr(Expansion, "pays", lambda *_, **__: True)
    directory, reference = checkpoints["v3"]
    scheduler = {"chunk_size": 13, "draft": "always"}
    llm = make_llm(directory, scheduler=scheduler, threads=1, speculative="ngram" if always else "none")
    check(llm, reference, [prompt * 2 for prompt in prompts_of([3, 40, 21, 64], shared=20)], rounds=2)
    assert (False, False) in steps
    if always:
        assert {(True, False), (True, True)} <= set(steps)
    llm.close()


def prompt_logprobs(llm: LLM, prompt: list[int]) -> torch.Tensor:
    """Return the logarithms of the probabilities of the tokens of a prompt, each of them given those before it."""
    (output,) = llm.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]])


@pytest.mark.parametrize("expanded", [False, True])
def test_scales_keep_latents_in_8_bits_whose_rotated_keys_are_large(
    expanded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotated keys are larger by 2 ** 9 and what meets them is smaller, so that nothing changes in float32. Without scales
    they saturate. Prefixes in the cache keep their scales."""
    if expanded:
        monkeypatch.setattr(Expansion, "pays", lambda *_, **__: True)
    config, settings = V2
    models.save(tmp_path, config, **settings)
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            weight[COMMON["kv_lora_rank"] :] *= 2.0**9
        if name.endswith("self_attn.q_proj.weight"):
            size = COMMON["qk_nope_head_dim"] + COMMON["qk_rope_head_dim"]
            weight.view(-1, size, weight.shape[1])[:, COMMON["qk_nope_head_dim"] :] *= 2.0**-9
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (prompt,) = prompts_of([90])
    found = {}
    for kv_dtype, store in (("float32", "paged"), ("fp8_e4m3", "scaled"), ("fp8_e4m3", "paged")):
        memory = {"kv_dtype": kv_dtype, "page_size": 4}
        llm = make_llm(tmp_path, memory=memory, store=store, scheduler={"chunk_size": 13}, threads=1)
        first, found[kv_dtype, store] = prompt_logprobs(llm, prompt), prompt_logprobs(llm, prompt)
        assert torch.equal(first, found[kv_dtype, store])
        check_idle(llm)
        llm.close()
    exact = found["float32", "paged"]
    errors = {key: float((value - exact).abs().mean()) for key, value in found.items()}
    assert errors["fp8_e4m3", "scaled"] < 0.6, errors  # 0.44; 0.46 where no key is large
    assert errors["fp8_e4m3", "paged"] > 4 * errors["fp8_e4m3", "scaled"], errors  # 2.37


def test_overlap_and_several_outputs_change_no_token(checkpoints) -> None:
    directory, _ = checkpoints["v3"]
    prompts = prompts_of([5, 33, 18], shared=9)
    params = SamplingParams(max_new_tokens=16, temperature=0.9, top_p=0.95, n=3, seed=4)
    found = []
    for scheduler in ({"overlap": False}, {"overlap": True, "chunk_size": 7}):
        llm = make_llm(directory, scheduler=scheduler, threads=1)
        found.append(results(llm.generate(prompts, params)))
        check_idle(llm)
        llm.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(("target", "drafter"), [("v3", "v3"), ("v3", "llama"), ("llama", "v2")])
def test_drafters_keep_latents_or_keys_and_values_whatever_the_target_keeps(
    checkpoints, target: str, drafter: str, tmp_path: Path
) -> None:
    places = {name: directory for name, (directory, _) in checkpoints.items()}
    places["llama"] = models.save_llama(tmp_path)
    prompts = prompts_of([3, 30, 17])
    speculative = {"kind": "draft_model", "path": str(places[drafter])}
    plain, drafting = (
        make_llm(places[target], speculative=one, scheduler={"draft": "always"}, threads=1)
        for one in ("none", speculative)
    )
    assert results(drafting.generate(prompts, GREEDY)) == results(plain.generate(prompts, GREEDY))
    stats = drafting.loop.stats()
    assert stats.drafted_tokens > 0
    if target == drafter:
        assert stats.accepted_tokens > 0.95 * stats.drafted_tokens
    check_idle(drafting)
    plain.close()
    drafting.close()


@pytest.mark.parametrize("kind", ["eagle3_tree", "dflash"])
def test_heads_draft_trees_and_blocks_for_a_target_with_latents(kind: str, tmp_path: Path) -> None:
    """The nodes of a tree are verified over latents, and accepted ones are moved to consecutive places."""
    config, settings = V3
    models.save(tmp_path, config, **settings | {"num_hidden_layers": 8})
    save_eagle3(tmp_path / "eagle3", hidden_size=64)
    save_dflash(tmp_path / "dflash", hidden=64, head_dim=16, mask=models.VOCAB - 1)
    head = load_file(tmp_path / "model.safetensors")
    head["lm_head.weight"][5:] = 0  # drafts of random weights are right now and then
    save_file(head, tmp_path / "model.safetensors", {"format": "pt"})
    prompts, params = prompts_of([3, 30, 17], shared=9), SamplingParams(max_new_tokens=32, temperature=1.0, seed=2)
    plain, drafting = (
        make_llm(tmp_path, speculative=one, scheduler={"draft": "always"}, threads=1)
        for one in ("none", {"kind": kind, "path": str(tmp_path / kind.removesuffix("_tree"))})
    )
    for _ in range(2):  # the second time from the prefix cache
        assert results(drafting.generate(prompts, params)) == results(plain.generate(prompts, params))
    stats = drafting.loop.stats()
    assert stats.drafted_tokens > stats.accepted_tokens > 0
    check_idle(drafting)
    plain.close()
    drafting.close()


@pytest.mark.full  # tests/plugins/test_mtp_experts.py runs two ranks always
@pytest.mark.parametrize("experts", ["tp", "ep"])
def test_two_ranks_divide_heads_and_experts_and_share_latents(checkpoints, experts: str) -> None:
    directory, reference = checkpoints["v3"]
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
