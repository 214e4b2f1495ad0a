"""Run the conformance suite of quantizations on weights in blocks of GGUF.

.venv/bin/python -m pytest -q tests/plugins/test_gguf_quantization.py
"""

import re
from typing import ClassVar

import pytest
import torch
from tests.gguf_blocks import random_blocks

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import TYPES
from dovetail.gguf.blocks import dequantize
from dovetail.interfaces.quantization import LinearShape, QuantizationContext
from dovetail.ops import block_products, experts
from dovetail.ops.cpu.blocks import TileKind, block_kernels
from dovetail.testing.quantization import QuantizationSuite
from dovetail_quantization import gguf_products
from dovetail_quantization.config import GgufConfig
from dovetail_quantization.gguf import Gguf
from dovetail_quantization.gguf_blocks import fill_random
from dovetail_quantization.gguf_formats import describe

MIXED = {"q": "Q4_1", "k": "Q8_0", "v": "Q5_0", "gate": "Q4_0", "up": "IQ4_NL", "down": "Q5_1"}


def checkpoint(kinds):
    types = {f"body.{name}_proj.weight": kind for name, kind in kinds.items()}
    parts = {"gate": kinds.get("gate"), "up": kinds.get("gate"), "down": kinds.get("down")}
    experts = {f"body.experts.*.{name}_proj.weight": kind for name, kind in parts.items() if kind}
    return {"quant_method": "gguf", "types": types | experts}


def has_tiles():
    found = block_kernels(torch.float32)
    return found is not None and found.tile_kind


class Blocks(QuantizationSuite):
    name = "gguf"
    checkpoints: ClassVar = {
        "types that differ": checkpoint(MIXED),
        "mxfp4": checkpoint(dict.fromkeys(MIXED, "MXFP4")),
    }

    def store(self, checkpoint, module, weight):
        kind = checkpoint["types"][re.sub(r"\.\d+\.", ".*.", f"{module}.weight")]
        with torch.random.fork_rng():
            torch.manual_seed(int(weight.abs().sum() * 1000))
            blocks = random_blocks(kind, *weight.shape)
        return {f"{module}.weight": blocks}, dequantize(blocks, TYPES[kind])


class TestInputsOf8Bits(Blocks):
    tolerance = 0.012


class TestDequantized(Blocks):
    """Without compiled kernels, products are those of the dequantized weights."""

    @pytest.fixture(autouse=True)
    def no_kernels(self, monkeypatch):
        for module in (gguf_products, experts):
            monkeypatch.setattr(module, "block_kernels", lambda dtype: None)


@pytest.mark.skipif(not has_tiles(), reason="the processor has no products of bfloat16")
class TestTiles(Blocks):
    """Products of all rows are those of tiles."""

    tolerance = 0.012

    @pytest.fixture(autouse=True)
    def from_one_row_on(self, monkeypatch):
        monkeypatch.setattr(block_products, "_MOST_ROWS_BEFORE_TILES", dict.fromkeys(TileKind, -1))


class TestManyRows(Blocks):
    """Products of many rows are those of the dequantized weights."""

    @pytest.fixture(autouse=True)
    def from_one_row_on(self, monkeypatch):
        for kernels in filter(None, map(block_kernels, (torch.float32, torch.bfloat16))):
            monkeypatch.setattr(kernels, "tile_kind", TileKind.NONE)
        monkeypatch.setattr(block_products, "_MOST_ROWS", {torch.float32: -1, torch.bfloat16: -1})
        monkeypatch.setattr(block_products, "_CHUNK", 48)


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ("F32", "F16", "BF16")])
def test_dummy_weights_keep_the_limit(name):
    kind = TYPES[name]
    blocks = torch.zeros(64, kind.nbytes, dtype=torch.uint8)
    fill_random(blocks, kind, 0.02, torch.Generator().manual_seed(0))
    weight = dequantize(blocks, kind)
    assert weight.abs().max() <= 0.02 * 1.001
    assert weight.std() > 0.02 / 10


def method(kinds, names, columns):
    context = QuantizationContext(checkpoint(kinds), torch.float32, torch.device("cpu"))
    return Gguf(GgufConfig(), context).method(LinearShape(names, (8,) * len(names), columns))


def test_layers_that_cannot_be_kept_in_blocks_are_refused():
    names = ("body.q_proj", "body.k_proj")
    assert method({}, names, 64) is None
    with pytest.raises(ConfigError, match=r"body\.k_proj is stored as numbers.*quantization: none"):
        method({"q": "Q4_0"}, names, 64)
    with pytest.raises(ConfigError, match=r"body\.q_proj is made of tensors of types Q4_0 and Q8_0"):
        method({"q": "Q4_0+Q8_0", "k": "Q4_0"}, names, 64)
    with pytest.raises(ConfigError, match=r"body\.q_proj has type Q4_K, whose blocks have 256 columns, and 128"):
        method({"q": "Q4_K", "k": "Q8_0"}, names, 128)


def test_describe_says_what_it_cannot_read():
    assert "no GGUF file" in str(describe(None, GgufConfig()))
    assert "IQ1_S" in str(describe({"quant_method": "gguf", "types": {"a": "IQ1_S"}}, GgufConfig()))
    assert describe(checkpoint(MIXED), GgufConfig()) is None
