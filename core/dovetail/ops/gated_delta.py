"""Compute the gated delta rule (Yang et al. 2024, arXiv 2412.06464), a recurrence whose state is a matrix for each head.

With the decay ``d = exp(-rate * softplus(a + bias))`` and the strength ``beta = sigmoid(b)`` of a token, its query, key
and value change the state S and read it:

    S = d * S;  S = S + beta * k (v - k S);  out = q S / sqrt(key_dim)

Queries and keys are normalised to length 1. The decay is one number for each head, or one for each of its key channels
(Kimi delta attention, arXiv 2510.26692). Everything is computed in float32.

Prompts are computed in chunks: within a chunk, the changes of all tokens solve one triangular system, and depend on the
state before the chunk by a product. The result is the same, rounding apart.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
from dovetail.interfaces.state_rows import StateRows
from dovetail.ops.state_rows import accepted_tokens

NORM_EPS = 1e-6


def gated_delta(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, rows: StateRows, shape: DeltaShape
) -> torch.Tensor:
    """Return the outputs ``[tokens, value_heads, value_dim]`` in the dtype of ``qkv``, and write the state of each row
    to its slot.

    ``qkv [tokens, shape.width]`` has the queries of all key heads, the keys, and the values of all value heads, and is
    contiguous except in the token dimension. ``state`` is float32 or bfloat16 ``[slots, *shape.state]``, contiguous except in the slot
    dimension. ``StateRows``
    describes with which state a row begins. Mutates ``state`` only.
    """
    parts = _parts(qkv, gates, shape)
    out = qkv.new_empty(len(qkv), shape.value_heads, shape.value_dim)
    states = rows.initial(state).float()
    counts = rows.first_chunks.diff()
    for index in range(int(counts.max()) if len(counts) else 0):
        live = (counts > index).nonzero().flatten()
        chunk = (rows.first_chunks[live] + index).long()
        size = min(rows.chunk, int((rows.indptr[live + 1] - rows.chunk_starts[chunk]).max()))
        tokens = rows.chunk_starts[chunk, None] + torch.arange(size, device=qkv.device)
        inside = tokens < rows.indptr[live + 1, None]
        padded = [_padded(part, tokens, inside) for part in parts]
        found, states[live] = _chunk(padded, states[live])
        rows.save(state, chunk, states[live])
        out[tokens[inside]] = found.transpose(1, 2)[inside].to(out.dtype)
    rows.store(state, states)
    return out


def gated_delta_step(
    qkv: torch.Tensor, gates: DeltaGates, state: torch.Tensor, slots: torch.Tensor, shape: DeltaShape
) -> torch.Tensor:
    """Compute ``gated_delta`` for rows of one token each, none of which is fresh: token r belongs to the state in slot
    ``slots[r]`` (int32 ``[tokens]``). For slot 0 see ``StateRows``."""
    q, k, v, log_decay, beta = _parts(qkv, gates, shape)
    old, real = state[slots.long()].float(), (slots != 0).view(-1, 1, 1, 1)
    kept = torch.where(real, old, 0) * log_decay.exp()[..., None]
    change = (v - (k[..., None, :] @ kept).squeeze(-2)) * beta
    kept += k[..., None] * change[..., None, :]
    state[slots.long()] = torch.where(real, kept, old).to(state.dtype)
    return (q[..., None, :] @ kept).squeeze(-2).to(qkv.dtype)


def gated_delta_advance(
    qkv: torch.Tensor,
    gates: DeltaGates,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    shape: DeltaShape,
) -> None:
    """Write to slot ``slots[r]`` the state after the tokens ``[starts[r], starts[r] + counts[r])``, which is that of
    ``gated_delta_step`` (all int32 ``[rows]``). No row is fresh, counts may be 0, and nothing is written to slot 0."""
    for tokens, live in accepted_tokens(slots, starts, counts):
        own = DeltaGates(gates.a[tokens], gates.b[tokens], gates.rate, gates.bias)
        gated_delta_step(qkv[tokens], own, state, live, shape)


def _parts(qkv: torch.Tensor, gates: DeltaGates, shape: DeltaShape) -> tuple[torch.Tensor, ...]:
    """Return queries (scaled), keys, values, logarithms of decays, and strengths, float32 ``[tokens, value_heads,
    ...]``; the last dimension of the last two may be 1."""
    keys = shape.key_heads * shape.key_dim
    q, k, v = qkv.float().split((keys, keys, shape.width - 2 * keys), 1)
    q, k = (_normed(x.unflatten(1, (shape.key_heads, shape.key_dim)), shape) for x in (q, k))
    a = gates.a if gates.by_channel else gates.a[..., None]
    bias = gates.bias if gates.by_channel else gates.bias[:, None]
    log_decay = -gates.rate[:, None] * functional.softplus(a.float() + bias)
    v = v.unflatten(1, (shape.value_heads, shape.value_dim))
    return q * shape.key_dim**-0.5, k, v, log_decay, gates.b.float().sigmoid()[..., None]


def _normed(x: torch.Tensor, shape: DeltaShape) -> torch.Tensor:
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x.repeat_interleave(shape.value_heads // shape.key_heads, 1)


def _padded(part: torch.Tensor, tokens: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Return ``part[tokens]`` with zeros outside of the rows, ``[rows, heads, size, ...]``. A strength of 0 changes
    nothing."""
    found = part[tokens.clamp(max=len(part) - 1).long()].masked_fill(~inside[..., None, None], 0)
    return found.transpose(1, 2)


def _chunk(parts: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of one chunk of each row, ``[rows, heads, size, value_dim]``, and the states after it."""
    q, k, v, log_decay, beta = parts
    total = log_decay.cumsum(2)  # the logarithm of the decay since the chunk began
    size = q.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(later[..., None], float("-inf")).exp()
    if between.shape[-1] == 1:
        keys, queries = (x @ k.transpose(2, 3) * between.squeeze(-1) for x in (k, q))
    else:
        keys, queries = (torch.einsum("bhid,bhjd,bhijd->bhij", x, k, between) for x in (k, q))
    decayed = k * total.exp()
    change = torch.linalg.solve_triangular(keys * beta, (v - decayed @ state) * beta, upper=False, unitriangular=True)
    out = (q * total.exp()) @ state + queries @ change
    last = total[:, :, -1:]
    return out, state * last.exp().transpose(2, 3) + (k * (last - total).exp()).transpose(2, 3) @ change
