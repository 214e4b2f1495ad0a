"""Store the weights of experts in FP8 (E4M3, arXiv 2209.05433) with float32 scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    ParameterShape,
    QuantizationContext,
)
from dovetail.layers.expert_targets import OneExpert
from dovetail.layers.transforms import Reshape
from dovetail_quantization.fp8_formats import Activations, Fp8Format, Scales
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
    from collections.abc import Sequence

COLUMNS = range(32, 129)
"""The numbers of columns of a block that the kernels multiply: tensor cores need 32, and tiles of more than 128 do not fit
into shared memory."""


class Fp8Experts(ExpertsMethod):
    """Store a layer of experts as FP8 numbers and float32 scales: of each expert one for gate, up and down (``tensor``),
    or one for each row or block."""

    def __init__(self, shape: ExpertWeightsShape, own: Fp8Format, context: QuantizationContext) -> None:
        self.shape, self.format = shape, own
        if own.scales is not Scales.BLOCK:
            return
        rows, columns = own.block
        if shape.size % rows:
            raise ConfigError(
                f"{shape.names[0]} has {shape.size} rows on this rank, which blocks of {rows} rows do not divide; set "
                "parallel.experts: ep, or parallel.tp to a smaller number"
            )
        if context.device.type == "cuda" and columns not in COLUMNS:
            raise ConfigError(
                f"{shape.names[0]} has blocks of {columns} columns; implemented for experts in FP8 on CUDA: {COLUMNS[0]} to {COLUMNS[-1]}"
            )

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``ExpertsMethod``."""
        shape, found = self.shape, dict[str, ParameterShape]()
        whole = {"gate_up": (shape.gate_up, 2), "down": (shape.down, 1)}
        for name, ((rows, columns), projections) in whole.items():
            scales = {
                Scales.TENSOR: (shape.count * projections, 1),
                Scales.ROW: (rows, 1),
                Scales.BLOCK: (
                    shape.count * blocks_of(rows // shape.count, self.format.block[0]),
                    blocks_of(columns, self.format.block[1]),
                ),
            }[self.format.scales]
            found[name] = ParameterShape((rows, columns), FP8)
            found[f"{name}_scale"] = ParameterShape(scales, torch.float32)
            if self.format.activations is Activations.STATIC:
                found[f"{name}_input_scale"] = ParameterShape((shape.count * projections, 1), torch.float32)
        return found

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``ExpertsMethod``."""
        inner, scales = weight.transform, f"{weight.parameter}_scale"
        if self.format.online:
            columns = self.shape.hidden_size if weight.parameter == "gate_up" else self.shape.size
            yield name, weight._replace(transform=QuantizeRows(inner))
            rows = RowScales(columns, inner)
            yield name, weight._replace(parameter=scales, transform=rows, check=check_computed)
            return
        static = self.format.activations is Activations.STATIC
        if static and inner is not None:
            raise ConfigError(
                f"{name} holds several experts, and the checkpoint has static scales of activations; implemented with these: "
                "tensors of one expert each"
            )
        yield name, weight._replace(check=check_codes)
        module = name.removesuffix(".weight")
        # a tensor of all experts is no module with a weight: its scales are beside it
        beside = (
            f".{self.format.scale_name}" if module != name else f"_{self.format.scale_name.removeprefix('weight_')}"
        )
        make = {Scales.TENSOR: self._of_tensor, Scales.ROW: self._of_rows, Scales.BLOCK: self._of_blocks}
        yield f"{module}{beside}", make[self.format.scales](name, weight, scales)._replace(check=check_scales)
        if static:
            of_input = self._of_tensor(name, weight, f"{weight.parameter}_input_scale")
            yield f"{module}.input_scale", of_input._replace(check=check_input_scales)

    def _of_tensor(self, name: str, weight: WeightTarget, parameter: str) -> WeightTarget:
        """Return the target of the scales of whole projections: one number, or ``[experts, projections, 1]``."""
        projections = 2 if weight.parameter == "gate_up" else 1
        inner, rows = weight.transform, self._rows(weight) // projections
        if isinstance(inner, OneExpert):
            raise ConfigError(
                f"{name} is stored as {inner.layout} with one scale for each tensor; this is not implemented"
            )
        if weight.start is None or weight.size is None:
            source = (self.shape.count, projections, 1)
            return WeightTarget(parameter, None, None, _of_dims(weight.shares, 0), Reshape(source))
        index = weight.start // rows
        if inner is None:
            return WeightTarget(parameter, index, 1)
        # a part of a tensor of all experts: up may be the first half
        half = next((int(share.start >= share.whole // 2) for share in weight.shares if share.dim == 1), 0)
        shares = (*_of_dims(weight.shares, 0), TensorShare(1, half, 1, 2))
        return WeightTarget(parameter, index, 1, shares, Reshape((1, 1, 1)))

    def _of_rows(self, name: str, weight: WeightTarget, parameter: str) -> WeightTarget:
        """Return the target of the scales of rows: ``[out, 1]``, or with the dimensions of the tensor of the weight."""
        inner = weight.transform
        transposed = isinstance(inner, OneExpert) and inner.layout.transposed
        of_columns = 1 if inner is None or transposed else 2
        if isinstance(inner, Reshape):
            inner = Reshape((*inner.source[:2], 1))
        elif transposed and weight.parameter == "down":
            inner = Reshape((1, self.shape.hidden_size, 1))  # FBGEMM stores these scales by row nevertheless
        shares = tuple(share for share in weight.shares if share.dim != of_columns)
        return weight._replace(parameter=parameter, shares=shares, transform=inner)

    def _of_blocks(self, name: str, weight: WeightTarget, parameter: str) -> WeightTarget:
        """Return the target of the scales of blocks, which has the dimensions of the tensor of the weight."""
        block, inner = self.format.block, weight.transform
        sizes = (*block,) if inner is None else (1, *block)
        if isinstance(inner, OneExpert):
            if inner.layout.interleaved:
                raise ConfigError(
                    f"{name} has rows of gate and up in turn, and scales by block; implemented with these: scales by row"
                )
            sizes = (1, block[1], block[0]) if inner.layout.transposed else sizes
        elif isinstance(inner, Reshape):
            experts, rows, columns = inner.source
            inner = Reshape((experts, blocks_of(rows, block[0]), blocks_of(columns, block[1])))
        shares = tuple(block_share(name, share, sizes[share.dim]) for share in weight.shares)
        if weight.start is None or weight.size is None:
            return weight._replace(parameter=parameter, shares=shares, transform=inner)
        rows = self._rows(weight)
        expert, within = divmod(weight.start, rows)
        start = expert * blocks_of(rows, block[0]) + within // block[0]
        return WeightTarget(parameter, start, blocks_of(weight.size, block[0]), shares, inner)

    def _rows(self, weight: WeightTarget) -> int:
        """Return the number of rows that one expert has in the parameter of ``weight``."""
        return 2 * self.shape.size if weight.parameter == "gate_up" else self.shape.hidden_size

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``ExpertsMethod``."""
        for name in ("gate_up", "down"):
            fill_codes(parameters[name], parameters[f"{name}_scale"], limit, generator)
            if f"{name}_input_scale" in parameters:
                parameters[f"{name}_input_scale"].fill_(1.0)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """See ``ExpertsMethod``."""
        by_block = self.format.scales is Scales.BLOCK
        return ExpertWeights(
            parameters["gate_up"].view(self.shape.count, 2 * self.shape.size, -1),
            parameters["down"].view(self.shape.count, self.shape.hidden_size, -1),
            format="fp8_blocks" if by_block else "fp8_rows",
            gate_up_scale=self._scale("gate_up", parameters),
            down_scale=self._scale("down", parameters),
            block=self.format.block,
            input_bound=self.format.bound,
        )

    def _scale(self, name: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the scales of a parameter as ``ExpertWeights`` has them. Static scales of activations are not used: each
        token gets scales of its own."""
        shape, scale = self.shape, parameters[f"{name}_scale"]
        if self.format.scales is Scales.BLOCK:
            return scale.view(shape.count, -1, scale.shape[1])
        if self.format.scales is Scales.TENSOR:
            scale = scale.repeat_interleave(shape.size if name == "gate_up" else shape.hidden_size, 0)
        return scale.view(shape.count, -1)


def _of_dims(shares: Sequence[TensorShare], dim: int) -> tuple[TensorShare, ...]:
    return tuple(share for share in shares if share.dim == dim)
