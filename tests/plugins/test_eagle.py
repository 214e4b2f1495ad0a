"""Compare EAGLE drafters with an implementation in plain torch, without KV cache, pages or batches.

Run: python -m pytest tests/plugins/test_eagle.py
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import drafter_checkpoints as checkpoints
from plain_drafters import attend, norm, rotate

import bnb_checkpoints
from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, ResolutionError, WeightsError
from dovetail.testing.drafter import text_of
from dovetail_speculative.config import TreeShape
from dovetail_speculative.eagle import fitted
from dovetail_speculative.eagle_checkpoint import Eagle3ConfigJson, aux_layers

VOCAB = checkpoints.VOCAB


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = checkpoints.save_target(tmp_path_factory.mktemp("eagle") / "target")
    checkpoints.save_eagle(directory / "eagle")
    checkpoints.save_eagle3(directory / "eagle3")
    return directory


@pytest.fixture(scope="module")
def heads(target):
    """Return each head in plain torch. Several tests draft for the same texts, which are computed once."""
    return {name: head(target / name, target) for name, head in HEADS.items()}


# -- a head in plain torch -------------------------------------------------------------------------------------------


class PlainHead:
    """Run a head on one text at a time, and compute everything anew for every token.

    ``next_output(hidden, tokens)`` is the output for the last of ``tokens``, given the hidden state before each token.
    """

    def __init__(self, directory: Path, target: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.w = load_file(directory / "model.safetensors")
        self.target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.embedding = self.w.get("embed_tokens.weight", self.target.model.embed_tokens.weight)
        self.prefix = "midlayer" if any(name.startswith("midlayer") for name in self.w) else "layers.0"
        self.drafters = lru_cache(None)(self._drafter)

    def states(self, text: list[int]) -> list[torch.Tensor]:
        """Return the residual stream that enters each layer, and the final output."""
        return [s[0] for s in self.target(torch.tensor([text]), output_hidden_states=True).hidden_states]

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.w[f"{self.prefix}.{name}.weight"], self.w.get(f"{self.prefix}.{name}.bias"))

    def layer(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        count, dim = len(x), self.config["head_dim"]
        q, k, v = (self.project(x, f"self_attn.{p}_proj").view(count, -1, dim) for p in ("q", "k", "v"))
        attended = attend(rotate(q), rotate(k), v, causal=True)
        x = residual + self.project(attended, "self_attn.o_proj")
        normed = norm(x, self.w[f"{self.prefix}.post_attention_layernorm.weight"])
        gated = functional.silu(self.project(normed, "mlp.gate_proj")) * self.project(normed, "mlp.up_proj")
        return x + self.project(gated, "mlp.down_proj")

    def entering(self, text: list[int]) -> torch.Tensor:
        raise NotImplementedError

    def output(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        raise NotImplementedError

    def logprobs(self, output: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def drafter(self, text: list[int]) -> Any:
        """Return the logarithms of the probabilities [V] of what follows ``text`` and a path of drafts. The results are
        cached."""
        return self.drafters(tuple(text))

    def _drafter(self, key: tuple[int, ...]) -> Any:
        text = list(key)
        entering = self.entering(text[:-1])

        @lru_cache(None)
        def output(path: tuple[int, ...]) -> torch.Tensor:
            own = [output(path[:i]) for i in range(len(path))]
            return self.output(torch.stack([*entering, *own]), [*text[1:], *path])

        return lru_cache(None)(lambda path: self.logprobs(output(path)))


class PlainEagle(PlainHead):
    def entering(self, text):
        return self.states(text)[-1]

    def output(self, hidden, tokens):
        x = torch.cat((self.embedding[tokens], hidden), -1)
        x = functional.linear(x, self.w["fc.weight"], self.w.get("fc.bias"))
        return self.layer(x, x)[-1]

    def logprobs(self, output):
        return self.target.lm_head(output).log_softmax(-1)


class PlainEagle3(PlainHead):
    layers = (2, 4, 5)  # layers of a target that has 8

    def entering(self, text):
        states = self.states(text)
        return functional.linear(torch.cat([states[i] for i in self.layers], -1), self.w["fc.weight"])

    def output(self, hidden, tokens):
        normed = norm(hidden, self.w[f"{self.prefix}.hidden_norm.weight"])
        embedded = norm(self.embedding[tokens], self.w[f"{self.prefix}.input_layernorm.weight"])
        residual = normed if self.config.get("norm_before_residual") else hidden
        return self.layer(torch.cat((embedded, normed), -1), residual)[-1]

    def logprobs(self, output):
        small = functional.linear(norm(output, self.w["norm.weight"]), self.w["lm_head.weight"]).log_softmax(-1)
        wide = torch.full((VOCAB,), -torch.inf)
        wide[self.w["t2d"].nonzero()[:, 0]] = small  # d2t is not used here: both tensors must agree
        return wide


def plain_chain(logprobs: Any, count: int) -> list[int]:
    path: tuple[int, ...] = ()
    for _ in range(count):
        path = (*path, int(logprobs(path).argmax()))
    return list(path)


def plain_tree(logprobs: Any, topk: int, depth: int, count: int) -> set[tuple[int, ...]]:
    """Return the paths of EAGLE-2's tree."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        born = {}
        for path in frontier:
            best = logprobs(path).topk(topk)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                born[(*path, token)] = scores[path] + value
        scores |= born
        frontier = sorted(born, key=born.__getitem__, reverse=True)[:topk]
    del scores[()]
    return set(sorted(scores, key=scores.__getitem__, reverse=True)[:count])


