"""Keep adapters (LoRA) in slots on the device, for all linear layers of a model.

Adapters are read on a thread, into an image in host memory that is laid out like a slot. To put an adapter into a slot is
one copy of its image, which runs between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch

from dovetail.engine.build import as_list, as_module
from dovetail.engine.peft import LowRank, PeftAdapter, read_adapter
from dovetail.engine.shards import StoredTensor
from dovetail.errors import WeightsError
from dovetail.interfaces.model import ModelArchitecture, TensorShare, WeightTarget, WeightTransform
from dovetail.layers.adapters import AdaptedTokens, LinearAdapters
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.experts import Experts
from dovetail.layers.linear import Linear
from dovetail.layers.transforms import Transpose
from dovetail.ops.adapter_weights import LowRankWeights, TokenSlots
from dovetail.ops.low_rank import (
    LARGE_TILE,
    SMALL_STEP,
    SMALL_TILE,
    most_tiles,
    packed_tiles,
    token_groups,
    unpacked_tiles,
)
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.config.sections import Config
    from dovetail.types import Batch, IntArray

LEAST_RANK = 16
"""The largest rank of adapters if neither the config nor the adapters known at the start require a larger one."""
_RANK_UNIT = 16
"""On CUDA the rank of a slot is a multiple of this."""


class _Place(NamedTuple):
    """Describe where the matrices of one module of the checkpoint go: to part ``part`` of a layer, of which they fill ``size``
    rows from ``start`` on. ``inputs`` and ``outputs`` are this rank's shares of them, or None."""

    layer: str
    part: int
    start: int
    size: int
    inputs: TensorShare | None
    outputs: TensorShare | None
    transform: WeightTransform | None


class _LayerRegion(NamedTuple):
    """Describe the part of a slot that belongs to one layer: the elements of ``a [parts, rank, in]`` begin at ``a``, those of
    ``b [out, rank]`` at ``b``, and the ranks of the parts at ``ranks``."""

    layer: Linear
    parts: tuple[tuple[int, int], ...]
    a: int
    b: int
    ranks: int


class AdapterImage(NamedTuple):
    """Hold an adapter in host memory: what is copied to a slot, and the rank of each part of each layer."""

    elements: torch.Tensor
    ranks: IntArray


