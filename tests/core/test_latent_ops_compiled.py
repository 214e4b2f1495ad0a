"""Test the kernel that prepares latent attention as it is compiled for compute capability 9.0, with the sizes of DeepSeek.
That needs no GPU. The interpreter runs kernels that the compiler refuses.

Run: python -m pytest tests/core/test_latent_ops_compiled.py
"""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.ops.triton import latent
from dovetail.ops.triton.launch import INTERPRETED
from sass import compile_source, source_of

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.mark.parametrize(
    ("heads", "interleaved", "pool", "scaled"),
    [(16, True, "*bf16", False), (128, False, "*fp8e4nv", False), (16, True, "*fp8e4nv", True)],
)
def test_the_kernel_compiles(heads: int, interleaved: bool, pool: str, scaled: bool) -> None:
    kernel = latent._rotate_and_store_latents
    constants: dict[str, Any] = {
        "HEADS": heads, "RANK": 512, "SIZE": 64, "INTERLEAVED": interleaved, "LIMIT": 0.0 if pool == "*bf16" else 448.0,
        "SCALED": scaled, "LEAST": 2.0**-120, "BLOCK_HEADS": 16, "BLOCK_HALF": 32, "BLOCK_RANK": 512,
    }  # fmt: skip
    types = dict.fromkeys(("q", "out", "latents", "weight"), "*bf16") | {"keys": pool, "table": "*fp32", "eps": "fp32"}
    types["scales"] = "*bf16" if scaled else pool
    types |= dict.fromkeys(("positions", "out_loc"), "*i64")
    assert compile_source(source_of(kernel, constants, types), 4).asm["cubin"]
