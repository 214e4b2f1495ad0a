"""Compare drafters from random checkpoints in the layouts of several libraries, inside the engine, with plain torch.

Run: python -m pytest tests/plugins/test_draft_checkpoints.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as checkpoints
from plain_drafters import EPS, PlainTensors, check_best, drafts_of, make_llm, rotate

from dovetail import LLM
from dovetail.engine.draft_runtime import EngineDraftRuntime
from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE
from dovetail_speculative.dflash_checkpoint import describe_dflash

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE = 199, 48, 4, 2, 16
Tensors = dict[str, torch.Tensor]

LAYERS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


# -- plain torch -----------------------------------------------------------------------------------------------------


class Plain(PlainTensors):
    """Run a drafter's checkpoint with its target. Everything is computed anew for every draft."""

    def __init__(self, directory: Path, target: Path) -> None:
        super().__init__(load_file(directory / "model.safetensors"))
        self.target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def embed(self, tokens: list[int]) -> torch.Tensor:
        return self.tensors.get("embed_tokens.weight", self.target.model.embed_tokens.weight)[tokens]

    def entering(self, text: list[int], layers: list[int]) -> torch.Tensor:
        """Return the residual streams that enter ``layers``, side by side."""
        states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], -1)

    def attended(self, name: str, x: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return attention before the output projection. ``x`` are the last of ``keys``; ``seen`` is
        ``[tokens, keys]``."""
        q, k, v = (self.heads(y, f"{name}.{part}_proj", SIZE) for part, y in (("q", x), ("k", keys), ("v", keys)))
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        places = torch.arange(len(keys))
        q, k = rotate(q, places[-len(x) :]), rotate(k, places)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits of the draft vocabulary as logits of the target's, by ``t2d``, so that ``d2t`` must agree with
        it."""
        if "t2d" not in self.tensors:
            return logits
        wide = torch.full((len(logits), VOCAB), -torch.inf)
        wide[:, self.tensors["t2d"].nonzero()[:, 0]] = logits
        return wide


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_target(tmp_path_factory.mktemp("target"))


@torch.inference_mode()
def check(llm: LLM, plain: Callable[[list[int], list[int]], torch.Tensor]) -> None:
    check_best(drafts_of(llm, VOCAB, 29, 23), plain)


def speculators(kind: str, layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return config.json as the speculators library writes it."""
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    return {
        "auto_map": {"": "config.Speculator"},
        "dtype": "float32",
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": LAYERS | layers,
    } | settings


def vocabulary(random: checkpoints.Random, count: int) -> Tensors:
    """Return a head over ``count`` tokens of the target, and the tensors that name these tokens."""
    kept = torch.randperm(VOCAB, generator=random.generator)[:count].sort().values
    return {
        "lm_head.weight": random.matrix(count, HIDDEN, 3.0),
        "d2t": kept - torch.arange(count),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, kept, value=True),
    }


def head_norms(random: checkpoints.Random, name: str) -> Tensors:
    return {f"{name}.self_attn.{part}_norm.weight": random.norm(SIZE) for part in "qk"}


# -- EAGLE-3 of the speculators library ------------------------------------------------------------------------------


class PlainEagle3(Plain):
    def __init__(self, directory: Path, target: Path, config: dict[str, Any]) -> None:
        super().__init__(directory, target)
        self.residual_normed = config["norm_before_residual"]
        self.layers = config["eagle_aux_hidden_state_layer_ids"] or [2, 4, 5]

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        features = self.entering(text[:-1], self.layers)
        if "input_norm.weight" in self.tensors:
            features = self.norm(features, "input_norm")
        hidden = self.project(features, "fc")
        for step in range(len(drafts)):
            hidden = torch.cat((hidden, self.output(hidden, text[1:] + drafts[:step])))
        return self.spread(self.project(self.norm(hidden[len(text) - 1 :], "norm"), "lm_head"))

    def output(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Return the output for the last of ``tokens``."""
        normed = self.norm(hidden, "layers.0.hidden_norm")
        both = torch.cat((self.norm(self.embed(tokens), "layers.0.input_layernorm"), normed), -1)
        before = torch.ones(len(both), len(both)).tril().bool()
        attended = self.attended("layers.0.self_attn", both, both, before)
        return self.after_attention(normed if self.residual_normed else hidden, attended, "layers.0")[-1:]


def save_eagle3(directory: Path, layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    config = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 61,
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "norm_before_fc": False,
        "norm_before_residual": True,
    } | settings
    config = speculators("eagle3", layers, **config)
    random = checkpoints.Random(4)
    tensors = random.layer(LAYERS, "layers.0", 2 * HIDDEN) | vocabulary(random, config["draft_vocab_size"])
    if layers.get("model_type") == "qwen3":
        tensors |= head_norms(random, "layers.0")
    if config["norm_before_fc"]:
        tensors["input_norm.weight"] = random.norm(3 * HIDDEN)
    norms = ("layers.0.hidden_norm", "layers.0.input_layernorm", "norm", "verifier_norm")
    tensors |= {f"{name}.weight": random.norm(HIDDEN) for name in norms}
    tensors["fc.weight"] = random.matrix(HIDDEN, 3 * HIDDEN)
    tensors["embed_tokens.weight"] = random.matrix(VOCAB, HIDDEN, 4.0)
    checkpoints.write(directory, config, tensors)
    return config


EAGLE3: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "qwen3, other layers": ({"model_type": "qwen3"}, {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}),
    "norm before fc, not before the residual": ({}, {"norm_before_fc": True, "norm_before_residual": False}),
    "all tokens": ({}, {"draft_vocab_size": VOCAB}),
}


@pytest.mark.parametrize("case", EAGLE3)
@pytest.mark.parametrize("chunk", [64, 5])
def test_eagle3_of_speculators(target: Path, tmp_path: Path, case: str, chunk: int) -> None:
    layers, settings = EAGLE3[case]
    config = save_eagle3(tmp_path, layers, **settings)
    llm = make_llm(target, {"kind": "eagle3", "path": str(tmp_path)}, chunk_size=chunk)
    check(llm, PlainEagle3(tmp_path, target, config).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark', but this drafter reads 'eagle3'"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None"),
        (
            {"transformer_layer_config": LAYERS | {"num_hidden_layers": 2}},
            r"num_hidden_layers: Input should be 1 \(it is 2\)",
        ),
        ({"transformer_layer_config": LAYERS | {"vocab_size": 200}}, "vocab_size is 200; the target's is 199"),
    ],
)
def test_other_speculators_are_refused(target: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = save_eagle3(tmp_path, {})
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        make_llm(target, {"kind": "eagle3", "path": str(tmp_path)})


# -- DFlash: of the speculators library, with windows, causal --------------------------------------------------------


class PlainDFlash(Plain):
    """Run a DFlash drafter. ``windows`` are those of its layers; ``layers`` of the target are numbered by what enters
    them."""

    def __init__(
        self, directory: Path, target: Path, layers: list[int], windows: list[int | None], *, causal: bool
    ) -> None:
        super().__init__(directory, target)
        self.layers, self.windows, self.causal = layers, windows, causal
        self.mask = 198

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        context = self.norm(self.project(self.entering(text[:-1], self.layers), "fc"), "hidden_norm")
        x = self.embed([text[-1]] + [self.mask] * len(drafts))
        for index, window in enumerate(self.windows):
            x = self.layer(f"layers.{index}", x, context, window)
        head = self.tensors.get("lm_head.weight", self.target.lm_head.weight)
        return self.spread(self.norm(x, "norm")[1:] @ head.T)

    def layer(self, name: str, x: torch.Tensor, context: torch.Tensor, window: int | None) -> torch.Tensor:
        normed = self.norm(x, f"{name}.input_layernorm")
        keys = torch.cat((context, normed))
        distance = torch.arange(len(context), len(keys))[:, None] - torch.arange(len(keys))
        seen = distance < (window or len(keys))
        if self.causal:
            seen &= distance >= 0
        return self.after_attention(x, self.attended(f"{name}.self_attn", normed, keys, seen), name)


def save_dflash(directory: Path, config: dict[str, Any], count: int, tensors: Tensors) -> None:
    """Save a drafter with ``count`` layers, and with ``tensors`` added."""
    random = checkpoints.Random(6)
    for index in range(count):
        name = f"layers.{index}"
        tensors = tensors | random.layer(LAYERS, name) | head_norms(random, name)
        tensors[f"{name}.input_layernorm.weight"] = random.norm(HIDDEN)
    tensors |= {f"{name}.weight": random.norm(HIDDEN) for name in ("norm", "hidden_norm")}
    tensors["fc.weight"] = random.matrix(HIDDEN, 3 * HIDDEN)
    checkpoints.write(directory, config, tensors)


SLIDING, FULL = "sliding_attention", "full_attention"
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "full": ({}, {}, False),
    "all slide, causal": ({"layer_types": [SLIDING, SLIDING], "sliding_window": 9}, {}, True),
    "some slide, not causal": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 9, "is_causal": False},
        {"sliding_window_non_causal": True},
        False,
    ),
}


