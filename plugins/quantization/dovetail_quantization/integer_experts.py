"""Store the weights of experts as integers of 4 or 8 bits with scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import ExpertsMethod, ExpertWeightsShape, ParameterShape, QuantizationContext
from dovetail_quantization.integer_formats import IntegerActivations, IntegerLayout, Scheme
from dovetail_quantization.integer_stored import matrix_targets, rounded_targets, sizes_target
from dovetail_quantization.integer_tensors import InOrder, check_input_scales, fits_blocks, narrowed


class IntegerExperts(ExpertsMethod):
    """Store a layer of experts as codes, ``scale`` and ``zero`` ``[rows, groups]`` of the rows of all experts. Activations keep
    16 bits: an ``input_scale`` is checked and not used."""

    def __init__(self, shape: ExpertWeightsShape, scheme: Scheme, context: QuantizationContext) -> None:
        self.shape, self.scheme = shape, scheme
        if scheme.ordered:
            raise ConfigError(
                f"{shape.names[0]} is an expert in a checkpoint with act-order (desc_act or actorder); implemented for experts: without it"
            )
        for what, columns in (("inputs", shape.hidden_size), ("intermediate values on this rank", shape.size)):
            whole = fits_blocks(columns, scheme.bits) and (context.device.type == "cpu" or columns % 32 == 0)
            if not whole or columns % (scheme.group or 1):
                raise ConfigError(
                    f"{shape.names[0]} has {columns} {what}, which groups of {scheme.group or 32} columns do not divide; set "
                    "parallel.experts: ep or parallel.tp to a smaller number if ranks divide them, or choose another group_size"
                )

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``ExpertsMethod``."""
        scheme, found = self.scheme, dict[str, ParameterShape]()
        for name, (rows, columns) in (("gate_up", self.shape.gate_up), ("down", self.shape.down)):
            modules, groups = self._modules(name), columns // (scheme.group or columns)
            codes = ((rows, columns), torch.int8) if scheme.bits == 8 else ((rows, columns // 2), torch.uint8)
            found[name] = ParameterShape(*codes)
            found[f"{name}_scale"] = ParameterShape((rows, groups), torch.float32)
            if scheme.zeros:
                found[f"{name}_zero"] = ParameterShape((rows, groups), torch.uint8)
            if scheme.indexed:
                found[f"{name}_groups"] = ParameterShape((modules, 1), torch.int32)
            if scheme.layout is IntegerLayout.PACKED:
                found[f"{name}_sizes"] = ParameterShape((modules, 2), torch.int64)
            if scheme.activations is IntegerActivations.STATIC:
                found[f"{name}_input_scale"] = ParameterShape((modules,), torch.float32)
        return found

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``ExpertsMethod``."""
        scheme, parameter = self.scheme, weight.parameter
        columns = self.shape.hidden_size if parameter == "gate_up" else self.shape.size
        scale, zero = f"{parameter}_scale", f"{parameter}_zero"
        if scheme.layout is IntegerLayout.ONLINE:
            yield from rounded_targets(name, weight, scheme, columns, scale)
            return
        if weight.transform is not None or weight.start is None or weight.size is None:
            raise ConfigError(
                f"{name} holds several experts; implemented for stored integers: tensors of one expert each, such as "
                "model.layers.0.mlp.experts.0.gate_proj.weight"
            )
        module = name.removesuffix(".weight")
        yield from matrix_targets(module, weight, scheme, scale=scale, zero=zero)
        index = weight.start // weight.size
        if scheme.indexed:
            shares = tuple(share._replace(dim=0) for share in weight.shares if share.dim == 1)
            group = scheme.group or columns
            first = shares[0].start // group if shares and scheme.group else 0
            listed = InOrder(f"{module}.g_idx", columns, group, first)
            yield listed.name, WeightTarget(f"{parameter}_groups", index, 1, shares, listed, default=0.0)
        if scheme.layout is IntegerLayout.PACKED:
            yield sizes_target(module, weight, f"{parameter}_sizes", index, (weight.size, columns))
        if scheme.activations is IntegerActivations.STATIC:
            of_inputs = WeightTarget(f"{parameter}_input_scale", index, 1, check=check_input_scales)
            yield f"{module}.input_scale", of_inputs

    def _modules(self, parameter: str) -> int:
        """Return the number of tensors that fill a parameter."""
        return self.shape.count * (2 if parameter == "gate_up" else 1)

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``ExpertsMethod``."""
        middle = 1 << self.scheme.bits - 1
        for name, parameter in parameters.items():
            if name.endswith("_scale"):
                parameter.fill_(1.0 if name.endswith("input_scale") else limit / middle)
            elif name.endswith(("_zero", "_groups", "_sizes")):
                parameter.fill_(middle if name.endswith("_zero") else 0)
            else:
                parameter.view(torch.uint8).random_(0, 256, generator=generator)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """See ``ExpertsMethod``."""
        count = self.shape.count

        def of_experts(name: str) -> torch.Tensor:
            return parameters[name].view(count, len(parameters[name]) // count, -1)

        def turned(name: str) -> torch.Tensor | None:
            return of_experts(name).mT.contiguous() if name in parameters else None

        scales = [scale for name in ("gate_up_scale", "down_scale") if (scale := turned(name)) is not None]
        return ExpertWeights(
            of_experts("gate_up"),
            of_experts("down"),
            format="int4" if self.scheme.bits == 4 else "int8",
            gate_up_scale=narrowed(scales[0]),
            down_scale=narrowed(scales[1]),
            gate_up_zero=turned("gate_up_zero"),
            down_zero=turned("down_zero"),
        )
