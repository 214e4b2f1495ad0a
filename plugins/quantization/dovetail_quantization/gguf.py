"""Keep weights in the blocks in which GGUF files store them (ggml's types), and multiply with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import TYPES, BlockType
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearProduct,
    LinearShape,
    ParameterShape,
    Quantization,
    QuantizationContext,
)
from dovetail.ops.block_products import BlockWeight, dequantized
from dovetail_quantization.checkpoint import listed, module_index
from dovetail_quantization.dequantized import DequantizedLinear
from dovetail_quantization.gguf_blocks import check_columns, fill_random, in_bytes
from dovetail_quantization.gguf_cuda import PackedLinear
from dovetail_quantization.gguf_experts import GgufExperts, Mxfp4GgufExperts, layer_of
from dovetail_quantization.gguf_formats import expert_format, expert_types, module_types
from dovetail_quantization.gguf_products import BlockProduct, can_multiply, kinds_of
from dovetail_quantization.invariant_products import InvariantLinear

if TYPE_CHECKING:
    from dovetail_quantization.config import GgufConfig


class Gguf(Quantization):
    """Keep the weights of linear layers and of experts in the blocks of a GGUF file. Modules that the file stores as numbers are not
    quantized."""

    def __init__(self, config: GgufConfig, context: QuantizationContext) -> None:
        assert context.checkpoint is not None, "describe has refused the checkpoint"
        self._types, self._context = module_types(context.checkpoint), context
        self._experts = expert_types(context.checkpoint)
        self._mxfp4 = expert_format(context.checkpoint, config) == "mxfp4"

    def stores_tied(self, module: str) -> bool:
        """See ``Quantization``. A head reads the blocks of the embedding."""
        return module in self._types

    def method(self, shape: LinearShape) -> LinearMethod | None:
        """See ``Quantization``."""
        dense = [name for name in shape.names if name not in self._types]
        if len(dense) == len(shape.names):
            return None
        if dense:
            raise ConfigError(
                f"{listed(dense)} is stored as numbers, but the other modules of the same layer in blocks; set quantization: none, "
                "which dequantizes all weights while loading"
            )
        kinds = [self._types[name] for name in shape.names]
        for name, kind in zip(shape.names, kinds, strict=True):
            if kind not in TYPES:
                raise ConfigError(
                    f"{name} is made of tensors of types {kind.replace('+', ' and ')}, which cannot be kept in blocks; set "
                    "quantization: none, which dequantizes all weights while loading"
                )
        layer = PackedLinear if self._context.device.type == "cuda" else GgufLinear
        return layer(shape, [TYPES[kind] for kind in kinds], self._context)

    def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
        """See ``Quantization``. Experts of which all layers are MXFP4 have the kernels of that format."""
        kinds = self._experts.get(layer_of(shape.names[0]))
        if kinds is None:
            return None
        gate_up, down = kinds
        return (
            Mxfp4GgufExperts(shape, self._context)
            if self._mxfp4
            else GgufExperts(shape, TYPES[gate_up], TYPES[down], self._context)
        )


class GgufLinear(LinearMethod):
    """Store one layer as the blocks of its modules, whose types may differ: parameter ``blocks_i`` of the i-th module, uint8
    ``[rows, bytes]``."""

    def __init__(self, shape: LinearShape, types: list[BlockType], context: QuantizationContext) -> None:
        self.shape, self.types, self.context = shape, types, context
        for name, kind in zip(shape.names, types, strict=True):
            check_columns(name, shape.in_features, kind)

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``LinearMethod``."""
        return {
            f"blocks_{index}": ParameterShape((rows, kind.row_bytes(self.shape.in_features)), torch.uint8)
            for index, (rows, kind) in enumerate(zip(self.shape.rows, self.types, strict=True))
        }

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``LinearMethod``."""
        index = module_index(self.shape, weight)
        if weight.transform is not None and not weight.transform.orders_rows:
            raise ConfigError(f"{name} is read through {weight.transform}, which is not implemented for blocks of GGUF")
        kind = self.types[index]
        for share in weight.shares:
            if share.dim == 1:
                check_columns(name, share.start, kind)
        shares = tuple(in_bytes(share, kind) if share.dim == 1 else share for share in weight.shares)
        yield f"{name}.weight", weight._replace(parameter=f"blocks_{index}", start=None, size=None, shares=shares)

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``LinearMethod``."""
        for index, kind in enumerate(self.types):
            fill_random(parameters[f"blocks_{index}"].view(-1, kind.nbytes), kind, limit, generator)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """See ``LinearMethod``."""
        weights, dtype = self._weights(parameters), self.context.dtype
        if self.context.batch_invariant:
            plain = dequantized(weights, dtype)
            return InvariantLinear(lambda _: plain, dtype, kinds_of(weights))
        kernels = can_multiply(weights, dtype)
        if kernels is None:
            return DequantizedLinear(dequantized(weights, dtype), kinds_of(weights))
        return BlockProduct(weights, kernels)

    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``LinearMethod``."""
        return dequantized(self._weights(parameters), self.context.dtype)

    def _weights(self, parameters: Mapping[str, torch.Tensor]) -> list[BlockWeight]:
        return [BlockWeight(parameters[f"blocks_{index}"], kind) for index, kind in enumerate(self.types)]
