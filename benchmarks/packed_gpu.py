"""Measure experts in packed blocks of GGUF, and linear layers in NF4, on one GPU, next to weights in bfloat16.

    python benchmarks/packed_gpu.py [--tokens 1 16 64 512 4096] [--only experts|nf4]

Experts: one layer of the shape of Qwen3-30B-A3B (128 experts of 768, 8 of them for a token), gate and up in Q4_K, down in Q6_K; uniform random
choices. NF4: the weights of an 8B model, cold: calls rotate over copies. ``stored`` is the time of reading the packed rows once at
``ops_gpu.READ``, for experts those of the experts that are chosen. Results are first compared with float32.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from dovetail.gguf.block_types import TYPES
from dovetail.interfaces.expert_shapes import ExpertBlocks, ExpertWeights, Routing
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.experts import experts
from dovetail.ops.linear import few_rows
from dovetail.ops.packed_blocks import pack
from dovetail_quantization.bnb_tensors import TABLES
from dovetail_quantization.gguf_blocks import fill_random
from dovetail_quantization.table_product import TableProduct
from dovetail_quantization.table_weights import TableWeight, packed_codes, padded_scales
from ops_gpu import COLD, READ, per_call, randn

COUNT, TOP_K, HIDDEN, SIZE = 128, 8, 2048, 768
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def close(got: torch.Tensor, exact: torch.Tensor) -> None:
    error = (got.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.02, f"relative error of {float(error):.3f}"


def measure_experts(tokens: list[int]) -> None:
    generator, given = torch.Generator("cuda").manual_seed(0), []
    for kind, rows, columns in (("Q4_K", 2 * SIZE, HIDDEN), ("Q6_K", HIDDEN, SIZE)):
        one = TYPES[kind]
        blocks = torch.empty(COUNT * rows, one.row_bytes(columns), dtype=torch.uint8, device="cuda")
        fill_random(blocks.view(-1, one.nbytes), one, 0.02, generator)
        given.append(pack(blocks, one).view(COUNT, rows, -1))
    weights = ExpertWeights(*given, format="gguf", blocks=ExpertBlocks("Q4_K", "Q6_K", packed=True), whole=COUNT)
    plain = dequantized(weights, torch.bfloat16)
    of_one = sum(tensor[0].nbytes for tensor in given)
    for count in tokens:
        x = randn(count, HIDDEN)
        choices = [
            Routing(
                torch.rand(count, COUNT, device="cuda").topk(TOP_K, 1).indices.int(),
                torch.rand(count, TOP_K, device="cuda"),
            )
            for _ in range(8)
        ]
        close(experts(x, choices[0], weights), experts(x, choices[0], plain).float())
        times = [per_call([partial(experts, x, choice, held) for choice in choices]) for held in (weights, plain)]
        chosen = sum(choice.ids.unique().numel() for choice in choices) / len(choices)
        print(
            f"experts {count:6} tokens: {times[0]:9.1f} us   stored {chosen * of_one / READ * 1e6:7.1f}   bf16 {times[1]:9.1f}",
            flush=True,
        )


def measure_nf4(tokens: list[int]) -> None:
    for name, (n, k) in SHAPES.items():
        copies, stored = [], n * (k // 2 + k // 16)
        for _ in range(max(2, -(-int(COLD) // stored))):
            codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
            scales = padded_scales(torch.rand(n, k // 64, device="cuda") * 0.02, 64)
            copies.append(TableProduct(TableWeight(packed_codes(codes), scales, TABLES["nf4"], k, 64, "NF4")))
        plain = copies[0].weight(torch.bfloat16)
        dense = few_rows(plain)
        for count in tokens:
            x = randn(count, k)
            close(copies[0].forward(x, None), x.float() @ copies[0].weight(torch.float32).T)
            ours = per_call([partial(product.forward, x, None) for product in copies])
            theirs = (
                partial(torch.mm, x, plain.T) if dense is None or count > dense.most_rows else partial(dense, x, None)
            )
            theirs = per_call([theirs] * 4)
            print(
                f"nf4 {name:8}{count:6} rows: {ours:9.1f} us   stored {stored / READ * 1e6:7.1f}   bf16 (warm) {theirs:9.1f}",
                flush=True,
            )


def main() -> None:
    """Print one row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 512, 4096])
    parser.add_argument("--only", choices=("experts", "nf4"))
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    if given.only != "nf4":
        measure_experts(given.tokens)
    if given.only != "experts":
        measure_nf4(given.tokens)


if __name__ == "__main__":
    main()
