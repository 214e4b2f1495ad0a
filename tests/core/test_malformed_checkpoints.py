"""Test that checkpoints which are damaged or wrong are errors that name the file and what is wrong with it.

.venv/bin/python -m pytest -q tests/core/test_malformed_checkpoints.py
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM
from dovetail.config.checkpoint import locate
from dovetail.errors import DovetailError

Change = Callable[[Path], None]
TINY = locate("tiny")
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
INDEX = "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj.weight"


def written(name: str, data: str | bytes) -> Change:
    return lambda directory: replace(directory / name, data.encode() if isinstance(data, str) else data)


def with_keys(name: str, **keys: Any) -> Change:
    return written(name, json.dumps(json.loads((TINY / name).read_text()) | keys))


def with_tokenizer(**keys: Any) -> Change:
    tree = json.loads((TINY / "tokenizer.json").read_text())
    return written("tokenizer.json", json.dumps(tree | {name: tree[name] | keys[name] for name in keys}))


def with_header(change: Callable[[dict[str, Any]], Any]) -> Change:
    data = (TINY / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.dumps(change(json.loads(data[8:end]))).encode()
    return written("model.safetensors", struct.pack("<Q", len(header)) + header + data[end:])


def with_tensor(**keys: Any) -> Change:
    return with_header(lambda header: header | {UP: header[UP] | keys})


def with_index(text: str | bytes) -> Change:
    def change(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "part.safetensors")
        replace(directory / INDEX, text.encode() if isinstance(text, str) else text)

    return change


def replace(file: Path, data: bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(data)


def cut(size: int) -> Change:
    return written("model.safetensors", (TINY / "model.safetensors").read_bytes()[:size])


CASES: dict[str, tuple[Change, str]] = {
    **{f"{name} is broken": (written(name, "{"), name) for name in JSON_FILES},
    **{f"{name} is a list": (written(name, "[]"), name) for name in JSON_FILES},
    **{f"{name} is null": (written(name, "null"), name) for name in JSON_FILES},
    **{f"{name} is not UTF-8": (written(name, b"\xff{}"), f"{name} cannot be read") for name in JSON_FILES},
    **{f"{name} is deep": (written(name, "[" * 100_000), name) for name in JSON_FILES},
    **{f"{name} has a huge number": (written(name, f'{{"x": {"9" * 5000}}}'), name) for name in JSON_FILES},
    "no config.json": (lambda directory: (directory / "config.json").unlink(), "has no config.json"),
    "architectures are numbers": (with_keys("config.json", architectures=[1]), "architectures"),
    "vocab_size is a text": (with_keys("config.json", vocab_size="x"), "vocab_size is 'x'"),
    "hidden_size is missing": (with_keys("config.json", hidden_size=None), "has no hidden_size"),
    "vocab_size is huge": (with_keys("config.json", vocab_size=10**30), "vocab_size is 10+; allowed: an integer of at most"),
    "positions are huge": (with_keys("config.json", max_position_embeddings=10**30), "max_position_embeddings is 10+"),
    "heads do not divide": (with_keys("config.json", num_attention_heads=3), "num_attention_heads is 3"),
    "rope is unknown": (with_keys("config.json", rope_scaling={"rope_type": "nope"}), "nope"),
    "eos of the model is a text": (with_keys("generation_config.json", eos_token_id=[1, "x"]), r"generation_config.json: eos_token_id is \[1, 'x'\]"),
    "eos of the model is an object": (with_keys("generation_config.json", eos_token_id={}), "eos_token_id is {}"),
    "a sampling default is a text": (with_keys("generation_config.json", temperature="0.6"), r"generation_config.json: temperature is '0.6'; allowed: a number from 0 to 100"),
    "eos_token is a number": (with_keys("tokenizer_config.json", eos_token=1), "tokenizer_config.json: eos_token is 1"),
    "bos_token has no content": (with_keys("tokenizer_config.json", bos_token={}), "bos_token is {}"),
    "the template is a number": (with_keys("tokenizer_config.json", chat_template=1), "tokenizer_config.json: chat_template is 1"),
    "templates are numbers": (with_keys("tokenizer_config.json", chat_template=[1]), r"chat_template is \[1\]"),
    "a template has no source": (with_keys("tokenizer_config.json", chat_template=[{"name": "default"}]), "chat_template is"),
    "the template is no Jinja": (with_keys("tokenizer_config.json", chat_template="{% if"), "chat template is not valid, line 1"),
    "chat_template.json is broken": (written("chat_template.json", "{"), "chat_template.json is not valid JSON"),
    "chat_template.json has no template": (written("chat_template.json", "{}"), "chat_template.json: chat_template is"),
    "chat_template.jinja is not UTF-8": (written("chat_template.jinja", b"\xff"), "chat_template.jinja cannot be read"),
    "the vocabulary is a list": (with_tokenizer(model={"vocab": [1]}), "tokenizer.json cannot be read"),
    "an id is huge": (with_tokenizer(model={"vocab": {"a": 20, "zz": 4_000_000_000}, "merges": []}), "tokenizer.json gives 'zz' the id 4000000000"),
    "the decoder is of another family": (with_tokenizer(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "tokenizer.json has decoder"),
    "no weights": (lambda directory: (directory / "model.safetensors").unlink(), "has no model.safetensors"),
    "weights are empty": (written("model.safetensors", b""), "model.safetensors"),
    "weights are cut": (cut(-1000), "model.safetensors is not a valid safetensors file"),
    "the header is cut": (cut(200), "model.safetensors is not a valid safetensors file"),
    "a tensor is missing": (with_header(lambda header: {name: each for name, each in header.items() if name != UP}), "safetensors|up_proj"),
    "a tensor has another shape": (with_tensor(shape=[256, 704]), r"up_proj.weight has shape \[256, 704\]"),
    "a tensor has another dtype": (with_tensor(dtype="I16"), "up_proj"),
    "a tensor has an unknown dtype": (with_tensor(dtype="NOPE"), "model.safetensors"),
    "a tensor has no place": (with_tensor(data_offsets="x"), "model.safetensors"),
    "the index is broken": (with_index("{"), f"{INDEX} is not valid JSON"),
    "the index is not UTF-8": (with_index(b"\xff"), f"{INDEX} cannot be read"),
    "the index is deep": (with_index("[" * 100_000), f"{INDEX} is not valid JSON"),
    "the index has no map": (with_index("{}"), f"{INDEX} has no weight_map"),
    "the index names a missing file": (with_index('{"weight_map": {"a": "b.safetensors"}}'), f"{INDEX} names b.safetensors"),
    "the index leaves its directory": (with_index('{"weight_map": {"a": "../b"}}'), f"{INDEX} names files outside"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_is_one_error_that_names_its_file(tmp_path: Path, name: str):
    change, words = CASES[name]
    for file in TINY.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    change(tmp_path)
    with pytest.raises(DovetailError, match=words):
        LLM(str(tmp_path))
