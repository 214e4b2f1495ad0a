"""Read adapters (LoRA) into images in host memory, which are laid out like the slots on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch

from dovetail.engine.adapter_places import NAMES, AdaptedModules, Place, RegionShape
from dovetail.engine.adapter_stacks import ExpertStack, Side, expert_matrices, sides_of
from dovetail.engine.peft import FLOATS, PeftAdapter, read_adapter
from dovetail.engine.read_thread import Note
from dovetail.engine.shards import StoredTensor, cut
from dovetail.errors import WeightsError
from dovetail.interfaces.model import TensorShare

if TYPE_CHECKING:
    from dovetail.config.adapters import AdaptedKind
    from dovetail.types import IntArray

_COPY_ROWS = 8192
"""The number of rows of a base weight that are compared at a time."""


class Region(NamedTuple):
    """Describe the part of a slot that belongs to one product: the elements of its matrices begin at ``a`` and at ``b``, and its
    ``num_ranks`` ranks, one for each part of each expert, at ``ranks``."""

    shape: RegionShape
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    a: int
    b: int
    end: int
    ranks: int
    num_ranks: int

    def views(self, elements: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices in ``elements [..., size of a slot]``."""
        b_end = self.b + int(np.prod(self.b_shape))
        return (
            elements[..., self.a : self.b].unflatten(-1, self.a_shape),
            elements[..., self.b : b_end].unflatten(-1, self.b_shape),
        )


