"""Store the weights of linear layers in FP8 (E4M3, arXiv 2209.05433) with float32 scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.interfaces.quantization import (
    LinearMethod,
    LinearProduct,
    LinearShape,
    ParameterShape,
    Quantization,
    QuantizationContext,
)
from dovetail_quantization.fp8_formats import Activations, Fp8Format, Scales, read_format
from dovetail_quantization.fp8_products import LARGEST, make_product

if TYPE_CHECKING:
    from dovetail_quantization.config import Fp8Config

FP8 = torch.float8_e4m3fn


class Fp8(Quantization):
    """Choose FP8 for every linear layer that the checkpoint, or config, does not exclude."""

    def __init__(self, config: Fp8Config, context: QuantizationContext) -> None:
        self._format = read_format(context.checkpoint, config)
        self._context = context

    def method(self, shape: LinearShape) -> LinearMethod | None:
        """See ``Quantization``."""
        own = self._format
        if shape.precise and not own.precise_too:
            return None
        ignored = [name for name in shape.names if own.ignored.fullmatch(name)]
        if ignored and len(ignored) < len(shape.names):
            raise ConfigError(
                f"the quantization leaves out {', '.join(ignored)}, but not the other modules of the same layer "
                f"({', '.join(name for name in shape.names if name not in ignored)}); all of them or none can be quantized"
            )
        if ignored:
            return None
        return Fp8Linear(shape, own, self._context)


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
            self._scales = (_blocks(shape.out_features, rows), _blocks(shape.in_features, columns))
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
            scales = weight._replace(parameter="weight_scale", transform=RowScales(self.shape.in_features, inner))
            yield f"{name}.weight", scales
            return
        if weight.transform is not None and (self.format.scales is Scales.BLOCK or not weight.transform.orders_rows):
            raise ConfigError(
                f"{name} is read through {weight.transform}, which is not implemented for stored scales by {self.format.scales}"
            )
        yield f"{name}.weight", weight
        yield f"{name}.{self.format.scale_name}", self._scale_target(name, weight)
        if self.format.activations is Activations.STATIC:
            yield f"{name}.input_scale", WeightTarget("input_scale", self._index(weight), 1)

    def _scale_target(self, name: str, weight: WeightTarget) -> WeightTarget:
        if self.format.scales is Scales.TENSOR:
            return WeightTarget("weight_scale", self._index(weight), 1)
        if self.format.scales is Scales.ROW:
            shares = tuple(share for share in weight.shares if share.dim == 0)
            return weight._replace(parameter="weight_scale", shares=shares)
        start, rows = weight.start or 0, self.shape.out_features if weight.size is None else weight.size
        block = self.format.block
        shares = tuple(_block_share(name, share, block[share.dim]) for share in weight.shares)
        return WeightTarget("weight_scale", start // block[0], _blocks(rows, block[0]), shares)

    def _index(self, weight: WeightTarget) -> int:
        """Return the place of the module that ``weight`` is of among those of the layer."""
        starts = [sum(self.shape.rows[:index]) for index in range(len(self.shape.rows))]
        return starts.index(weight.start or 0)

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``LinearMethod``."""
        weight = parameters["weight"]
        for rows in weight.split(4096):
            values = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
            rows.copy_(values.uniform_(-LARGEST, LARGEST, generator=generator))
        parameters["weight_scale"].fill_(limit / LARGEST)
        if "input_scale" in parameters:
            parameters["input_scale"].fill_(1.0)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """See ``LinearMethod``."""
        scale = parameters["weight_scale"]
        self._refuse_scales("weights", scale.isfinite().all())
        if self.format.scales is Scales.TENSOR:
            counts = torch.tensor(self.shape.rows, device=scale.device)
            scale = scale.repeat_interleave(counts)
        elif self.format.scales is Scales.ROW:
            scale = scale.view(-1)
        static = parameters["input_scale"].max() if "input_scale" in parameters else None
        if static is not None:
            self._refuse_scales("activations", static.isfinite() & (static > 0))
        block = self.format.block if self.format.scales is Scales.BLOCK else None
        bound = self.format.bound
        return make_product(parameters["weight"], scale, block, static, self.context.dtype, bound)

    def _refuse_scales(self, what: str, usable: torch.Tensor) -> None:
        """Raise ``WeightsError`` unless ``usable`` is true."""
        if not usable:
            raise WeightsError(
                f"the FP8 scales of the {what} of {', '.join(dict.fromkeys(self.shape.names))} are not finite numbers"
                f"{' above 0' if what == 'activations' else ''}; convert the checkpoint again"
            )


@dataclass(frozen=True, slots=True)
class QuantizeRows(WeightTransform):
    """Divide each row of a weight by its scale (see ``RowScales``) and round it to FP8, after ``inner``."""

    inner: WeightTransform | None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape if self.inner is None else self.inner.source_shape(shape)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        weight = _after(self.inner, tensor, shape)
        return (weight / _row_scales(weight)).to(FP8)


@dataclass(frozen=True, slots=True)
class RowScales(WeightTransform):
    """Compute the scale of each row of a weight with ``columns`` columns, after ``inner``: its largest magnitude divided
    by the largest FP8 number."""

    columns: int
    inner: WeightTransform | None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        whole = (shape[0], self.columns)
        return whole if self.inner is None else self.inner.source_shape(whole)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return _row_scales(_after(self.inner, tensor, (shape[0], self.columns)))


def _after(inner: WeightTransform | None, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return (tensor if inner is None else inner.apply(tensor, shape)).float()


def _row_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return the scales ``[rows, 1]`` of a float32 weight. A row of zeros has the scale 1."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    return torch.where(largest > 0, largest / LARGEST, 1.0)


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


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _block_share(name: str, share: TensorShare, block: int) -> TensorShare:
    """Return the share of the scales for a share of the weight."""
    dim, start, size, whole = share
    if start % block or (size % block and start + size < whole):
        raise ConfigError(
            f"{name} is divided into parts of {size} of {whole}, for projections that share the tensor or for ranks, and blocks of "
            f"{block} do not divide these; if parallel.tp is above 1, set it to a smaller number"
        )
    return TensorShare(dim, start // block, _blocks(size, block), _blocks(whole, block))
