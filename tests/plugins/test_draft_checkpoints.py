"""Drafters from checkpoints of several libraries: random ones in each layout, against plain torch, inside the engine.

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

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as checkpoints

from dovetail import LLM, SamplingParams
from dovetail.engine.draft_runtime import EngineDraftRuntime
from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail_speculative.dflash_checkpoint import describe_dflash

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE, EPS, THETA = 199, 48, 4, 2, 16, 1e-5, 10000.0
Tensors = dict[str, torch.Tensor]
Logits = Callable[[list[int], list[int]], torch.Tensor]
"""Of each of the drafts (second) after a text (first), given the drafts before: [drafts, vocabulary]."""

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
    "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


# -- decoder layers in plain torch -----------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: torch.Tensor, first: int = 0, theta: float = THETA) -> torch.Tensor:
    """[tokens, heads, d] at positions ``first``, ``first`` + 1 ..."""
    half = x.shape[-1] // 2
    angles = (first + torch.arange(len(x)))[:, None] * theta ** -(torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Plain:
    """Layers of a checkpoint; everything is computed anew for every draft."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.w = load_file(directory / "model.safetensors")
        self.target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    def embed(self, tokens: list[int]) -> torch.Tensor:
        own = self.w.get("embed_tokens.weight")
        return (self.target.model.embed_tokens.weight if own is None else own)[tokens]

    def entering(self, text: list[int], layers: list[int]) -> torch.Tensor:
        """The residual streams that enter ``layers``, side by side."""
        states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], -1)

    def heads(self, x: torch.Tensor, name: str, part: str) -> torch.Tensor:
        y = linear(x, self.w[f"{name}.{part}_proj.weight"], self.w.get(f"{name}.{part}_proj.bias")).unflatten(
            -1, (-1, SIZE)
        )
        weight = self.w.get(f"{name}.{part}_norm.weight")
        return y if weight is None else norm(y, weight)

    def attend(
        self, name: str, x: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, theta: float = THETA
    ) -> torch.Tensor:
        """``x`` are the last of ``keys``; ``seen [tokens, keys]``."""
        q = rotate(self.heads(x, name, "q"), len(keys) - len(x), theta)
        k, v = rotate(self.heads(keys, name, "k"), 0, theta), self.heads(keys, name, "v")
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), self.w[f"{name}.o_proj.weight"])

    def feed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The second half of a layer: ``x`` with what its MLP adds."""
        normed = norm(x, self.w[f"{name}.post_attention_layernorm.weight"])
        gate, up, down = (self.w[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return x + linear(silu(linear(normed, gate)) * linear(normed, up), down)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Of the draft vocabulary, over the target's: by ``t2d``, so that ``d2t`` must agree with it."""
        if "t2d" not in self.w:
            return logits
        wide = torch.full((len(logits), VOCAB), -torch.inf)
        wide[:, self.w["t2d"].nonzero()[:, 0]] = logits
        return wide


def before(count: int) -> torch.Tensor:
    return torch.ones(count, count).tril().bool()


# -- what the engine's drafter says ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_target(tmp_path_factory.mktemp("target"))


def make_llm(target: Path, speculative: Any, page_size: int = 4, **sections: Any) -> LLM:
    return LLM(
        str(target),
        device="cpu",
        grammar="none",
        threads=1,
        memory={"page_size": page_size, "num_pages": 1 + 2048 // page_size},
        speculative=speculative,
        **sections,
    )


@torch.inference_mode()
def check(llm: LLM, logits: Logits) -> None:
    """Every draft that the engine is offered is the most likely token, by ``logits``."""
    drafter, seen, asked = llm.loop.drafter, [], 0
    assert drafter is not None
    propose = drafter.propose

    def spied(batch: Any) -> Any:
        nonlocal asked
        tree = propose(batch)
        asked += int((batch.draft_room[batch.num_extend :] > 0).sum())
        for row, req in enumerate(batch.reqs):
            if tree is not None and tree.lens[row]:
                drafts = tree.token_ids[row, : tree.lens[row]].tolist()
                seen.append((req.token_ids[: req.known_len].tolist(), drafts))
        return tree

    drafter.propose = spied
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 7, 29)]
    prompts.append(prompts[2][:23] + rng.integers(0, VOCAB, 4).tolist())
    for some in (prompts[:3], prompts[3:]):  # the last finds a prefix of the third in the cache
        llm.generate(some, SamplingParams(max_new_tokens=12, temperature=1.0, seed=1, ignore_eos=True))
    assert llm.loop.drafter_errors == 0
    assert len(seen) == asked > 10
    for text, drafts in seen:
        expected = logits(text, drafts)
        got = expected.gather(-1, torch.tensor(drafts)[:, None])[:, 0]
        assert (expected.max(-1).values - got).abs().max() < 1e-4, f"{drafts} after {text}"


