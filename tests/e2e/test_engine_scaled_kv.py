"""Test keys and values in FP8 with scales in the engine: how far outputs are from exact ones, and that prefixes, windows,
drafts, retraction and ranks change nothing.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_engine_scaled_kv.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import TreeDrafter, check_idle, drafting, make_llm
from safetensors.torch import load_file, save_file

import dovetail
from dovetail import LLM, SamplingParams
from dovetail.engine.grouped import pools_of
from dovetail.errors import ConfigError
from dovetail.interfaces.store import KVStore

TINY = Path(dovetail.__file__).parent / "assets" / "tiny"
WINDOW = 24
PARAMS = SamplingParams(max_new_tokens=32, temperature=0, ignore_eos=True)
STORY = "The capital of France is Paris. Monday Tuesday Wednesday Thursday Friday. One and one is two. " * 3
PROMPTS = [
    *(STORY + end for end in ("The capital of France is", "Monday Tuesday", "One and one is")),
    "The capital of Italy is",
    "Monday Tuesday Wednesday Monday Tuesday Wednesday Monday",
    "What is the capital of France?",
]
"""Texts that the model knows, so that differences in the order of sums decide nothing."""
FP8 = {"kv_dtype": "fp8_e4m3"}


def with_changes(folder: Path, config: dict, **tensors: torch.Tensor) -> Path:
    """Write the embedded model with other settings, and with tensors in addition to or in place of its own."""
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / file, folder)
    given = json.loads((TINY / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(given | config))
    own = load_file(TINY / "model.safetensors")
    if "architectures" in config:  # without the layer that predicts further tokens
        own = {name: tensor for name, tensor in own.items() if not name.startswith("model.layers.4")}
    save_file({name: tensor.contiguous() for name, tensor in {**own, **tensors}.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Path:
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "no_rope_layers": [1] * 4}
    window = {"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True, "sliding_window": WINDOW}
    return with_changes(tmp_path_factory.mktemp("windowed") / "model", layers | window)


def opened(checkpoint: Path | str = TINY, memory: dict | None = None, **sections) -> LLM:
    scheduler = {"chunk_size": 48, "draft": "always"} | sections.pop("scheduler", {})
    sections = {"store": "scaled"} | sections
    return make_llm(checkpoint, memory=FP8 | (memory or {}), scheduler=scheduler, threads=1, **sections)


def stores_of(llm: LLM) -> tuple[KVStore, ...]:
    return pools_of(llm.loop.executor.rank.engine.pool)


def texts(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Return the tokens of an engine without any feature."""
    llm = opened(cache="none", scheduler={"overlap": False, "chunk_size": 512})
    assert stores_of(llm)[0].tensors(0).scales is not None
    return texts(llm.generate(PROMPTS, PARAMS))


def test_prefixes_chunks_and_drafts_change_nothing(plain):
    """The second time prompts come from the prefix cache; trees of drafts move what is stored, with its scales."""
    llm = opened(speculative="ngram")
    first = llm.generate(PROMPTS, PARAMS)
    drafter = TreeDrafter(right=0.8, vocab=llm.loop.executor.rank.engine.info.vocab_size)
    drafter.learn(first)
    with drafting(llm, drafter):
        second = llm.generate(PROMPTS, PARAMS)
    assert texts(first) == texts(second) == plain
    assert sum(output.accepted for output in second) > 0
    assert sum(output.cached_tokens for output in second) > 100
    check_idle(llm)


def test_retraction_changes_nothing(plain):
    llm = opened(memory={"page_size": 4, "num_pages": 60}, scheduler={"max_running": 6})
    assert texts(llm.generate(PROMPTS, PARAMS)) == plain
    assert llm.loop.stats().retractions > 0
    check_idle(llm)


@pytest.mark.full
def test_ranks_change_nothing(plain):
    llm = opened(parallel={"tp": 2})
    try:
        assert texts(llm.generate(PROMPTS, PARAMS)) == plain
    finally:
        llm.close()


def test_windows_share_slabs_with_scales(windowed):
    """Pages that windows have left are poisoned, scales included, and given to other requests."""
    whole = texts(
        opened(windowed, cache="none", scheduler={"overlap": False, "chunk_size": 512}).generate(PROMPTS, PARAMS)
    )
    llm = opened(windowed, memory={"page_size": 4, "num_pages": 150})
    assert llm.loop.executor.rank.engine.budget.arena is not None
    ledger, stores = llm.loop.scheduler.ledger, stores_of(llm)
    free = ledger.allocator.free

    def freed(pages):
        free(pages)
        for store, own in zip(stores, pages, strict=True):
            store.poison(own[own > 0].tolist())

    ledger.allocator.free = freed
    for _ in range(2):
        assert texts(llm.generate(PROMPTS, PARAMS)) == whole
    check_idle(llm)