# -- drafts of the engine's drafter ----------------------------------------------------------------------------------


def make_llm(target: Path, speculative: Any, **sections: Any) -> LLM:
    sections = {"memory": {"page_size": 16, "num_pages": 100}, "grammar": "none", "threads": 1} | sections
    sections["scheduler"] = {"draft": "always"} | sections.get("scheduler", {})
    return LLM(str(target), device="cpu", speculative=speculative, **sections)


class Proposals:
    """Collect all drafts that an engine was given: (text, limit, paths of the nodes in order)."""

    def __init__(self, llm: LLM) -> None:
        self.seen: list[tuple[list[int], int, list[tuple[int, ...]]]] = []
        drafter = llm.loop.executor.rank.drafter
        assert drafter is not None
        propose = drafter.propose

        def recorded(batch):
            tree = propose(batch)
            for row in range(batch.num_extend, len(batch.slots)):
                limit = int(batch.draft_limits[row])
                paths: list[tuple[int, ...]] = []
                for node in range(int(tree.lens[row]) if tree is not None else 0):
                    parent = int(tree.parents[row, node])
                    paths.append((*(paths[parent] if parent >= 0 else ()), int(tree.token_ids[row, node])))
                assert bool(paths) == (limit > 0), "every row with a positive limit is drafted for"
                self.seen.append((text_of(batch, row), limit, paths))
            return tree

        drafter.propose = recorded


def record(llm: LLM, prompts: list[list[int]], times: int = 1) -> Proposals:
    proposals = Proposals(llm)
    params = [SamplingParams(max_new_tokens=30, temperature=0.7 * (i % 2), seed=i) for i in range(len(prompts))]
    for _ in range(times):
        llm.generate(prompts, params)
    assert llm.loop.drafter_errors == 0
    assert len(proposals.seen) > 25 * len(prompts)
    return proposals


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


CUTS = {
    "whole prompts": {},
    "chunks": {"scheduler": {"chunk_size": 7}},
    "pages of one": {"memory": {"page_size": 1, "num_pages": 1000}, "cache": "none"},
}
HEADS = {"eagle": PlainEagle, "eagle3": PlainEagle3}


