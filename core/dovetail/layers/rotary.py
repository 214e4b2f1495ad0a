"""Rotate the queries and keys of a step. Cosines and sines are looked up once per step and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import nn

from dovetail.interfaces.attention import ProjectedRows
from dovetail.layers.base import Layer
from dovetail.layers.rope import RopeConfig
from dovetail.ops.latent import rotate_and_store_latents
from dovetail.ops.rotary import apply_rotary, rotate_and_store, rotate_and_store_scaled

if TYPE_CHECKING:
    from dovetail.layers.norm import HeadNorm, RMSNorm
    from dovetail.types import StoresKV


class HeadCounts(NamedTuple):
    """Hold the number of query heads and the number of key heads. There are as many value heads as key heads."""

    queries: int
    keys: int


class KVPlace(NamedTuple):
    """Describe where the keys and values of a step are written: locations ``out_loc`` of layer ``layer_id`` of a
    pool."""

    pool: StoresKV
    layer_id: int
    out_loc: torch.Tensor


class Latents(NamedTuple):
    """Hold what latent attention stores of a step's tokens: ``x [tokens, rank + rope]``, of which the first ``rank``
    numbers are to be normalised with ``norm`` and the others to be rotated. With ``interleaved``, the elements 2i and 2i + 1
    of these, and of queries, are a pair, otherwise i and i + rope / 2; after the rotation, always i and i + rope / 2."""

    x: torch.Tensor
    norm: RMSNorm
    interleaved: bool


class Rotation(Protocol):
    """Hold the positions of a step's tokens, and compute what each layer computes between the projection and
    attention."""

    def rotate_and_store(
        self, qkv: torch.Tensor, counts: HeadCounts, norm: HeadNorm | None, place: KVPlace
    ) -> torch.Tensor:
        """Normalise (if ``norm`` is given) and rotate the queries and keys of ``qkv [tokens, heads of q, k and v,
        head_dim]``, and write keys and values to the pool. Return the queries ``[tokens, heads, head_dim]``."""
        ...

    def projected(self, qkv: torch.Tensor, norm: HeadNorm | None, place: KVPlace) -> ProjectedRows | None:
        """Return what an attention backend needs to do for one token of each row what ``rotate_and_store`` does, or None if it depends on
        more."""
        ...

    def rotate_and_store_latents(self, q: torch.Tensor, out: torch.Tensor, latents: Latents, place: KVPlace) -> None:
        """Rotate ``q [tokens, heads, rope]``, the rotated elements of the queries of latent attention, into ``out``, of
        the same shape. Normalise and rotate ``latents``, and write them to the pool. Does not change ``q``; both may be
        views with any strides except in the last dimension."""
        ...


class GatheredRotation(NamedTuple):
    """Hold cosines and signed sines of a step's tokens, ``[tokens, 1, head_dim]``; see ``ops.rotary.apply_rotary``."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate_and_store(
        self, qkv: torch.Tensor, counts: HeadCounts, norm: HeadNorm | None, place: KVPlace
    ) -> torch.Tensor:
        """See ``Rotation.rotate_and_store``."""
        heads, kv_heads = counts
        qk, v = torch.split_with_sizes(qkv, (heads + kv_heads, kv_heads), 1)
        if norm is not None:
            qk = norm.forward(qk)
        q, k = torch.split_with_sizes(apply_rotary(qk, self.cos, self.sin), (heads, kv_heads), 1)
        pool, layer_id, out_loc = place
        pool.store(layer_id, k, v, out_loc)
        return q

    def projected(self, qkv: torch.Tensor, norm: HeadNorm | None, place: KVPlace) -> ProjectedRows | None:
        """See ``Rotation.projected``."""
        return None

    def rotate_and_store_latents(self, q: torch.Tensor, out: torch.Tensor, latents: Latents, place: KVPlace) -> None:
        """See ``Rotation.rotate_and_store_latents``."""
        rank = latents.x.shape[1] - q.shape[2]
        key = apply_rotary(_pairs_apart(latents.x[:, None, rank:], latents), self.cos, self.sin)
        _store_latents(latents, key, place)
        out.copy_(apply_rotary(_pairs_apart(q, latents), self.cos, self.sin))