# outliers

OUTLIER = 2.0**18
"""In each layer the keys of head 0 are larger by this factor and its queries smaller: in float32 nothing changes. Numbers of 8
bits cover a factor of 2 ** 18 themselves."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict[str, torch.Tensor]:
    """Return the weights of the embedded model with outliers among its keys."""
    own, found = load_file(TINY / "model.safetensors"), {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.self_attn"
        q, k = own[f"{prefix}.q_proj.weight"].clone(), own[f"{prefix}.k_proj.weight"].clone()
        k[:64] *= OUTLIER
        q[:128] /= OUTLIER
        found |= {f"{prefix}.q_proj.weight": q, f"{prefix}.k_proj.weight": k}
    return found


def prompt_logprobs(llm: LLM) -> torch.Tensor:
    """Return the logarithms of the probabilities of the tokens of a text, each of them given the text before it."""
    params = SamplingParams(max_new_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([STORY], params)
    return torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]])


def scales_of(llm: LLM, *, by_head: bool) -> dict[str, torch.Tensor]:
    """Return the scales that suit what the stores of ``llm`` hold: one for each layer, or for each of its heads."""
    (store,), found = stores_of(llm), {}
    for layer in range(4):
        for name, tensor in (("k", store.keys(layer)), ("v", store.values(layer))):
            tensor = tensor[torch.isfinite(tensor).flatten(1).all(1)]
            largest = tensor.abs().amax((0, 1, 3)) / 448
            found[f"model.layers.{layer}.self_attn.{name}_scale"] = largest if by_head else largest.amax()
    return found


def test_the_error_on_outliers(tmp_path, planted):
    """With one head of large keys, scales for each layer lose the other heads; scales for each head do not, and scales for each
    token and head need no calibration."""
    plain = with_changes(tmp_path / "plain", {}, **planted)
    exact_llm = opened(plain, memory={"kv_dtype": "float32"}, store="paged")
    for store in stores_of(exact_llm):
        store.clear()
    exact = prompt_logprobs(exact_llm)
    errors = {"token and head": (prompt_logprobs(opened(plain)) - exact).abs().mean()}
    for name, by_head in (("tensor", False), ("head", True)):
        folder = with_changes(tmp_path / name, {}, **planted, **scales_of(exact_llm, by_head=by_head))
        llm = opened(folder, store={"kind": "scaled", "scales": "checkpoint"})
        errors[name] = (prompt_logprobs(llm) - exact).abs().mean()
    errors["unscaled"] = (prompt_logprobs(opened(plain, store="paged")) - exact).abs().mean()
    shown = {name: round(float(error), 4) for name, error in errors.items()}
    assert errors["token and head"] < 0.3, shown  # 0.20; without outliers, unscaled numbers of 8 bits have 0.17
    assert errors["head"] < 0.3, shown  # 0.24
    assert errors["tensor"] > 8 * errors["token and head"], shown  # 3.80
    assert errors["unscaled"] > 8 * errors["token and head"], shown  # 3.44


def test_a_checkpoint_without_scales_is_refused():
    with pytest.raises(ConfigError, match=r"has no k_scale and no v_scale of layer 0; allowed: .*scales: token_head"):
        opened(store={"kind": "scaled", "scales": "checkpoint"})


def test_pages_move_between_engines(plain):
    """Pages that one engine has exported give another one the tokens of the first, as if it had computed them."""
    first, second = opened(), opened()
    prompt = first.tokenizer.encode(PROMPTS[1])
    expected = first.generate([prompt], PARAMS)[0].token_ids
    second.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0))
    ours, theirs = (llm.loop.scheduler.ledger.cache.match(np.array(prompt, np.int32)) for llm in (first, second))
    assert ours.length == theirs.length >= len(prompt) - 16
    (source,), (target,) = stores_of(first), stores_of(second)
    target.poison(theirs.pages[0].tolist())
    target.import_pages(source.export_pages(ours.pages[0].tolist()), theirs.pages[0].tolist())
    again = second.generate([prompt], PARAMS)[0]
    assert again.cached_tokens > 0
    assert again.token_ids == expected
