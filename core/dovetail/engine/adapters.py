"""Keep adapters (LoRA) in slots on the device, for all layers of a model that may have adapters.

Adapters are read on a thread, into an image in host memory that is laid out like a slot. To put an adapter into a slot is
one copy of its image, which runs between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dovetail.engine.adapter_files import AdapterReader, AdapterRegions, Region, kinds_of
from dovetail.engine.adapter_places import AdaptedModules, adapted_modules
from dovetail.engine.build import as_module
from dovetail.engine.captured_slots import CapturedSlots
from dovetail.engine.own_rows import kept
from dovetail.engine.peft import read_adapter
from dovetail.engine.read_thread import Note, note_nothing
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture
from dovetail.layers.adapters import (
    AdaptedTokens,
    EmbeddingAdapters,
    ExpertsAdapters,
    LinearAdapters,
    OwnTokens,
    SampledTokens,
)
from dovetail.layers.embedding import LMHead
from dovetail.layers.own_rows import layers_of_own_rows
from dovetail.ops.adapter_weights import (
    AdapterCount,
    EmbeddingLowRank,
    ExpertLowRank,
    ExpertPairLowRank,
    LowRankWeights,
    TokenSlots,
)
from dovetail.ops.low_rank import (
    LARGE_TILE,
    SMALL_STEP,
    SMALL_TILE,
    adapter_count,
    kernel_count,
    packed_tiles,
    token_slots,
    unpacked_tiles,
)
from dovetail.ops.transfer import to_device
from dovetail.registry.rules import check_adapted_backend

if TYPE_CHECKING:
    from dovetail.config.adapters import AdaptedKind
    from dovetail.engine.adapter_files import AdapterImage
    from dovetail.registry.resolution import Resolved
    from dovetail.types import Batch, IntArray

LEAST_RANK = 16
"""The largest rank of adapters if neither the config nor the adapters known at the start require a larger one."""
_RANK_UNIT = 16
"""On CUDA the rank of a slot is a multiple of this."""
_WEIGHTS: dict[str, type[LowRankWeights]] = {
    "product": LowRankWeights,
    "embedding": EmbeddingLowRank,
    "experts": ExpertLowRank,
}


class EngineAdapters:
    """Keep up to ``slots`` adapters of rank up to ``max_rank`` for the layers of ``model``, in ``dtype``: for modules of ``kinds``.

    The constructor allocates the slots and gives each layer its share of them; the layers must be prepared afterwards. A
    method that reads files may run on another thread; the others must not run during a step.

    With data-parallel attention, the layers of attention compute the adapters of the rows of this rank, and the other layers those
    of all rows.
    """

    def __init__(
        self,
        model: ModelArchitecture,
        slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kinds: Collection[AdaptedKind] = ("linear",),
        modules: AdaptedModules | None = None,
        kernels: bool | None = None,
        max_rows: int = 0,
        mesh: Mesh = SINGLE,
    ) -> None:
        """``modules`` are those of ``model``, which was built with ``mesh``. ``kernels`` means that Triton's kernels compute, by default
        on CUDA. Captured steps have up to ``max_rows`` rows."""
        self.max_rank = max_rank
        self.tokens = AdaptedTokens()
        self._device = device
        self._kernels = device.type == "cuda" if kernels is None else kernels
        rank = rank_of_slots(max_rank, kernels=self._kernels)
        found = adapted_modules(model) if modules is None else modules
        self._regions = AdapterRegions(found, kinds, rank)
        self._reader = AdapterReader(found, self._regions, kinds, max_rank, model.body, device, dtype)
        self._slots = torch.zeros(slots, self._regions.size, dtype=dtype, device=device)
        self._ranks = np.zeros((slots, self._regions.num_ranks), np.int32)
        self._device_ranks = torch.from_numpy(self._ranks.copy()).to(device) if self._kernels else None
        self._arrived = self._counters()
        self._samples = "head" in kinds
        self._attach(layers_of_own_rows(as_module(model)))
        self._tp = mesh.tp if mesh.attention == "data" else None
        self._captured = CapturedSlots(max_rows, slots, device)
        self._captured_own = None if self._tp is None else CapturedSlots(max_rows, slots, device)
        # of the decode rows with a ``rows_version``: of all rows, and of the own rows of this rank
        self._known: tuple[int, TokenSlots | None, TokenSlots | None] = 0, None, None
        self._count = 0, AdapterCount.NONE  # ``rows_version`` and what ``count`` returned for it

    # -- building ----------------------------------------------------------------------------------------------------

    def _attach(self, of_own_rows: Collection[Any]) -> None:
        """Give each layer its share of the slots. The layers ``of_own_rows`` compute the tokens of ``Batch.own``."""
        experts: dict[Any, dict[str, ExpertLowRank]] = {}
        for name, region in self._regions.items():
            layer, weights = region.shape.layer, self._weights(region)
            if isinstance(weights, ExpertLowRank):
                experts.setdefault(layer, {})[name.rpartition(".")[2]] = weights
            elif isinstance(weights, EmbeddingLowRank):
                layer.adapters = EmbeddingAdapters(weights, self.tokens)
            else:
                tokens = SampledTokens(self.tokens) if isinstance(layer, LMHead) else self.tokens
                layer.adapters = LinearAdapters(weights, OwnTokens(self.tokens) if layer in of_own_rows else tokens)
        for layer, own in experts.items():
            layer.adapters = ExpertsAdapters(ExpertPairLowRank(own["gate_up"], own["down"]), self.tokens)

    def _weights(self, region: Region) -> LowRankWeights:
        a, b = region.views(self._slots)
        own, shape = slice(region.ranks, region.ranks + region.num_ranks), region.shape
        if self._device_ranks is None:
            return _WEIGHTS[shape.kind](a, b, shape.parts, self._ranks[:, own])
        from dovetail.ops.triton.low_rank import row_blocks

        given = row_blocks(shape.parts, self._device), self._arrived
        return _WEIGHTS[shape.kind](a, b, shape.parts, self._ranks[:, own], self._device_ranks[:, own], *given)

    def _counters(self) -> torch.Tensor | None:
        """Return the counters that all layers share, because they run one after the other; None without Triton's kernels."""
        if not self._kernels:
            return None
        from dovetail.ops.triton.low_rank_few import arrivals

        return arrivals(self._device)

    # -- adapters ----------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> list[str]:
        """Return the modules of the checkpoint that may have an adapter."""
        return self._reader.modules

    @property
    def slot_bytes(self) -> int:
        """Return the size of an adapter on this rank, on the device and in host memory."""
        return self._regions.size * self._slots.dtype.itemsize

    def check(self, directory: str) -> int:
        """Read the headers of an adapter, and return its rank. Raises ``WeightsError`` if it does not fit the model."""
        return self._reader.check(directory)

    def read(self, directory: str, note: Note = note_nothing) -> AdapterImage:
        """Read an adapter. Raises ``WeightsError``, and what ``note`` raises."""
        return self._reader.read(directory, note)

    def install(self, image: AdapterImage, slot: int) -> None:
        """Copy an adapter to ``slot`` (from 1 on). Does not wait for the device."""
        targets = self._slots[slot - 1].split([len(piece) for piece in image.pieces])
        for target, piece in zip(targets, image.pieces, strict=True):
            target.copy_(piece, non_blocking=True)
        self._ranks[slot - 1] = image.ranks
        if self._device_ranks is not None:
            self._device_ranks[slot - 1].copy_(to_device(image.ranks, self._device), non_blocking=True)

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def active(self, batch: Batch) -> Iterator[None]:
        """Let the layers add the adapters of a batch that has ``adapters``, for the time of its forward pass."""
        version, tokens, own = self._known
        if tokens is None or not batch.rows_version or version != batch.rows_version or batch.drafts is not None:
            tokens, own = self._token_slots(batch), self._own_slots(batch)
            self._known = (batch.rows_version, tokens, own) if batch.drafts is None else (0, None, None)
        self.tokens.current, self.tokens.own = tokens, own
        try:
            yield
        finally:
            self.tokens.current = self.tokens.own = None

    @contextmanager
    def rehearsed(self, tokens: int, rows: int) -> Iterator[None]:
        """Let the layers compute the adapter of the first slot for all ``tokens`` of a step that answers no request, and the head for ``rows`` rows,
        so that the step takes the memory of one with adapters."""
        # a step that answers no request has no own rows: layers of attention compute all tokens
        self.tokens.current = self.tokens.own = self._on_device(np.zeros(tokens, np.int32))
        self.tokens.sampled = self._on_device(np.zeros(rows, np.int32)) if self._samples else None
        try:
            yield
        finally:
            self.tokens.current = self.tokens.own = self.tokens.sampled = None

    def count(self, batch: Batch) -> AdapterCount:
        """Return how many adapters the rows of a batch that has ``adapters`` have."""
        version, count = self._count
        if not batch.rows_version or version != batch.rows_version:
            rows: Any = batch.adapters
            count = adapter_count(int(np.count_nonzero(np.unique(rows))))
            self._count = batch.rows_version, count
        return count

    @contextmanager
    def captured(self, rows: int, count: AdapterCount, own: int = 0) -> Iterator[None]:
        """Let the layers read the slots of ``rows`` tokens from memory of fixed address, which ``send`` fills, while a decode step is
        captured. ``count`` says how many adapters they may have. ``own`` is the number of own rows, with data-parallel attention."""
        before = self.tokens.current, self.tokens.own
        self.tokens.current = self._captured.of_rows(rows, count)
        self.tokens.own = None if self._captured_own is None else self._captured_own.of_rows(own, count)
        try:
            yield
        finally:
            self.tokens.current, self.tokens.own = before

    def send(self, batch: Batch) -> None:
        """Send the slots of the rows of a decode batch to the memory that captured steps read."""
        state, slots = (batch.rows_version, len(batch.slots)), batch.adapters
        assert slots is not None, "a step with adapters is replayed"
        if not self._captured.is_sent(*state):
            self._captured.send(slots, *state)
        if self._captured_own is not None and self._tp is not None and not self._captured_own.is_sent(*state):
            self._captured_own.send(slots[kept(batch.slots, self._tp)], *state)

    @contextmanager
    def sampled(self, batch: Batch, rows: IntArray) -> Iterator[None]:
        """Let the head compute the adapters of ``rows`` of the active batch: the row that each of its inputs belongs to."""
        if not self._samples or self.tokens.current is None:
            yield
            return
        adapters: Any = batch.adapters
        self.tokens.sampled = self._on_device(adapters[rows].astype(np.int32) - 1)
        try:
            yield
        finally:
            self.tokens.sampled = None

    def _token_slots(self, batch: Batch) -> TokenSlots:
        rows: Any = batch.adapters
        return self._on_device(np.repeat(rows, batch.extend_lens).astype(np.int32) - 1)

    def _own_slots(self, batch: Batch) -> TokenSlots | None:
        """Return the slots of the tokens of this rank's rows, with data-parallel attention; None if none has an adapter."""
        slots: Any = batch.adapters
        rows = None if self._tp is None else kept(batch.slots, self._tp)
        if rows is None or not slots[rows].any():
            return None
        return self._on_device(np.repeat(slots[rows], batch.extend_lens[rows]).astype(np.int32) - 1)

    def _on_device(self, slots: IntArray) -> TokenSlots:
        if not self._kernels:
            return token_slots(slots)
        size = SMALL_TILE if len(slots) <= SMALL_STEP else LARGE_TILE
        packed = packed_tiles(slots, size)
        count = kernel_count(adapter_count(int(packed[1])), len(slots))
        tiles = unpacked_tiles(to_device(packed, self._device), size, len(slots), len(slots), count=count)
        return TokenSlots(len(slots), (), tiles)