def check_chains(proposals: Proposals, head: PlainHead, count: int) -> None:
    for text, limit, paths in proposals.seen:
        expected = plain_chain(head.drafter(text), min(limit, count))
        assert paths == [tuple(expected[: i + 1]) for i in range(len(expected))]


@torch.no_grad()
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", HEADS)
def test_chains_are_those_of_a_plain_head(target, heads, name, cut):
    chain = {"topk": 1, "depth": 3} if name == "eagle" else {"num_draft_tokens": 3}
    llm = make_llm(target, {"kind": name} | chain, **CUTS[cut])
    proposals = record(llm, prompts_of(1, 2, 40, 9, 61))
    check_chains(proposals, heads[name], 3)


@torch.no_grad()
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", ["eagle", "eagle3_tree"])
def test_trees_are_those_of_a_plain_head(target, heads, kind, cut):
    name = kind.removesuffix("_tree")
    llm = make_llm(target, {"kind": kind, "topk": 3, "depth": 4, "num_draft_tokens": 8}, **CUTS[cut])
    assert llm.loop.executor.rank.drafter.max_draft_tokens == 8
    proposals = record(llm, prompts_of(1, 30, 9))
    head = heads[name]
    for text, limit, paths in proposals.seen:
        if not limit:
            assert not paths
            continue
        width, depth = (int(x[0]) for x in fitted(TreeShape(3, 4), np.array([limit])))
        expected = plain_tree(head.drafter(text), width, depth, min(limit, 8))
        assert len(paths) == len(expected)
        assert set(paths) == expected
    assert max(len(path) for _, _, paths in proposals.seen for path in paths) >= 3


@torch.no_grad()
def test_a_prefix_from_the_cache_has_the_heads_keys_too(target):
    llm = make_llm(target, {"kind": "eagle3"}, memory={"page_size": 4, "num_pages": 200})
    proposals = record(llm, prompts_of(33, 21), times=2)
    assert llm.loop.stats().cached_tokens > 0
    check_chains(proposals, PlainEagle3(target / "eagle3", target), 4)


VARIANTS = {
    "layers by another name": {"layer": "layers.0"},
    "a narrower head with an embedding of its own": {"hidden_size": 32, "target_hidden_size": 48},
    "norm before the residual": {"norm_before_residual": True},
    "layers that return": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}},
    "layers that are entered": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]},
    "all tokens": {"draft_vocab_size": VOCAB},
}


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_eagle3_checkpoints(target, tmp_path, variant):
    directory = checkpoints.save_eagle3(tmp_path / "head", **VARIANTS[variant])
    proposals = record(make_llm(target, {"kind": "eagle3", "path": str(directory)}), prompts_of(20))
    head = PlainEagle3(directory, target)
    if "layers that" in variant:
        head.layers = (1, 3, 7)
    check_chains(proposals, head, 4)


@torch.no_grad()
def test_biases_are_found_in_the_checkpoint(target, tmp_path):
    directory = checkpoints.save_eagle(tmp_path / "head", bias=False)
    tensors, random = load_file(directory / "model.safetensors"), checkpoints.Random(8)
    for part in ("q", "k", "v", "o"):
        weight = tensors[f"layers.0.self_attn.{part}_proj.weight"]
        tensors[f"layers.0.self_attn.{part}_proj.bias"] = random.norm(len(weight)) - 1
    del tensors["embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors")
    proposals = record(make_llm(target, {"kind": "eagle", "topk": 1, "path": str(directory)}), prompts_of(20))
    check_chains(proposals, PlainEagle(directory, target), 5)


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS)
def test_quantized_heads_compute_with_the_weights_of_their_checkpoint(target, tmp_path, name):
    save = checkpoints.save_eagle if name == "eagle" else checkpoints.save_eagle3
    directory = save(tmp_path / "head")
    given = bnb_checkpoints.config("int8", llm_int8_skip_modules=["fc", "lm_head"])
    exact = bnb_checkpoints.quantize_directory(directory, given)
    llm = make_llm(
        target,
        {"kind": name, "topk": 1, "path": str(directory)}
        if name == "eagle"
        else {"kind": name, "path": str(directory)},
    )
    check_chains(record(llm, prompts_of(20)), HEADS[name](exact, target), 5 if name == "eagle" else 4)
    text = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(text | {"quantization_config": given | {"quant_method": "none"}}))
    with pytest.raises(ConfigError, match="no installed component of kind quantization can load"):
        make_llm(target, {"kind": name, "path": str(directory)})


