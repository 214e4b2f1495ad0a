"""Test draft_model: the conformance suite over an engine's pages, and its drafts against transformers.

Run: python -m pytest tests/plugins/test_draft_model.py
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as checkpoints
import engine_models

from dovetail import LLM, SamplingParams
from dovetail.engine.draft_pages import DraftPages
from dovetail.engine.draft_runtime import EngineDraftRuntime
from dovetail.errors import ConfigError
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.testing.drafter import MAX_CONTEXT, VOCAB_SIZE, DrafterSuite, draft_of, make_decode_batch, text_of
from fp8_checkpoints import by_block

PAGE = 4


def make_llm(target: Path, speculative: Any, **sections: Any) -> LLM:
    sections = {"memory": {"page_size": PAGE, "num_pages": 400}, "grammar": "none", "threads": 1} | sections
    sections["scheduler"] = {"draft": "always"} | sections.get("scheduler", {})
    return LLM(str(target), device="cpu", speculative=speculative, **sections)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Save a target with the suite's vocabulary, and a smaller model for it."""
    directory = tmp_path_factory.mktemp("small") / "target"
    checkpoints.save_target(directory, vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    checkpoints.save_target(directory / "draft_model", 4, vocab_size=VOCAB_SIZE, num_hidden_layers=1, hidden_size=32)
    return directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Return an engine of a model with experts and the suite's vocabulary, with a smaller model beside it."""
    directory = tmp_path_factory.mktemp("experts")
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16, "hidden_size": 32}
    for own, layers in ((directory, 1), (directory / "draft_model", 2)):
        engine_models.save(own, Qwen3MoeConfig, **sizes, vocab_size=VOCAB_SIZE, num_hidden_layers=layers)
    return make_llm(directory, "none", scheduler={"max_running": 16}, memory={"page_size": PAGE, "num_pages": 1100})


@pytest.fixture(scope="module")
def llm(small):
    return make_llm(small, "none", scheduler={"max_running": 16}, memory={"page_size": PAGE, "num_pages": 1100})


class TestDraftModel(DrafterSuite):
    name = "draft_model"
    engine_settings = None

    @pytest.fixture(autouse=True)
    def _engines(self, llm, experts):
        self.llm, self.experts = llm, experts
        pages = 1 + np.random.default_rng(0).permutation(16 * MAX_CONTEXT // PAGE)
        for each in (llm, experts):
            each.loop.executor.rank.engine.inputs.page_table[:16, : MAX_CONTEXT // PAGE] = pages.reshape(16, -1)

    def make(self) -> Drafter:
        """Return a drafter with a cache over scattered pages of the engine. Slots are numbered as in the suite."""
        return self.make_for(self.llm, SINGLE)

    def make_rank(self, mesh: Mesh) -> Drafter:
        return self.make_for(self.experts, mesh)

    def make_for(self, llm: LLM, mesh: Mesh) -> Drafter:
        engine = llm.loop.executor.rank.engine
        runtime = EngineDraftRuntime(llm.loop.resolved, engine.model, engine.device, torch.float32, mesh)
        context = DrafterContext(engine.device, VOCAB_SIZE, 16, MAX_CONTEXT, runtime)
        drafter = self.build(context)
        runtime.allocate(engine.inputs, DraftPages(engine.num_pages), engine.stores, MAX_CONTEXT)
        return drafter

    @pytest.mark.parametrize("follows", [0, 1, 2, 3])
    def test_drafts_that_no_step_has_verified_may_be_what_follows(self, follows: int) -> None:
        """An interrupt between a proposal and its step leaves the step without drafts. Its tokens are those of the model all the
        same, and the draft cache has read them."""
        drafter, req = self.make(), self.make_requests(3)[2]
        draft = draft_of(drafter.propose(make_decode_batch([req], [9])), 0)
        assert len(draft) > 3
        req.append([token for token, _ in draft[:follows]])
        batch = make_decode_batch([req], [9])
        assert draft_of(drafter.propose(batch), 0) == draft_of(self.make().propose(batch), 0) != []


# -- what it drafts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(small):
    model = LlamaForCausalLM.from_pretrained(small / "draft_model", dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(text: list[int], count: int) -> list[int]:
        text = list(text)
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        return text[len(text) - count :]

    return greedy


def record(llm: LLM, prompts: list[list[int]], **params: Any) -> list[tuple[list[int], int, list[int]]]:
    """Return (text, limit, draft) of every row of every proposal."""
    seen = []
    drafter = llm.loop.executor.rank.drafter
    assert drafter is not None
    propose = drafter.propose

    def recorded(batch):
        tree = propose(batch)
        for row in range(batch.num_extend, len(batch.slots)):
            count = 0 if tree is None else tree.lens[row]
            draft = [] if tree is None else tree.token_ids[row, :count].tolist()
            seen.append((text_of(batch, row), int(batch.draft_limits[row]), draft))
        return tree

    drafter.propose = recorded
    llm.generate(
        prompts,
        [SamplingParams(max_new_tokens=30, temperature=0.8 * (i % 2), seed=i, **params) for i in range(len(prompts))],
    )
    assert llm.loop.drafter_errors == 0
    return seen


def prompts_of(*lengths: int, seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, n).tolist() for n in lengths]


@pytest.mark.parametrize(
    "sections", [{}, {"scheduler": {"chunk_size": 7}}, {"memory": {"page_size": 1, "num_pages": 1000}}]
)
def test_it_says_what_the_smaller_model_would_say(small, reference, sections):
    llm = make_llm(small, {"kind": "draft_model", "num_draft_tokens": 3}, **sections)
    seen = record(llm, prompts_of(1, 2, 40, 9, 61))
    assert len(seen) > 100
    for text, limit, draft in seen:
        assert draft == reference(text, min(limit, 3))


def test_long_prompts_are_read_in_parts_and_delay_no_request(small, reference):
    llm = make_llm(small, {"kind": "draft_model", "num_draft_tokens": 3, "chunk_size": 16})
    prompts = prompts_of(100, 3, 70)
    seen = record(llm, prompts, ignore_eos=True)
    waiting = [text for text, limit, draft in seen if limit and not draft]
    for text, limit, draft in seen:
        if draft:
            assert draft == reference(text, min(limit, 3))
        else:
            assert not limit or len(text) > 60, "short texts do not wait for long ones"
    steps = {len(p): sum(text[: len(p)] == p for text in waiting) for p in prompts}
    assert steps[3] == 0
    assert 4 <= steps[70] <= steps[100] + 5
    drafted = [text for text, _, draft in seen if draft]
    assert all(any(text[: len(p)] == p for text in drafted) for p in prompts), "in the end all are drafted for"


def test_a_text_is_read_once(small):
    """After its first draft, a request costs reading the new tokens and making its drafts."""
    llm = make_llm(small, {"kind": "draft_model", "num_draft_tokens": 4})
    drafter = llm.loop.executor.rank.drafter
    tokens = []
    forward = drafter._model.forward

    def counted(batch):
        tokens.append(len(batch.input_ids))
        return forward(batch)

    drafter._model.forward = counted
    llm.generate(prompts_of(90), SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True))
    first, *others = tokens
    assert first == 91
    assert max(others) <= 5, "at most what was accepted since, and one"


def test_a_model_of_its_own_kind_is_always_right(small):
    llm = make_llm(small, {"kind": "draft_model", "path": str(small)})
    llm.generate(prompts_of(3, 30, 70), SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True))
    stats = llm.loop.stats()
    assert stats.drafted_tokens > 100
    assert stats.accepted_tokens > 0.95 * stats.drafted_tokens