class TableRotation(NamedTuple):
    """Hold the positions of a step's tokens and the table of all cosines and sines. Used on CUDA, where one kernel does
    the lookup and the other operations."""

    table: torch.Tensor
    positions: torch.Tensor

    def rotate_and_store(
        self, qkv: torch.Tensor, counts: HeadCounts, norm: HeadNorm | None, place: KVPlace
    ) -> torch.Tensor:
        """See ``Rotation.rotate_and_store``."""
        pool, layer_id, out_loc = place
        weights = None if norm is None else norm.operands
        keys, values, scales = pool.tensors(layer_id)
        if scales is not None:
            return rotate_and_store_scaled(
                qkv, *counts, self.table, self.positions, weights, keys, values, scales, out_loc
            )
        return rotate_and_store(qkv, *counts, self.table, self.positions, weights, keys, values, out_loc)

    def projected(self, qkv: torch.Tensor, norm: HeadNorm | None, place: KVPlace) -> ProjectedRows | None:
        """See ``Rotation.projected``."""
        if place.pool.tensors(place.layer_id).scales is not None:
            return None
        weights = None if norm is None else norm.operands
        return ProjectedRows(qkv, self.table, self.positions, weights, place.out_loc)

    def rotate_and_store_latents(self, q: torch.Tensor, out: torch.Tensor, latents: Latents, place: KVPlace) -> None:
        """See ``Rotation.rotate_and_store_latents``."""
        norm, (pool, layer_id, out_loc) = latents.norm, place
        keys, _, scales = pool.tensors(layer_id)
        rotate_and_store_latents(
            q,
            out,
            latents.x,
            (norm.weight, norm.eps),
            self.table,
            self.positions,
            keys,
            out_loc,
            scales=None if scales is None else scales.keys,
            interleaved=latents.interleaved,
        )


class NoRotation:
    """Leave queries and keys as they are: for models with learned positions, and for layers without positions."""

    def rotate_and_store(
        self, qkv: torch.Tensor, counts: HeadCounts, norm: HeadNorm | None, place: KVPlace
    ) -> torch.Tensor:
        """See ``Rotation.rotate_and_store``."""
        heads, kv_heads = counts
        qk, v = torch.split_with_sizes(qkv, (heads + kv_heads, kv_heads), 1)
        if norm is not None:
            qk = norm.forward(qk)
        q, k = torch.split_with_sizes(qk, (heads, kv_heads), 1)
        pool, layer_id, out_loc = place
        pool.store(layer_id, k, v, out_loc)
        return q.contiguous() if q.is_cuda else q  # as the kernel of the other rotations returns them

    def projected(self, qkv: torch.Tensor, norm: HeadNorm | None, place: KVPlace) -> ProjectedRows | None:
        """See ``Rotation.projected``."""
        return None

    def rotate_and_store_latents(self, q: torch.Tensor, out: torch.Tensor, latents: Latents, place: KVPlace) -> None:
        """See ``Rotation.rotate_and_store_latents``."""
        rank = latents.x.shape[1] - q.shape[2]
        _store_latents(latents, _pairs_apart(latents.x[:, None, rank:], latents), place)
        out.copy_(_pairs_apart(q, latents))


class LayerRotation(NamedTuple):
    """Hold the rotation of each layer, for models whose layers differ in it. In models with one cache group it is also
    the ``Rotation`` of all layers, by ``KVPlace.layer_id``; with several, the model gives each layer its own."""

    layers: tuple[Rotation, ...]

    def rotate_and_store(
        self, qkv: torch.Tensor, counts: HeadCounts, norm: HeadNorm | None, place: KVPlace
    ) -> torch.Tensor:
        """See ``Rotation.rotate_and_store``."""
        return self.layers[place.layer_id].rotate_and_store(qkv, counts, norm, place)

    def projected(self, qkv: torch.Tensor, norm: HeadNorm | None, place: KVPlace) -> ProjectedRows | None:
        """See ``Rotation.projected``."""
        return self.layers[place.layer_id].projected(qkv, norm, place)

    def rotate_and_store_latents(self, q: torch.Tensor, out: torch.Tensor, latents: Latents, place: KVPlace) -> None:
        """See ``Rotation.rotate_and_store_latents``."""
        self.layers[place.layer_id].rotate_and_store_latents(q, out, latents, place)


