"""Compare models and drafters' models on two and three gloo ranks with one rank, from the same checkpoints.

.venv/bin/python -m pytest -q tests/plugins/test_rank_models.py

One rank is compared with Hugging Face transformers in test_models_dense.py, and the models of drafters with plain
implementations in the tests of drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from dovetail.engine.build import WeightFiller, as_module, build_model
from dovetail.engine.mesh import local_info
from dovetail.engine.weights import load_weights
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo
from dovetail.layers.attention import AttentionShape
from dovetail.layers.decoder import DecoderShape
from dovetail.memory.pool import PagedKVPool
from dovetail.testing.batches import make_batch, make_page_table
from dovetail.testing.eager import EagerAttention
from dovetail.testing.model import ModelRows, random_tokens
from dovetail.testing.ranks import thread_meshes
from dovetail_models import dense_describe
from dovetail_models.dense import DenseModel
from dovetail_speculative.dflash_checkpoint import DFlashShape
from dovetail_speculative.dflash_model import DFlashModel
from dovetail_speculative.eagle_checkpoint import HeadShape
from dovetail_speculative.eagle_heads import Eagle3Head, EagleHead
from dovetail_speculative.mtp_checkpoint import DEEPSEEK, MIMO, MtpShape
from dovetail_speculative.mtp_model import MtpModel
from rank_processes import RankProcesses

TOLERANCE = 1e-4
CPU = torch.device("cpu")
SIZES = (2, 3)

BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


class Family(NamedTuple):
    """Name a config.json: the function that describes it, and how it differs from ``BASE``. The model is divided among
    ``sizes`` ranks."""

    describe: str
    config: dict[str, Any]
    sizes: tuple[int, ...] = SIZES


MODELS = {
    "llama, llama3 rope": Family("describe_llama", {"rope_parameters": LLAMA3}),
    "llama, all biases": Family("describe_llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, one KV head": Family("describe_llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, yarn, two KV heads": Family("describe_llama", {"rope_parameters": YARN, "num_key_value_heads": 2}, (2,)),
    "mistral, window": Family("describe_mistral", {"sliding_window": 6, "num_key_value_heads": 3}, (3,)),
    "qwen2, window": Family("describe_qwen2", WINDOW),
    "qwen2, tied, one KV head": Family("describe_qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mimo": Family("describe_mimo", {"num_nextn_predict_layers": 1}),
    "qwen3": Family("describe_qwen3", {"num_key_value_heads": 1}),
    "qwen3, biases, tied": Family("describe_qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, even vocabulary": Family("describe_qwen3", {"vocab_size": 96, "head_dim": 16}),
}


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    processes = RankProcesses(request.param)
    yield processes
    processes.close()


def same_on_all(results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the tensors of rank 0, after comparing their bits with those of the other ranks."""
    for result in results[1:]:
        assert all(a.equal(b) for a, b in zip(result, results[0], strict=True))
    return results[0]


def write_random(model: ModelArchitecture, directory: Path) -> None:
    """Write a checkpoint of random weights for ``model``, with the names of its ``weights_map``."""
    filler = WeightFiller(model)
    torch.manual_seed(0)
    tensors = {name: torch.randn(filler.whole_shape(name)) * 0.2 for name in filler.targets}
    save_file(tensors, directory / "model.safetensors")


# -- models ------------------------------------------------------------------------------------------------------------


def info_of(family: Family) -> ModelInfo:
    return getattr(dense_describe, family.describe)(BASE | family.config)


def rows_of(model: ModelArchitecture, mesh: Mesh, lens: list[int]) -> ModelRows:
    return ModelRows(model, lens, 4, mesh)


