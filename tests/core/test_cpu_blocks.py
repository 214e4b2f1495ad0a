"""Test the compiled products with weights in blocks of GGUF against dequantized weights.

.venv/bin/python -m pytest -q tests/core/test_cpu_blocks.py
"""

import pytest
import torch
from tests.gguf_blocks import random_blocks

from dovetail.gguf.block_types import TYPES
from dovetail.gguf.blocks import dequantize
from dovetail.ops.cpu.blocks import FORMATS, BlockRows, block_kernels
from dovetail.ops.cpu.library import BLOCKS, library

pytestmark = pytest.mark.skipif(library(BLOCKS).handle is None, reason=f"no compiled kernels: {library(BLOCKS).text}")

each_block = pytest.mark.parametrize("block", FORMATS)


def kernels(dtype=torch.float32):
    found = block_kernels(dtype)
    assert found is not None
    return found


def sizes(block):
    """Return numbers of columns: less and more than what is read together, and no multiple of it where that is possible."""
    return (96, 800) if TYPES[block].elements == 32 else (256, 768)


def product(x, blocks, block, bias=None):
    """Return the product with rows of ``blocks`` in two parts, and the inputs that were multiplied."""
    own = kernels(x.dtype)
    parts = [(blocks[:2], block), (blocks[2:], block)]
    got, inputs = own.product(x, BlockRows(parts, x.shape[1]), bias), own.quantize(x)
    return got, (inputs.codes.float() * inputs.scales[..., None]).flatten(1)[:, : x.shape[1]]


@each_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_those_of_the_reference(block, dtype):
    for columns in sizes(block):
        blocks = random_blocks(block, 7, columns)
        out = torch.full((7, columns), float("nan"), dtype=dtype)
        kernels(dtype).weight(blocks, block, out)
        assert torch.equal(out, dequantize(blocks, TYPES[block]).to(dtype))


@each_block
def test_products_are_those_of_the_quantized_inputs(block):
    for columns in sizes(block):
        for rows in (1, 2, 3, 8, 11):
            blocks, x, bias = random_blocks(block, 5, columns), torch.randn(rows, columns), torch.randn(5)
            got, codes = product(x, blocks, block, bias)
            weight = dequantize(blocks, TYPES[block]).double()
            bound = 1e-5 * (codes.double().abs() @ weight.abs().T) + 1e-5
            assert ((got - codes.double() @ weight.T - bias).abs() <= bound).all()
            assert (codes - x).abs().max() <= x.abs().max() / 127


@each_block
def test_a_row_does_not_depend_on_the_others(block):
    columns = sizes(block)[1]
    blocks, x = random_blocks(block, 40, columns), torch.randn(19, columns)
    together, _ = product(x, blocks, block)
    for row in (0, 7, 8, 18):
        assert torch.equal(product(x[row : row + 1], blocks, block)[0], together[row : row + 1])
    narrow, _ = product(x.bfloat16(), blocks, block)
    exact, _ = product(x.bfloat16().float(), blocks, block)
    assert torch.equal(narrow, exact.bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_not_hidden(value):
    x = torch.randn(2, 96)
    x[1, 40] = value
    got, _ = product(x, random_blocks("Q4_1", 3, 96), "Q4_1")
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_inputs_of_zeros_have_products_of_zero():
    got, _ = product(torch.zeros(1, 64), random_blocks("Q8_0", 3, 64), "Q8_0")
    assert torch.equal(got, torch.zeros(1, 3))


def test_parts_may_have_other_formats_and_no_rows():
    x, first, last = torch.randn(3, 256), random_blocks("Q6_K", 7, 256), random_blocks("Q4_1", 300, 256)
    parts = [(first, "Q6_K"), (first[:0], "Q8_0"), (last, "Q4_1")]
    got = kernels().product(x, BlockRows(parts, 256), None)
    one, other = (kernels().product(x, BlockRows([part], 256), None) for part in (parts[0], parts[2]))
    assert torch.equal(got, torch.cat((one, other), 1))
    assert kernels().product(x[:0], BlockRows(parts, 256), None).shape == (0, 307)
