"""Define what layers with a state for each request share: the shapes of their states, and the rows of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.interfaces.model import WeightTarget
from dovetail.layers.base import Layer
from dovetail.ops.state_rows import StateRows

if TYPE_CHECKING:
    from dovetail.layers.linear import ColumnLinear, Linear
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch


class StateShape(NamedTuple):
    """Describe a state of one request: its shape, and its dtype, or None for the model's dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class StateLayer(Layer):
    """Compute a layer that keeps states. ``state_id`` is the layer's index among the model's layers with states."""

    state_id: int

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Return the shapes of this rank's states of one request."""


StateTargets = Iterator[tuple[str, WeightTarget | list[WeightTarget]]]
"""Yield names in a checkpoint and the targets of their tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """Hold the states of all requests and the rows of a step. It is the entry of ``Batch.attn`` of a cache group of states.

    The tokens of a step are those of prompts first, described by ``prompts`` (None: there are none), and then one of
    each decode row, whose states are in the slots ``decodes`` (int32). ``memory[state_id]`` are the states of a layer,
    ``[slots, *shape]`` for each of its ``state_shapes``; slot 0 belongs to padding.
    """

    memory: Sequence[tuple[torch.Tensor, ...]]
    prompts: StateRows | None
    decodes: torch.Tensor

    def run(
        self,
        prompt: Callable[[Sequence[torch.Tensor], StateRows], torch.Tensor],
        step: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Return the results of ``prompt`` for the tokens of prompts and of ``step`` for those of decode rows, in the order
        of the tokens. ``tensors`` are ``[tokens, ...]``; both get their parts of them."""
        if self.prompts is None:
            return step(tensors, self.decodes)
        count = len(self.decodes)
        if not count:
            return prompt(tensors, self.prompts)
        before = prompt([each[:-count] for each in tensors], self.prompts)
        return torch.cat((before, step([each[-count:] for each in tensors], self.decodes)))


class StateMixer(StateLayer):
    """Compute a layer with states between two projections, ``project`` and ``out``, in place of attention."""

    project: ColumnLinear
    out: Linear

    @abstractmethod
    def mix(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None) -> torch.Tensor:
        """Return the input of the last projection from ``x [tokens, hidden_size]``, the layer's input. Writes the states of
        the step. With ``rows`` (int64), only these tokens are returned."""

    @abstractmethod
    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> StateTargets:
        """Yield the targets of the layer's tensors. Names in the checkpoint begin with ``checkpoint_prefix``, parameters of
        the model with ``parameter_prefix``."""

    def parts_forward(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None = None) -> Addend:
        """Map ``x [tokens, hidden_size]`` to ``[tokens, hidden_size]``, but leave it to ``RMSNorm.add_forward`` to add up
        parts (see ``Linear.parts_forward``). For ``rows`` see ``mix``."""
        return self.out.parts_forward(self.mix(x, states, rows))

    def forward(self, x: torch.Tensor, states: StepStates, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``parts_forward``, added up."""
        return self.out.forward(self.mix(x, states, rows))


def step_states(batch: Batch, group: int) -> StepStates:
    """Return the states of cache group ``group`` and the rows of ``batch``."""
    states = batch.attn[group]
    assert isinstance(states, StepStates)
    return states