def dflash_layers(case: str) -> tuple[dict[str, Any], list[int | None]]:
    layers = {"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": [FULL, FULL]} | KINDS[case][0]
    return layers, [layers["sliding_window"] if kind == SLIDING else None for kind in layers["layer_types"]]


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (8, 5)])
def test_dflash_with_windows(target: Path, tmp_path: Path, case: str, page_size: int, chunk: int) -> None:
    layers, windows = dflash_layers(case)
    own = {"mask_token_id": 198, "target_layer_ids": [0, 3, 6]}
    config = LAYERS | layers | {"architectures": ["DFlashDraftModel"], "block_size": 6, "dflash_config": own}
    save_dflash(tmp_path, config, 2, {})
    llm = make_llm(target, {"kind": "dflash", "path": str(tmp_path)}, page_size, chunk_size=chunk)
    check(llm, PlainDFlash(tmp_path, target, [1, 4, 7], windows, causal=KINDS[case][2]).logits)


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("draft_vocab", [61, VOCAB])
def test_dflash_of_speculators(target: Path, tmp_path: Path, case: str, draft_vocab: int) -> None:
    layers, windows = dflash_layers(case)
    layers.pop("is_causal", None)
    settings = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [1, 4, 7],
        "block_size": 6,
        "draft_vocab_size": draft_vocab,
        "mask_token_id": 198,
        "projector_type": "dflash",
        "sample_from_anchor": False,
        "shift_label": False,
        "sliding_window_non_causal": False,
    } | KINDS[case][1]
    random = checkpoints.Random(7)
    tensors = vocabulary(random, draft_vocab) if draft_vocab < VOCAB else {}
    if case == "full":
        tensors["embed_tokens.weight"] = random.matrix(VOCAB, HIDDEN, 4.0)
    save_dflash(tmp_path, speculators("dflash", layers, **settings), 2, tensors)
    llm = make_llm(target, {"kind": "dflash", "path": str(tmp_path)})
    check(llm, PlainDFlash(tmp_path, target, [1, 4, 7], windows, causal=KINDS[case][2]).logits)


def test_windows_need_attention_that_has_them(target: Path) -> None:
    resolved = make_llm(target, "none").loop.resolved
    chosen = resolved.attention_decode
    spec = replace(chosen.spec, offers=chosen.spec.offers - {Feature.ATTN_SLIDING_WINDOW})
    chosen = replace(chosen, component=replace(chosen.component, spec=spec))
    resolved = replace(resolved, parts={**resolved.parts, "attention.decode": (chosen,)})
    runtime = EngineDraftRuntime(
        resolved, SimpleNamespace(info=resolved.model_info), torch.device("cpu"), torch.float32, SINGLE
    )
    config = LAYERS | {"block_size": 6, "dflash_config": {"mask_token_id": 198, "target_layer_ids": [0]}}
    sliding = config | {"layer_types": [SLIDING], "sliding_window": 9}
    runtime.create_cache(describe_dflash(config, resolved.model_info, 256))
    with pytest.raises(ConfigError, match=r"needs attention\.sliding_window, which attention '\w+' does not offer"):
        runtime.create_cache(describe_dflash(sliding, resolved.model_info, 256))