class EngineAdapters:
    """Keep up to ``slots`` adapters of rank up to ``max_rank`` for the linear layers of ``model``, in ``dtype``.

    The constructor allocates the slots and gives each layer its share of them; the layers must be prepared afterwards. A
    method that reads files may run on another thread; the others must not run during a step.
    """

    def __init__(
        self,
        model: ModelArchitecture,
        slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kernels: bool | None = None,
        max_rows: int = 0,
    ) -> None:
        """``kernels`` means that Triton's kernels compute, by default on CUDA. Captured steps have up to ``max_rows`` rows."""
        self.max_rank = max_rank
        self.tokens = AdaptedTokens()
        self._device, self._dtype = device, dtype
        self._on_cuda = device.type == "cuda"
        self._kernels = self._on_cuda if kernels is None else kernels
        self._rank = -(-max_rank // _RANK_UNIT) * _RANK_UNIT if self._kernels else max_rank
        self._body = model.body
        self._refused: dict[str, str] = {}
        self._places = self._find_places(model)
        self._regions, self._size, self.num_parts = self._find_regions(model)
        self._slots = torch.zeros(slots, self._size, dtype=dtype, device=device)
        self._ranks = np.zeros((slots, self.num_parts), np.int32)
        self._device_ranks = torch.from_numpy(self._ranks.copy()).to(device) if self._kernels else None
        for region in self._regions.values():
            region.layer.adapters = LinearAdapters(self._weights(region), self.tokens)
        self._most_rows, self._most_tiles = max_rows, most_tiles(max_rows, slots)
        # of captured steps: see ``packed_tiles``
        self._static = torch.zeros(1 + 2 * max_rows + 3 * self._most_tiles, dtype=torch.int32, device=device)
        self._sent = (0, -1)  # ``rows_version`` and number of rows of what ``_static`` holds
        self._known: tuple[int, TokenSlots | None] = 0, None  # of the decode rows with a ``rows_version``

    # -- building ----------------------------------------------------------------------------------------------------

    def _find_places(self, model: ModelArchitecture) -> dict[str, list[_Place]]:
        """Return the places of each module that may have an adapter, and note why the others may not."""
        layers = dict(as_module(model).named_modules())
        found: dict[str, list[_Place]] = {}
        for name, entry in model.weights_map().items():
            module, targets = name.removesuffix(".weight"), as_list(entry)
            if not targets:
                self._refused[module] = "a weight of experts"  # of other ranks
            for target in targets:
                owner, _, field = target.parameter.rpartition(".")
                layer = layers.get(owner)
                if isinstance(layer, Linear) and layer.adaptable and field == "weight":
                    place = _place_of(target, owner, layer)
                    if place is None:
                        self._refused[module] = "stored in an order that adapters cannot follow"
                    else:
                        found.setdefault(module, []).append(place)
                else:
                    self._refused[module] = _kind(layer)
        for module in self._refused.keys() & found.keys():
            del found[module]
        ranges: dict[str, set[int]] = {}
        for place in (one for places in found.values() for one in places):
            ranges.setdefault(place.layer, set()).add(place.start)
        order = {layer: sorted(starts) for layer, starts in ranges.items()}
        return {
            module: [place._replace(part=order[place.layer].index(place.start)) for place in places]
            for module, places in found.items()
        }

    def _find_regions(self, model: ModelArchitecture) -> tuple[dict[str, _LayerRegion], int, int]:
        """Return the region of each layer in a slot, the number of elements of a slot, and that of its parts."""
        parts: dict[str, dict[int, tuple[int, int]]] = {}
        for place in (one for places in self._places.values() for one in places):
            parts.setdefault(place.layer, {})[place.part] = place.start, place.size
        layers, regions, size, count = dict(as_module(model).named_modules()), dict[str, _LayerRegion](), 0, 0
        for name, own in parts.items():
            layer = layers[name]
            assert isinstance(layer, Linear)
            a, b = len(own) * self._rank * layer.in_features, layer.out_features * self._rank
            regions[name] = _LayerRegion(layer, tuple(own[part] for part in sorted(own)), size, size + a, count)
            size, count = size + -(-(a + b) // 64) * 64, count + len(own)
        return regions, size, count

    def _weights(self, region: _LayerRegion) -> LowRankWeights:
        a, b = self._views(self._slots, region)
        own = slice(region.ranks, region.ranks + len(region.parts))
        if self._device_ranks is None:
            return LowRankWeights(a, b, region.parts, self._ranks[:, own])
        from dovetail.ops.triton.low_rank import row_blocks
        from dovetail.ops.triton.low_rank_few import arrivals

        arrivals(self._device)  # allocated before anything is captured
        blocks = row_blocks(region.parts, self._device)
        return LowRankWeights(a, b, region.parts, self._ranks[:, own], self._device_ranks[:, own], blocks)

    def _views(self, elements: torch.Tensor, region: _LayerRegion) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of a layer in ``elements [..., size of a slot]``."""
        parts, inputs, outputs, rank = (
            len(region.parts),
            region.layer.in_features,
            region.layer.out_features,
            self._rank,
        )
        a = elements[..., region.a : region.a + parts * rank * inputs].unflatten(-1, (parts, rank, inputs))
        return a, elements[..., region.b : region.b + outputs * rank].unflatten(-1, (outputs, rank))

    # -- adapters ----------------------------------------------------------------------------------------------------

    @property
    def modules(self) -> list[str]:
        """Return the modules of the checkpoint that may have an adapter."""
        return [*self._places]

    @property
    def slot_bytes(self) -> int:
        """Return the size of an adapter on this rank, on the device and in host memory."""
        return self._size * self._dtype.itemsize

    def check(self, directory: str) -> int:
        """Read the headers of an adapter, and return its rank. Raises ``WeightsError`` if it does not fit the model."""
        adapter = read_adapter(Path(directory))
        self._fit(adapter, directory)
        return adapter.rank

    def read(self, directory: str) -> AdapterImage:
        """Read an adapter. Raises ``WeightsError``."""
        adapter = read_adapter(Path(directory))
        placed = self._fit(adapter, directory)
        elements = torch.zeros(self._size, dtype=self._dtype, pin_memory=self._on_cuda)
        ranks = np.zeros(self.num_parts, np.int32)
        file = next(iter(adapter.modules.values())).a.file
        try:
            with file.open("rb") as opened:
                for pair, places in placed:
                    a, b = (_read_tensor(opened, one).float() for one in (pair.a, pair.b))
                    a, b = a.to(self._dtype), (b * pair.scale).to(self._dtype)
                    _check_finite(pair, a, b)
                    for place in places:
                        self._fill(elements, ranks, place, a, b)
        except OSError as error:
            raise WeightsError(f"{file} cannot be read: {error}") from error
        return AdapterImage(elements, ranks)

    def install(self, image: AdapterImage, slot: int) -> None:
        """Copy an adapter to ``slot`` (from 1 on). Does not wait for the device."""
        self._slots[slot - 1].copy_(image.elements, non_blocking=True)
        self._ranks[slot - 1] = image.ranks
        if self._device_ranks is not None:
            self._device_ranks[slot - 1].copy_(to_device(image.ranks, self._device), non_blocking=True)

    def _fit(self, adapter: PeftAdapter, directory: str) -> list[tuple[LowRank, list[_Place]]]:
        """Return the places of all matrices. Raises ``WeightsError`` if one of them has none, or has another shape."""
        if adapter.rank > self.max_rank:
            raise WeightsError(
                f"{directory} has rank {adapter.rank}; allowed: at most {self.max_rank} (adapters.max_rank, --max-lora-rank)"
            )
        placed = [(pair, self._places_of(module, pair)) for module, pair in adapter.modules.items()]
        for name in adapter.config.targets or ():
            named = [module for module in self._places if module == name or module.endswith(f".{name}")]
            used = any(module == name or module.endswith(f".{name}") for module in adapter.modules)
            if named and not used:
                raise WeightsError(
                    f"{directory}: target_modules names {name:.80}, and there are no matrices of {named[0]}"
                )
        return placed

    def _places_of(self, module: str, pair: LowRank) -> list[_Place]:
        own = module if module in self._places or module in self._refused else self._body + module
        places = self._places.get(own)
        if places is None:
            what = self._refused.get(own)
            why = (
                "which the model does not have"
                if what is None
                else f"which is {what}; adapters of it are not implemented"
            )
            raise WeightsError(f"{pair.a.file} has tensor {pair.a.name:.200}, an adapter of {module:.200}, {why}")
        inputs, outputs = self._whole(places)
        if pair.a.shape[1] != inputs or pair.b.shape[0] != outputs:
            raise WeightsError(
                f"{pair.a.file}: the matrices of {module:.200} have {pair.a.shape[1]} inputs and {pair.b.shape[0]} outputs; the "
                f"model has {inputs} and {outputs}"
            )
        return places

    def _whole(self, places: Sequence[_Place]) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a module, over all ranks."""
        first = places[0]
        inputs = first.inputs.whole if first.inputs else self._regions[first.layer].layer.in_features
        if first.outputs:
            return inputs, first.outputs.whole
        return inputs, first.size if first.transform is None else first.transform.source_shape((first.size, 1))[0]

    def _fill(self, elements: torch.Tensor, ranks: IntArray, place: _Place, a: torch.Tensor, b: torch.Tensor) -> None:
        """Write this rank's share of the matrices of a module to ``elements``."""
        region, rank = self._regions[place.layer], len(a)
        if place.inputs is not None:
            a = a.narrow(1, place.inputs.start, place.inputs.size)
        if place.outputs is not None:
            b = b.narrow(0, place.outputs.start, place.outputs.size)
        if place.transform is not None:
            b = place.transform.apply(b, (place.size, rank))
        to_a, to_b = self._views(elements, region)
        to_a[place.part, :rank] = a
        to_b[place.start : place.start + place.size, :rank] = b
        ranks[region.ranks + place.part] = rank

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def active(self, batch: Batch) -> Iterator[None]:
        """Let the layers add the adapters of a batch that has ``adapters``, for the time of its forward pass."""
        version, tokens = self._known
        if tokens is None or not batch.rows_version or version != batch.rows_version or batch.drafts is not None:
            tokens = self._token_slots(batch)
            self._known = (batch.rows_version, tokens) if batch.drafts is None else (0, None)
        self.tokens.current = tokens
        try:
            yield
        finally:
            self.tokens.current = None

    @contextmanager
    def captured(self, rows: int) -> Iterator[None]:
        """Let the layers read the slots of ``rows`` tokens from memory of fixed address, which ``send`` fills, while a decode step is
        captured. With 0 rows, no token has an adapter."""
        before = self.tokens.current
        self._static.zero_()  # no tile has tokens: those of an earlier step may be beyond these rows
        self._sent = (0, -1)
        most = most_tiles(rows, len(self._slots))
        tiles = unpacked_tiles(self._static, SMALL_TILE, self._most_rows, rows, most)
        self.tokens.current = TokenSlots(rows, (), tiles) if rows else None
        try:
            yield
        finally:
            self.tokens.current = before

    def send(self, batch: Batch) -> None:
        """Send the slots of the rows of a decode batch to the memory that captured steps read."""
        state = batch.rows_version, len(batch.slots)
        if batch.rows_version and self._sent == state:
            return
        rows: Any = batch.adapters
        sent = packed_tiles(rows.astype(np.int32) - 1, SMALL_TILE, self._most_rows, self._most_tiles)
        self._static.copy_(to_device(sent, self._device), non_blocking=True)
        self._sent = state

    def _token_slots(self, batch: Batch) -> TokenSlots:
        rows: Any = batch.adapters
        slots = np.repeat(rows, batch.extend_lens).astype(np.int32) - 1
        if not self._kernels:
            return TokenSlots(len(slots), token_groups(slots))
        size = SMALL_TILE if len(slots) <= SMALL_STEP else LARGE_TILE
        sent = to_device(packed_tiles(slots, size), self._device)
        return TokenSlots(len(slots), (), unpacked_tiles(sent, size, len(slots), len(slots)))


def build_adapters(
    model: ModelArchitecture, config: Config, device: torch.device, dtype: torch.dtype
) -> EngineAdapters | None:
    """Allocate the slots of adapters, before the weights are loaded and the layers are prepared. Return None if the config does
    not enable adapters. Raises ``WeightsError`` if an adapter in ``adapters.load`` cannot be read."""
    section = config.adapters
    if not section.enabled:
        return None
    ranks = [] if section.max_rank else [read_adapter(Path(directory)).rank for directory in section.load.values()]
    rank, rows = section.max_rank or max([LEAST_RANK, *ranks]), min(config.scheduler.rows, config.graphs.max_rows)
    return EngineAdapters(model, section.max_resident, rank, device, dtype, max_rows=rows)


def _place_of(target: WeightTarget, owner: str, layer: Linear) -> _Place | None:
    """Return where the matrices of a module go whose weight goes to ``target``; None if they cannot."""
    transform, shares = target.transform, {share.dim: share for share in target.shares}
    if isinstance(transform, Transpose):
        transform, shares = None, {1 - dim: share for dim, share in shares.items()}
    start = target.start or 0
    size = layer.out_features if target.size is None else target.size
    if transform is not None:
        width = 3  # whatever the width, only rows may change
        shape = transform.source_shape((size, width))
        if not transform.keeps_dtype or len(shape) != 2 or shape[1] != width:
            return None
    return _Place(owner, 0, start, size, shares.get(1), shares.get(0), transform)


def _kind(layer: Any) -> str:
    match layer:
        case Experts():
            return "a weight of experts"
        case LMHead():
            return "the head"
        case Embedding():
            return "an embedding"
        case Linear():
            return "used in other ways than by a product, or computed in float32"
        case _:
            return "no linear layer"


def _read_tensor(opened: BinaryIO, stored: StoredTensor) -> torch.Tensor:
    """Read a tensor. The file is not mapped to memory: the process would end if it became shorter meanwhile."""
    data = bytearray(stored.nbytes)
    opened.seek(stored.offset)
    if opened.readinto(data) != stored.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise WeightsError(
            f"{stored.file} ends before the end of tensor {stored.name:.200}; it changed while it was read"
        )
    assert isinstance(stored.dtype, torch.dtype)
    return torch.frombuffer(data, dtype=stored.dtype).view(stored.shape)


def _check_finite(pair: LowRank, a: torch.Tensor, b: torch.Tensor) -> None:
    for tensor, stored in ((a, pair.a), (b, pair.b)):
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(
                f"{stored.file}: tensor {stored.name:.200} has numbers that are not finite, or not in {tensor.dtype} once they are "
                "multiplied by the scale of the adapter"
            )
