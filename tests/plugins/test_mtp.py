"""Compare layers that predict further tokens, inside the engine and in each published layout, with a plain
implementation.

Run: python -m pytest tests/plugins/test_mtp.py
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import plain_drafters
from plain_drafters import EPS, PlainTensors, Spy, attend, check_best, drafts_of, rotate

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, ResolutionError, WeightsError
from dovetail.interfaces.features import Feature
from dovetail_models.dense_describe import describe_llama

VOCAB, HIDDEN, LAYERS = 131, 48, 3
TARGET: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "rms_norm_eps": EPS,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


class Names(NamedTuple):
    """Name the tensors of one layer: ``{i}`` counts from 0, ``{n}`` from the number of the target's layers."""

    layer: str
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str


NAMES = {
    "deepseek": Names(
        "model.layers.{n}",
        "model.layers.{n}.enorm",
        "model.layers.{n}.hnorm",
        "model.layers.{n}.eh_proj",
        "model.layers.{n}.shared_head.norm",
    ),
    "qwen": Names("mtp.layers.{i}", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    "mimo": Names(
        "model.mtp_layers.{i}",
        "model.mtp_layers.{i}.token_layernorm",
        "model.mtp_layers.{i}.hidden_layernorm",
        "model.mtp_layers.{i}.input_proj",
        "model.mtp_layers.{i}.final_layernorm",
    ),
}


def names_of(layout: str, index: int) -> Names:
    return Names(*(name.format(i=index, n=LAYERS + index) for name in NAMES[layout]))


def save_target(
    directory: Path,
    layout: str = "deepseek",
    layers: int = 1,
    family: str = "llama",
    wide: int = 40,
    key: str = "num_nextn_predict_layers",
    **changes: Any,
) -> Path:
    """Save a random model as transformers does, and then ``layers`` more in one of the layouts."""
    torch.manual_seed(3)
    built = AutoConfig.for_model(family, **(TARGET | changes))
    model = AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    saved = load_file(file)
    save_file(saved | further_layers(saved, layout, layers, wide), file)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {key: layers}))
    return directory


