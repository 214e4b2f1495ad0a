"""Compute causal convolutions over a few tokens, each channel by itself, as layers with a state have them before their
recurrence.

The state of a row are its last ``width - 1`` inputs, ``[channels, width - 1]``, the oldest first. Rounding apart, the
result does not depend on how a row is divided among steps.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from dovetail.interfaces.mixer import ConvActivation
from dovetail.interfaces.state_rows import StateRows


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StateRows,
    activation: ConvActivation = "silu",
) -> torch.Tensor:
    """Return ``activation(bias[c] + sum over i of weight[c, i] * x[t - width + 1 + i, c])``, ``[tokens, channels]`` in
    the dtype of ``x``, and write the last inputs of each row to its slot of ``state``.

    ``x [tokens, channels]`` is contiguous except in the token dimension, ``weight`` is ``[channels, width]``, ``bias``
    ``[channels]`` and ``state`` ``[slots, channels, width - 1]``, contiguous except in the slot dimension. Inputs before the first token of a row
    are those of its state, as ``StateRows`` describes. Sums are computed in float32. Mutates ``state`` only.
    """
    before = weight.shape[1] - 1
    count = len(rows.lens)
    row, column = torch.arange(count, device=x.device), torch.arange(before, device=x.device)
    row_of = torch.repeat_interleave(row, rows.indptr.diff(), output_size=len(x))
    # every row's inputs follow those of its state: token t is at t + (its row + 1) * before
    place = torch.arange(len(x), device=x.device) + (row_of + 1) * before
    inputs = x.new_empty(len(x) + count * before, x.shape[1])
    inputs[place] = x
    into = (rows.indptr[:-1, None] + row[:, None] * before + column).flatten()
    inputs[into] = rows.initial(state).transpose(1, 2).flatten(0, 1).to(x.dtype)
    out = _convolved([inputs[place - before + i] for i in range(before + 1)], weight, bias, activation)
    last = rows.indptr[1:, None] + row[:, None] * before + column
    rows.store(state, inputs[last].transpose(1, 2))
    if rows.saves is not None:
        saved = rows.saves.nonzero().flatten()
        latest = (rows.chunk_starts[saved, None] + rows.chunk - before + column).long()
        rows.save(state, saved, x[latest].transpose(1, 2))
    return out


def short_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slots: torch.Tensor,
    activation: ConvActivation = "silu",
) -> torch.Tensor:
    """Compute ``short_conv`` for rows of one token each, none of which is fresh: token r belongs to the state in slot
    ``slots[r]`` (int32 ``[tokens]``). For slot 0 see ``StateRows``."""
    old, real = state[slots.long()], (slots != 0).view(-1, 1, 1)
    inputs = torch.cat((torch.where(real, old, 0).to(x.dtype), x[:, :, None]), 2)
    state[slots.long()] = torch.where(real, inputs[:, :, 1:].to(state.dtype), old)
    return _convolved(list(inputs.unbind(2)), weight, bias, activation)


def short_conv_advance(
    x: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor
) -> None:
    """Write to slot ``slots[r]`` the state after the tokens ``[starts[r], starts[r] + counts[r])`` of ``x``, which is that
    of ``short_conv`` (all int32 ``[rows]``). No row is fresh, counts may be 0, and nothing is written to slot 0."""
    kept = state[slots.long()]
    before = state.shape[2]
    source = counts[:, None] + torch.arange(before, device=x.device)  # from the beginning of the state on
    new = x[(starts[:, None] + source - before).clamp(min=0, max=len(x) - 1).long()].transpose(1, 2)
    old = kept.gather(2, source.clamp(max=before - 1).long()[:, None].expand_as(kept))
    changed = torch.where((source < before)[:, None], old, new.to(state.dtype))
    state[slots.long()] = torch.where((slots != 0).view(-1, 1, 1), changed, kept)


def _convolved(
    inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, activation: ConvActivation
) -> torch.Tensor:
    """Return the result from the ``inputs [tokens, channels]`` of each column of the weight."""
    total = inputs[0].new_zeros(inputs[0].shape, dtype=torch.float32) if bias is None else bias.float()
    for column, x in enumerate(inputs):
        total = total + x.float() * weight[:, column].float()
    return (functional.silu(total) if activation == "silu" else total).to(inputs[0].dtype)
