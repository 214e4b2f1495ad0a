"""Give the layers that keep states what they need in a step: which slot of states each row has, and copies of states.

A request keeps its state in one slot of each state group while it runs. The plan that admits it names these slots. They are
in an array by the request's own slot, from which graphs read them on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.grouped import Pools, mixer_of, states_of
from dovetail.interfaces.mixer import MixerBackend, MixerContext
from dovetail.interfaces.state_rows import CHUNK, StateRows
from dovetail.layers.states import StepStates
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.store import StateStore
    from dovetail.registry.resolution import Resolved
    from dovetail.types import AdmittedRequest, Batch, IntArray, StateCopies, StateSaves


class StateSlots:
    """Hold the states of all requests, and the slots of each running request. ``stores`` has the store of each state group.
    ``slots`` (int32 ``[state groups, slots of requests]``, on the device) has the slot of each request's state; that of
    slot 0, to which padding rows belong, is 0."""

    def __init__(self, stores: Sequence[StateStore], num_slots: int, mixer: MixerBackend, pool: int = 0) -> None:
        """``num_slots`` is the number of slots of requests, slot 0 included. ``mixer`` computes the steps. ``pool`` is that of the
        stores, see ``StateCopies``."""
        self.stores, self.device, self._mixer, self._pool = tuple(stores), stores[0].device, mixer, pool
        self._on_host = np.zeros((len(stores), num_slots), np.int32)
        on_host = torch.from_numpy(self._on_host)
        self.slots = on_host if self.device.type == "cpu" else on_host.to(self.device)

    @classmethod
    def of(cls, pool: Pools, num_slots: int, mesh: Mesh) -> StateSlots | None:
        """Return the states in ``pool``, or None if the model keeps none. This rank of ``mesh`` keeps those of its own requests
        only, with data-parallel attention."""
        stores = states_of(pool)
        number = mesh.tp.rank if mesh.attention == "data" else 0
        return cls(stores, num_slots, mixer_of(pool), number) if stores else None

    def admit(self, requests: Iterable[AdmittedRequest]) -> None:
        """Record the slots of requests that were admitted. The host does not wait for the device."""
        found = [(request.slot, request.state_slots) for request in requests]
        if not found:
            return
        for slot, own in found:
            assert len(own) == len(self.stores), f"a request has {len(own)} slots of states, not {len(self.stores)}"
            self._on_host[:, slot] = own
        if self.device.type != "cpu":
            self.slots.copy_(to_device(self._on_host.copy(), self.device))

    @torch.inference_mode()
    def copy(self, copies: StateCopies) -> None:
        """Copy states as a plan says. The host does not wait for the device."""
        for group, store in enumerate(self.stores):
            own = (copies.groups == group) & (copies.pools == self._pool)
            if own.any():
                pairs = np.stack([copies.sources[own], copies.targets[own]]).astype(np.int64)
                store.copy(*to_device(pairs, self.device).unbind(0))

    def of_step(self, batch: Batch) -> tuple[StepStates, ...]:
        """Plan the state groups of a step that is launched kernel by kernel, and return their entries of
        ``Batch.attn``."""
        split, slots = batch.num_extend, self._on_host[:, batch.slots]
        stores = enumerate(zip(self.stores, slots, strict=True))
        found = tuple(self._rows(batch, group, store, own, split) for group, (store, own) in stores)
        for states in found:
            states.backend.plan(states.rows)
        return found

    def _rows(self, batch: Batch, group: int, store: StateStore, slots: IntArray, split: int) -> StepStates:
        lens, prompts, drafts = batch.extend_lens, None, None
        if split:
            fresh = batch.prefix_lens[:split] == 0
            prompts = StateRows.of(
                slots[:split], lens[:split], fresh, self.device, saves=_saves_of(batch.state_saves, group)
            )
        rest = slots[split:]
        if batch.drafts is not None and len(rest):
            drafts = StateRows.of(rest, lens[split:], np.zeros(len(rest), np.bool_), self.device, writes=False)
            rest = rest[:0]
        return StepStates(store.memory, prompts, to_device(rest, self.device), drafts, self._mixer)


def _saves_of(saves: StateSaves | None, group: int) -> list[tuple[int, int, int]]:
    """Return row, length and slot of each state that a step keeps in a state group."""
    if saves is None:
        return []
    own = saves.groups == group
    return list(zip(saves.rows[own].tolist(), saves.lens[own].tolist(), saves.targets[own].tolist(), strict=True))


def build_mixer(resolved: Resolved, device: torch.device, dtype: torch.dtype) -> MixerBackend | None:
    """Build the backend of layers with a state, if the model has such layers."""
    return None if resolved.mixer is None else resolved.mixer.build(MixerContext(device, dtype))


def capture_states(batch: Batch) -> None:
    """Plan the state groups of a step that is to be captured."""
    for states in batch.attn:
        if isinstance(states, StepStates):
            states.backend.plan_capture(states.rows)


def replay_states(batch: Batch) -> None:
    """Plan the state groups of a captured step that is to be replayed."""
    for states in batch.attn:
        if isinstance(states, StepStates):
            states.backend.plan_replay(states.rows)


def padding(pool: Pools, lens: Sequence[int]) -> tuple[StepStates, ...]:
    """Return the entries of ``Batch.attn`` for the state groups in a step of prompts of ``lens`` tokens that answers no
    request: it writes no state."""
    nothing, found = np.zeros(len(lens), np.int32), []
    for store in states_of(pool):
        rows = StateRows.of(nothing, np.array(lens, np.int32), nothing == 0, store.device)
        found.append(StepStates(store.memory, rows, rows.slots[:0], backend=mixer_of(pool)))
        found[-1].backend.plan(found[-1].rows)
    return tuple(found)


def draft_rows(slots: torch.Tensor, indptr: torch.Tensor) -> StateRows:
    """Describe rows with drafts, of at most ``CHUNK`` tokens each, by tensors of fixed address: ``slots [rows]`` and ``indptr
    [rows + 1]``, int32. The rows have ``rows`` tokens together, so that some may have none."""
    rows, device = len(slots), slots.device
    each = torch.arange(rows + 1, dtype=torch.int32, device=device)
    fresh = torch.zeros(rows, dtype=torch.int32, device=device)
    lens = np.ones(rows, np.int32)  # what matters is their number and their sum
    return StateRows(lens, slots, indptr, fresh, each[:-1], indptr[:-1], each, CHUNK, writes=False)


def advance_states(batch: Batch, accepted: torch.Tensor) -> None:
    """Write the states after the accepted drafts of a step that was launched kernel by kernel. ``accepted`` (``[rows]``) are the numbers of
    new tokens of the rows of ``batch`` after its prompts."""
    for states in batch.attn:
        if isinstance(states, StepStates) and states.drafts is not None:
            states.advance(accepted.int())
