"""Hold the states of layers that keep a state for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from dovetail.interfaces.mixer_shapes import StateShape


class StatePool:
    """Hold the states of all layers of a model in ``num_slots`` slots. ``memory[state_id]`` are those of a layer,
    ``[num_slots, *shape]`` for each of its shapes. Slot 0 belongs to padding rows: no operation writes to it.

    States of equal shape and dtype are in one tensor, so that a copy is one operation for each kind of state, whatever the
    number of layers. All are 0 at first.
    """

    def __init__(
        self,
        layers: Sequence[tuple[StateShape, ...]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the states of layers with the shapes ``layers``, in the order of ``state_id``. ``dtype`` is that of the
        model."""
        counts = Counter(shape for layer in layers for shape in layer)
        self.num_slots = num_slots
        self._tensors = {
            kind: torch.zeros(count, num_slots, *kind.shape, dtype=kind.dtype or dtype, device=device)
            for kind, count in counts.items()
        }
        unused = {kind: iter(tensor.unbind(0)) for kind, tensor in self._tensors.items()}
        self.memory = tuple(tuple(next(unused[shape]) for shape in layer) for layer in layers)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the states of all layers from the slots ``source [n]`` to ``target [n]`` (int64), as if all were read before
        any is written. Mutates the pool."""
        for tensor in self._tensors.values():
            tensor.index_copy_(1, target, tensor.index_select(1, source))

    def fill(self, value: float) -> None:
        """Set all numbers of all slots. Tests poison the pool in this way."""
        for tensor in self._tensors.values():
            tensor.fill_(value)


def bytes_per_slot(layers: Sequence[tuple[StateShape, ...]], dtype: torch.dtype) -> int:
    """Return the bytes of one slot of a pool: the states of all layers for one request, or one snapshot of them."""
    return sum(torch.Size(shape.shape).numel() * (shape.dtype or dtype).itemsize for layer in layers for shape in layer)
