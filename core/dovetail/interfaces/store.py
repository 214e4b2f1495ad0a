"""Define KV stores: the memory in which layers keep the keys and values, or the latents, of earlier tokens.

A ``KVStore`` owns the memory of one cache group, in pages, and knows its layout, its dtype and its scales. Everything else
handles pages by their numbers: the scheduler, the prefix cache, and whatever moves pages to another memory. A
``KVStoreFactory`` is the component that config selects; it makes the stores of all groups, those of states
(``StateStore``) too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from pydantic import BaseModel

    from dovetail.interfaces.cache import CacheGroup
    from dovetail.interfaces.executor import ArenaLayout

SLOT_ALIGNMENT = 16
"""Slots begin at multiples of this number of bytes, which is the size of the words in which they are copied."""


class KVScales(NamedTuple):
    """Hold what the numbers of a layer in a store are multiplied by: one scale for each key and each value of a token and
    a head. Both are ``[num_pages, page_size, num_kv_heads]``, float32 or bfloat16. Where scales are equal, the tensor is
    an expanded one with strides of 0, so that a reader that uses strides serves scales of every kind."""

    keys: torch.Tensor
    values: torch.Tensor


class KVTensors(NamedTuple):
    """Hold the tensors of one layer in a store, for kernels that write or read them. For ``keys`` and ``values`` see
    ``KVStore``. ``scales`` is None in a store without scales."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: KVScales | None = None


class PageBytes(NamedTuple):
    """Hold the bytes of a page of a group. ``page`` counts everything. ``block`` are those of the keys, or of the values, of
    one layer; all blocks of a group have the same size. For a state group ``page`` are the bytes of a slot, and ``block`` is
    0: the slots of a slab fill it. ``beside`` is the part of ``page`` that is in no block, such as
    scales."""

    page: int
    block: int
    beside: int = 0


class PageLayout(msgspec.Struct, frozen=True):
    """Describe the bytes of an exported page. Two stores exchange pages if their layouts are equal.

    ``store`` names the code that wrote the page, and ``version`` its layout. ``parts`` has the dtype and the shape of each
    tensor of a page, in their order. ``scales`` is a checksum of scales that belong to the store and not to its pages.
    """

    store: str
    version: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    scales: int = 0


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Describe what stores are made for: the layers of one rank on one device. ``dtype`` is that of ``memory.kv_dtype``.
    ``checkpoint`` is the ``quantization_config`` of the model's config.json, which may declare scales. ``model_dtype`` is that
    of states that name no other."""

    page_size: int
    dtype: torch.dtype
    device: torch.device
    checkpoint: Mapping[str, Any] | None = None
    model_dtype: torch.dtype | None = None

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of states that name no other. Raises ``ValueError`` if ``model_dtype`` is None."""
        if self.model_dtype is None:
            raise ValueError("StoreContext.model_dtype is None; stores that keep states need the dtype of the model")
        return self.model_dtype


