"""Test models in GGUF files: the embedded model, converted, is the same model with the same tokenizer.

Run: python -m pytest tests/core/test_gguf_checkpoint.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dovetail.cli import main as command_line
from dovetail.cli.serve import split_words
from dovetail.config.checkpoint import locate, read_json
from dovetail.config.model import ModelSection
from dovetail.engine.build import as_module, build_model
from dovetail.engine.weights import load_weights
from dovetail.errors import ConfigError, WeightsError
from dovetail.gguf.block_types import TYPES
from dovetail.gguf.blocks import as_torch, dequantize
from dovetail.gguf.changes import Change, ExpandKeyValue, Interleaved, Rows, Transposed
from dovetail.gguf.config import config_json
from dovetail.gguf.directory import MARKER, is_gguf_directory
from dovetail.gguf.mapping import block_type
from dovetail.gguf.reader import read_gguf
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture
from dovetail.llm import LLM
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.sampling_params import SamplingParams
from dovetail.testing.installed import installed
from dovetail.testing.ranks import thread_meshes
from dovetail.tokenizer.tokenizer import Tokenizer
from dovetail_apis.ollama.checkpoint import read_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gguf_files import gguf_bytes, plain, write_gguf
from tiny_gguf import TINY, metadata, tensors, write_tiny

sys.path.pop(0)

PAGE = """The quick brown fox jumps over 12 lazy dogs, 3.14159 times; it's what they'd do!
  Indented    with   spaces\tand tabs\r\n\n
