"""Compare the DFlash drafter, inside the engine (pages, chunks, prefix hits), with a plain implementation of its paper.

Run: python -m pytest tests/plugins/test_dflash.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import plain_drafters
from plain_drafters import EPS, PlainTensors, Spy, attend, check_best, drafts_of, rotate

import bnb_checkpoints
from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, ResolutionError, WeightsError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.model import ModelInfo
from dovetail_speculative.dflash_checkpoint import describe_dflash

VOCAB, HIDDEN, MASK = 131, 48, 130
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": EPS,
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "block_size": 6,
    "num_target_layers": 3,
    "layer_types": ["full_attention"] * 2,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}


def save_target(directory: Path) -> Path:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=256,
        initializer_range=0.25,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def save_drafter(directory: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a checkpoint with random weights in the published layout: names and shapes as in
    https://github.com/z-lab/dflash."""
    config = DRAFTER | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    wide = config["intermediate_size"]
    shapes = {
        "fc.weight": (HIDDEN, HIDDEN * len(config["dflash_config"]["target_layer_ids"])),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(config["num_hidden_layers"]):
        own = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (heads * size, HIDDEN),
            "self_attn.k_proj.weight": (kv * size, HIDDEN),
            "self_attn.v_proj.weight": (kv * size, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, heads * size),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "mlp.gate_proj.weight": (wide, HIDDEN),
            "mlp.up_proj.weight": (wide, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, wide),
        }
        if config["attention_bias"]:
            for name in ("q", "k", "v", "o"):
                own[f"self_attn.{name}_proj.bias"] = own[f"self_attn.{name}_proj.weight"][:1]
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    torch.manual_seed(5)
    tensors = {name: torch.randn(shape) * 0.2 + (1.0 if "norm" in name else 0.0) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return tensors


class Plain(PlainTensors):
    """Implement the paper for one text at a time, without any memory between drafts."""

    def __init__(self, target: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        super().__init__(tensors)
        self.config = config

    @torch.inference_mode()
    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        """Return the logits that ``drafts`` after ``text`` were taken from, [drafts, vocabulary]."""
        own = self.config["dflash_config"]
        states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer + 1][0] for layer in own["target_layer_ids"]], -1)
        context = self.norm(self.project(features, "fc"), "hidden_norm")
        block = torch.tensor([text[-1]] + [own["mask_token_id"]] * len(drafts))
        x = self.target.get_input_embeddings()(block)
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(f"layers.{layer}", x, context)
        return self.target.lm_head(self.norm(x, "norm")[1:])

    def layer(self, name: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        normed, attn, size = self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn", self.config["head_dim"]
        both = torch.cat((context, normed))
        places, theta = torch.arange(len(both)), self.config["rope_theta"]
        q = self.norm(self.heads(normed, f"{attn}.q_proj", size), f"{attn}.q_norm")
        k = self.norm(self.heads(both, f"{attn}.k_proj", size), f"{attn}.k_norm")
        q, k = rotate(q, places[len(context) :], theta), rotate(k, places, theta)
        attended = attend(q, k, self.heads(both, f"{attn}.v_proj", size), causal=False)
        return self.after_attention(x, attended, name)


def make_llm(target: Path, page_size: int = 1, speculative: Any = "dflash", **scheduler: Any) -> LLM:
    return plain_drafters.make_llm(target, speculative, page_size, **scheduler)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


CASES = {
    "plain": {},
    "biases": {"attention_bias": True},
    "one layer of one head, block of 3": {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "block_size": 3,
    },
    "middle layers, out of order": {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 0, 2]}},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (8, 5), (16, 1)])
def test_drafts_are_those_of_the_paper(target: Path, tmp_path: Path, case: str, page_size: int, chunk: int) -> None:
    tensors = save_drafter(tmp_path, **CASES[case])
    plain = Plain(target, DRAFTER | CASES[case], tensors)
    llm = make_llm(target, page_size, {"kind": "dflash", "path": str(tmp_path)}, chunk_size=chunk)
    spy = drafts_of(llm, VOCAB, longest=23, shared=20)
    assert spy.asked >= 4 * 11 / (DRAFTER | CASES[case])["block_size"]
    check_best(spy, plain.logits)