def _pairs_apart(x: torch.Tensor, latents: Latents) -> torch.Tensor:
    """Return contiguous ``x [tokens, heads, rope]`` with the first elements of all pairs before the second ones."""
    return x.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2) if latents.interleaved else x.contiguous()


def _store_latents(latents: Latents, key: torch.Tensor, place: KVPlace) -> None:
    """Write normalised latents and the rotated ``key [tokens, 1, rope]`` to the pool."""
    normed = latents.norm.forward(latents.x[:, : latents.x.shape[1] - key.shape[2]])
    place.pool.store(place.layer_id, torch.cat((normed[:, None], key), 2), None, place.out_loc)


class Rotary(Layer):
    """Hold the table of all positions. A model has one; its layers get the rotation of a step as an argument."""

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self._dtype = torch.get_default_dtype()
        self.register_buffer("table", rotary_table(rope, torch.get_default_device()), persistent=False)
        self._table: torch.Tensor

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        self._table = self.get_buffer("table")
        super().prepare()

    def forward(self, positions: torch.Tensor) -> GatheredRotation | TableRotation:
        """Return the rotation of int64 ``positions [tokens]``: on CUDA the float32 table and the positions, elsewhere
        cosines and sines in the model's dtype."""
        if not self.prepared:
            self.prepare()
        if positions.is_cuda:
            return TableRotation(self._table, positions)
        rows = self._table.index_select(0, positions)
        if self._dtype is not torch.float32:
            rows = rows.to(self._dtype)
        cos, sin = rows.split(1, 1)
        return GatheredRotation(cos, sin)


class LayerRotary(Layer):
    """Hold a ``Rotary`` for each of the different settings in ``ropes``, which has one entry for each layer: None for a
    layer without rotary positions. Used in place of ``Rotary`` by models whose layers differ in it, and by models
    without rotary positions."""

    def __init__(self, ropes: Sequence[RopeConfig | None]) -> None:
        super().__init__()
        different = dict.fromkeys(ropes)
        self.kinds = nn.ModuleList(Rotary(rope) for rope in different if rope is not None)
        order = {rope: index for index, rope in enumerate(rope for rope in different if rope is not None)}
        self._index = tuple(-1 if rope is None else order[rope] for rope in ropes)
        self._kinds: tuple[Rotary, ...] = tuple(self.kinds)  # pyright: ignore[reportAttributeAccessIssue]
        self._none = NoRotation()

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of int64 ``positions [tokens]`` for all layers."""
        if not self._kinds:
            return self._none
        found = (*(rotary.forward(positions) for rotary in self._kinds), self._none)
        return LayerRotation(tuple([found[index] for index in self._index]))


def rotary_table(rope: RopeConfig, device: torch.device) -> torch.Tensor:
    """Return float32 ``[context_len, 2, head_dim]``: cosines ``[c, c]`` and signed sines ``[-s, s]`` of every
    position. Pairs that are not rotated are the last of each half, with cosine 1 and sine 0; the weights of queries and
    keys are in that order (``layers.transforms.SplitHalves``)."""
    frequencies = torch.from_numpy(rope.inverse_frequencies()).to(device)
    positions = torch.arange(rope.context_len, device=device, dtype=torch.float32)
    angles = positions[:, None] * frequencies
    table = torch.zeros(rope.context_len, 2, 2, rope.head_dim // 2, device=device, dtype=torch.float32)
    table[:, 0] = 1.0
    rotated = rope.rotary_dim // 2
    table[:, 0, :, :rotated] = (angles.cos() * rope.scale)[:, None]
    table[:, 1, 1, :rotated] = angles.sin() * rope.scale
    table[:, 1, 0] = -table[:, 1, 1]
    return table.flatten(2)
