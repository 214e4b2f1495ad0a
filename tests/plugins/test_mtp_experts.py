"""Compare the layers of GLM-4.5, DeepSeek-V3, ERNIE 4.5, Qwen3-Next and Qwen3.5 that predict further tokens with layers of
transformers.

Run: python -m pytest tests/plugins/test_mtp_experts.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import mtp_dflash_checkpoints as checkpoints
from plain_drafters import PlainTensors, check_best, drafts_of, make_llm, norm

from dovetail import LLM, SamplingParams
from dovetail.layers.latent import LatentAttention
from fp8_checkpoints import by_block

VOCAB, LAYERS = checkpoints.GLM["vocab_size"], checkpoints.GLM_LAYERS
LAYER = f"model.layers.{LAYERS}"


class PlainLayer(PlainTensors):
    """Run a layer of transformers after those of the target. It continues from its own output."""

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
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
        x = self.entered(self.tensors["model.embed_tokens.weight"][tokens], hidden)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        rotation = self.model.model.rotary_emb(x, positions)
        out = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self.left(out[0])[-1:]

    def entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        halves = [self.norm(embedded, f"{LAYER}.enorm"), self.norm(hidden, f"{LAYER}.hnorm")]
        return self.project(torch.cat(halves, -1), f"{LAYER}.eh_proj")

    def left(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out, f"{LAYER}.shared_head.norm")


class PlainErnie(PlainLayer):
    """The embedding of the first token counts as zeros, and what the layer returns is not normalised."""

    def entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        halves = [self.norm(embedded, "model.mtp_emb_norm.0"), self.norm(hidden, "model.mtp_hidden_norm.0")]
        return self.project(torch.cat(halves, -1), "model.mtp_linear_proj.0")

    def left(self, out: torch.Tensor) -> torch.Tensor:
        return out


class PlainQwen(PlainLayer):
    """Norms multiply by one plus their weight."""

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, 1 + self.tensors[f"{name}.weight"])

    def entered(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        halves = [self.norm(embedded, "mtp.pre_fc_norm_embedding"), self.norm(hidden, "mtp.pre_fc_norm_hidden")]
        return self.project(torch.cat(halves, -1), "mtp.fc")

    def left(self, out: torch.Tensor) -> torch.Tensor:
        return self.norm(out, "mtp.norm")


PLAIN = {checkpoints.save_ernie: PlainErnie, checkpoints.save_qwen3_next: PlainQwen}


@pytest.mark.parametrize(
    ("save", "changes"),
    [
        (checkpoints.save_glm, {}),
        (checkpoints.save_glm, {"use_qk_norm": True, "attention_bias": False}),
        (checkpoints.save_deepseek, {}),
        (checkpoints.save_glm_lite, {}),
        (checkpoints.save_ernie, {}),
        (checkpoints.save_qwen3_next, {}),
        (checkpoints.save_qwen3_next, {"num_experts": 0}),
    ],
    ids=["GLM, biases", "GLM, norms of heads", "DeepSeek", "GLM-4.7-Flash", "ERNIE", "Qwen3-Next", "Qwen3.5"],
)
def test_drafts_are_those_of_the_layer_of_transformers(
    save: Callable[..., Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = save(tmp_path, **changes)
    llm = make_llm(tmp_path, {"kind": "mtp", "num_draft_tokens": 3})
    plain = PLAIN.get(save, PlainLayer)
    check_best(drafts_of(llm, VOCAB, 29, 23), plain(tmp_path, model).logits)
    assert llm.loop.stats().drafted_tokens > 0
    llm.close()


def test_a_layer_that_is_stored_in_fp8_drafts_with_the_weights_that_the_codes_stand_for(tmp_path: Path) -> None:
    """As in published checkpoints, the projection from the embedding and the hidden state is not quantized."""
    model = checkpoints.save_deepseek(tmp_path)
    file = tmp_path / "model.safetensors"
    stored, exact = by_block(load_file(file), 32)
    assert f"{LAYER}.self_attn.kv_b_proj.weight_scale_inv" in stored
    assert f"{LAYER}.mlp.experts.5.up_proj.weight_scale_inv" in stored
    save_file(exact, file)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = config | {"num_hidden_layers": LAYERS + 1}
    (tmp_path / "config.json").write_text(json.dumps(layers))
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    plain = PlainLayer(tmp_path, model)
    save_file(stored, file)
    fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    llm = make_llm(tmp_path, {"kind": "mtp", "num_draft_tokens": 2})
    check_best(drafts_of(llm, VOCAB, 29, 23), plain.logits)
    assert llm.loop.stats().drafted_tokens > 0
    llm.close()


@pytest.mark.parametrize(
    ("save", "experts"),
    [
        pytest.param(checkpoints.save_glm, "tp", marks=pytest.mark.full),
        pytest.param(checkpoints.save_glm, "ep", marks=pytest.mark.full),
        pytest.param(checkpoints.save_deepseek, "tp", marks=pytest.mark.full),
        (checkpoints.save_deepseek, "ep"),
        pytest.param(checkpoints.save_qwen3_next, "tp", marks=pytest.mark.full),
    ],
)
def test_two_ranks_draft_the_same(save: Callable[..., Any], experts: str, tmp_path: Path) -> None:
    save(tmp_path)
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


def test_every_draft_is_accepted_of_a_layer_that_agrees_with_its_target(tmp_path: Path) -> None:
    """Layers that add nothing leave the embedding of a token, by which target and layer then choose the next one."""
    checkpoints.save_deepseek(tmp_path)
    file, hidden = tmp_path / "model.safetensors", checkpoints.DEEPSEEK["hidden_size"]
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros_like(tensors[name])
        elif name in ("model.norm.weight", f"{LAYER}.enorm.weight", f"{LAYER}.shared_head.norm.weight"):
            tensors[name] = torch.ones(hidden)
    tensors[f"{LAYER}.eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
    save_file(tensors, file)
    prompts = [[(7 * i + 3 * j) % VOCAB for j in range(n)] for i, n in enumerate((3, 17, 30))]
    params = SamplingParams(max_new_tokens=16, temperature=0)
    plain = make_llm(tmp_path, "none")
    expected = [output.token_ids for output in plain.generate(prompts, params)]
    plain.close()
    llm = make_llm(tmp_path, {"kind": "mtp", "num_draft_tokens": 3})
    assert [output.token_ids for output in llm.generate(prompts, params)] == expected
    stats = llm.loop.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 30
    llm.close()


@pytest.mark.parametrize("save", [checkpoints.save_glm, checkpoints.save_deepseek, checkpoints.save_qwen3_next])
def test_dummy_weights_make_the_layers_of_the_config(save: Callable[..., Any], tmp_path: Path) -> None:
    save(tmp_path)
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
    assert layer.mlp.shape.routing.num_experts in (6, 8)
    assert isinstance(layer.attn, LatentAttention) == (save is checkpoints.save_deepseek)
    llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, temperature=0))
    assert llm.loop.drafter_errors == 0
    llm.close()