def test_a_smaller_context_ends_its_drafts(small, tmp_path):
    checkpoints.save_target(
        tmp_path / "short", 4, vocab_size=VOCAB_SIZE, num_hidden_layers=1, max_position_embeddings=50
    )
    llm = make_llm(small, {"kind": "draft_model", "path": str(tmp_path / "short")})
    seen = record(llm, prompts_of(30), ignore_eos=True)
    for text, limit, draft in seen:
        assert len(draft) == max(0, min(limit, 4, 51 - len(text)))


def test_another_vocabulary_is_refused(small, tmp_path):
    checkpoints.save_target(tmp_path / "other", vocab_size=VOCAB_SIZE + 1)
    with pytest.raises(
        ConfigError, match=r"a model of 65 tokens; the target has 64\. A draft model needs the vocabulary"
    ):
        make_llm(small, {"kind": "draft_model", "path": str(tmp_path / "other")})


def fp8_pair(directory: Path, size: int = 16) -> tuple[Path, Path]:
    """Write a model in FP8 by blocks, and the model that its numbers stand for."""
    stored, exact = directory / "stored", directory / "exact"
    checkpoints.save_target(exact, vocab_size=VOCAB_SIZE)
    shutil.copytree(exact, stored)
    tensors = by_block(load_file(exact / "model.safetensors"), size)
    for path, part in zip((stored, exact), tensors, strict=True):
        save_file(part, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [size, size]}
    (stored / "config.json").write_text(json.dumps(config))
    return stored, exact


def test_a_quantized_checkpoint_drafts_what_its_numbers_stand_for(tmp_path):
    """Also if the target is not quantized, in which case no quantization was chosen for it."""
    stored, exact = fp8_pair(tmp_path)
    drafted = [
        record(make_llm(exact, {"kind": "draft_model", "path": str(path)}), prompts_of(5)) for path in (stored, exact)
    ]
    assert drafted[0] == drafted[1]
    llm = make_llm(exact, {"kind": "draft_model", "path": str(stored)})
    (model,) = llm.loop.executor.rank.engine._draft_runtime._models
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float8_e4m3fn, torch.float32}
    llm.generate(prompts_of(5), SamplingParams(max_new_tokens=20, temperature=0))
    stats = llm.loop.stats()
    assert stats.accepted_tokens > 0.95 * stats.drafted_tokens > 0  # it drafts for itself


def test_a_quantized_checkpoint_that_cannot_be_loaded_is_refused(small, tmp_path):
    checkpoints.save_target(tmp_path / "other", vocab_size=VOCAB_SIZE)
    file = tmp_path / "other" / "config.json"
    before = json.loads(file.read_text())
    drafter = {"kind": "draft_model", "path": str(tmp_path / "other")}
    file.write_text(json.dumps({**before, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(
        ConfigError, match=r"(?s)other/config\.json has a quantization_config that no .*'fp8'.*'bitsandbytes'"
    ):
        make_llm(small, drafter)
    file.write_text(json.dumps({**before, "quantization_config": 8}))
    with pytest.raises(ConfigError, match=r"quantization_config is 8; allowed: an object, null"):
        make_llm(small, drafter)


def test_a_missing_checkpoint_is_named(small):
    with pytest.raises(ConfigError, match=r"speculative\.path is '/nowhere'"):
        make_llm(small, {"kind": "draft_model", "path": "/nowhere"})


def test_a_request_that_has_gone_leaves_nothing(small):
    llm = make_llm(small, "draft_model")
    llm.generate(prompts_of(3, 30), SamplingParams(max_new_tokens=10))
    assert not llm.loop.executor.rank.drafter._cursors