def speculators(kind: str, layers: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """config.json as the speculators library writes it."""
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
    """A head over ``count`` tokens of the target, and which they are."""
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
        if "input_norm.weight" in self.w:
            features = norm(features, self.w["input_norm.weight"])
        hidden = linear(features, self.w["fc.weight"])
        for step in range(len(drafts)):
            hidden = torch.cat((hidden, self.output(hidden, text[1:] + drafts[:step])))
        said = hidden[len(text) - 1 :]
        return self.spread(linear(norm(said, self.w["norm.weight"]), self.w["lm_head.weight"]))

    def output(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Of the last of ``tokens``."""
        normed = norm(hidden, self.w["layers.0.hidden_norm.weight"])
        both = torch.cat((norm(self.embed(tokens), self.w["layers.0.input_layernorm.weight"]), normed), -1)
        added = self.attend("layers.0.self_attn", both, both, before(len(both)))
        return self.feed("layers.0", added + (normed if self.residual_normed else hidden))[-1:]


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
    llm = make_llm(
        target, {"kind": "eagle3", "path": str(tmp_path)}, scheduler={"draft": "always", "chunk_size": chunk}
    )
    check(llm, PlainEagle3(tmp_path, target, config).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dspark"}, "speculators_model_type is 'dspark'; read here: 'eagle3'"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None"),
        (
            {"transformer_layer_config": LAYERS | {"num_hidden_layers": 2}},
            r"num_hidden_layers: Input should be 1 \(it is 2\)",
        ),
        ({"transformer_layer_config": LAYERS | {"vocab_size": 200}}, "vocab_size is 200, that of the target 199"),
    ],
)
def test_other_speculators_are_refused(target: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = save_eagle3(tmp_path, {})
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=message):
        make_llm(target, {"kind": "eagle3", "path": str(tmp_path)})


# -- DFlash: of the speculators library, with windows, causal --------------------------------------------------------


class PlainDFlash(Plain):
    """``windows`` of the layers; ``layers`` of the target are counted as what enters them."""

    def __init__(
        self, directory: Path, target: Path, layers: list[int], windows: list[int | None], *, causal: bool
    ) -> None:
        super().__init__(directory, target)
        self.layers, self.windows, self.causal = layers, windows, causal
        self.mask = 198

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        features = linear(self.entering(text[:-1], self.layers), self.w["fc.weight"])
        context = norm(features, self.w["hidden_norm.weight"])
        x = self.embed([text[-1]] + [self.mask] * len(drafts))
        for index, window in enumerate(self.windows):
            x = self.layer(f"layers.{index}", x, context, window)
        head = self.w.get("lm_head.weight", self.target.lm_head.weight)
        return self.spread(linear(norm(x, self.w["norm.weight"])[1:], head))

    def layer(self, name: str, x: torch.Tensor, context: torch.Tensor, window: int | None) -> torch.Tensor:
        normed = norm(x, self.w[f"{name}.input_layernorm.weight"])
        keys = torch.cat((context, normed))
        distance = torch.arange(len(context), len(keys))[:, None] - torch.arange(len(keys))
        seen = distance < (window or len(keys))
        if self.causal:
            seen &= distance >= 0
        return self.feed(name, x + self.attend(f"{name}.self_attn", normed, keys, seen))


def save_dflash(directory: Path, config: dict[str, Any], count: int, tensors: Tensors) -> None:
    """``count`` layers and ``tensors``."""
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
    scheduler = {"draft": "always", "chunk_size": chunk}
    llm = make_llm(target, {"kind": "dflash", "path": str(tmp_path)}, page_size, scheduler=scheduler)
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
    llm = make_llm(target, {"kind": "dflash", "path": str(tmp_path)}, scheduler={"draft": "always"})
    check(llm, PlainDFlash(tmp_path, target, [1, 4, 7], windows, causal=KINDS[case][2]).logits)


def test_windows_need_attention_that_has_them(target: Path) -> None:
    resolved = make_llm(target, "none").loop.resolved
    chosen = resolved.attention_decode
    spec = replace(chosen.spec, offers=chosen.spec.offers - {Feature.ATTN_SLIDING_WINDOW})
    chosen = replace(chosen, component=replace(chosen.component, spec=spec))
    resolved = replace(resolved, attention_decode=chosen)
    runtime = EngineDraftRuntime(resolved, SimpleNamespace(), torch.device("cpu"), torch.float32)
    config = LAYERS | {"block_size": 6, "dflash_config": {"mask_token_id": 198, "target_layer_ids": [0]}}
    sliding = config | {"layer_types": [SLIDING], "sliding_window": 9}
    runtime.room(describe_dflash(config, resolved.model_info, 256))
    with pytest.raises(ConfigError, match=r"needs attention\.sliding_window, which attention '\w+' does not offer"):
        runtime.room(describe_dflash(sliding, resolved.model_info, 256))


# -- layers of the target's own checkpoint ---------------------------------------------------------------------------


class PlainMtp(Plain):
    """DeepSeek-V3's or MiMo's layer behind those of the target, which goes on from what it said."""

    def __init__(self, target: Path, names: dict[str, str], theta: float = THETA) -> None:
        super().__init__(target, target)
        self.names, self.theta = names, theta
        self.mimo = "token_layernorm" in names["embedding_norm"]

    def part(self, name: str) -> torch.Tensor:
        return self.w[f"{self.names[name]}.weight"]

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        hidden = self.said_by_target(text[:-1])
        for step in range(len(drafts)):
            hidden = torch.cat((hidden, self.output(hidden, text[1:] + drafts[:step])))
        return linear(hidden[len(text) - 1 :], self.part("head"))

    def said_by_target(self, text: list[int]) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        handle = self.target.model.norm.register_forward_hook(lambda _, given, out: kept.extend((given[0][0], out[0])))
        self.target(torch.tensor([text]))
        handle.remove()
        return kept[0 if self.mimo else 1]

    def output(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        embedded = self.part("embedding")[tokens]
        if self.mimo:
            embedded = torch.cat((torch.zeros(1, HIDDEN), embedded[1:]))
        halves = [norm(embedded, self.part("embedding_norm")), norm(hidden, self.part("hidden_norm"))]
        x = linear(torch.cat(halves[::-1] if self.mimo else halves, -1), self.part("projection"))
        layer = self.names["layer"]
        normed = norm(x, self.w[f"{layer}.input_layernorm.weight"])
        x = x + self.attend(f"{layer}.self_attn", normed, normed, before(len(x)), self.theta)
        return norm(self.feed(layer, x), self.part("final_norm"))[-1:]


DEEPSEEK = {
    "layer": "model.layers.8",
    "embedding_norm": "model.layers.8.enorm",
    "hidden_norm": "model.layers.8.hnorm",
    "projection": "model.layers.8.eh_proj",
    "final_norm": "model.layers.8.shared_head.norm",
    "embedding": "model.layers.8.embed_tokens",
    "head": "model.layers.8.shared_head.head",
}
MIMO = {
    "layer": "model.mtp_layers.0",
    "embedding_norm": "model.mtp_layers.0.token_layernorm",
    "hidden_norm": "model.mtp_layers.0.hidden_layernorm",
    "projection": "model.mtp_layers.0.input_proj",
    "final_norm": "model.mtp_layers.0.final_layernorm",
    "embedding": "model.embed_tokens",
    "head": "lm_head",
}


def save_mtp(directory: Path, names: dict[str, str], layers: int = 1, **settings: Any) -> Path:
    """A target with layers of its own for further tokens; an embedding and a head that the names leave to the target are its."""
    checkpoints.save_target(directory)
    file, random = directory / "model.safetensors", checkpoints.Random(9)
    tensors = load_file(file)
    if settings.get("attention_bias"):
        for index in range(8):
            for part, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                tensors[f"model.layers.{index}.self_attn.{part}_proj.bias"] = random.norm(size * SIZE) - 1
    for index in range(layers):
        own = {part: name.replace("layers.8", f"layers.{8 + index}") for part, name in names.items()}
        tensors |= random.layer(LAYERS, own["layer"])
        if settings.get("attention_bias"):
            for part, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                tensors[f"{own['layer']}.self_attn.{part}_proj.bias"] = random.norm(size * SIZE) - 1
        norms = [f"{own['layer']}.input_layernorm"] + [own[part] for part in own if part.endswith("norm")]
        tensors |= {f"{name}.weight": random.norm(HIDDEN) for name in norms}
        tensors[f"{own['projection']}.weight"] = random.matrix(HIDDEN, 2 * HIDDEN)
        for part, scale in (("embedding", 4.0), ("head", 3.0)):
            tensors.setdefault(f"{own[part]}.weight", random.matrix(VOCAB, HIDDEN, scale))
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": layers} | settings
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("own", ["embedding", "head", "both", "neither"])
def test_mtp_with_an_embedding_or_a_head_of_its_own(tmp_path: Path, own: str) -> None:
    directory = save_mtp(tmp_path, DEEPSEEK)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for part, of_target in (("embedding", "model.embed_tokens"), ("head", "lm_head")):
        if own not in (part, "both"):
            tensors[f"{DEEPSEEK[part]}.weight"] = tensors[f"{of_target}.weight"].clone()
    save_file(tensors, file)
    llm = make_llm(directory, "mtp", scheduler={"draft": "always"})
    parameters = dict(llm.loop.drafter._model.named_parameters())
    assert ("embed.weight" in parameters) == (own in ("embedding", "both"))
    assert ("head.weight" in parameters) == (own in ("head", "both"))
    check(llm, PlainMtp(directory, DEEPSEEK).logits)


def test_heads_of_several_mtp_layers_are_refused(tmp_path: Path) -> None:
    save_mtp(tmp_path, DEEPSEEK, layers=2)
    with pytest.raises(
        ConfigError, match=r"one of 2 layers .*\(model\.layers\.8\) has an embedding or a head other than"
    ):
        make_llm(tmp_path, "mtp")


@pytest.mark.parametrize("chunk", [64, 5])
def test_mimo(tmp_path: Path, chunk: int) -> None:
    """The target is Qwen2 by another name; its layer reads it before the final norm."""
    published = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "use_sliding_window": False,
    }
    save_mtp(tmp_path / "mimo", MIMO, **published)
    llm = make_llm(tmp_path / "mimo", "mtp", scheduler={"draft": "always", "chunk_size": chunk})
    plain = PlainMtp(tmp_path / "mimo", MIMO)
    plain.target = qwen2(tmp_path / "mimo")
    check(llm, plain.logits)
    text = llm.generate([[3, 1, 4]], SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True))[0].token_ids
    with torch.inference_mode():
        expected = plain.target(torch.tensor([[3, 1, 4, *text]])).logits[0, 2:-1].argmax(-1)
    assert list(text) == expected.tolist()


def qwen2(directory: Path) -> Any:
    """The target in transformers, which does not know MiMo."""
    config = Qwen2Config(**json.loads((directory / "config.json").read_text()) | {"model_type": "qwen2"})
    model = Qwen2ForCausalLM(config).eval()
    left = model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    assert not left.missing_keys
    assert all("mtp_layers" in name for name in left.unexpected_keys)
    return model


def test_mtp_follows_what_overrides_say_of_the_target(tmp_path: Path) -> None:
    directory = save_mtp(tmp_path / "target", DEEPSEEK)
    other = save_mtp(tmp_path / "other", DEEPSEEK, rope_theta=300.0)
    model = {"path": str(directory), "overrides": {"rope_theta": 300.0}}
    llm = LLM(model=model, device="cpu", grammar="none", threads=1, speculative="mtp", scheduler={"draft": "always"})
    check(llm, PlainMtp(other, DEEPSEEK, theta=300.0).logits)
