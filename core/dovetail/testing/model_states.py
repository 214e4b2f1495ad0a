"""Keep the states of rows, for the suite of models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dovetail.engine.build import as_module
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.model import ModelArchitecture
from dovetail.interfaces.state_rows import StateRows
from dovetail.layers.states import StateLayer, StepStates
from dovetail.memory.state_pool import StatePool, bytes_per_slot


class RowStates:
    """Hold the states of all layers of a model for ``rows`` rows: row r has slot r + 1. Every state is NaN until it is
    written, also that of slot 0, which belongs to padding."""

    def __init__(self, model: ModelArchitecture, rows: int) -> None:
        module = as_module(model)
        dtype = next(module.parameters()).dtype
        layers = sorted(_state_layers(module), key=lambda layer: layer.state_id)
        assert [layer.state_id for layer in layers] == list(range(len(layers))), "state_id is an index without gaps"
        group = CacheGroup.of_states(len(layers), layers[0].state_shapes)
        memory = torch.empty(rows + 1, bytes_per_slot(group, dtype), dtype=torch.uint8)
        pool = StatePool(group, memory, dtype)
        pool.fill(float("nan"))
        self._memory = pool.memory

    def step(self, rows: Sequence[int], prefix_lens: Sequence[int], lens: Sequence[int]) -> StepStates:
        """Return what layers need in a step of ``rows``, in which ``lens[i]`` tokens follow ``prefix_lens[i]``. Rows are
        prompts up to the last one that has no tokens yet or gets more than one."""
        prefix, count = np.array(prefix_lens, np.int32), np.array(lens, np.int32)
        slots = np.array(rows, np.int32) + 1
        first = int((np.flatnonzero((prefix == 0) | (count > 1)) + 1).max(initial=0))
        prompts = StateRows.of(slots[:first], count[:first], prefix[:first] == 0) if first else None
        return StepStates(self._memory, prompts, torch.from_numpy(slots[first:].copy()))


def _state_layers(module: torch.nn.Module) -> list[StateLayer]:
    return [layer for layer in module.modules() if isinstance(layer, StateLayer)]
