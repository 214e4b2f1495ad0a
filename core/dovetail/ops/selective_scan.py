"""Compute the recurrence of Mamba (selective state spaces, Gu and Dao 2023, arXiv 2312.00752).

Channel i of token t has the step size ``dt' = softplus(dt[t, i] + dt_bias[i])``. Its state ``h [state_size]`` and its
output are ::

    h = exp(dt' * a[i]) * h + dt' * x[t, i] * b[t]
    y[t, i] = h @ c[t] + d[i] * x[t, i]
"""

from __future__ import annotations

import numpy as np
import torch

from dovetail.interfaces.state_rows import StateRows
from dovetail.interfaces.state_space import ScanChannels
from dovetail.ops.state_rows import accepted_tokens
from dovetail.ops.state_space import channel_step_sizes


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    channels: ScanChannels,
    state: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Return the outputs ``[tokens, channels]`` in the dtype of ``x``, and write the last state of each row to its slot
    of ``state``.

    ``x`` and ``dt`` are ``[tokens, channels]``, ``b`` and ``c [tokens, state_size]``; they are contiguous except in the
    token dimension. ``state`` is float32 or bfloat16 ``[slots, channels, state_size]``, contiguous except in the slot dimension; rows begin and end as
    ``StateRows`` describes. Sums are computed in float32. Mutates ``state`` only.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes, values, keys, queries = channel_step_sizes(dt, channels), x.float(), b.float(), c.float()
    longest = np.argsort(-rows.lens, kind="stable")  # rows that have a token at place t come first
    lens, order = rows.lens[longest], torch.from_numpy(longest).to(x.device)
    states, begin = rows.initial(state)[order].float(), rows.indptr[:-1].long()[order]
    for t in range(int(lens.max(initial=0))):
        own = states[: int(np.count_nonzero(lens > t))]
        at = begin[: len(own)] + t
        out[at] = _advance(own, values[at], sizes[at], keys[at], queries[at], channels).to(x.dtype)
        if rows.saves is not None and (t + 1) % rows.chunk == 0:
            rows.save(state, rows.first_chunks[:-1].long()[order][: len(own)] + t // rows.chunk, own)
    last = torch.empty_like(states)
    last[order] = states
    rows.store(state, last)
    return out


def _advance(
    state: torch.Tensor, x: torch.Tensor, size: torch.Tensor, b: torch.Tensor, c: torch.Tensor, channels: ScanChannels
) -> torch.Tensor:
    """Return the outputs of one token of each row in float32, and change ``state [rows, channels, state_size]``."""
    state.mul_((size[..., None] * channels.a).exp_()).addcmul_((size * x)[..., None], b[:, None])
    return (state @ c[..., None])[..., 0].addcmul_(x, channels.d)


def selective_scan_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    channels: ScanChannels,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Compute ``selective_scan`` for rows of one token each, none of which is fresh: token r belongs to the state in slot
    ``slots[r]`` (int32 ``[tokens]``). Each state is read once and written once. For slot 0 see ``StateRows``."""
    old, real = state[slots.long()].float(), (slots != 0).view(-1, 1, 1)
    new = torch.where(real, old, 0)
    out = _advance(new, x.float(), channel_step_sizes(dt, channels), b.float(), c.float(), channels)
    state[slots.long()] = torch.where(real, new, old).to(state.dtype)
    return out.to(x.dtype)


def selective_scan_advance(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    channels: ScanChannels,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Write to slot ``slots[r]`` the state after the tokens ``[starts[r], starts[r] + counts[r])``, which is that of
    ``selective_scan_step`` (all int32 ``[rows]``). No row is fresh, counts may be 0, and nothing is written to slot 0."""
    for tokens, live in accepted_tokens(slots, starts, counts):
        selective_scan_step(x[tokens], dt[tokens], b[tokens], b[tokens], channels, state, live)
