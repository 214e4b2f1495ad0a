"""Compare the layer of GLM-4.5 that predicts further tokens, which has experts, with a layer of transformers.

Run: python -m pytest tests/plugins/test_mtp_experts.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Glm4MoeForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import mtp_dflash_checkpoints as checkpoints
from plain_drafters import PlainTensors, check_best, drafts_of, make_llm

from dovetail import LLM, SamplingParams

VOCAB, LAYERS = checkpoints.GLM["vocab_size"], checkpoints.GLM_LAYERS
LAYER = f"model.layers.{LAYERS}"


class PlainGlm(PlainTensors):
    """Run a layer of transformers after those of the target. It continues from its own output."""

    def __init__(self, directory: Path, model: Glm4MoeForCausalLM) -> None:
        super().__init__(load_file(directory / "model.safetensors"))
        self.layer, self.model = model.model.layers[LAYERS], model
        model.model.layers = model.model.layers[:LAYERS]

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        for step in range(len(drafts)):
            hidden = torch.cat((hidden, self.output(hidden, text[1:] + drafts[:step])))
        return self.model.lm_head(hidden[len(text) - 1 :])

    def output(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Return the output for the last of ``tokens``."""
        embedded = self.tensors["model.embed_tokens.weight"][tokens]
        halves = [self.norm(embedded, f"{LAYER}.enorm"), self.norm(hidden, f"{LAYER}.hnorm")]
        x = self.project(torch.cat(halves, -1), f"{LAYER}.eh_proj")[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self.norm(out[0], f"{LAYER}.shared_head.norm")[-1:]


@pytest.mark.parametrize(
    "changes", [{}, {"use_qk_norm": True, "attention_bias": False}], ids=["biases", "norms of heads"]
)
def test_drafts_are_those_of_the_layer_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = checkpoints.save_glm(tmp_path, **changes)
    llm = make_llm(tmp_path, {"kind": "mtp", "num_draft_tokens": 3})
    check_best(drafts_of(llm, VOCAB, 29, 23), PlainGlm(tmp_path, model).logits)
    assert llm.loop.stats().drafted_tokens > 0
    llm.close()


@pytest.mark.parametrize("experts", [pytest.param("tp", marks=pytest.mark.full), "ep"])
def test_two_ranks_draft_the_same(experts: str, tmp_path: Path) -> None:
    checkpoints.save_glm(tmp_path)
    prompts = [[(7 * i + 3 * j) % VOCAB for j in range(n)] for i, n in enumerate((3, 17, 30))]
    params = SamplingParams(max_new_tokens=16, temperature=0)
    found = []
    for parallel in ({}, {"parallel": {"tp": 2, "experts": experts}}):
        llm = LLM(
            str(tmp_path),
            model={"dtype": "float32"},
            device="cpu",
            grammar="none",
            threads=1,
            memory={"page_size": 4, "num_pages": 512},
            speculative={"kind": "mtp"},
            scheduler={"draft": "always"},
            **parallel,
        )
        outputs = [output.token_ids for output in llm.generate(prompts, params)]
        stats = llm.loop.stats()
        found.append((outputs, stats.drafted_tokens, stats.accepted_tokens))
        llm.close()
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_dummy_weights_make_the_layers_of_the_config(tmp_path: Path) -> None:
    checkpoints.save_glm(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    llm = LLM(
        str(tmp_path),
        model={"dtype": "float32", "load_format": "dummy"},
        device="cpu",
        grammar="none",
        memory={"page_size": 4, "num_pages": 512},
        speculative={"kind": "mtp", "load_format": "dummy"},
        scheduler={"draft": "always"},
    )
    layer = llm.loop.executor.rank.drafter._model.layers[0]
    assert layer.mlp.shape.routing.num_experts == checkpoints.GLM["n_routed_experts"]
    llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, temperature=0))
    assert llm.loop.drafter_errors == 0
    llm.close()
