"""Test checkpoints that store a head although config.json ties it to the embedding.

Run: python -m pytest tests/plugins/test_tied_heads.py
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dovetail.engine.build import as_module, build_model
from dovetail.engine.weights import load_weights
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture
from dovetail.testing.ranks import thread_meshes
from dovetail_models.dense import DenseModel
from dovetail_models.dense_describe import describe_llama
from dovetail_models.gpt2 import GPT2Model
from dovetail_models.gpt2_describe import describe_gpt2

CPU = torch.device("cpu")
LLAMA = transformers.LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(directory: Path, head: torch.Tensor | None = None) -> torch.Tensor:
    """Write a tied checkpoint of Llama, with ``head`` as well, and return its embedding."""
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    assert HEAD not in tensors
    if head is not None:
        save_file({**tensors, HEAD: head}, file)
    return tensors[EMBED]


def load(directory: Path, mesh: Mesh = SINGLE, dtype: torch.dtype = torch.float32) -> ModelArchitecture:
    model = build_model(DenseModel, describe_llama(LLAMA.to_dict()), CPU, dtype, mesh)
    load_weights(model, directory, shown=False)
    return model


def test_a_stored_head_that_differs_is_used_as_in_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = torch.randn(97, 32)
    embedding = write(tmp_path, own)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert f"ties {HEAD} to {EMBED}, and the checkpoint has both with different values" in caplog.text
    assert "tie_word_embeddings" in caplog.text
    parameters = dict(as_module(model).named_parameters())
    torch.testing.assert_close(parameters["embed.weight"], embedding, rtol=0, atol=0)
    torch.testing.assert_close(parameters["head.weight"], own, rtol=0, atol=0)
    hidden = torch.randn(5, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(hidden), theirs.lm_head(hidden))


def test_ranks_read_their_shares_of_such_a_head(tmp_path: Path) -> None:
    own = torch.randn(97, 32)
    write(tmp_path, own)
    models = [as_module(load(tmp_path, mesh)) for mesh in thread_meshes(2)]
    heads = [model.get_parameter("head.weight").data for model in models]
    torch.testing.assert_close(torch.cat(heads), own, rtol=0, atol=0)


def test_a_stored_copy_stays_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    embedding = write(tmp_path)
    (tmp_path / "copy").mkdir()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, HEAD: embedding.clone()}, tmp_path / "copy" / "model.safetensors")
    for directory in (tmp_path, tmp_path / "copy"):
        with caplog.at_level(logging.WARNING):
            parameters = dict(as_module(load(directory)).named_parameters())
        assert "head.weight" not in parameters
    assert not caplog.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_whole_tensor_is_compared(tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.engine.tied.CHUNK_BYTES", 256)
    own = write(tmp_path).to(dtype)
    own[-1, -1] += 1
    write(tmp_path, own)
    parameters = dict(as_module(load(tmp_path)).named_parameters())
    torch.testing.assert_close(parameters["head.weight"], own.float(), rtol=0, atol=0)


def test_other_names_are_compared_too(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    file, own = tmp_path / "model.safetensors", torch.randn(97, 32)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, HEAD: own}, file)
    model = build_model(GPT2Model, describe_gpt2(config.to_dict()), CPU, torch.float32, SINGLE)
    load_weights(model, tmp_path, shown=False)
    torch.testing.assert_close(dict(as_module(model).named_parameters())["head.weight"], own, rtol=0, atol=0)