Été à l'œuvre, naïve façade. Привет, мир! Γειά σου. שלום مرحبا नमस्ते 日本語、中文。한국어 ไทย 🎉
def f(x): return x**2  # <|im_end|><tool_call>{"a": 1}</tool_call> <|im_start|>user\n <think>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(autouse=True)
def _own_cache(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


@pytest.fixture(scope="module")
def plain_file(folder: Path) -> Path:
    return write_tiny(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def block_file(folder: Path) -> Path:
    return write_tiny(folder / "tiny-q8.gguf", quantized=True)


def loaded(directory: Path, mesh: Mesh = SINGLE) -> ModelArchitecture:
    spec = installed().get(ComponentKind.MODEL, "llama").spec
    assert spec.describe is not None
    info = load_attribute(spec.describe, "llama")(read_json(directory, "config.json"))
    model = build_model(load_attribute(spec.target, "llama"), info, torch.device("cpu"), torch.float32, mesh)
    load_weights(model, directory, shown=False)
    return model


def test_weights_are_those_of_the_safetensors(plain_file: Path) -> None:
    theirs = dict(as_module(loaded(TINY)).named_parameters())
    ours = dict(as_module(loaded(locate(str(plain_file)))).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name


def test_blocks_are_dequantized_and_ranks_get_their_share(block_file: Path) -> None:
    directory = locate(str(block_file))
    whole = dict(as_module(loaded(directory)).named_parameters())
    stored = read_gguf(block_file).tensors
    down = stored["blk.1.ffn_down.weight"]
    expected = dequantize(as_torch(down.data), TYPES["Q8_0"])
    assert torch.equal(whole["layers.1.mlp.down.weight"], expected)
    gate = dequantize(as_torch(stored["blk.1.ffn_gate.weight"].data), TYPES["Q8_0"])
    assert torch.equal(whole["layers.1.mlp.gate_up.weight"][: gate.shape[0]], gate)
    qkv = whole["layers.0.attn.qkv.weight"]
    for rank, mesh in enumerate(thread_meshes(2)):
        part = dict(as_module(loaded(directory, mesh)).named_parameters())
        half = expected.shape[1] // 2
        assert torch.equal(part["layers.1.mlp.down.weight"], expected[:, rank * half : (rank + 1) * half])
        queries = part["layers.0.attn.qkv.weight"][:128]
        assert torch.equal(queries, qkv[rank * 128 : (rank + 1) * 128])


def test_the_config_names_the_types_of_blocks(block_file: Path, plain_file: Path) -> None:
    config = read_json(locate(str(block_file)), "config.json")
    blocks = config["quantization_config"]
    assert blocks["quant_method"] == "gguf"
    assert block_type(blocks, "model.layers.0.self_attn.q_proj.weight") == "Q8_0"
    assert block_type(blocks, "model.norm.weight") is None
    assert "quantization_config" not in read_json(locate(str(plain_file)), "config.json")
    theirs = read_json(TINY, "config.json")
    for key in (
        "hidden_size",
        "num_hidden_layers",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert config[key] == theirs[key], key
    assert config["eos_token_id"] == [2, 0], "<|endoftext|> ends an output too, as in llama.cpp"


def test_the_tokenizer_is_that_of_the_model(plain_file: Path) -> None:
    ours, theirs = Tokenizer.from_dir(locate(str(plain_file))), Tokenizer.from_dir(TINY)
    for text in (PAGE, "", " ", *PAGE.splitlines()):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.token_bytes == theirs.token_bytes
    assert ours.special_token_ids == theirs.special_token_ids
    chat = [{"role": "user", "content": "Hello <|im_end|>"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    assert ours.named_tokens == theirs.named_tokens


def test_bos_is_added_as_the_metadata_says(folder: Path) -> None:
    more = {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    own = Tokenizer.from_dir(locate(str(write_tiny(folder / "bos.gguf", **more))))
    assert own.encode("Hi") == [1, *own.encode("Hi", add_special_tokens=False), 2]
    assert own.adds_bos


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "é",
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, *[0.0] * 256, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -9.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def test_sentencepiece_merges_the_best_tokens_first(folder: Path) -> None:
    own = {key: value for key, value in metadata().items() if key != "tokenizer.ggml.merges"}
    file = write_gguf(folder / "sp.gguf", own | SENTENCEPIECE, tensors(quantized=False))
    tokenizer = Tokenizer.from_dir(locate(str(file)))
    names = SENTENCEPIECE["tokenizer.ggml.tokens"]
    assert [names[index] for index in tokenizer.encode("ab aé")] == ["<s>", "▁ab", "▁a", "é"]
    assert [names[index] for index in tokenizer.encode("b日")] == ["<s>", "▁", "b", "<0xE6>", "<0x97>", "<0xA5>"]
    for text in ("ab aé", "b日 a", "  a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_directory_with_one_file_is_that_model(plain_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(plain_file.read_bytes())
    assert is_gguf_directory(locate(str(tmp_path)))
    (tmp_path / "other.gguf").write_bytes(plain_file.read_bytes())
    with pytest.raises(ConfigError, match=r"several GGUF files: other.gguf, tiny.gguf; give one of them"):
        locate(str(tmp_path))


def test_pieces_are_put_together(plain_file: Path, tmp_path: Path) -> None:
    content = plain_file.read_bytes()
    third = len(content) // 3
    for index in range(3):
        end = None if index == 2 else (index + 1) * third
        (tmp_path / f"m.gguf.part{index:02}").write_bytes(content[index * third : end])
    directory = locate(str(tmp_path / "m.gguf.part00"))
    assert (directory / "model.gguf").read_bytes() == content
    assert locate(str(tmp_path)) == directory
    (tmp_path / "m.gguf.part01").unlink()
    with pytest.raises(ConfigError, match=r"has the pieces 0000, 0002 of m.gguf; download those that are missing"):
        locate(str(tmp_path / "m.gguf.part00"))


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "m.gguf")
    first = locate(str(file))
    assert locate(str(file)) == first
    write_tiny(file, quantized=False, **{"llama.context_length": 64})
    assert read_json(locate(str(file)), "config.json")["max_position_embeddings"] == 64
    assert json.loads((first / MARKER).read_text())["files"] == [str(file)]


@pytest.mark.parametrize(
    ("more", "gone", "message"),
    [
        ({"general.architecture": "gpt9"}, (), r"architecture 'gpt9'; implemented for GGUF: .*llama"),
        ({}, ("llama.block_count",), r"has no llama.block_count in its metadata"),
        ({"llama.attention.head_count_kv": [1, 2, 1, 2]}, (), r"head_count_kv differs between layers"),
        ({"llama.rope.scaling.type": "ntk"}, (), r"rope.scaling.type is 'ntk'; implemented"),
        ({"tokenizer.ggml.model": "bert"}, (), r"tokenizer of kind 'bert'; implemented: gpt2"),
        ({"tokenizer.ggml.pre": "new"}, (), r"tokenizer.ggml.pre 'new'; implemented: .*qwen2"),
        ({"tokenizer.ggml.token_type": [1]}, (), r"token_type has 1 values, and there are 4096 tokens"),
        ({}, ("token_embd.weight",), r"has no tensor token_embd.weight"),
        ({"llama.block_count": 5}, (), r"block_count makes 5 layers .* no tensor blk.4"),
        ({"llama.block_count": 1}, (), r"has tensor blk.1.\S+, and llama.block_count is 1"),
        ({"llama.block_count": [1, 1]}, (), r"llama.block_count is \[1 1\]; expected an integer"),
        ({"llama.nextn_predict_layers": "x"}, (), r"nextn_predict_layers is x; expected an integer"),
        ({"llama.nextn_predict_layers": -1}, (), r"nextn_predict_layers is -1; expected 0 or more"),
        ({"llama.expert_count": [2, 2]}, (), r"expert_count is \[2 2\]; expected an integer"),
        ({"llama.embedding_length": ["a"]}, (), r"embedding_length is \['a'\]; expected a finite number"),
        ({"llama.attention.head_count": 0}, (), r"head_count is 0; expected a positive integer"),
        ({"llama.rope.freq_base": float("nan")}, (), r"rope.freq_base is nan; expected a finite number"),
        ({"llama.rope.dimension_count": [64, 64]}, (), r"rope.dimension_count is \[64 64\]; expected an integer"),
        ({"llama.rope.scaling.type": [True, True]}, (), r"rope.scaling.type is .*; expected a text"),
        ({"llama.rope.scaling.factor": float("inf")}, (), r"rope.scaling.factor is inf; expected a finite number"),
        ({"tokenizer.ggml.model": [1, 2]}, (), r"tokenizer.ggml.model is \[1 2\]; expected a text"),
        ({"tokenizer.ggml.pre": ["a"]}, (), r"tokenizer.ggml.pre is \['a'\]; expected a text"),
        ({"tokenizer.ggml.merges": [1, 2]}, (), r"tokenizer.ggml.merges is \[1 2\]; expected an array of texts"),
        ({"tokenizer.ggml.token_type": ["a"]}, (), r"token_type is \['a'\]; expected an array of numbers"),
        ({"tokenizer.ggml.eos_token_id": 4096}, (), r"eos_token_id is 4096; allowed: 0 to 4095"),
        ({"tokenizer.ggml.bos_token_id": -2}, (), r"bos_token_id is -2; allowed: 0 to 4095"),
        ({"tokenizer.ggml.padding_token_id": [1, 2]}, (), r"padding_token_id is \[1 2\]; expected an integer"),
        ({"tokenizer.ggml.add_bos_token": [1, 2]}, (), r"add_bos_token is \[1 2\]; expected true or false"),
        ({"tokenizer.chat_template": 1}, (), r"chat_template is 1; expected a text"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]},
            (),
            r"scores has 1 values, and there are 4096",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [float("nan")] * 4096},
            (),
            r"scores contains numbers that are not finite",
        ),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": -5},
            (),
            r"unknown_token_id is -5; allowed",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(more: dict, gone: tuple[str, ...], message: str, tmp_path: Path) -> None:
    own = {key: value for key, value in (metadata() | more).items() if key not in gone}
    stored = {name: tensor for name, tensor in tensors(quantized=False).items() if name not in gone}
    with pytest.raises(ConfigError, match=message):
        locate(str(write_gguf(tmp_path / "m.gguf", own, stored)))


def test_an_id_that_stands_for_no_token_is_none(tmp_path: Path) -> None:
    more: dict[str, Any] = {"tokenizer.ggml.bos_token_id": -1, "tokenizer.ggml.padding_token_id": -1}
    directory = locate(str(write_tiny(tmp_path / "m.gguf", **more)))
    assert "bos_token_id" not in read_json(directory, "config.json")
    assert not {"bos_token", "pad_token"} & read_json(directory, "tokenizer_config.json").keys()


def test_tensors_whose_shapes_fit_no_layer_are_refused(tmp_path: Path) -> None:
    stored = tensors(quantized=False)
    vector = stored["output_norm.weight"]
    number = "9" * 5000
    with pytest.raises(ConfigError, match=r"has tensor blk.9+.attn_q.weight, which LlamaForCausalLM does not have"):
        locate(str(write_gguf(tmp_path / "m.gguf", metadata(), stored | {f"blk.{number}.attn_q.weight": vector})))
    with pytest.raises(ConfigError, match=r"has no tensor rope_factors_long.weight"):
        locate(str(write_gguf(tmp_path / "m.gguf", metadata(), stored | {"rope_factors_short.weight": vector})))
    experts = {"llama.expert_count": 2, "llama.expert_used_count": 1}
    with pytest.raises(
        ConfigError, match=r"blk.0.ffn_up_exps.weight has shape \[256\]; expected \[experts, rows, columns\]"
    ):
        locate(
            str(write_gguf(tmp_path / "m.gguf", metadata() | experts, {"blk.0.ffn_up_exps.weight": vector} | stored))
        )


@pytest.mark.parametrize(
    ("change", "shapes"),
    [
        (Transposed(), [(4,)]),
        (Rows(1), [(2, 4, 8), (2, 4)]),
        (Rows(1), [(2, 4, 8), (3, 4, 8)]),
        (Interleaved(), [(2, 4), (2, 8)]),
        (Interleaved(transposed=True), [(2, 4), (2, 4)]),
        (ExpandKeyValue(), [(2, 4), (2, 4, 8)]),
        (ExpandKeyValue(), [(2, 8, 4), (2, 4, 9)]),
    ],
)
def test_changes_accept_no_shapes_that_they_cannot_be_applied_to(change: Change, shapes: list[tuple[int, ...]]) -> None:
    assert not change.fits(*shapes)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        change.apply([torch.zeros(shape) for shape in shapes]).view(change.shape(*shapes))


def test_unknown_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    stored, norm = tensors(quantized=False), tensors(quantized=False)["output_norm.weight"]
    with pytest.raises(ConfigError, match=r"has tensor blk.0.ssm_a.weight, which LlamaForCausalLM does not have"):
        locate(str(write_gguf(tmp_path / "m.gguf", metadata(), stored | {"blk.0.ssm_a.weight": norm})))
    del stored["blk.1.ffn_up.weight"]
    with pytest.raises(WeightsError, match=r"lacks 1 tensors that the model needs: model.layers.1.mlp.up_proj.weight"):
        loaded(locate(str(write_gguf(tmp_path / "m.gguf", metadata(), stored))))


def test_rotary_factors_of_llama_3_are_read(tmp_path: Path) -> None:
    import numpy as np

    factors = np.linspace(1, 8, 32).astype(np.float32)
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf_bytes(metadata(), tensors(quantized=False) | {"rope_freqs.weight": plain(factors)}))
    scaling = config_json(read_gguf(file))["rope_scaling"]
    assert scaling["short_factor"] == scaling["long_factor"] == pytest.approx(factors.tolist())
    assert scaling["attention_factor"] == 1.0
    loaded(locate(str(file)))


def test_a_file_is_a_model_on_the_command_line(plain_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("{}")
    assert split_words([str(plain_file), str(config)]) == (str(plain_file), [config])
    assert ModelSection(path="models/SmolLM2.Q4_1.gguf").name == "SmolLM2.Q4_1"


def test_explain_names_the_file_and_the_types(block_file: Path, capsys) -> None:
    for setting, how in (("auto", "matrices stay in blocks"), ("none", "dequantized to float32 while loading")):
        with pytest.raises(SystemExit) as status:
            command_line(["explain", str(block_file), "--set", f"quantization={setting}", "--set", "device=cpu"])
        assert status.value.code == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("GGUF "))
        assert line == f"GGUF {block_file}: llama, tensors 29 Q8_0, 9 F32; {how}"


def test_ollama_describes_the_file(block_file: Path) -> None:
    described = read_checkpoint(str(block_file))
    assert described.details()["format"] == "gguf"
    assert described.details()["quantization_level"] == "Q8_0"
    assert described.size == block_file.stat().st_size
    assert described.parameters == sum(
        tensor.numel() for tensor in as_module(loaded(locate(str(block_file)))).parameters()
    )


def test_outputs_are_those_of_the_embedded_model(plain_file: Path, block_file: Path) -> None:
    prompts, greedy = ["The sea", "1 2 3"], SamplingParams(temperature=0.0, max_new_tokens=12)
    outputs = []
    for path in ("tiny", str(plain_file), str(block_file)):
        with LLM(path, quantization="none") as llm:
            outputs.append([output.token_ids for output in llm.generate(prompts, greedy)])
    assert outputs[1] == outputs[0]
    assert [len(ids) for ids in outputs[2]] == [len(ids) for ids in outputs[0]]


@torch.inference_mode()
def test_a_tied_head_reads_the_blocks_of_the_embedding(block_file: Path) -> None:
    with LLM(str(block_file), model={"dtype": "float32"}) as llm:
        head = cast("Any", llm.loop.executor).rank.engine.model.head
        stored = read_gguf(block_file).tensors["token_embd.weight"]
        assert head.method is not None
        assert torch.equal(
            head.method.dequantized(dict(head.named_parameters())), dequantize(as_torch(stored.data), TYPES["Q8_0"])
        )
    with LLM(str(block_file), quantization="none") as llm:
        assert cast("Any", llm.loop.executor).rank.engine.model.head.tied