def further_layers(saved: dict[str, torch.Tensor], layout: str, layers: int, wide: int) -> dict[str, torch.Tensor]:
    """Return layers with the target's shape, except for their intermediate size, which is ``wide``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(layers):
        names = names_of(layout, index)
        for norm in (names.embed_norm, names.hidden_norm, names.final_norm):
            shapes[f"{norm}.weight"] = (HIDDEN,)
        shapes[f"{names.projection}.weight"] = (HIDDEN, 2 * HIDDEN)
        for name, tensor in saved.items():
            if name.startswith("model.layers.0."):
                shapes[f"{names.layer}.{name.removeprefix('model.layers.0.')}"] = tuple(tensor.shape)
        for part in ("gate", "up"):
            shapes[f"{names.layer}.mlp.{part}_proj.weight"] = (wide, HIDDEN)
        shapes[f"{names.layer}.mlp.down_proj.weight"] = (HIDDEN, wide)
    torch.manual_seed(5)
    further = {
        name: torch.randn(shape) * 0.2 + ("norm" in name and not name.endswith("bias"))
        for name, shape in shapes.items()
    }
    for index in range(layers if layout == "deepseek" else 0):  # published checkpoints have copies of the target's
        for name, copied in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            further[f"{names_of(layout, index).layer}.{name}.weight"] = saved[f"{copied}.weight"].clone()
    return further


class Plain(PlainTensors):
    """Implement the paper for one text at a time, without any memory between drafts."""

    def __init__(self, directory: Path, layout: str, layers: int) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        super().__init__(load_file(directory / "model.safetensors"))
        self.layout, self.layers = layout, layers
        self.known = lru_cache(None)(self._logits)

    def logits(self, text: list[int], drafts: list[int]) -> torch.Tensor:
        """Return the logits that ``drafts`` after ``text`` were taken from, [drafts, vocabulary], given the drafts
        before."""
        return self.known(tuple(text), tuple(drafts))

    @torch.inference_mode()
    def _logits(self, before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
        text, drafts = list(before), list(after)
        hidden = self.said_by_target(torch.tensor([text[:-1]]))
        tokens = torch.tensor(text + drafts)
        said = []
        for step in range(len(drafts)):
            if self.layers > 1:  # one layer after the other, all at the same positions
                hidden = self.advance(step, tokens[step + 1 :][: len(hidden)], hidden)
                said.append(hidden[-1])
            else:  # one layer, which continues from its own output
                out = self.advance(0, tokens[1:][: len(hidden)], hidden)
                said.append(out[-1])
                hidden = torch.cat((hidden, out[-1:]))
        return self.target.lm_head(torch.stack(said))

    def said_by_target(self, text: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        final_norm = self.target.model.norm
        handle = final_norm.register_forward_hook(lambda _, given, out: kept.extend((given[0][0], out[0])))
        self.target(text)
        handle.remove()
        return kept[0 if self.layout == "mimo" else 1]

    def advance(self, index: int, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        names = names_of(self.layout, index)
        embedding = self.target.get_input_embeddings()(ids)
        if self.layout == "mimo":
            embedding = embedding.clone()
            embedding[0] = 0
        embedding, hidden = self.norm(embedding, names.embed_norm), self.norm(hidden, names.hidden_norm)
        halves = (hidden, embedding) if self.layout == "mimo" else (embedding, hidden)
        x = self.layer(names.layer, self.project(torch.cat(halves, -1), names.projection))
        return self.norm(x, names.final_norm)

    def layer(self, name: str, x: torch.Tensor) -> torch.Tensor:
        normed, attn = self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn"
        q, k, v = (self.heads(normed, f"{attn}.{part}_proj", 12) for part in "qkv")
        if f"{attn}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{attn}.q_norm"), self.norm(k, f"{attn}.k_norm")
        return self.after_attention(x, attend(rotate(q), rotate(k), v, causal=True), name)


def make_llm(target: Path, page_size: int = 4, speculative: Any = "mtp", **scheduler: Any) -> LLM:
    return plain_drafters.make_llm(target, speculative, page_size, **scheduler)


CASES: dict[str, dict[str, Any]] = {
    "deepseek": {"layout": "deepseek"},
    "deepseek, three layers": {"layout": "deepseek", "layers": 3},
    "deepseek, norms of heads": {"layout": "deepseek", "family": "qwen3"},
    "qwen": {"layout": "qwen", "family": "qwen3", "key": "mtp_num_hidden_layers"},
    "qwen, two layers": {"layout": "qwen", "layers": 2},
    "mimo, biases": {"layout": "mimo", "family": "qwen2"},
    "mimo, two layers, tied": {"layout": "mimo", "layers": 2, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plain]:
    settings = CASES[request.param]
    directory = save_target(tmp_path_factory.mktemp("target"), **settings)
    return directory, Plain(directory, settings["layout"], settings.get("layers", 1))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 64), (8, 5), (16, 1), (8, 3)])
def test_drafts_are_those_of_the_paper(case: tuple[Path, Plain], page_size: int, chunk: int) -> None:
    directory, plain = case
    llm = make_llm(directory, page_size, chunk_size=chunk)
    drafter = llm.loop.executor.rank.drafter
    assert drafter.max_draft_tokens == (3 if plain.layers == 1 else plain.layers)
    spy = drafts_of(llm, VOCAB, longest=29, shared=23)
    assert spy.asked > 12
    check_best(spy, plain.logits)


def rewrite(directory: Path, change: dict[str, torch.Tensor | None], **config: Any) -> None:
    """Add tensors to a checkpoint, remove those that are None, and change its config.json."""
    file = directory / "model.safetensors"
    changed = load_file(file) | change
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
    given = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(given))


LAYER = f"model.layers.{LAYERS}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(9, HIDDEN)},
            "latent attention, unlike the target's layers, which is not implemented",
        ),
        (
            {f"{LAYER}.mlp.gate.weight": torch.zeros(8, HIDDEN)},
            "a mixture of experts, unlike the target's layers, which is not implemented",
        ),
        (
            {f"{LAYER}.self_attn.q_proj.weight": torch.zeros(96, HIDDEN)},
            "a gate on its attention, unlike the target's layers, which is not implemented",
        ),
        ({f"{LAYER}.self_attn.k_proj.weight": None}, r"lacks model\.layers\.3\.self_attn\.k_proj\.weight"),
        (
            {f"{LAYER}.eh_proj.weight": None},
            r"model\.layers\.3\.eh_proj\.weight or mtp\.fc\.weight or model\.mtp_layers",
        ),
    ],
)
def test_layers_that_are_not_implemented_are_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    save_target(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        make_llm(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{LAYER}.hnorm.weight", None),
        (f"{LAYER}.self_attn.sinks", torch.zeros(4)),
        (f"{LAYER}.enorm.weight", torch.ones(5)),
    ],
)
def test_tensors_must_be_those_of_the_layout(tmp_path: Path, name: str, tensor: torch.Tensor | None) -> None:
    save_target(tmp_path)
    rewrite(tmp_path, {name: tensor})
    with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
        make_llm(tmp_path)


@pytest.mark.parametrize("layout", NAMES)
def test_the_target_ignores_only_layers_that_config_json_declares(tmp_path: Path, layout: str) -> None:
    save_target(tmp_path, layout)
    llm = make_llm(tmp_path, speculative="none")
    assert Feature.MODEL_MTP_HEAD in llm.resolved.model_info.offers
    rewrite(tmp_path, {}, num_nextn_predict_layers=0)
    with pytest.raises(WeightsError, match="which the model does not know"):
        make_llm(tmp_path, speculative="none")
    with pytest.raises(ResolutionError, match=r"model\.mtp_head"):
        make_llm(tmp_path)


def test_a_layer_beyond_those_of_config_json_is_refused(tmp_path: Path) -> None:
    save_target(tmp_path, layers=2)
    rewrite(tmp_path, {}, num_nextn_predict_layers=1)
    with pytest.raises(WeightsError, match=r"model\.layers\.4"):
        make_llm(tmp_path, speculative="none")


def test_how_many_tokens_are_drafted(tmp_path: Path) -> None:
    one, two = save_target(tmp_path / "one"), save_target(tmp_path / "two", layers=2)
    assert (
        make_llm(one, speculative={"kind": "mtp", "num_draft_tokens": 7}).loop.executor.rank.drafter.max_draft_tokens
        == 7
    )
    assert (
        make_llm(two, speculative={"kind": "mtp", "num_draft_tokens": 1}).loop.executor.rank.drafter.max_draft_tokens
        == 1
    )
    with pytest.raises(ConfigError, match=r"num_draft_tokens is 3.*2 layers.*1 to 2"):
        make_llm(two, speculative={"kind": "mtp", "num_draft_tokens": 3})


@pytest.mark.parametrize("layers", [1, 2])
def test_dummy_weights_need_no_tensors(tmp_path: Path, layers: int) -> None:
    save_target(tmp_path, layers=layers)
    names = [
        name
        for name in load_file(tmp_path / "model.safetensors")
        if name.startswith(("model.layers.3", "model.layers.4"))
    ]
    rewrite(tmp_path, dict.fromkeys(names))
    llm = make_llm(tmp_path, speculative={"kind": "mtp", "load_format": "dummy"})
    spy = Spy(llm.loop.executor.rank.drafter)
    llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=8, temperature=0))
    assert spy.drafts
    assert llm.loop.drafter_errors == 0


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "mtp_num_hidden_layers"])
def test_the_target_declares_the_number_of_layers(key: str) -> None:
    shape = {k: v for k, v in TARGET.items() if k != "initializer_range"}
    assert Feature.MODEL_MTP_HEAD not in describe_llama(shape | {key: None}).offers
    described = describe_llama(shape | {key: 2})
    assert Feature.MODEL_MTP_HEAD in described.offers
    assert (described.config.predict_layers, described.num_layers) == (2, LAYERS)
    with pytest.raises(ConfigError, match=f"{key} is '2'"):
        describe_llama(shape | {key: "2"})
