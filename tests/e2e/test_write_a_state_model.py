"""docs/write_a_model.md, "Layers with a state": the code is a model whose suite passes, and the table is complete.

Run: python -m pytest -q tests/e2e/test_write_a_state_model.py
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from test_write_a_model import filled, python_blocks, rows_after
from torch import nn
from transformers import Lfm2Config, Lfm2ForCausalLM

from dovetail.engine.build import build_model
from dovetail.interfaces import mixer_shapes
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.interfaces.state_rows import StateRows
from dovetail.layers.attention import SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import linear_targets
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import Rotary
from dovetail.layers.states import StateMixer, StepStates
from dovetail.testing.model import ModelSuite, Reference
from dovetail.types import Batch


class Hybrid(Layer, ModelArchitecture):
    """Compute LFM2 with the layers that the page shows."""

    recipes: ClassVar[dict[str, Any]] = {"__name__": "hybrid"}
    blocks: Any

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        super().__init__()
        self.info = info
        self.embed = Embedding(info.vocab_size, info.hidden_size, mesh)
        self.blocks = nn.ModuleList(self.recipes["HybridBlock"](info, mesh, index) for index in range(info.num_layers))
        self.norm = RMSNorm(info.hidden_size, info.config.norm_eps)
        self.head = LMHead(info.hidden_size, info.vocab_size, mesh, tied=self.embed)
        self.rotary = Rotary(info.config.rope)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.embed.forward(batch.input_ids)
        rotation = self.rotary.forward(batch.positions)
        for block in self.blocks:
            x = block(x, rotation, batch, batch.last if block is self.blocks[-1] else None)
        return self.norm.forward(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.forward(hidden)

    def weights_map(self) -> dict[str, Any]:
        targets: dict[str, Any] = {
            "model.embed_tokens.weight": self.embed.target("embed.weight"),
            "model.embedding_norm.weight": WeightTarget("norm.weight"),
        }
        for index, block in enumerate(self.blocks):
            ours, theirs, mixer = f"blocks.{index}", f"model.layers.{index}", block.mixer
            targets[f"{theirs}.operator_norm.weight"] = WeightTarget(f"{ours}.norm.weight")
            targets[f"{theirs}.ffn_norm.weight"] = WeightTarget(f"{ours}.mlp_norm.weight")
            if isinstance(mixer, SelfAttention):
                for part in ("q", "k", "v"):
                    name = f"{theirs}.self_attn.{part}_proj"
                    targets |= dict(linear_targets(mixer.qkv, name, f"{ours}.mixer.qkv", part))
                targets |= dict(linear_targets(mixer.out, f"{theirs}.self_attn.out_proj", f"{ours}.mixer.out"))
                for part in ("q", "k"):
                    weight = WeightTarget(f"{ours}.mixer.qk_norm.{part}_weight")
                    targets[f"{theirs}.self_attn.{part}_layernorm.weight"] = weight
            else:
                targets |= dict(mixer.targets(f"{ours}.mixer", f"{theirs}.conv"))
            for name, part in (("w1", "gate"), ("w3", "up")):
                name = f"{theirs}.feed_forward.{name}"
                targets |= dict(linear_targets(block.mlp.gate_up, name, f"{ours}.mlp.gate_up", part))
            targets |= dict(linear_targets(block.mlp.down, f"{theirs}.feed_forward.w2", f"{ours}.mlp.down"))
        return targets

    def ignored_weights(self) -> tuple[str, ...]:
        return (r"lm_head\.weight",)


class TestTheModelWithStates(ModelSuite):
    """The layers with a state that the page shows, as LFM2 of transformers computes them."""

    name = "lfm2"
    configs = {  # noqa: RUF012
        "small": {
            "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 256, "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
        }
    }  # fmt: skip

    def write_checkpoint(self, config: Mapping[str, Any], directory: Path) -> None:
        torch.manual_seed(0)
        model = Lfm2ForCausalLM(Lfm2Config(**config))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(torch.randn_like(tensor) * 0.2)
        model.save_pretrained(directory)

    def new_model(self, info: ModelInfo, dtype: torch.dtype = torch.float32, mesh: Any = SINGLE) -> ModelArchitecture:
        exec(python_blocks()[1], Hybrid.recipes)
        sizes = info.config
        groups = Hybrid.recipes["hybrid_groups"](
            sizes.states, info.hidden_size, sizes.conv_width, info.num_kv_heads, info.head_dim
        )
        one_rank = frozenset({Feature.MODEL_LAST_ROWS})
        own = dataclasses.replace(info, cache_groups=groups, offers=one_rank)
        return build_model(Hybrid, own, torch.device("cpu"), dtype, mesh)

    def reference(self, directory: Path) -> Reference:
        model = Lfm2ForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()

        @torch.no_grad()
        def logits(token_ids: Sequence[int]) -> torch.Tensor:
            return model(torch.tensor([token_ids])).logits[0]

        return logits


def test_the_layer_with_a_state_accepts_drafts() -> None:
    """After three drafts of which one was accepted, the state is that after the token before the drafts and this one."""
    exec(python_blocks()[1], Hybrid.recipes)
    layer = filled(Hybrid.recipes["OwnShortConv"](6, 4, 0))
    x = torch.randn(9, 6)
    slots, none = np.array([2], np.int32), torch.zeros(0, dtype=torch.int32)

    def step(memory: torch.Tensor, part: torch.Tensor, *, fresh: bool = False, drafts: bool = False) -> StepStates:
        rows = StateRows.of(slots, np.array([len(part)], np.int32), np.array([fresh]), writes=not drafts)
        states = StepStates([(memory,)], None if drafts else rows, none, rows if drafts else None)
        layer(part, states)
        return states

    drafted, plain = torch.zeros(4, 6, 3), torch.zeros(4, 6, 3)
    for memory in (drafted, plain):
        step(memory, x[:5], fresh=True)
    step(drafted, x[5:], drafts=True).advance(torch.tensor([2], dtype=torch.int32))
    step(plain, x[5:7])
    assert plain.any()
    torch.testing.assert_close(drafted, plain)


def test_the_layers_with_a_state_are_those_of_the_table() -> None:
    """The table names every mixer of ``dovetail.layers``, its module, its shape, and what it needs."""
    found = set()
    for row in rows_after("### Layers with a state"):
        call, module, needs = (re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split(" | "))
        cls = getattr(importlib.import_module(f"dovetail.layers.{module[0]}"), call[0].partition("(")[0])
        written = call[0].partition("(")[2].rstrip(")").split(", ")
        parameters = [
            p.name if p.default is p.empty else f"{p.name}={p.default}"
            for p in inspect.signature(cls).parameters.values()
        ]
        assert written == parameters
        assert cls.needs == getattr(mixer_shapes, needs[-1])
        found.add(cls)
    assert found == set(StateMixer.__subclasses__())
