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


tiles = pytest.mark.skipif(
    library(BLOCKS).handle is None or not kernels().tile_kind, reason="the processor has no products of bfloat16"
)


def rounded_product(x, weight):
    """Return the product of inputs and weights rounded to bfloat16, in float64, and the bound of the error of its sums in float32."""
    a, b = x.bfloat16().double(), weight.bfloat16().double()
    return a @ b.T, 1e-5 * (a.abs() @ b.abs().T) + 1e-6


@tiles
@each_block
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_tiles_are_those_of_numbers_rounded_to_bfloat16(block, dtype):
    own = kernels(dtype)
    for columns in sizes(block):
        blocks = random_blocks(
            block, 83, columns
        )  # tiles of 16 rows in pairs, a last tile of 3 rows in a part of its own
        rows = BlockRows([(blocks[:47], block), (blocks[47:48], block), (blocks[48:], block)], columns)
        for count in (1, 15, 16, 17, 32, 50):
            x, bias = torch.randn(count, columns, dtype=dtype), torch.randn(83, dtype=dtype)
            expected, bound = rounded_product(x, dequantize(blocks, TYPES[block]))
            for added in (None, bias):
                got = own.tiles(x, rows, added).double()
                wanted = expected if added is None else expected + added.double()
                allowed = bound if dtype is torch.float32 else bound + wanted.abs() / 256
                # a weight whose exact number lies between two of bfloat16 may be rounded to either: one unit in 256
                spare = x.double().abs() @ dequantize(blocks, TYPES[block]).double().abs().T / 256 / columns**0.5
                assert ((got - wanted).abs() <= allowed + spare).all()


@tiles
def test_a_row_of_tiles_does_not_depend_on_the_others():
    blocks, x = random_blocks("Q4_K", 75, 512), torch.randn(41, 512)
    rows = BlockRows([(blocks, "Q4_K")], 512)
    together = kernels().tiles(x, rows, None)
    for row in (0, 15, 16, 31, 40):
        assert torch.equal(kernels().tiles(x[row : row + 1], rows, None), together[row : row + 1])


@tiles
def test_tiles_do_not_hide_values_that_are_no_numbers():
    x = torch.randn(20, 96)
    x[17, 40] = float("nan")
    got = kernels().tiles(x, BlockRows([(random_blocks("Q4_1", 3, 96), "Q4_1")], 96), None)
    assert got[17].isnan().all()
    assert got[:17].isfinite().all()
    assert got[18:].isfinite().all()


@tiles
def test_many_inputs_and_rows_are_multiplied_in_parts():
    blocks, x = random_blocks("Q4_0", 1500, 1024), torch.randn(70, 1024)
    expected, bound = rounded_product(x, dequantize(blocks, TYPES["Q4_0"]))
    got = kernels().tiles(x, BlockRows([(blocks, "Q4_0")], 1024), None)
    assert ((got - expected).abs() <= bound + 0.01 * expected.abs().mean()).all()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype, set_threads):
    """The engine changes it while it runs (``engine.adaptive_threads``)."""
    own = kernels(dtype)
    blocks, other = random_blocks("Q4_1", 700, 768), random_blocks("Q6_K", 300, 768)
    rows, bias = BlockRows([(blocks, "Q4_1"), (other, "Q6_K")], 768), torch.randn(1000).to(dtype)
    x, found = torch.randn(70, 768).to(dtype), []
    for threads in (1, 2, 3, 5):
        set_threads(threads)
        results = [own.product(x[:count], rows, bias) for count in (1, 5, 9)]
        if own.tile_kind:
            results += [own.tiles(x[:count], rows, bias) for count in (9, 70)]
        weight = torch.empty(700, 768, dtype=dtype)
        own.weight(blocks, "Q4_1", weight)
        found.append([*results, weight])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