@torch.inference_mode()
def model_outputs(mesh: Mesh, name: str, directory: str) -> list[torch.Tensor]:
    """Return logits of a chunked prompt with decode steps between, of steps in which the last layer computes only some
    rows, and the embeddings of some tokens."""
    model = build_model(DenseModel, info_of(MODELS[name]), CPU, torch.float32, mesh)
    load_weights(model, Path(directory))
    texts = [random_tokens(model.info, 21, seed) for seed in range(3)]
    rows = rows_of(model, mesh, [21, 21, 21])
    outputs = []
    for pieces in (
        {0: texts[0][:9]},
        {0: texts[0][9:16], 1: texts[1][:5]},
        {0: texts[0][16:17], 1: texts[1][5:6], 2: texts[2][:11]},
    ):
        outputs += list(rows.enter(pieces).values())
    outputs.append(rows.enter_for([0, 2], {0: texts[0][17:18], 1: texts[1][6:9], 2: texts[2][11:13]}))
    outputs.append(rows.enter_for([], {0: texts[0][18:20]}))
    outputs += list(rows.enter({0: texts[0][20:], 1: texts[1][9:10], 2: texts[2][13:14]}).values())
    return [*outputs, model.embed_tokens(torch.arange(model.info.vocab_size))]


@pytest.mark.parametrize("name", MODELS)
def test_ranks_return_the_logits_of_one(ranks: RankProcesses, tmp_path: Path, name: str) -> None:
    family = MODELS[name]
    if len(ranks.processes) not in family.sizes:
        pytest.skip("the KV heads cannot be divided by this number of ranks")
    write_random(build_model(DenseModel, info_of(family), CPU, torch.float32), tmp_path)
    expected = model_outputs(SINGLE, name, str(tmp_path))
    found = same_on_all(ranks.run(model_outputs, name, str(tmp_path)))
    assert len(found) == len(expected) == 12
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)
    assert max(float(one.abs().max()) for one in expected if one.numel()) > 0.5, "the logits are not near zero"


def dummy_parameters(mesh: Mesh, name: str, seed: int) -> dict[str, torch.Tensor]:
    model = build_model(DenseModel, info_of(MODELS[name]), CPU, torch.float32, mesh)
    load_weights(model, Path("nowhere"), "dummy", seed)
    return {name: parameter.data for name, parameter in as_module(model).named_parameters()}


@pytest.mark.parametrize("name", ["llama, all biases", "qwen3, biases, tied", "qwen2, tied, one KV head"])
def test_dummy_weights_are_shares_of_the_weights_of_one_rank(ranks: RankProcesses, name: str) -> None:
    family = MODELS[name]
    whole = build_model(DenseModel, info_of(family), CPU, torch.float32)
    load_weights(whole, Path("nowhere"), "dummy", 3)
    filler = WeightFiller(whole)
    results = ranks.run(dummy_parameters, name, 3)
    assert len(results) == len(ranks.processes)
    for rank, parameters in enumerate(results):
        model = build_model(DenseModel, info_of(family), CPU, torch.float32, thread_meshes(len(results))[rank])
        for parameter in as_module(model).parameters():
            parameter.fill_(float("nan"))
        shares = WeightFiller(model)
        for theirs in shares.targets:
            shares.fill(theirs, partial(filler.place, *filler.targets[theirs]))
        for ours, parameter in as_module(model).named_parameters():
            assert parameters[ours].equal(parameter), ours


# -- the models of drafters --------------------------------------------------------------------------------------------


class Draft(NamedTuple):
    """Name a drafter's model: how it is built for a target, and its description."""

    build: Callable[..., ModelArchitecture]
    info: ModelInfo


TARGET = Family("describe_qwen3", {"num_key_value_heads": 1})
HIDDEN, HEADS, HEAD_DIM, VOCAB = 48, 6, 8, 97


def draft_info(config: Any, layers: int = 1, kv_heads: int = 6) -> ModelInfo:
    return ModelInfo(
        "Draft", VOCAB, HIDDEN, layers, HEADS, kv_heads, HEAD_DIM, 128, (CacheGroup(layers, kv_heads, HEAD_DIM),),
        config=config, needs=frozenset({Feature.ATTN_SLIDING_WINDOW}) if isinstance(config, DFlashShape) else frozenset(),
    )  # fmt: skip


