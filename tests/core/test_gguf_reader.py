"""Test the reader of GGUF files, and dequantization against the package gguf.

Run: python -m pytest tests/core/test_gguf_reader.py
"""

from __future__ import annotations

import struct
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import TYPES
from dovetail.gguf.blocks import as_torch, dequantize
from dovetail.gguf.reader import read_gguf, tensor_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gguf_files import Stored, gguf_bytes, plain, quantized_q8_0, write_gguf

sys.path.pop(0)

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "é", "日本"],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
    "tokenizer.ggml.token_type": [1, 1, 3],
    "tokenizer.ggml.add_bos_token": True,
}
DATA = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
TENSORS = {"one": plain(DATA), "two": quantized_q8_0(DATA), "norm": plain(DATA[0])}

RECORDED = {
    "F32": 3939040977,
    "F16": 2508162095,
    "BF16": 1085960205,
    "Q4_0": 2351876381,
    "Q4_1": 2907320637,
    "Q5_0": 851930041,
    "Q5_1": 3400706444,
    "Q8_0": 718885409,
    "Q2_K": 1118957714,
    "Q3_K": 62032321,
    "Q4_K": 4286431856,
    "Q5_K": 3889167752,
    "Q6_K": 3121357046,
    "IQ4_NL": 2706393800,
    "IQ4_XS": 3731849299,
    "MXFP4": 2873990873,
}
"""The CRC-32 of what the package gguf 0.19 makes of ``blocks_of(name)``, in float32."""


def blocks_of(name: str) -> np.ndarray:
    """Return random blocks, four to a row, whose float16 numbers are finite."""
    kind = TYPES[name]
    data = np.random.default_rng(kind.code).integers(0, 256, (16, 4 * kind.nbytes), dtype=np.uint8)
    return data & 0xBF if name in ("F16", "BF16", "F32") else data & 0xBB


@pytest.mark.parametrize("name", TYPES)
def test_dequantization_gives_the_bits_of_the_package_gguf(name: str) -> None:
    data = blocks_of(name)
    made = dequantize(as_torch(data), TYPES[name]).numpy()
    assert made.shape == (16, 4 * TYPES[name].elements)
    assert zlib.crc32(made.tobytes()) == RECORDED[name]


def test_the_recorded_values_are_those_of_the_package_gguf() -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'dovetail[test]')")
    for name, kind in TYPES.items():
        theirs = gguf.GGMLQuantizationType[name]
        assert kind.code == theirs.value
        assert (kind.elements, kind.nbytes) == gguf.GGML_QUANT_SIZES[theirs]
        expected = gguf.quants.dequantize(blocks_of(name), theirs)
        np.testing.assert_array_equal(dequantize(as_torch(blocks_of(name)), kind).numpy(), expected, name)


def test_what_the_package_gguf_reads_is_the_same(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'dovetail[test]')")
    file = write_gguf(tmp_path / "model.gguf", METADATA, TENSORS)
    theirs, ours = gguf.GGUFReader(file), read_gguf(file)
    assert {t.name: [*map(int, t.shape)][::-1] for t in theirs.tensors} == {
        name: [*tensor.shape] for name, tensor in ours.tensors.items()
    }
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(tensor.data.view(np.uint8).ravel(), ours.tensors[tensor.name].data.ravel())


def test_metadata_and_tensors_are_read_without_copies(tmp_path: Path) -> None:
    checkpoint = read_gguf(write_gguf(tmp_path / "model.gguf", METADATA, TENSORS))
    assert checkpoint.architecture == "llama"
    assert checkpoint.get("llama.block_count", int) == 2
    assert checkpoint.get("llama.block_count", float) == 2.0
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == METADATA["tokenizer.ggml.tokens"]
    assert checkpoint.metadata["tokenizer.ggml.scores"].tolist() == METADATA["tokenizer.ggml.scores"]
    assert checkpoint.metadata["tokenizer.ggml.add_bos_token"] is True
    found = {name: (kind, shape, data) for name, kind, shape, data in tensor_bytes(checkpoint.files[0])}
    assert {name: entry[:2] for name, entry in found.items()} == {
        "one": ("F32", (8, 64)),
        "two": ("Q8_0", (8, 64)),
        "norm": ("F32", (64,)),
    }
    assert found["two"][2].shape == (8, 2 * 34)
    assert not found["two"][2].flags.owndata
    assert not found["two"][2].flags.writeable
    torch.testing.assert_close(dequantize(as_torch(found["one"][2]), TYPES["F32"]), torch.from_numpy(DATA))
    made = dequantize(as_torch(found["two"][2]), TYPES["Q8_0"])
    torch.testing.assert_close(made, torch.from_numpy(DATA), rtol=0, atol=np.abs(DATA).max() / 200)


