"""Store weights in FP8 (E4M3, arXiv 2209.05433) with float32 scales."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError
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
from dovetail_quantization.checkpoint import leaves_out, module_index, refuse_unused
from dovetail_quantization.fp8_experts import Fp8Experts
from dovetail_quantization.fp8_formats import Activations, Fp8Format, Scales, read_format
from dovetail_quantization.fp8_products import dequantize, make_product
from dovetail_quantization.fp8_weights import (
    FP8,
    QuantizeRows,
    RowScales,
    block_share,
    blocks_of,
    check_codes,
    check_computed,
    check_input_scales,
    check_scales,
    fill_codes,
)

if TYPE_CHECKING:
    from dovetail_quantization.config import Fp8Config


class Fp8(Quantization):
    """Choose FP8 for every linear layer and layer of experts that the checkpoint, or config, does not exclude."""

    def __init__(self, config: Fp8Config, context: QuantizationContext) -> None:
        self._format = read_format(context.checkpoint, config)
        self._context, self._ignore = context, config.ignore

    def check_modules(self, names: Collection[str]) -> None:
        """See ``Quantization``."""
        refuse_unused(self._ignore, names)

    def method(self, shape: LinearShape) -> LinearMethod | None:
        """See ``Quantization``."""
        own = self._format
        if shape.precise and not own.precise_too:
            return None
        return None if leaves_out(shape.names, self._format.ignored) else Fp8Linear(shape, own, self._context)

    def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
        """See ``Quantization``."""
        return None if leaves_out(shape.names, self._format.ignored) else Fp8Experts(shape, self._format, self._context)


class Fp8Linear(LinearMethod):
    """Store one layer as FP8 numbers and float32 scales: one for each module (``tensor``), row or block."""

    def __init__(self, shape: LinearShape, own: Fp8Format, context: QuantizationContext) -> None:
        self.shape, self.format, self.context = shape, own, context
        if own.scales is Scales.BLOCK:
            rows, columns = own.block
            for name, count in list(zip(shape.names, shape.rows, strict=True))[:-1]:
                if count % rows:
                    raise ConfigError(
                        f"{name} has {count} rows on this rank, which blocks of {rows} rows do not divide, and shares a layer with "
                        f"{shape.names[-1]}; set parallel.tp to a smaller number"
                    )
            self._scales = (blocks_of(shape.out_features, rows), blocks_of(shape.in_features, columns))
        else:
            self._scales = (len(shape.names),) if own.scales is Scales.TENSOR else (shape.out_features, 1)
            _check_cuda(shape, context)

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``LinearMethod``."""
        found = {
            "weight": ParameterShape((self.shape.out_features, self.shape.in_features), FP8),
            "weight_scale": ParameterShape(self._scales, torch.float32),
        }
        if self.format.activations is Activations.STATIC:
            found["input_scale"] = ParameterShape((len(self.shape.names),), torch.float32)
        return found

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``LinearMethod``."""
        if self.format.online:
            inner = weight.transform
            yield f"{name}.weight", weight._replace(transform=QuantizeRows(inner))
            rows = RowScales(self.shape.in_features, inner)
            yield f"{name}.weight", weight._replace(parameter="weight_scale", transform=rows, check=check_computed)
            return
        if weight.transform is not None and (self.format.scales is Scales.BLOCK or not weight.transform.orders_rows):
            raise ConfigError(
                f"{name} is read through {weight.transform}, which is not implemented for stored scales by {self.format.scales}"
            )
        yield f"{name}.weight", weight._replace(check=check_codes)
        yield f"{name}.{self.format.scale_name}", self._scale_target(name, weight)._replace(check=check_scales)
        if self.format.activations is Activations.STATIC:
            yield (
                f"{name}.input_scale",
                WeightTarget("input_scale", module_index(self.shape, weight), 1, check=check_input_scales),
            )

    def _scale_target(self, name: str, weight: WeightTarget) -> WeightTarget:
        if self.format.scales is Scales.TENSOR:
            return WeightTarget("weight_scale", module_index(self.shape, weight), 1)
        if self.format.scales is Scales.ROW:
            shares = tuple(share for share in weight.shares if share.dim == 0)
            return weight._replace(parameter="weight_scale", shares=shares)
        start, rows = weight.start or 0, self.shape.out_features if weight.size is None else weight.size
        block = self.format.block
        shares = tuple(block_share(name, share, block[share.dim]) for share in weight.shares)
        return WeightTarget("weight_scale", start // block[0], blocks_of(rows, block[0]), shares)

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``LinearMethod``."""
        fill_codes(parameters["weight"], parameters["weight_scale"], limit, generator)
        if "input_scale" in parameters:
            parameters["input_scale"].fill_(1.0)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """See ``LinearMethod``."""
        scale, block = self._read_scales(parameters)
        static = parameters["input_scale"].max() if "input_scale" in parameters else None
        bound = self.format.bound
        return make_product(parameters["weight"], scale, block, static, self.context.dtype, bound)

    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``LinearMethod``."""
        return dequantize(parameters["weight"], *self._read_scales(parameters), self.context.dtype)

    def _read_scales(self, parameters: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, tuple[int, int] | None]:
        """Return the scales of the blocks and the size of a block, or the scales of the rows and None."""
        scale = parameters["weight_scale"]
        if self.format.scales is Scales.BLOCK:
            return scale, self.format.block
        if self.format.scales is Scales.ROW:
            return scale.view(-1), None
        return scale.repeat_interleave(torch.tensor(self.shape.rows, device=scale.device)), None


def _check_cuda(shape: LinearShape, context: QuantizationContext) -> None:
    """Raise ``ConfigError`` for what cuBLAS does not multiply in FP8 with scales by row."""
    if context.device.type != "cuda":
        return
    if context.dtype != torch.bfloat16:
        raise ConfigError(f"model.dtype is {context.dtype}; FP8 products on CUDA need model.dtype: bfloat16")
    if shape.in_features % 16 or shape.out_features % 16:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(shape.names))} is {shape.out_features} x {shape.in_features} on this rank; FP8 products on "
            "CUDA need multiples of 16. Set parallel.tp to a smaller number, or leave the modules out (quantization.ignore)"
        )