# -- checkpoints that do not fit -------------------------------------------------------------------------------------


def test_layers_that_are_read_by_default():
    head = Eagle3ConfigJson.model_validate(checkpoints.EAGLE3)
    assert aux_layers(head, 32) == (2, 16, 29)
    assert aux_layers(head, 80) == (2, 40, 77)
    with pytest.raises(ConfigError, match=r"layers \[2, 2, 1\] of a target of 4; needed: three, rising"):
        aux_layers(head, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 200}, "vocab_size is 200; the target's is 199"),
        ({"hidden_size": 64}, "hidden_size is 64; the target's hidden states have 48"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers: Input should be 1 \(it is 2\)"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, num_key_value_heads 3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, r"layers \[1, 2, 8\] of a target of 8"),
        ({"rope_scaling": {"rope_type": "other"}}, "rope_scaling has type 'other'"),
    ],
)
def test_a_head_for_another_target_is_refused(target, tmp_path, overrides, message):
    directory = checkpoints.save_eagle3(tmp_path / "head")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | overrides))
    with pytest.raises(ConfigError, match=message):
        make_llm(target, {"kind": "eagle3", "path": str(directory)})


def test_missing_keys_are_named(target, tmp_path):
    directory = checkpoints.write(tmp_path / "head", {"vocab_size": VOCAB}, {})
    with pytest.raises(ConfigError, match=r"hidden_size: Field required; intermediate_size: Field required"):
        make_llm(target, {"kind": "eagle", "path": str(directory)})


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    file = directory / "model.safetensors"
    changed = load_file(file) | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "lacks tensor d2t"),
        (torch.zeros(60, dtype=torch.int64), r"d2t of the drafter is torch.int64 \[60\]"),
        (torch.zeros(61), r"d2t of the drafter is torch.float32 \[61\]"),
        (torch.full((61,), 170), "maps to tokens 170 to 230; the target has 199"),
    ],
)
def test_a_bad_map_of_the_vocabulary_is_refused(target, tmp_path, d2t, message):
    directory = checkpoints.save_eagle3(tmp_path / "head")
    change(directory, d2t=d2t)
    with pytest.raises(WeightsError, match=message):
        make_llm(target, {"kind": "eagle3", "path": str(directory)})


def test_other_tensors_are_refused(target, tmp_path):
    directory = checkpoints.save_eagle3(tmp_path / "head")
    change(directory, **{"midlayer.other.weight": torch.zeros(3)})
    with pytest.raises(WeightsError, match=r"midlayer\.other\.weight"):
        make_llm(target, {"kind": "eagle3", "path": str(directory)})


def test_pickles_are_refused(target, tmp_path):
    directory = checkpoints.save_eagle3(tmp_path / "head")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="convert them"):
        make_llm(target, {"kind": "eagle3", "path": str(directory)})


def test_without_a_path_the_folder_is_named(tmp_path):
    with pytest.raises(ResolutionError, match=r"speculative\.path is 'auto', which is the folder 'eagle3'"):
        make_llm(checkpoints.save_target(tmp_path / "target"), "eagle3")


def test_auto_chooses_what_has_a_checkpoint(tmp_path):
    directory = checkpoints.save_target(tmp_path / "target")
    assert make_llm(directory, "auto").loop.resolved.drafter.spec.name == "ngram"
    checkpoints.save_eagle3(directory / "eagle3")
    assert make_llm(directory, "auto").loop.resolved.drafter.spec.name == "eagle3"
