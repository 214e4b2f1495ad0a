"""Test layers for further tokens that differ from their target: MiMo's, own embeddings and heads, settings from the
config.

Run: python -m pytest tests/plugins/test_mtp_checkpoints.py
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
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as checkpoints
from plain_drafters import PlainTensors, attend, check_best, drafts_of, make_llm, rotate

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE = 199, 48, 4, 2, 16
LAYERS: dict[str, Any] = checkpoints.TARGET | {"intermediate_size": 56}
Names = dict[str, str]


class PlainMtp(PlainTensors):
    """Run DeepSeek-V3's or MiMo's layer after those of the target. It continues from its own output."""

    def __init__(self, directory: Path, names: Names, target: Any = None, theta: float = 10000.0) -> None:
        super().__init__(load_file(directory / "model.safetensors"))
        self.target = target or LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.names, self.theta = names, theta
        self.mimo = "token_layernorm" in names["embedding_norm"]

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        hidden = self.target_states(text[:-1])
        for step in range(len(drafts)):
            hidden = torch.cat((hidden, self.output(hidden, text[1:] + drafts[:step])))
        return self.project(hidden[len(text) - 1 :], self.names["head"])

    def target_states(self, text: list[int]) -> torch.Tensor:
        """Return the target's hidden states after its final norm; for MiMo's layer, those before the norm."""
        kept: list[torch.Tensor] = []
        handle = self.target.model.norm.register_forward_hook(lambda _, given, out: kept.extend((given[0][0], out[0])))
        self.target(torch.tensor([text]))
        handle.remove()
        return kept[0 if self.mimo else 1]

    def output(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Return the output for the last of ``tokens``."""
        embedded = self.tensors[f"{self.names['embedding']}.weight"][tokens]
        if self.mimo:
            embedded = torch.cat((torch.zeros(1, HIDDEN), embedded[1:]))
        halves = [self.norm(embedded, self.names["embedding_norm"]), self.norm(hidden, self.names["hidden_norm"])]
        x = self.project(torch.cat(halves[::-1] if self.mimo else halves, -1), self.names["projection"])
        layer = self.names["layer"]
        normed = self.norm(x, f"{layer}.input_layernorm")
        q, k, v = (self.heads(normed, f"{layer}.self_attn.{part}_proj", SIZE) for part in "qkv")
        attended = attend(rotate(q, theta=self.theta), rotate(k, theta=self.theta), v, causal=True)
        return self.norm(self.after_attention(x, attended, layer), self.names["final_norm"])[-1:]


@torch.inference_mode()
def check(llm: LLM, plain: Callable[[list[int], list[int]], torch.Tensor]) -> None:
    check_best(drafts_of(llm, VOCAB, 29, 23), plain)


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


def save_mtp(directory: Path, names: Names, layers: int = 1, **settings: Any) -> Path:
    """Save a target with layers for further tokens. An embedding or a head that ``names`` lacks is the target's."""
    checkpoints.save_target(directory)
    file, random = directory / "model.safetensors", checkpoints.Random(9)
    tensors = load_file(file)
    biased = [f"model.layers.{index}" for index in range(8)] + [names["layer"]]
    for layer in biased if settings.get("attention_bias") else ():
        for part, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{layer}.self_attn.{part}_proj.bias"] = random.norm(size * SIZE) - 1
    for index in range(layers):
        own = {part: name.replace("layers.8", f"layers.{8 + index}") for part, name in names.items()}
        tensors |= random.layer(LAYERS, own["layer"])
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
    llm = make_llm(directory, "mtp")
    parameters = dict(llm.loop.executor.rank.drafter._model.named_parameters())
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
    """The target is Qwen2 under another name; its layer reads the hidden states before the final norm."""
    published = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "use_sliding_window": False,
    }
    save_mtp(tmp_path, MIMO, **published)
    plain = PlainMtp(tmp_path, MIMO, qwen2(tmp_path))
    llm = make_llm(tmp_path, "mtp", chunk_size=chunk)
    check(llm, plain.logits)
    text = llm.generate([[3, 1, 4]], SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True))[0].token_ids
    with torch.inference_mode():
        expected = plain.target(torch.tensor([[3, 1, 4, *text]])).logits[0, 2:-1].argmax(-1)
    assert list(text) == expected.tolist()


def qwen2(directory: Path) -> Any:
    """Load the target in transformers, which does not support MiMo."""
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