def test_split_files_are_one_checkpoint(tmp_path: Path) -> None:
    split = {"split.count": 2, "split.tensors.count": 3}
    first = write_gguf(
        tmp_path / "m-00001-of-00002.gguf",
        METADATA | split | {"split.no": 0},
        {"one": TENSORS["one"], "two": TENSORS["two"]},
    )
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", split | {"split.no": 1}, {"norm": TENSORS["norm"]})
    for given_file in (first, second):
        checkpoint = read_gguf(given_file)
        assert checkpoint.files == (first, second)
        assert list(checkpoint.tensors) == ["one", "two", "norm"]
    whole = second.read_bytes()
    second.write_bytes(gguf_bytes(split | {"split.no": 1}, {"one": TENSORS["one"]}))
    with pytest.raises(ConfigError, match=r"tensor one is in m-00001-of-00002.gguf and again"):
        read_gguf(first)
    second.write_bytes(gguf_bytes({}, {"norm": TENSORS["norm"]}))
    with pytest.raises(ConfigError, match=r"is part 0 of 1 by its metadata, and part 1 of 2"):
        read_gguf(first)
    second.unlink()
    with pytest.raises(ConfigError, match=r"has no m-00002-of-00002.gguf; download all parts"):
        read_gguf(first)
    second.write_bytes(whole[:-40])
    with pytest.raises(ConfigError, match=r"m-00002-of-00002.gguf ends within tensor norm"):
        read_gguf(first)


HEADER = b"GGUF" + struct.pack("<I", 3)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file: it begins with b''"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), r"at byte 4: its version is 1; allowed: \(2, 3\)"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (HEADER + struct.pack("<QQ", 1 << 60, 0), r"claims 1152921504606846976 tensors, and at most 0"),
        (HEADER + struct.pack("<QQ", 0, 1 << 60), "entries of metadata"),
        (HEADER + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 4, 1 << 61), "values in k, and at most"),
        (HEADER + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 8, 1 << 61), "strings in k, and at most"),
        (HEADER + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IIQ", 9, 9, 1), "array of type 9"),
        (HEADER + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IQ", 8, 1 << 62), "ends within k"),
        (HEADER + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IQ", 99, 0), "has type 99"),
        (HEADER + struct.pack("<QQ", 0, 1) + KEY + struct.pack("<IQ", 8, 1) + b"\xff", "not written in UTF-8"),
        (gguf_bytes({"general.alignment": 3}, {}), "general.alignment is 3"),
        (gguf_bytes({}, {"a": Stored("F32", (1 << 40, 1 << 40), b"")}), "ends within tensor a"),
        (gguf_bytes({}, {"a": Stored("Q8_0", (2, 33), b"")}), "rows of 33 elements, which blocks of 32"),
        (gguf_bytes({}, {"a": Stored("F32", (0, 33), b"")}), r"shape \[0, 33\]"),
        (gguf_bytes({}, {"a": Stored("F32", (1, 1, 1, 1, 1), b"")}), "has 5 dimensions"),
        (gguf_bytes({}, {"a": Stored("F32", (16,), bytes(32)), "b": TENSORS["norm"]}), "tensor b begins within tensor a"),
        (gguf_bytes({}, {"a": TENSORS["norm"]}).replace(struct.pack("<QI", 64, 0), struct.pack("<QI", 64, 16)), "IQ2_XXS"),
        (gguf_bytes({}, {"a": TENSORS["norm"]}).replace(struct.pack("<QIQ", 64, 0, 0), struct.pack("<QIQ", 64, 0, 7)), "offset 7"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused_with_the_place(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_gguf(file)


WHOLE = gguf_bytes(METADATA, TENSORS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("changed")


@given(at=st.integers(0, len(WHOLE) - 1), change=st.binary(min_size=1, max_size=9), cut=st.integers(0, len(WHOLE)))
@settings(max_examples=400, deadline=None)
def test_random_changes_give_a_checkpoint_or_an_error(folder: Path, at: int, change: bytes, cut: int) -> None:
    at %= 700  # where the metadata and the descriptions of tensors are
    content = (WHOLE[:at] + change + WHOLE[at + len(change) :])[: max(cut, 4) if cut % 3 == 0 else len(WHOLE)]
    file = folder / "changed.gguf"
    file.write_bytes(content)
    tracemalloc.start()
    try:
        checkpoint = read_gguf(file)
    except ConfigError:
        pass
    else:
        assert all(tensor.offset + tensor.nbytes <= len(content) for tensor in checkpoint.tensors.values())
    finally:
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
