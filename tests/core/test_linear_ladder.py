"""Test products with any number of rows: oneDNN must see few different numbers, because it keeps machine code for
each.

Run: python -m pytest tests/core/test_linear_ladder.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from dovetail.ops.linear import ladder, packed, packed_linear

MOST_ROWS = 2304
CACHED_PRODUCTS = 1024
"""What oneDNN and the layer above it in torch keep of products, each."""

SEEN = """
import torch
from dovetail.ops.linear import packed, packed_linear
weight = packed(torch.randn(32, 16))
for rows in range(1, 301):
    packed_linear(torch.randn(rows, 16), weight)
"""


def test_steps_are_small_and_never_down() -> None:
    sizes = [ladder(rows) for rows in range(1, MOST_ROWS + 1)]
    assert sizes == sorted(sizes)
    for rows, size in enumerate(sizes, 1):
        assert rows <= size <= rows * 9 / 8
        assert ladder(size) == size


def test_small_numbers_and_whole_eighths_are_as_they_are() -> None:
    kept = [*range(17), 24, 32, 48, 64, 96, 120, 128, 256, 320, 512, 1024, 2048]
    assert [ladder(rows) for rows in kept] == kept


def test_ten_weights_with_all_their_sizes_are_cached_at_once() -> None:
    assert 10 * len({ladder(rows) for rows in range(1, MOST_ROWS + 1)}) <= CACHED_PRODUCTS


@pytest.mark.parametrize("rows", [33, 65, 130, 257])
def test_rows_that_fill_up_do_not_show(rows: int) -> None:
    torch.manual_seed(0)
    ready = packed(torch.randn(24, 40))
    if ready is None:
        pytest.skip("this processor has no kernels for packed weights")
    x = torch.randn(ladder(rows), 40)
    got = packed_linear(x[:rows], ready)
    assert got.shape == (rows, 24)
    assert got.is_contiguous()
    assert got.equal(packed_linear(x, ready)[:rows])


def test_onednn_sees_the_ladder_alone() -> None:
    if packed(torch.randn(32, 16)) is None:
        pytest.skip("this processor has no kernels for packed weights")
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_create"}
    said = subprocess.run([sys.executable, "-c", SEEN], env=environment, capture_output=True, text=True, check=True)
    if "create:" not in said.stdout:
        pytest.skip("this build of oneDNN does not tell what it does")
    written = [int(rows) for rows in re.findall(r"create:cache_miss.*?,mb(\d+)ic16oc32,", said.stdout)]
    assert sorted(written) == sorted({ladder(rows) for rows in range(1, 301)})
