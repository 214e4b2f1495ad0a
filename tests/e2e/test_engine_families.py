"""Test models of other families in an engine: greedy tokens equal those of transformers, however the work is cut.

.venv/bin/python -m pytest -q tests/e2e/test_engine_families.py
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, Mamba2Config, Phi3Config

from dovetail import LLM, ConfigError, SamplingParams

_spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).parent / "engine_models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

STEPS = 24
GREEDY = SamplingParams(max_new_tokens=STEPS, temperature=0)
ORIGINAL = 64
"""The context of the first training of the model with longrope."""


def prompts_of(lengths, shared=0):
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, models.VOCAB, shared).tolist()
    return [prefix + rng.integers(0, models.VOCAB, n).tolist() for n in lengths]


def check(checkpoint, prompts, cached, **sections):
    """Generate twice, so that the second time prefixes are found in the cache."""
    settings = {"memory": {"page_size": 8, "num_pages": 300}, "scheduler": {"chunk_size": 24}} | sections
    llm = LLM(str(checkpoint), grammar="none", device="cpu", **settings)
    reference = models.Reference(checkpoint)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == reference.greedy(tuple(prompt), STEPS)
    assert [output.cached_tokens for output in outputs] == cached
    llm.loop.scheduler.check_integrity()
    assert llm.loop.stats().pages_used == 0


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return models.save(tmp_path_factory.mktemp("gpt2"), GPT2Config, n_positions=256)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    factors = {
        "short_factor": [1.0 + 0.1 * pair for pair in range(4)],
        "long_factor": [2.0 + pair for pair in range(4)],
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **factors}
    return models.save(
        tmp_path_factory.mktemp("phi3"),
        Phi3Config,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope,
        sliding_window=50,
        tie_word_embeddings=False,
    )


def test_gpt2(gpt2):
    check(gpt2, prompts_of([3, 40, 17, 90], shared=32), [32, 64, 48, 120])


def test_gpt2_as_it_was_published(gpt2, tmp_path):
    """The first checkpoints lack the prefix of the body, and contain the masks of attention."""
    tensors = load_file(gpt2 / "model.safetensors")
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert all(name.startswith(("h.", "wte.", "wpe.", "ln_f.")) for name in named)
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 256, 256).tril() for layer in range(2)}
    (tmp_path / "config.json").write_text((gpt2 / "config.json").read_text())
    save_file(named | masks, tmp_path / "model.safetensors")
    check(tmp_path, prompts_of([20]), [16])


def test_phi3_with_long_factors(phi3):
    """Transformers uses the long factors for texts above the original context."""
    check(phi3, prompts_of([3, 40, 17], shared=ORIGINAL), [64, 96, 80])


def test_phi3_with_short_factors(phi3):
    """A context within the original one gives the short factors."""
    check(phi3, prompts_of([3, 38, 17]), [0, 32, 16], model={"context_len": ORIGINAL})


def test_a_drafter_has_the_factors_of_its_target(phi3):
    """With others, its drafts would be wrong."""
    llm = LLM(
        str(phi3),
        grammar="none",
        device="cpu",
        memory={"page_size": 8, "num_pages": 300},
        model={"context_len": ORIGINAL},
        scheduler={"draft": "always"},
        speculative={"kind": "draft_model", "path": str(phi3)},
    )
    llm.generate(prompts_of([3, 20, 30]), SamplingParams(max_new_tokens=30, temperature=0))
    stats = llm.loop.stats()
    assert stats.drafted_tokens > 30
    assert stats.accepted_tokens > 0.95 * stats.drafted_tokens


def test_a_drafter_with_states_is_refused(tmp_path):
    """The caches of drafters have pages only."""
    sizes = {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16}
    drafter = models.save(tmp_path / "drafter", Mamba2Config, **sizes)
    target = models.save_llama(tmp_path / "target")
    with pytest.raises(ConfigError, match="the drafter's model Mamba2ForCausalLM has cache groups of kind state"):
        LLM(str(target), grammar="none", device="cpu", speculative={"kind": "draft_model", "path": str(drafter)})
