"""Compute the recurrence of Mamba-2 (state space duality, Dao and Gu 2024, arXiv 2405.21060).

Head h of token t has a step size ``dt' = clamp(softplus(dt[t, h] + dt_bias[h]), limits)``. Its state
``H [head_dim, state_size]`` and its output are ::

    H = exp(dt' * a[h]) * H + dt' * outer(x[t, h], b[t, g])        g: the group of head h
    y[t, h] = H @ c[t, g] + d[h] * x[t, h]

Prompts are computed in chunks: products within a chunk, and the recurrence from chunk to chunk only. Rounding apart, the
result does not depend on how a row is divided into chunks or steps.
"""

from __future__ import annotations

import torch

from dovetail.interfaces.state_rows import StateRows
from dovetail.interfaces.state_space import SSDHeads
from dovetail.ops.state_rows import accepted_tokens
from dovetail.ops.state_space import head_step_sizes


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    heads: SSDHeads,
    state: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Return the outputs ``[tokens, heads, head_dim]`` in the dtype of ``x``, and write the last state of each row to
    its slot of ``state``.

    ``x`` is ``[tokens, heads, head_dim]``, ``dt [tokens, heads]``, ``b`` and ``c [tokens, groups, state_size]``; they
    are contiguous except in the token dimension. Head h belongs to group ``h // (heads / groups)``. ``state`` is float32 or bfloat16
    ``[slots, heads, head_dim, state_size]``, contiguous except in the slot dimension; rows begin and end as ``StateRows`` describes. Sums are
    computed in float32. Mutates ``state`` only.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = rows.initial(state).float()
    sizes = head_step_sizes(dt, heads)
    ends = rows.indptr.tolist()[1:]
    for chunk, (row, start) in enumerate(zip(rows.chunk_rows.tolist(), rows.chunk_starts.tolist(), strict=True)):
        at = slice(start, min(start + rows.chunk, ends[row]))
        out[at] = _chunk(x[at].float(), sizes[at], b[at].float(), c[at].float(), heads, states[row])
        rows.save(state, torch.tensor([chunk], device=x.device), states[row, None])
    rows.store(state, states)
    return out


def _chunk(
    x: torch.Tensor, sizes: torch.Tensor, b: torch.Tensor, c: torch.Tensor, heads: SSDHeads, state: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of one chunk, whose tensors are float32. Changes ``state [heads, head_dim, state_size]`` to
    that after the chunk."""
    groups = b.shape[1]
    total = (sizes * heads.a).cumsum(0).T.unflatten(0, (groups, -1))  # [groups, heads of a group, tokens]
    inputs = (x * sizes[..., None]).permute(1, 0, 2).unflatten(0, (groups, -1))  # [..., tokens, head_dim]
    b, c = b.transpose(0, 1)[:, None], c.transpose(0, 1)[:, None]  # [groups, 1, tokens, state_size]
    own = state.unflatten(0, (groups, -1))
    decay = (total[..., :, None] - total[..., None, :]).exp().tril()
    out = (c @ b.transpose(-1, -2) * decay) @ inputs
    out += (c @ own.transpose(-1, -2)) * total.exp()[..., None]
    left = (total[..., -1:] - total).exp()
    own.mul_(total[..., -1, None, None].exp()).add_((inputs * left[..., None]).transpose(-1, -2) @ b)
    return out.flatten(0, 1).transpose(0, 1).addcmul_(x, heads.d[:, None])


def ssd_step(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    heads: SSDHeads,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Compute ``ssd`` for rows of one token each, none of which is fresh: token r belongs to the state in slot
    ``slots[r]`` (int32 ``[tokens]``). Each state is read once and written once. For slot 0 see ``StateRows``."""
    sizes = head_step_sizes(dt, heads)
    old, real = state[slots.long()].float(), (slots != 0).view(-1, 1, 1, 1)
    new = torch.where(real, old, 0)
    share = x.shape[1] // b.shape[1]
    b, c = (each.float().repeat_interleave(share, 1)[:, :, None] for each in (b, c))  # [tokens, heads, 1, state_size]
    values = x.float()
    new.mul_((sizes * heads.a).exp()[..., None, None]).addcmul_((values * sizes[..., None])[..., None], b)
    state[slots.long()] = torch.where(real, new, old).to(state.dtype)
    return ((new * c).sum(-1) + values * heads.d[:, None]).to(x.dtype)


def ssd_advance(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    heads: SSDHeads,
    state: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Write to slot ``slots[r]`` the state after the tokens ``[starts[r], starts[r] + counts[r])``, which is that of
    ``ssd_step`` (all int32 ``[rows]``). No row is fresh, counts may be 0, and nothing is written to slot 0."""
    for tokens, live in accepted_tokens(slots, starts, counts):
        ssd_step(x[tokens], dt[tokens], b[tokens], b[tokens], heads, state, live)
