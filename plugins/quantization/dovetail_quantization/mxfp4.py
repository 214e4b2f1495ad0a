"""Store the weights of experts in MXFP4 (OCP Microscaling Formats 1.0): 4-bit floating-point numbers (E2M1) with a power of
two (E8M0) as the scale of each 32 columns of a row."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearShape,
    ParameterShape,
    Quantization,
    QuantizationContext,
)
from dovetail.layers.expert_targets import OneExpert
from dovetail.ops.mxfp4 import BIAS, BLOCK, NAN_SCALE, VALUES, halved, quantize
from dovetail_quantization.checkpoint import leaves_out, refuse_unused
from dovetail_quantization.mxfp4_formats import read_format

if TYPE_CHECKING:
    from dovetail_quantization.config import Mxfp4Config

LARGEST_SCALES = {torch.float16: 128}
LARGEST_SCALE = 191
"""The largest code of a scale with which products multiply (see ``ops.triton.mxfp4``); in float16 it is lower."""
_ROWS = 4096
"""The number of rows that are held in float32 at a time."""


class Mxfp4(Quantization):
    """Choose MXFP4 for every layer of experts that the checkpoint, or config, does not exclude."""

    def __init__(self, config: Mxfp4Config, context: QuantizationContext) -> None:
        self._format = read_format(context.checkpoint, config)
        self._context, self._ignore = context, config.ignore

    def check_modules(self, names: Collection[str]) -> None:
        """See ``Quantization``."""
        refuse_unused(self._ignore, names)

    def method(self, shape: LinearShape) -> LinearMethod | None:
        """See ``Quantization``."""
        return None

    def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
        """See ``Quantization``."""
        if leaves_out(shape.names, self._format.ignored):
            return None
        return Mxfp4Experts(shape, self._format.online, self._context)


class Mxfp4Experts(ExpertsMethod):
    """Store a layer of experts as codes ``[rows, in / 2]`` and scales ``[rows, in / 32]``."""

    def __init__(self, shape: ExpertWeightsShape, online: bool, context: QuantizationContext) -> None:
        self.shape, self.online, self._dtype = shape, online, context.dtype
        for what, number in (("inputs", shape.hidden_size), ("intermediate values on this rank", shape.size)):
            if number % BLOCK:
                raise ConfigError(
                    f"{shape.names[0]} has {number} {what}; MXFP4 experts need multiples of {BLOCK}. Set parallel.experts: "
                    "ep or parallel.tp to a smaller number if ranks divide them, or choose another quantization"
                )

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``ExpertsMethod``."""
        found = dict[str, ParameterShape]()
        for name, (rows, columns) in (("gate_up", self.shape.gate_up), ("down", self.shape.down)):
            found[name] = ParameterShape((rows, columns // 2), torch.uint8)
            found[f"{name}_scale"] = ParameterShape((rows, columns // BLOCK), torch.uint8)
        return found

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``ExpertsMethod``."""
        inner, scale = weight.transform, f"{weight.parameter}_scale"
        if self.online:
            columns = self.shape.hidden_size if weight.parameter == "gate_up" else self.shape.size
            yield name, weight._replace(transform=Quantized(inner, columns))
            yield (
                name,
                weight._replace(
                    parameter=scale, transform=Quantized(inner, columns, ScaleLimit(name, self._dtype, online=True))
                ),
            )
            return
        if not isinstance(inner, OneExpert) or not inner.layout.transposed:
            raise ConfigError(
                f"{name} is stored otherwise than in gpt-oss; implemented for MXFP4 checkpoints: tensors of all experts, "
                "such as model.layers.0.mlp.experts.gate_up_proj_blocks"
            )
        shares = tuple(_stored_share(share) for share in weight.shares)
        rows = weight._replace(shares=shares, transform=StoredExpert(inner))
        yield f"{name}_blocks", rows
        limit = ScaleLimit(f"{name}_scales", self._dtype)
        yield limit.name, rows._replace(parameter=scale, transform=StoredExpert(inner, limit))

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``ExpertsMethod``."""
        scale = BIAS + math.floor(math.log2(limit / VALUES[-1]))
        for name in ("gate_up", "down"):
            parameters[name].random_(0, 256, generator=generator)
            parameters[f"{name}_scale"].fill_(scale)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """See ``ExpertsMethod``."""
        count = self.shape.count
        return ExpertWeights(
            parameters["gate_up"].view(count, 2 * self.shape.size, -1),
            parameters["down"].view(count, self.shape.hidden_size, -1),
            format="mxfp4",
            # those of many rows side by side
            gate_up_scale=parameters["gate_up_scale"].view(count, 2 * self.shape.size, -1).mT.contiguous(),
            down_scale=parameters["down_scale"].view(count, self.shape.hidden_size, -1).mT.contiguous(),
        )


def _stored_share(share: TensorShare) -> TensorShare:
    """Return the share of ``*_blocks`` or ``*_scales [experts, out, in / 32]`` for one of a tensor ``[experts, in, out]``."""
    dim, start, size, whole = share
    if dim == 1:
        return TensorShare(2, start // BLOCK, size // BLOCK, whole // BLOCK)
    return TensorShare(1 if dim == 2 else dim, start, size, whole)


@dataclass(frozen=True, slots=True)
class ScaleLimit:
    """Refuse scales of tensor ``name`` that products with activations of ``dtype`` cannot hold. With ``online`` the scales
    were computed from that tensor."""

    name: str
    dtype: torch.dtype
    online: bool = False

    def check(self, scale: torch.Tensor) -> torch.Tensor:
        """Return ``scale``. Raises ``WeightsError``."""
        largest = LARGEST_SCALES.get(self.dtype, LARGEST_SCALE)
        if scale.numel() and (found := int(scale.max())) > largest:
            shown = "no number" if found == NAN_SCALE else f"2 ** {found - BIAS}"
            if found == NAN_SCALE and self.online:
                raise WeightsError(f"{self.name} has numbers that are infinite or NaN, and these cannot be quantized")
            raise WeightsError(
                f"{self.name} has the MXFP4 scale {shown}; with model.dtype {str(self.dtype).removeprefix('torch.')} the largest that is "
                f"implemented is 2 ** {largest - BIAS}"
            )
        return scale


@dataclass(frozen=True, slots=True)
class StoredExpert(WeightTransform):
    """Read what a published tensor holds of one expert: codes ``[1, rows, in / 32, 16]``, or with a limit of scales these,
    ``[1, rows, in / 32]``. ``inner`` is the transform of the unquantized tensor."""

    inner: OneExpert
    scales: ScaleLimit | None = None

    @property
    def keeps_dtype(self) -> bool:
        """See ``WeightTransform``."""
        return True

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        rows, columns = shape
        return (1, rows, columns) if self.scales else (1, rows, columns * 2 // BLOCK, BLOCK // 2)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        rows = tensor[0]
        if self.inner.pairs:
            rows = torch.cat((rows[1::2], rows[0::2]) if self.inner.layout.up_first else (rows[0::2], rows[1::2]))
        return halved(rows.flatten(1)) if self.scales is None else self.scales.check(rows)


@dataclass(frozen=True, slots=True)
class Quantized(WeightTransform):
    """Quantize weights with ``columns`` columns, after ``inner``. Return their codes, or with a limit of scales these."""

    inner: WeightTransform | None
    columns: int
    scales: ScaleLimit | None = None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        whole = (shape[0], self.columns)
        return whole if self.inner is None else self.inner.source_shape(whole)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        whole = (shape[0], self.columns)
        weight = tensor if self.inner is None else self.inner.apply(tensor, whole)
        result = torch.empty(shape, dtype=torch.uint8, device=weight.device)
        for rows, place in zip(weight.split(_ROWS), result.split(_ROWS), strict=True):
            codes, scale = quantize(rows)
            place.copy_(codes if self.scales is None else self.scales.check(scale).mT)
        return result
