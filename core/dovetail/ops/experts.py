"""Compute the feed-forward layers of experts: products of each token with the weights of the experts that were chosen
for it, and the weighted sum of their results."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch.nn import functional

from dovetail.gguf.block_types import TYPES
from dovetail.interfaces.expert_shapes import ADAPTED_ON_CUDA, SILU, ExpertFormat, ExpertWeights, Routing, SwiGLU
from dovetail.interfaces.experts import ExpertsProduct
from dovetail.ops.activation import silu_mul
from dovetail.ops.adapter_weights import ExpertPairLowRank, TokenSlots
from dovetail.ops.block_products import BlockMatrix, BlockWeight
from dovetail.ops.cpu.blocks import block_kernels
from dovetail.ops.cpu.kernels import kernels
from dovetail.ops.expert_formats import dequantized
from dovetail.ops.expert_scratch import ExpertScratch
from dovetail.ops.low_rank import add_low_rank_pairs
from dovetail.ops.mxfp4 import dequantize

_FEW_ROWS, _MOST_COMPILED = 2, 4
"""For up to the first number of rows per expert on average, experts with up to the second number of rows use the
compiled product."""
_MOST_MXFP4 = 48
"""Experts with MXFP4 weights and up to this number of rows use the compiled product."""
MOST_IN_PARTS = 64
"""Up to this number of tokens, on CUDA, the experts' results are left to the norm that follows to add up."""
FORMATS: dict[str, tuple[ExpertFormat, ...]] = {
    "cuda": ("plain", "fp8_rows", "fp8_blocks", "mxfp4", "int4", "int8", "gguf"),
    "cpu": ("plain", "mxfp4", "gguf"),
}
"""The formats of weights that can be multiplied on a type of device. Those of GGUF need compiled kernels on a CPU."""
ADAPTED_FORMATS: dict[str, tuple[ExpertFormat, ...]] = {"cuda": ADAPTED_ON_CUDA, "cpu": FORMATS["cpu"]}
"""The formats of weights that can be multiplied together with adapters."""


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import expert_layers

    return expert_layers