def test_a_quantized_drafter_computes_with_the_weights_of_its_checkpoint(target: Path, tmp_path: Path) -> None:
    save_drafter(tmp_path / "drafter")
    exact = bnb_checkpoints.quantize_directory(
        tmp_path / "drafter", bnb_checkpoints.config("int8", llm_int8_skip_modules=["fc"])
    )
    plain = Plain(target, DRAFTER, load_file(exact / "model.safetensors"))
    llm = make_llm(target, 8, {"kind": "dflash", "path": str(tmp_path / "drafter")}, chunk_size=5)
    check_best(drafts_of(llm, VOCAB, longest=23, shared=20), plain.logits)


TARGET_INFO = ModelInfo("Target", VOCAB, HIDDEN, 3, 4, 2, 12, 256, (CacheGroup(3, 2, 12),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": None}, "dflash_config is None"),
        ({"dflash_config": {"mask_token_id": MASK}}, "target_layer_ids is None"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, "mask_token_id is None"),
        ({"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [0]}}, "below 131"),
        ({"dflash_config": DRAFTER["dflash_config"] | {"use_swa": True}}, "use_swa is True"),
        ({"hidden_size": 60}, "hidden_size is 60; the target's is 48"),
        ({"layer_types": ["full_attention"]}, "needed: a list of 2"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window is None; needed: an integer of at least 6",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
            "By default, blocks are causal only in layers with a sliding window",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ({"block_size": 1}, "block_size is 1"),
        ({"intermediate_size": "72"}, "intermediate_size is '72'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    describe_dflash(DRAFTER, TARGET_INFO, 256)
    with pytest.raises(ConfigError, match=message):
        describe_dflash(DRAFTER | change, TARGET_INFO, 256)


def test_block_size_may_stand_in_either_place() -> None:
    without = {key: value for key, value in DRAFTER.items() if key != "block_size"}
    own = DRAFTER["dflash_config"] | {"block_size": 7}
    assert describe_dflash(without | {"dflash_config": own}, TARGET_INFO, 256).config.block_size == 7
    assert describe_dflash(without, TARGET_INFO, 256).config.block_size == 16


def test_auto_is_a_folder_of_the_target(tmp_path: Path) -> None:
    save_target(tmp_path)
    with pytest.raises(ResolutionError, match=r"speculative\.path"):
        make_llm(tmp_path)
    save_drafter(tmp_path / "dflash")
    assert make_llm(tmp_path).loop.executor.rank.drafter.max_draft_tokens == 5
    assert (
        make_llm(
            tmp_path, speculative={"kind": "dflash", "num_draft_tokens": 2}
        ).loop.executor.rank.drafter.max_draft_tokens
        == 2
    )
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 6.*1 to 5"):
        make_llm(tmp_path, speculative={"kind": "dflash", "num_draft_tokens": 6})


def test_layers_that_the_target_does_not_have_are_refused(target: Path, tmp_path: Path) -> None:
    save_drafter(tmp_path, dflash_config={"mask_token_id": MASK, "target_layer_ids": [3]})
    with pytest.raises(ConfigError, match="layers"):
        make_llm(target, speculative={"kind": "dflash", "path": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "added"), [("fc.weight", False), ("candidate_selector.hidden_projection.weight", True)]
)
def test_tensors_must_be_those_of_the_layout(target: Path, tmp_path: Path, name: str, added: bool) -> None:
    tensors = save_drafter(tmp_path)
    changed = tensors | {name: torch.zeros(3)} if added else {k: v for k, v in tensors.items() if k != name}
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=name):
        make_llm(target, speculative={"kind": "dflash", "path": str(tmp_path)})


def test_dummy_weights_need_no_tensors(target: Path, tmp_path: Path) -> None:
    save_drafter(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    llm = make_llm(target, speculative={"kind": "dflash", "path": str(tmp_path), "load_format": "dummy"})
    spy = Spy(llm.loop.executor.rank.drafter)
    llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, temperature=0))
    assert spy.drafts
    assert llm.loop.drafter_errors == 0
