"""Make the products of ``dovetail.ops.experts`` for layers of experts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from dovetail.errors import ConfigError
from dovetail.interfaces.expert_shapes import ExpertWeights
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext, ExpertsProduct
from dovetail.ops.expert_scratch import ExpertScratch
from dovetail.ops.experts import GroupedProduct, InvariantProduct


class GroupedExperts(ExpertsBackend):
    """Multiply with what ``dovetail.ops.experts`` has for one type of device."""

    device_type: ClassVar[str]

    def __init__(self, config: BaseModel, context: ExpertsContext) -> None:
        if context.device.type != self.device_type:
            raise ConfigError(
                f"{type(self).__name__} computes on {self.device_type}, and the device is {context.device}; name another backend "
                "of experts"
            )
        self._dtype = context.dtype

    def product(self, weights: ExpertWeights) -> ExpertsProduct:
        """See ``ExpertsBackend``."""
        return GroupedProduct(weights, self._dtype)


class TorchExperts(GroupedExperts):
    """Multiply with PyTorch on the CPU, and with compiled products for few rows."""

    device_type = "cpu"


class TritonExperts(GroupedExperts):
    """Multiply with the kernels of ``dovetail.ops.triton.experts`` on CUDA. With ``batch_invariant`` there is one tile for any
    number of tokens. The layers of the model share the memory for weights that are dequantized in each step."""

    device_type = "cuda"

    def __init__(self, config: BaseModel, context: ExpertsContext) -> None:
        super().__init__(config, context)
        self._batch_invariant, self._scratch = context.batch_invariant, ExpertScratch()

    def product(self, weights: ExpertWeights) -> ExpertsProduct:
        """See ``ExpertsBackend``."""
        if self._batch_invariant:
            return InvariantProduct(weights, self._dtype)
        return GroupedProduct(weights, self._dtype, self._scratch)