class KVStore(ABC):
    """Own the memory of one cache group, in pages. Page 0 belongs to no request: padding rows may write there.

    ``keys(layer)`` and ``values(layer)`` are ``[num_pages, page_size, num_kv_heads, head_dim]``. Without scales they hold
    what was stored, converted to their dtype and otherwise unchanged. With scales (``tensors(layer).scales``) a number that
    was stored is the number in the tensor times its scale; only attention backends that offer ``attention.scales`` get
    such a store. Both tensors are contiguous, except that the values of a latent group are a view of the first
    ``value_dim`` numbers of its keys. On CUDA, a kernel that has rotated keys in registers writes them into ``tensors``
    directly instead of calling ``store``, with scales as ``ops.kv_scales`` describes.
    """

    group: CacheGroup
    num_pages: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def keys(self, layer_id: int) -> torch.Tensor:
        """Return the keys of a layer, ``[num_pages, page_size, num_kv_heads, head_dim]``: the store's own tensor, not a
        copy."""

    @abstractmethod
    def values(self, layer_id: int) -> torch.Tensor:
        """Return the values of a layer, ``[num_pages, page_size, num_kv_heads, head_dim]``: the store's own tensor, not
        a copy. In a latent group the last dimension is ``value_dim``."""

    @abstractmethod
    def tensors(self, layer_id: int) -> KVTensors:
        """Return the keys, values and scales of a layer. The tensors keep their addresses."""

    @abstractmethod
    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None:
        """Write ``k`` and ``v`` (``[tokens, num_kv_heads, head_dim]`` each) to the locations ``out_loc [tokens]``. A
        location is page * page_size + offset. Called by the attention layers of the model in every forward pass.
        ``v`` is None for a latent group only, where the values are a part of ``k``. Mutates the store.
        """

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what is stored of every layer, with its scales, from the locations ``source [n]`` to ``target [n]``, as if
        all were read before any is written. The engine calls this to move the accepted nodes of a draft tree to
        consecutive locations. Mutates the store.
        """

    @property
    @abstractmethod
    def layout(self) -> PageLayout:
        """Return the layout of the pages that ``export_pages`` returns."""

    @abstractmethod
    def export_pages(self, pages: Sequence[int]) -> bytes:
        """Return the content of ``pages`` as bytes, with their layout and a checksum. Waits for the device."""

    @abstractmethod
    def import_pages(self, data: bytes, pages: Sequence[int]) -> None:
        """Write what ``export_pages`` returned to ``pages``, in the same order: attention over them gives the same numbers
        then. Raises ``PageFormatError``, and writes nothing, if ``data`` is no export, is truncated, was changed, or has
        another layout or another number of pages. Mutates the store."""

    @abstractmethod
    def clear(self) -> None:
        """Fill all pages with zeros."""

    @abstractmethod
    def poison(self, pages: Sequence[int] | None = None) -> None:
        """Fill ``pages``, by default all, with NaN, scales included: what is read before it was written is then seen in
        the results. For tests."""

    def load_scales(self, layer_id: int, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        """Take the scales of a layer from the checkpoint, float32 ``[]`` or ``[num_kv_heads]``. Called before anything is
        stored, in stores for which ``KVStoreFactory.reads_scales``. Mutates the store."""
        raise NotImplementedError(f"{type(self).__name__} reads no scales")


class StateStore(ABC):
    """Own the states of a state group, in slots. ``KVStoreFactory.make_states`` makes it.

    A slot has the states of all layers for one running request, or for one snapshot. The scheduler decides what each slot
    holds; a snapshot is taken, and restored, by a copy between slots. Slot 0 belongs to padding rows: no operation writes to
    it.

    ``memory[layer][index]`` is the state ``group.states[index]`` of a layer, ``[num_slots, *shape]``, in the dtype that the
    shape names, or else in that of the model. Layers and mixer backends read and write these tensors directly in each step,
    and graphs keep their addresses, so they are made once. All dimensions but the first are contiguous. No two of them share
    a byte.
    """

    group: CacheGroup
    num_slots: int
    device: torch.device
    memory: tuple[tuple[torch.Tensor, ...], ...]

    @abstractmethod
    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the states of all layers, bit for bit, from the slots ``source [n]`` to ``target [n]`` (int64, on the device),
        as if all were read before any is written. The host does not wait for the device. The engine calls this to take and to
        restore snapshots. Mutates the store."""

    @property
    @abstractmethod
    def layout(self) -> PageLayout:
        """Return the layout of the slots that ``export_slots`` returns, which does not depend on the distance of slots."""

    @abstractmethod
    def export_slots(self, slots: Sequence[int]) -> bytes:
        """Return the states in ``slots`` as bytes, with their layout and a checksum. Waits for the device."""

    @abstractmethod
    def import_slots(self, data: bytes, slots: Sequence[int]) -> None:
        """Write what ``export_slots`` returned to ``slots``, in the same order, bit for bit. Raises ``PageFormatError``, and
        writes nothing, if ``data`` is no export, is truncated, was changed, or has another layout or another number of
        slots. Mutates the store."""

    @abstractmethod
    def fill(self, value: float, slots: Sequence[int] | slice = slice(None)) -> None:
        """Set all numbers of ``slots`` to ``value``. Tests fill slots with NaN, so that a state that is read before it was
        written is seen in the results. Mutates the store."""


class SlabMemory(ABC):
    """Provide the memory that several cache groups share, in slabs (see ``memory.arena``)."""

    layout: ArenaLayout

    @property
    @abstractmethod
    def memory(self) -> torch.Tensor:
        """Return the memory, one-dimensional, in the dtype of keys and values."""

    @abstractmethod
    def beside(self, slab_bytes: int) -> torch.Tensor:
        """Return memory that belongs to the slabs, but is not in their blocks: uint8 ``[num_slabs * slab_bytes]``. Groups
        that need the same number of bytes for each slab share it, because a slab belongs to one group at a time."""


class KVStoreFactory(ABC):
    """Make the stores of the cache groups of a model."""

    def __init__(self, config: BaseModel, context: StoreContext) -> None:
        """Build the factory. ``config`` is its own config section. Allocates no memory of pages."""

    @abstractmethod
    def page_bytes(self, group: CacheGroup, page_size: int) -> PageBytes:
        """Return the bytes of one page of ``page_size`` tokens, of all layers of ``group`` together."""

    @abstractmethod
    def make(self, group: CacheGroup, num_pages: int) -> KVStore:
        """Allocate and return a store of ``num_pages`` pages. Page 0 is initialised with zeros, on CUDA all pages. The
        engine calls this only for kinds of groups that the component offers, such as ``store.full``."""

    def make_shared(self, group: CacheGroup, index: int, slabs: SlabMemory) -> KVStore:
        """Return a store in memory that several groups share, for the group with the number ``index`` in ``slabs.layout``.
        Needs ``store.slabs``; the engine gives components without it a memory of their own for each group."""
        raise NotImplementedError(f"{type(self).__name__} does not offer store.slabs")

    def slot_bytes(self, group: CacheGroup) -> int:
        """Return the bytes of a slot of a state group: the states of all layers for one request, or one snapshot of them. It
        is a multiple of ``SLOT_ALIGNMENT``. Needs ``store.state``."""
        raise NotImplementedError(f"{type(self).__name__} does not offer store.state")

    def make_states(self, group: CacheGroup, memory: torch.Tensor) -> StateStore:
        """Return the store of a state group, whose slots are the rows of ``memory``, uint8 ``[num_slots, stride]``, of which
        ``stride`` is at least ``slot_bytes``. The engine allocates it, because states and pages share the memory of all
        groups. Needs ``store.state``."""
        raise NotImplementedError(f"{type(self).__name__} does not offer store.state")

    @property
    def reads_scales(self) -> bool:
        """Return True if the stores need scales of keys and values from the checkpoint: ``KVStore.load_scales``."""
        return False

    def describe(self) -> Mapping[str, str]:
        """Return what ``dovetail explain`` and /server_info show of the stores, such as their scales."""
        return {}
