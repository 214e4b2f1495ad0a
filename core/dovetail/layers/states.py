"""Define what layers with a state for each request share: the shapes of their states, and the rows of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.layers.base import Layer
from dovetail.ops.state_rows import StateRows

if TYPE_CHECKING:
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


def step_states(batch: Batch, group: int) -> StepStates:
    """Return the states of cache group ``group`` and the rows of ``batch``."""
    states = batch.attn[group]
    assert isinstance(states, StepStates)
    return states
