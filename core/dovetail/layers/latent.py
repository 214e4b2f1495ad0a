"""Compute multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) over pools of latents.

A token's keys and values of all heads are linear functions of one latent of ``kv_lora_rank`` numbers, and of one rotated
key that all heads share. The pool stores these two only. Attention is *absorbed*: instead of expanding every latent to
keys and values, a query is multiplied with its head's part of the expansion, so that the latents themselves are keys and
values. With the parts ``w_uk`` and ``w_uv`` of ``kv_b`` (u: latents)

    q . (w_uk u) = (w_uk^T q) . u        sum_i p_i (w_uv u_i) = w_uv (sum_i p_i u_i)

In long prompts it takes fewer operations to expand the latents of a row once, for all of its queries. The engine chooses
these steps and sets ``Batch.expanded`` (``engine.expansion``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dovetail.layers.base import Layer
from dovetail.layers.linear import ColumnLinear, row_linear
from dovetail.layers.norm import RMSNorm
from dovetail.layers.rotary import KVPlace, Latents
from dovetail.ops.kv_dtypes import raw

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionLayer
    from dovetail.interfaces.expanded import ExpandedAttention
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import WeightTarget
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Describe the sizes and variants of a whole layer of latent attention, with the names of config.json.

    Without ``q_lora_rank``, queries are one product of the input. ``bias`` adds biases to the products of the input and
    to the last one. With ``interleaved``, the checkpoint rotates the pairs (0, 1), (2, 3) and so on of the rotated
    elements, otherwise the pairs (i, i + qk_rope_head_dim / 2).
    """

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float
    bias: bool = False
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.bias and self.q_lora_rank is None:
            raise ValueError("bias is True and q_lora_rank is None; implemented: biases with q_lora_rank")

    @property
    def head_dim(self) -> int:
        """Return the size of an expanded query or key, from which the scale of attention follows."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Return the size of what the pool stores for a token: ``head_dim`` of the cache group, whose ``value_dim`` is
        ``kv_lora_rank``."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedRows:
    """Divide a batch with prompts: the prompts attend over the keys and values that the latents of their rows are expanded
    to, the other rows over latents. Both parts are planned.

    ``prompts`` are the extend rows, which have the first ``num_tokens`` tokens and attend through ``attends``.
    ``locations`` (int64 ``[keys]``) are the pool's locations of all tokens of each of these rows, one row after the other.
    ``rest`` are the other rows, which attend through ``rest.attn``; None if there are none.
    """

    prompts: Batch
    attends: ExpandedAttention
    num_tokens: int
    locations: torch.Tensor
    rest: Batch | None


class LatentAttention(Layer):
    """Project the input to queries and latents, store the latents in the pool, attend over them, and project back.

    Its parameters are ``qkv_a`` (the products of the input: queries or what ``q_b`` makes queries of, and latents with the
    rotated key), ``q_norm`` and ``q_b`` with ``q_lora_rank``, ``kv_norm``, ``kv_b`` and ``out``. Every rank computes its
    share of the heads, and all latents. ``group`` is the cache group that contains the layer, ``constants.layer_id`` its
    index in the group's pool. Rotation and pool are those of ``qk_rope_head_dim`` and ``latent_dim`` numbers. With
    ``divides_rows``, it computes the tokens of ``Batch.own`` only.
    """

    def __init__(self, shape: LatentShape, constants: AttentionLayer, mesh: Mesh, group: int = 0) -> None:
        super().__init__()
        self.divides_rows, mesh = mesh.attention == "data", mesh.of_attention
        self.shape, self.constants, self.group = shape, constants, group
        self.num_heads = mesh.tp.share(shape.num_heads)[1]
        whole, queries = shape.num_heads, shape.num_heads * shape.head_dim
        first = {"q": queries} if shape.q_lora_rank is None else {"q_a": shape.q_lora_rank}
        parts, unit = {**first, "kv_a": shape.latent_dim}, shape.head_dim
        undivided = ("q_a", "kv_a")
        self.qkv_a = ColumnLinear(shape.hidden_size, parts, mesh, bias=shape.bias, unit=unit, whole=undivided)
        self.qkv_a.reads_selected = self.divides_rows
        self.q_norm = self.q_b = None
        if shape.q_lora_rank is not None:
            self.q_norm = RMSNorm(shape.q_lora_rank, shape.norm_eps)
            self.q_b = ColumnLinear(shape.q_lora_rank, {"q": queries}, mesh, unit=unit)
        self.kv_norm = RMSNorm(shape.kv_lora_rank, shape.norm_eps)
        expanded = shape.qk_nope_head_dim + shape.v_head_dim
        self.kv_b = ColumnLinear(shape.kv_lora_rank, {"kv": whole * expanded}, mesh, unit=expanded)
        self.kv_b.adaptable = False  # its weight is absorbed
        self.out = row_linear(whole * shape.v_head_dim, shape.hidden_size, mesh, bias=shape.bias)
        own = self.num_heads * shape.head_dim if shape.q_lora_rank is None else shape.q_lora_rank
        self._widths = (own, shape.latent_dim)
        self._w_uk: torch.Tensor
        self._w_uv: torch.Tensor

    def prepare(self) -> None:
        """See ``Layer.prepare``. Raises ``ConfigError`` if ``kv_b`` is stored in a form that cannot be absorbed."""
        shape = self.shape
        weight = self.kv_b.dense_weight().unflatten(0, (self.num_heads, -1))  # [heads, keys and values, latent]
        keys, values = weight.split((shape.qk_nope_head_dim, shape.v_head_dim), 1)
        self._w_uk, self._w_uv = keys, values.transpose(1, 2)
        super().prepare()

    def set_place(self, group: int, layer_id: int) -> None:
        """Set the cache group that contains the layer, and the layer's index in the group's pool."""
        self.group, self.constants = group, replace(self.constants, layer_id=layer_id)

    def forward(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> torch.Tensor:
        """Map ``x [tokens, hidden_size]`` to the same shape. Writes the latents of the step to the pool. With ``last``,
        only the tokens ``batch.logit_rows`` attend, as the rows of ``last``, and the result is ``[rows of last,
        hidden_size]``. With ``batch.own``, which excludes ``last``, this rank attends in its own rows only."""
        if batch.own is not None:
            return batch.own.sum_over_ranks(self, x, rotation)
        return self.out.forward(self.attend(x, rotation, batch, last))

    def parts_forward(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> Addend:
        """Compute ``forward``, but leave it to ``RMSNorm.add_forward`` to add up parts (see
        ``Linear.parts_forward``)."""
        if batch.own is not None:
            return batch.own.addend(self, x, rotation)
        return self.out.parts_forward(self.attend(x, rotation, batch, last))

    def attend(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> torch.Tensor:
        """Return the attended values, which are the input of the output projection."""
        if not self.prepared:
            self.prepare()
        constants, group, shape = self.constants, self.group, self.shape
        queries, latents = self.qkv_a.forward(x).split(self._widths, 1)
        q, plain = self._queries(queries), shape.qk_nope_head_dim
        expanded = batch.expanded if last is None else None
        width = shape.latent_dim if expanded is None else shape.head_dim
        made = q.new_empty(len(q), self.num_heads, width)  # the last part of each head is the rotated part of a query
        rotation.rotate_and_store_latents(
            q[..., plain:],
            made[..., -shape.qk_rope_head_dim :],
            Latents(latents, self.kv_norm, shape.interleaved),
            KVPlace(batch.kv[group], constants.layer_id, batch.view(group).out_loc),
        )
        if expanded is not None:
            return self._attend_expanded(q[..., :plain], made, batch, expanded)
        if last is not None:
            rows, batch = batch.logit_rows, last
            assert rows is not None
            q, made = q.index_select(0, rows), made.index_select(0, rows)
        return self._attend_absorbed(q[..., :plain], made, batch)

    def _attend_absorbed(self, plain: torch.Tensor, absorbed: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Attend over latents. ``plain [tokens, heads, qk_nope_head_dim]`` are the parts of queries that are not rotated.
        ``absorbed [tokens, heads, latent_dim]`` has the rotated parts at the end of each head, and its other numbers are
        overwritten."""
        if not len(plain):
            return plain.new_empty(0, self.num_heads * self.shape.v_head_dim)
        rank = self.shape.kv_lora_rank
        torch.bmm(plain.transpose(0, 1), self._w_uk, out=absorbed[..., :rank].transpose(0, 1))
        attended = batch.attn[self.group].forward(absorbed, self.constants, batch.view(self.group))
        return torch.bmm(attended.transpose(0, 1), self._w_uv).transpose(0, 1).flatten(1)

    def _attend_expanded(
        self, plain: torch.Tensor, queries: torch.Tensor, batch: Batch, rows: ExpandedRows
    ) -> torch.Tensor:
        """Attend in prompts over the keys and values that the latents of their rows are expanded to, in other rows over
        latents. ``plain [tokens, heads, qk_nope_head_dim]`` are the parts of queries that are not rotated. ``queries [tokens, heads,
        head_dim]`` has the rotated parts at the end of each head, and its other numbers are overwritten."""
        shape, count = self.shape, rows.num_tokens
        queries[:count, :, : shape.qk_nope_head_dim] = plain[:count]
        k, v = self._expand(batch, rows.locations, plain.dtype)
        attended = rows.attends.forward_expanded(queries[:count], k, v, self.constants, rows.prompts).flatten(1)
        if rows.rest is None:
            return attended
        absorbed = plain.new_empty(len(plain) - count, self.num_heads, shape.latent_dim)
        absorbed[..., shape.kv_lora_rank :] = queries[count:, :, shape.qk_nope_head_dim :]
        return torch.cat((attended, self._attend_absorbed(plain[count:], absorbed, rows.rest)))

    def _expand(self, batch: Batch, locations: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values, ``[keys, heads, ...]``, of the latents at ``locations``. They are views of one tensor, to
        which the products write. Only the rotated part of a key, which all heads share, is copied."""
        shape = self.shape
        memory, _, scales = batch.kv[self.group].tensors(self.constants.layer_id)
        latents = raw(memory).flatten(0, 2).index_select(0, locations).view(memory.dtype)
        if scales is not None:
            latents = latents.float() * scales.keys.flatten().index_select(0, locations).float()[:, None]
        latents = latents.to(dtype)
        latent, key = latents.split((shape.kv_lora_rank, shape.qk_rope_head_dim), 1)
        made = latents.new_empty(len(latents), self.num_heads, shape.v_head_dim + shape.head_dim)
        v, plain, rotated = made.split((shape.v_head_dim, shape.qk_nope_head_dim, shape.qk_rope_head_dim), 2)
        each = latent.expand(self.num_heads, -1, -1)
        torch.bmm(each, self._w_uv, out=v.transpose(0, 1))
        torch.bmm(each, self._w_uk.transpose(1, 2), out=plain.transpose(0, 1))
        rotated.copy_(key[:, None].expand_as(rotated))
        return made[..., shape.v_head_dim :], v

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """Return the queries ``[tokens, heads, head_dim]``, before they are rotated."""
        if self.q_b is not None:
            assert self.q_norm is not None
            x = self.q_b.forward(self.q_norm.forward(x))
        return x.view(x.shape[0], self.num_heads, self.shape.head_dim)


def latent_targets(
    attn: LatentAttention, checkpoint_prefix: str, parameter_prefix: str
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the targets of the tensors of ``attn``. Names in the checkpoint begin with ``checkpoint_prefix``, parameters
    of the model with ``parameter_prefix``."""
    products = [("kv_a_proj_with_mqa", attn.qkv_a, "qkv_a", "kv_a"), ("kv_b_proj", attn.kv_b, "kv_b", "kv")]
    if attn.q_b is None:
        products.append(("q_proj", attn.qkv_a, "qkv_a", "q"))
    else:
        assert attn.q_norm is not None
        products += [("q_a_proj", attn.qkv_a, "qkv_a", "q_a"), ("q_b_proj", attn.q_b, "q_b", "q")]
        yield from attn.q_norm.targets(f"{checkpoint_prefix}.q_a_layernorm", f"{parameter_prefix}.q_norm")
    yield from attn.kv_norm.targets(f"{checkpoint_prefix}.kv_a_layernorm", f"{parameter_prefix}.kv_norm")
    for theirs, layer, ours, part in (*products, ("o_proj", attn.out, "out", None)):
        yield f"{checkpoint_prefix}.{theirs}.weight", layer.target(f"{parameter_prefix}.{ours}.weight", part)
        if layer.bias is not None:
            yield f"{checkpoint_prefix}.{theirs}.bias", layer.target(f"{parameter_prefix}.{ours}.bias", part)