ROPE = info_of(TARGET).config.rope
ATTENTION = AttentionShape(HIDDEN, HEADS, 6, HEAD_DIM)
DECODER = DecoderShape(ATTENTION, 36, 1e-5)
EAGLE = HeadShape(frozenset({"fc.bias"}), 36, 1e-5, ROPE, HIDDEN)
NAMES = frozenset(
    {
        "embed_tokens.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.o_proj.bias",
        "layers.0.self_attn.q_norm.weight",
    }
)
EAGLE3 = replace(EAGLE, names=NAMES, norm_before_fc=True)
NORMED = replace(ATTENTION, num_kv_heads=1, qk_norm_eps=1e-5, qkv_bias=True, out_bias=True)
DFLASH = DFlashShape(replace(DECODER, attention=NORMED), ROPE, (None, 6), False, (0, 2), 5, 4)

DRAFTS = {
    "eagle": Draft(EagleHead, draft_info(EAGLE)),
    "eagle, one KV head": Draft(EagleHead, draft_info(EAGLE, kv_heads=1)),
    "eagle3": Draft(partial(Eagle3Head, draft_vocab=31), draft_info(EAGLE3)),
    "mtp": Draft(MtpModel, draft_info(MtpShape(DEEPSEEK, DECODER, ROPE, 2, 3), 2)),
    "mtp, own embedding and head": Draft(
        MtpModel, draft_info(MtpShape(replace(MIMO, embedding="embed", head="head"), DECODER, ROPE, 1, 3, True, True))
    ),
    "dflash": Draft(DFlashModel, draft_info(DFLASH, 2, 1)),
    "dflash, own embedding and head": Draft(
        DFlashModel, draft_info(replace(DFLASH, draft_vocab=31, own_embedding=True), 2, 1)
    ),
}


def draft_models(mesh: Mesh, draft: Draft) -> tuple[ModelArchitecture, ModelArchitecture]:
    target = build_model(DenseModel, info_of(TARGET), CPU, torch.float32, mesh)
    return target, build_model(partial(draft.build, target=target), draft.info, CPU, torch.float32, mesh)


@torch.inference_mode()
def draft_outputs(mesh: Mesh, name: str, directory: str) -> list[torch.Tensor]:
    """Return hidden states and logits of a drafter's model over two passes, the second of which reads the first's KV."""
    draft = DRAFTS[name]
    target, model = draft_models(mesh, draft)
    load_weights(target, Path(directory, "target"))
    load_weights(model, Path(directory, "draft"))
    (group,) = local_info(draft.info, mesh).cache_groups
    pool = PagedKVPool(group, 8, 4, torch.float32, CPU)
    attention, table = EagerAttention(pool), make_page_table([20], 4, 8)
    torch.manual_seed(1)
    outputs = []
    for start, count in ((0, 7), (7, 4)):
        ids = random_tokens(draft.info, count, start)
        batch = make_batch(4, table, [start], [count], input_ids=ids, attn=(attention,), kv=(pool,))
        states = torch.randn(count, 3 * HIDDEN)
        if isinstance(model, Eagle3Head):
            batch.hidden = model.enter(states)
        elif isinstance(model, DFlashModel):
            model.store_context(batch, states[:, : 2 * HIDDEN].contiguous())
        else:
            batch.hidden = states[:, :HIDDEN].contiguous()
        hidden = model.forward(batch)
        if isinstance(model, MtpModel) and draft.info.num_layers > 1:
            hidden = model.advance(1, batch, batch.input_ids, hidden)
        outputs += [hidden, model.logits(hidden)]
    return outputs


@pytest.mark.parametrize("name", DRAFTS)
def test_drafters_models_are_the_same_on_several_ranks(ranks: RankProcesses, tmp_path: Path, name: str) -> None:
    for folder, model in zip(("target", "draft"), draft_models(SINGLE, DRAFTS[name]), strict=True):
        (tmp_path / folder).mkdir()
        write_random(model, tmp_path / folder)
    expected = draft_outputs(SINGLE, name, str(tmp_path))
    found = same_on_all(ranks.run(draft_outputs, name, str(tmp_path)))
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=1e-5)
        assert other.abs().max() > 0.2, "the outputs are not near zero"