class AdapterRegions:
    """Divide a slot of ``rank`` into the regions of the modules of ``kinds``. ``size`` is its number of elements."""

    def __init__(self, modules: AdaptedModules, kinds: Collection[AdaptedKind], rank: int) -> None:
        used = {place.region for name, own in modules.places.items() if modules.kinds[name] in kinds for place in own}
        if "experts" in kinds:
            used |= {region for stack in modules.stacks.values() for region in (stack.up, stack.down)}
        self._regions: dict[str, Region] = {}
        self.size = self.num_ranks = 0
        for name, shape in modules.regions.items():
            if name not in used:
                continue
            (a, b), count = shape.sizes(rank), shape.experts * len(shape.parts)
            end = self.size + -(-(a + b) // 64) * 64
            self._regions[name] = Region(
                shape, *shape.shapes(rank), self.size, self.size + a, end, self.num_ranks, count
            )
            self.size, self.num_ranks = end, self.num_ranks + count

    def items(self) -> Iterable[tuple[str, Region]]:
        """Return the regions and their names."""
        return self._regions.items()

    def fill(
        self, elements: torch.Tensor, ranks: IntArray, place: Place, matrices: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Write this rank's share of the matrices of a module, ``[rank, in]`` and ``[out, rank]``, to an image."""
        (a, b), region = matrices, self._regions[place.region]
        rank, parts = len(a), len(region.shape.parts)
        if place.inputs is not None:
            a = a.narrow(1, place.inputs.start, place.inputs.size)
        if place.outputs is not None:
            b = b.narrow(0, place.outputs.start, place.outputs.size)
        if place.rows is not None:
            b = b.index_select(0, place.rows)
        if place.transform is not None:
            b = place.transform.apply(b, (place.size, rank))
        to_a, to_b = region.views(elements)
        if region.shape.kind == "experts":
            to_a, to_b = to_a[place.expert], to_b[place.expert]
        if region.shape.kind == "embedding":
            to_a[:, :rank] = a.T
        else:
            to_a[place.part, :rank] = a
        to_b[place.start : place.start + place.size, :rank] = b
        ranks[region.ranks + place.expert * parts + place.part] = rank


PIECE_BYTES = 4 << 20
"""The size of the pieces in which an adapter is read and pinned. No thread can launch kernels while the driver pins memory, which takes
tens of milliseconds for a whole adapter of an 8B model."""


class AdapterImage(NamedTuple):
    """Hold an adapter in host memory: what is copied to a slot, in pieces that follow one another, and the ranks of each
    region."""

    pieces: Sequence[torch.Tensor]
    ranks: IntArray


class _Placed(NamedTuple):
    """Hold the matrices of a module, or, with ``side``, of all experts of a layer. The product is multiplied by ``scale``."""

    a: StoredTensor
    b: StoredTensor
    scale: float
    places: Sequence[Place]
    stack: ExpertStack | None = None
    side: Side | None = None

    def matrices(self, a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[Place, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield the places and what is written to each."""
        if self.stack is None or self.side is None:
            yield from ((place, (a, b)) for place in self.places)
            return
        held, experts = self.stack.layer.held, self.stack.layer.shape.routing.num_experts
        for local, expert in enumerate(held):
            own = expert_matrices(a, b, self.side, expert, experts)
            yield from ((place._replace(expert=local), own) for place in self.places)


class AdapterReader:
    """Read adapters for the ``modules`` of a model, of rank up to ``max_rank``. May be used on another thread."""

    def __init__(
        self,
        modules: AdaptedModules,
        regions: AdapterRegions,
        kinds: Collection[AdaptedKind],
        max_rank: int,
        body: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._modules, self._regions, self._kinds, self._max_rank = modules, regions, kinds, max_rank
        self._body, self._device, self._dtype = body, device, dtype

    @property
    def modules(self) -> list[str]:
        """Return the modules of the checkpoint that may have an adapter."""
        return [module for module in self._modules.places if self._modules.kinds[module] in self._kinds]

    def check(self, directory: str) -> int:
        """See ``EngineAdapters.check``."""
        adapter = read_adapter(Path(directory))
        self._fit(adapter, directory)
        return adapter.rank

    def read(self, directory: str, note: Note) -> AdapterImage:
        """See ``EngineAdapters.read``."""
        adapter = read_adapter(Path(directory), note)
        placed = self._fit(adapter, directory)
        elements = torch.zeros(self._regions.size, dtype=self._dtype)
        ranks = np.zeros(self._regions.num_ranks, np.int32)
        try:
            with adapter.file.open("rb") as opened:
                for module, tensor in adapter.copies.items():
                    self._compare(opened, own_name(self._modules, self._body, module), tensor, note)
                for one in placed:
                    a, b = (_read_tensor(opened, tensor, note).float() for tensor in (one.a, one.b))
                    a, b = a.to(self._dtype), (b * one.scale).to(self._dtype)
                    _check_finite(one, a, b)
                    for place, matrices in one.matrices(a, b):
                        self._regions.fill(elements, ranks, place, matrices)
        except OSError as error:
            raise WeightsError(f"{adapter.file} cannot be read: {error}") from error
        return AdapterImage(_pinned(elements) if self._device.type == "cuda" else (elements,), ranks)

    def _fit(self, adapter: PeftAdapter, directory: str) -> list[_Placed]:
        """Return the places of all matrices. Raises ``WeightsError`` if one of them has none, or has another shape."""
        if adapter.rank > self._max_rank:
            raise WeightsError(
                f"{directory} has rank {adapter.rank}; allowed: at most {self._max_rank} (adapters.max_rank, --max-lora-rank)"
            )
        placed = [_Placed(*pair, self._places_of(module, pair.a, pair.b)) for module, pair in adapter.modules.items()]
        for module, pairs in adapter.stacked.items():
            stack = self._stack_of(module, pairs[0].a)
            for pair, side in zip(pairs, sides_of(stack, module, pairs, adapter.config), strict=True):
                placed.append(_Placed(*pair, side.scale, _stack_places(stack, side), stack, side))
        for module, tensor in adapter.copies.items():
            self._check_copy(module, tensor)
        named, used = _by_ending(self.modules), _by_ending(adapter.modules)
        for name in adapter.config.targets or ():
            if name in named and name not in used:
                raise WeightsError(
                    f"{directory}: target_modules names {name:.80}, and there are no matrices of {named[name]}"
                )
        return placed

    def _places_of(self, module: str, a: StoredTensor, b: StoredTensor) -> Sequence[Place]:
        own = own_name(self._modules, self._body, module)
        places = self._modules.places.get(own)
        if places is None:
            what = self._modules.refused.get(own)
            raise _refusal(
                module,
                a,
                "which the model does not have"
                if what is None
                else f"which is {what}; adapters of it are not implemented",
            )
        self._check_kind(self._modules.kinds[own], module, a)
        inputs, outputs = self._modules.widths[own]
        if a.shape[1] != inputs or b.shape[0] != outputs:
            raise WeightsError(
                f"{a.file}: the matrices of {module:.200} have {a.shape[1]} inputs and {b.shape[0]} outputs; the "
                f"model has {inputs} and {outputs}"
            )
        return places

    def _stack_of(self, module: str, tensor: StoredTensor) -> ExpertStack:
        stack = self._modules.stack(module) or self._modules.stack(self._body + module)
        if stack is None:
            raise _refusal(module, tensor, "which is no layer of experts of the model, and target_parameters names it")
        self._check_kind("experts", module, tensor)
        return stack

    def _check_kind(self, kind: AdaptedKind, module: str, tensor: StoredTensor) -> None:
        if kind not in self._kinds:
            what = NAMES.get(kind, "a linear layer")
            wanted = ", ".join([*self._kinds, kind])
            raise _refusal(
                module, tensor, f"which is {what}; slots have no memory for these. Set adapters.modules: [{wanted}]"
            )

    def _check_copy(self, module: str, tensor: StoredTensor) -> None:
        """Check that a base weight in an adapter may be that of the model. Raises ``WeightsError``."""
        own = own_name(self._modules, self._body, module)
        kind = self._modules.kinds.get(own)
        if kind not in ("embedding", "head") or tensor.dtype not in FLOATS:
            raise WeightsError(
                f"{tensor.file} has tensor {tensor.name:.200} of dtype {tensor.dtype}, a base weight; allowed beside the matrices: those of "
                "embeddings and heads, in float32, float16 or bfloat16"
            )
        inputs, outputs = self._modules.widths[own]
        expected = (inputs, outputs) if kind == "embedding" else (outputs, inputs)
        if tensor.shape != expected:
            raise WeightsError(
                f"{tensor.file} has tensor {tensor.name:.200} of shape {list(tensor.shape)}; the model has {list(expected)}. Adapters "
                "that change the vocabulary are not implemented"
            )

    def _compare(self, opened: BinaryIO, module: str, tensor: StoredTensor, note: Note) -> None:
        """Compare a base weight that PEFT has saved beside the matrices of an embedding or a head with that of the model. Raises
        ``WeightsError`` if they differ."""
        place = next(iter(self._modules.places[module]))
        layer, share = self._modules.regions[place.region].layer, place.inputs or place.outputs
        weight: torch.Tensor | None = getattr(layer, "weight", None)
        if weight is None:
            raise WeightsError(
                f"{tensor.file} has tensor {tensor.name:.200}, which cannot be compared with the quantized weight of the model; leave it out of "
                "the file: save the adapter with save_embedding_layers=False"
            )
        start = 0 if share is None else share.start
        for at in range(0, len(weight), _COPY_ROWS):
            count = min(_COPY_ROWS, len(weight) - at)
            rows = cut(tensor, (TensorShare(0, start + at, count, tensor.shape[0]),))
            own = _to_host(weight[at : at + count]).float()
            if not torch.allclose(_read_tensor(opened, rows, note).to(weight.dtype).float(), own, rtol=1e-2, atol=1e-4):
                raise WeightsError(
                    f"{tensor.file}: tensor {tensor.name:.200} differs from the weight of the model; adapters that bring base weights "
                    "of their own are not implemented"
                )


def own_name(modules: AdaptedModules, body: str, module: str) -> str:
    """Return the name in the model's checkpoint of a module of an adapter, which may have been trained without the head."""
    return module if module in modules.places or module in modules.refused else body + module


def kinds_of(modules: AdaptedModules, body: str, adapters: Sequence[PeftAdapter]) -> list[AdaptedKind]:
    """Return the kinds of modules, other than linear layers, of which ``adapters`` have matrices."""
    names = {own_name(modules, body, module) for adapter in adapters for module in adapter.modules}
    found: set[AdaptedKind] = {kind for name in names if (kind := modules.kinds.get(name)) is not None}
    if any(adapter.stacked for adapter in adapters):
        found.add("experts")
    return [*found - {"linear"}]


def _by_ending(modules: Iterable[str]) -> dict[str, str]:
    """Return the first of ``modules`` for each name with which some of them end: the whole name, and what follows each dot."""
    found: dict[str, str] = {}
    for module in modules:
        ending, dot = module, "."
        while dot:
            found.setdefault(ending, module)
            _, dot, ending = ending.partition(".")
    return found


def _refusal(module: str, tensor: StoredTensor, why: str) -> WeightsError:
    return WeightsError(f"{tensor.file} has tensor {tensor.name:.200}, an adapter of {module:.200}, {why}")


def _stack_places(stack: ExpertStack, side: Side) -> list[Place]:
    """Return the places of the matrices of one expert."""
    if side.field == 1:
        return [Place(stack.down, 0, 0, stack.layer.shape.hidden_size, stack.share)]
    places: list[Place] = []
    for part, rows in enumerate(stack.parts):
        places.append(Place(stack.up, part, part * len(rows), len(rows), rows=rows))
    return places


def _pinned(elements: torch.Tensor) -> list[torch.Tensor]:
    """Return a copy of ``elements`` in pinned memory, in pieces of ``PIECE_BYTES``."""
    parts = elements.split(PIECE_BYTES // elements.itemsize)
    return [torch.empty_like(part, pin_memory=True).copy_(part) for part in parts]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory of a tensor that no step writes, without waiting for the steps that run."""
    if not tensor.is_cuda:
        return tensor
    with torch.cuda.stream(_copy_stream(tensor.device)):
        return tensor.cpu()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that no engine uses: torch gives the same 32 streams of a priority out in turns, and what is copied on the
    stream of an engine would wait for its steps, or become part of a graph that is captured."""
    return torch.cuda.Stream(device, priority=-1)


def _read_tensor(opened: BinaryIO, stored: StoredTensor, note: Note) -> torch.Tensor:
    """Read a tensor. The file is not mapped to memory: the process would end if it became shorter meanwhile."""
    data = bytearray(stored.nbytes)
    opened.seek(stored.offset)
    for start in range(0, stored.nbytes, PIECE_BYTES):
        note(stored.file)
        piece = memoryview(data)[start : start + PIECE_BYTES]
        if opened.readinto(piece) != len(piece):  # pyright: ignore[reportAttributeAccessIssue]
            raise WeightsError(
                f"{stored.file} ends before the end of tensor {stored.name:.200}; it changed while it was read"
            )
    assert isinstance(stored.dtype, torch.dtype)
    return torch.frombuffer(data, dtype=stored.dtype).view(stored.shape)


def _check_finite(placed: _Placed, a: torch.Tensor, b: torch.Tensor) -> None:
    for tensor, stored in ((a, placed.a), (b, placed.b)):
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsError(
                f"{stored.file}: tensor {stored.name:.200} has numbers that are not finite, or not in {tensor.dtype} once they are "
                "multiplied by the scale of the adapter"
            )