def rank_of_slots(max_rank: int, *, kernels: bool) -> int:
    """Return the rank for which slots have memory. ``kernels`` means that Triton's kernels compute."""
    return -(-max_rank // _RANK_UNIT) * _RANK_UNIT if kernels else max_rank


def slots_for(model: ModelArchitecture, modules: AdaptedModules, resolved: Resolved) -> tuple[list[AdaptedKind], int]:
    """Return the kinds of modules and the largest rank for which slots have memory. Raises ``WeightsError`` if an adapter in
    ``adapters.load`` cannot be read, and ``ConfigError`` for adapters of experts with a backend of experts that does not allow
    them."""
    section = resolved.config.adapters
    given = [read_adapter(Path(directory)) for directory in section.load.values()]
    rank = section.max_rank or max([LEAST_RANK, *(adapter.rank for adapter in given)])
    kinds: list[AdaptedKind] = section.modules or ["linear", *kinds_of(modules, model.body, given)]
    if "experts" in kinds and resolved.experts is not None:
        check_adapted_backend(resolved.experts.spec)
    return kinds, rank


def build_adapters(
    model: ModelArchitecture, resolved: Resolved, device: torch.device, dtype: torch.dtype, mesh: Mesh
) -> EngineAdapters:
    """Allocate the slots of adapters, before the weights are loaded and the layers are prepared. ``model`` was built with ``mesh``.
    Raises what ``slots_for`` does."""
    config = resolved.config
    section = config.adapters
    modules = adapted_modules(model)
    kinds, rank = slots_for(model, modules, resolved)
    rows = min(config.scheduler.rows, config.graphs.max_rows)
    return EngineAdapters(
        model, section.max_resident, rank, device, dtype, kinds=kinds, modules=modules, max_rows=rows, mesh=mesh
    )
