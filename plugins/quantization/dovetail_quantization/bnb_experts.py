"""Read experts of checkpoints in which bitsandbytes has quantized each of their matrices, and dequantize them when they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearShape,
    ParameterShape,
)


class DequantizedExperts(ExpertsMethod):
    """Store a layer of experts as two linear layers, ``gate_up`` and ``down``, whose modules are the matrices of all experts, and multiply
    with the weights for which they stand, in the dtype of activations. ``linear`` makes the method of a linear layer."""

    def __init__(self, shape: ExpertWeightsShape, linear: Callable[[LinearShape], LinearMethod]) -> None:
        self.shape, count = shape, shape.count
        first = shape.names[:1]
        self._layers = {
            "gate_up": linear(LinearShape(first * 2 * count, (shape.size,) * 2 * count, shape.hidden_size)),
            "down": linear(LinearShape(first * count, (shape.hidden_size,) * count, shape.size)),
        }

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``ExpertsMethod``."""
        return {
            f"{layer}_{name}": shape
            for layer, method in self._layers.items()
            for name, shape in method.parameters().items()
        }

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``ExpertsMethod``."""
        if weight.transform is not None:
            raise ConfigError(
                f"{name} holds several experts, and the checkpoint has a matrix of bitsandbytes for each; implemented: tensors of one expert "
                "each, such as model.layers.0.mlp.experts.0.gate_proj.weight"
            )
        method = self._layers[weight.parameter]
        for stored, target in method.targets(name.removesuffix(".weight"), weight._replace(parameter="weight")):
            yield stored, target._replace(parameter=f"{weight.parameter}_{target.parameter}")

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``ExpertsMethod``."""
        for layer, method in self._layers.items():
            method.fill_dummy(self._own(layer, parameters), limit, generator)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """See ``ExpertsMethod``."""
        gate_up, down = (
            method.dequantized(self._own(layer, parameters)).unflatten(0, (self.shape.count, -1))
            for layer, method in self._layers.items()
        )
        return ExpertWeights(gate_up, down)

    def _own(self, layer: str, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters of one of the two linear layers, by their names there."""
        start = f"{layer}_"
        return {name.removeprefix(start): tensor for name, tensor in parameters.items() if name.startswith(start)}