def experts(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weighted sums of the results of each token's experts, ``[tokens, hidden]``, of contiguous
    ``x [tokens, hidden]``, plus ``shared [tokens, hidden]`` if it is given. Experts that ``weights`` does not have add
    nothing. The sums are computed in float32."""
    if x.is_cuda:
        return _triton().experts(x, routing, weights, shared)
    return _on_host(x, routing, weights, shared)


def expert_parts(
    x: torch.Tensor, routing: Routing, weights: ExpertWeights, scratch: ExpertScratch | None = None
) -> torch.Tensor | None:
    """Return ``experts`` as addends that are not added up yet, one for each of a token's experts: float32 ``[top_k,
    tokens, hidden]``. Return None if the result is not computed in parts for this number of tokens. Weights that are
    dequantized in each step are written to ``scratch``, or without it to memory of this call."""
    if not x.is_cuda or len(weights.gate_up) != weights.whole or not 1 <= x.shape[0] <= MOST_IN_PARTS:
        return None
    return _triton().expert_parts(x, routing, weights, scratch)


class GroupedProduct(ExpertsProduct):
    """Compute ``experts`` and ``expert_parts`` with the weights of one layer. Where there are no kernels for their format,
    they are dequantized to ``dtype``, that of activations. Kernels on CUDA that dequantize them in each step write them to ``scratch``,
    which the layers of a model share, or without it to memory of each call."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype, scratch: ExpertScratch | None = None) -> None:
        self._stored = weights.format
        if not _multiplied(weights, dtype):
            weights = dequantized(weights, dtype)
        self._weights = weights
        self._scratch = scratch
        self._experts = functools.partial(_triton().experts, scratch=scratch) if weights.gate_up.is_cuda else _on_host

    @property
    def weights(self) -> ExpertWeights:
        """Return the weights that are multiplied with."""
        return self._weights

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        """See ``ExpertsProduct``."""
        return self._experts(x, routing, self._weights, shared)

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor | None:
        """See ``ExpertsProduct``."""
        return expert_parts(x, routing, self._weights, self._scratch)

    def adds_one_token(self, top_k: int) -> bool:
        """Return whether there is a kernel for ``added`` with this number of experts for each token."""
        weights = self._weights
        if not weights.gate_up.is_cuda or weights.format != "plain" or top_k & (top_k - 1):
            return False
        return _triton().experts_one.adds_one_token(weights)

    def added(self, x: torch.Tensor, routing: Routing, stream: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``stream [1, hidden]`` and ``forward(x, routing, None)``, for one token. ``adds_one_token`` holds."""
        return _triton().experts_one.one_token_added(x, routing, self._weights, stream)

    @property
    def describe(self) -> str:
        """See ``ExpertsProduct``."""
        if self._weights.gate_up.is_cuda:
            form = self._weights.format
            return "triton, grouped by expert" + ("" if form == "plain" else f", {form}")
        if self._weights.format == "mxfp4":
            return "torch, expert by expert, mxfp4"
        if self._weights.blocks is not None:
            return f"compiled, expert by expert, {' and '.join(dict.fromkeys(self._weights.blocks[:2]))} in blocks"
        few = kernels(self._weights.gate_up.dtype) if self._weights.gate_up.dtype is torch.bfloat16 else None
        loaded = "" if self._stored == "plain" else f"{self._stored}, dequantized when loaded; "
        return f"{loaded}torch, grouped by expert" + (
            f", compiled for up to {_MOST_COMPILED} rows of an expert" if few else ""
        )


class InvariantProduct(ExpertsProduct):
    """Compute the experts of one layer on CUDA so that the bits of a token do not depend on the others. Quantized weights
    are dequantized to ``dtype``."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        from dovetail.ops.triton import expert_tiles

        self._weights = dequantized(weights, dtype)
        _, hidden, size = self._weights.down.shape
        self._tiles = expert_tiles.invariant_tiles(hidden, size, dtype.itemsize)
        self._experts = _triton().experts

    def forward(self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None) -> torch.Tensor:
        """See ``ExpertsProduct``. There are no parts: a norm would add them up in another order."""
        return self._experts(x, routing, self._weights, shared, self._tiles)

    @property
    def describe(self) -> str:
        """See ``ExpertsProduct``."""
        return "triton, grouped by expert, the same for any number of tokens"


def _multiplied(weights: ExpertWeights, dtype: torch.dtype) -> bool:
    """Return whether there are kernels that multiply activations of ``dtype`` with ``weights`` as they are stored."""
    device = weights.gate_up.device.type
    compiled = weights.format != "gguf" or device != "cpu" or block_kernels(dtype) is not None
    return weights.format in FORMATS[device] and compiled


def adapted_experts(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    shared: torch.Tensor | None,
    low_rank: ExpertPairLowRank,
    tokens: TokenSlots,
) -> torch.Tensor:
    """Compute ``experts`` with what the adapters of the tokens add to the products of each expert. The format of the weights is one of
    ``ADAPTED_FORMATS``. Mutates nothing."""
    assert len(x) == tokens.num_tokens, "an adapted layer computes all tokens of the step"
    if tokens.tiles is not None:
        return _triton().adapted_experts(x, routing, weights, shared, low_rank, tokens.tiles)
    assert tokens.slots is not None
    return _on_host(x, routing, weights, shared, (low_rank, tokens.slots))


def _on_host(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    shared: torch.Tensor | None,
    adapted: tuple[ExpertPairLowRank, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute ``experts``, or, with ``adapted``, ``adapted_experts`` of these matrices and slots of tokens."""
    first, (tokens, top_k) = weights.first, routing.ids.shape
    ids, factors = routing.ids.flatten(), routing.weights.flatten()
    counts = torch.bincount(ids, minlength=first + len(weights.gate_up)).tolist()
    before = sum(counts[:first])
    counts = counts[first : first + len(weights.gate_up)]
    pairs = ids.argsort(stable=True)[before : before + sum(counts)]
    factors, rows = factors[pairs].unsqueeze(1), x[pairs // top_k]
    if weights.scaled_input:
        rows = (rows * factors).to(x.dtype)
    held = None if weights.gate_up_bias is None and weights.down_bias is None else ids[pairs] - first
    keys = None if adapted is None else (adapted[1][pairs // top_k], ids[pairs].long() - first)
    gate_up = (
        _products(rows, weights.gate_up, weights.gate_up_scale, weights.gate_up_bias, counts, held)
        if weights.blocks is None
        else _block_products(rows, weights.gate_up, weights.blocks.gate_up, weights.gate_up_bias, counts)
    )
    if adapted is not None and keys is not None:
        add_low_rank_pairs(gate_up, rows, adapted[0].gate_up, *keys)
    inner = gate_up.relu_().square_() if weights.ungated else _activated(gate_up, weights.activation)
    found = (
        _products(inner, weights.down, weights.down_scale, weights.down_bias, counts, held)
        if weights.blocks is None
        else _block_products(inner, weights.down, weights.blocks.down, weights.down_bias, counts)
    )
    if adapted is not None and keys is not None:
        add_low_rank_pairs(found, inner, adapted[0].down, *keys)
    found = found if found.dtype is torch.float64 else found.float()
    if not weights.scaled_input:
        found = found * factors
    # other ranks' experts add nothing
    make = torch.empty if len(pairs) == len(ids) else torch.zeros
    results = make(len(ids), x.shape[1], dtype=found.dtype)
    results[pairs] = found
    total = results.view(tokens, top_k, x.shape[1]).sum(1)
    return (total if shared is None else total.add_(shared)).to(x.dtype)


def _products(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    counts: list[int],
    held: torch.Tensor | None,
) -> torch.Tensor:
    """Return the products of sorted rows ``x [pairs, in]`` with the weights ``[experts, out, in]`` of their experts,
    of which each has as many rows as ``counts`` says. ``held`` has the expert of each row, for the bias. With a
    ``scale``, the weights are MXFP4 codes.

    Three ways were measured on two cores of a Xeon with AMX, for 64 experts of which a token has 8, hidden 1024, size 512, at
    1, 8, 64 and 512 tokens; processor milliseconds of the whole layer on one thread of a busy machine (2026-11-23). Float32:
    ``grouped_mm`` 2.6, 24, 81, 160; one product for each expert 3.3, 28, 75, 184. Bfloat16: ``grouped_mm`` 4.1, 24, 37, 85; one product for
    each expert 4.2, 28, 45, 95; the compiled product for experts with up to four rows 1.4, 17, 43, 84. An expert
    without tokens costs nothing in any of them.
    """
    if scale is not None:
        return _mxfp4_products(x, weight, scale, bias, counts)
    compiled = kernels(x.dtype) if x.dtype is torch.bfloat16 and len(x) <= _FEW_ROWS * len(counts) else None
    aligned = x.shape[1] * x.element_size() % 16 == 0 and x.dtype is not torch.float64
    if compiled is None and aligned:
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        result = functional.grouped_mm(x, weight.mT, offs=ends).contiguous()  # its rows may be padded
        return result if bias is None else result.add_(bias[held])
    result = torch.empty(len(x), weight.shape[1], dtype=x.dtype)
    end = 0
    for expert, count in enumerate(counts):
        if count:
            start, end = end, end + count
            multiply = compiled.product if compiled is not None and count <= _MOST_COMPILED else functional.linear
            result[start:end] = multiply(x[start:end], weight[expert], None if bias is None else bias[expert])
    return result


def _mxfp4_products(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, counts: list[int]
) -> torch.Tensor:
    """Compute ``_products`` with MXFP4 weights, of which only those of experts with rows are read. For a weight of 2880 x
    2880 on one thread of a busy Xeon with AMX (2026-11-23), the compiled product takes 1.3 ms for 1 row in bfloat16, 3.1 for 16 and
    8.7 for 32, and dequantizing the whole weight first 11 to 17."""
    compiled = kernels(x.dtype)
    result = torch.empty(len(x), codes.shape[1], dtype=x.dtype)
    end = 0
    for expert, count in enumerate(counts):
        if count:
            start, end = end, end + count
            rows, added = x[start:end], None if bias is None else bias[expert]
            if compiled is not None and count <= _MOST_MXFP4:
                result[start:end] = compiled.mxfp4_product(rows, codes[expert], scale[expert], added)
                continue
            weight = (
                dequantize(codes[expert], scale[expert], x.dtype)
                if compiled is None
                else compiled.mxfp4_weight(codes[expert], scale[expert])
            )
            result[start:end] = functional.linear(rows, weight, added)
    return result


def _block_products(
    x: torch.Tensor, blocks: torch.Tensor, kind: str, bias: torch.Tensor | None, counts: list[int]
) -> torch.Tensor:
    """Compute ``_products`` with blocks of GGUF of one type, of which only those of experts with rows are read."""
    compiled = block_kernels(x.dtype)
    assert compiled is not None, "weights are dequantized where there are no kernels"
    result = torch.empty(len(x), blocks.shape[1], dtype=x.dtype)
    end = 0
    for expert, count in enumerate(counts):
        if count:
            start, end = end, end + count
            matrix = BlockMatrix([BlockWeight(blocks[expert], TYPES[kind])], compiled)
            result[start:end] = matrix.multiply(x[start:end], None if bias is None else bias[expert])
    return result


def _activated(gate_up: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    if activation == SILU:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, 1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.offset)
