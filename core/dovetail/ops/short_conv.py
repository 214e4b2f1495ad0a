"""Compute causal convolutions over a few tokens, each channel by itself, as layers with a state have them before their
recurrence.

The state of a row are its last ``width - 1`` inputs, ``[channels, width - 1]``, the oldest first. Rounding apart, the
result does not depend on how a row is divided among steps.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Literal

import torch
from torch.nn import functional

from dovetail.ops.state_rows import StateRows

ConvActivation = Literal["silu", "none"]


@functools.cache
def _triton() -> ModuleType:
    from dovetail.ops.triton import short_conv

    return short_conv


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
    ``[channels]`` and ``state`` ``[slots, channels, width - 1]``, contiguous. Inputs before the first token of a row
    are those of its state, as ``StateRows`` describes. Sums are computed in float32. Mutates ``state`` only.
    """
    if x.is_cuda:
        return _triton().short_conv(x, weight, bias, state, rows, activation == "silu")
    before = weight.shape[1] - 1
    count = len(rows.lens)
    row_of = torch.repeat_interleave(torch.arange(count), rows.indptr.diff())
    # every row's inputs follow those of its state: token t is at t + (its row + 1) * before
    place = torch.arange(len(x)) + (row_of + 1) * before
    inputs = x.new_empty(len(x) + count * before, x.shape[1])
    inputs[place] = x
    into = (rows.indptr[:-1, None] + torch.arange(count)[:, None] * before + torch.arange(before)).flatten()
    inputs[into] = rows.initial(state).transpose(1, 2).flatten(0, 1).to(x.dtype)
    out = _convolved([inputs[place - before + i] for i in range(before + 1)], weight, bias, activation)
    last = rows.indptr[1:, None] + torch.arange(count)[:, None] * before + torch.arange(before)
    rows.store(state, inputs[last].transpose(1, 2))
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
    if x.is_cuda:
        return _triton().short_conv_step(x, weight, bias, state, slots, activation == "silu")
    kept = state[slots.long()].masked_fill_((slots == 0).view(-1, 1, 1), 0)
    inputs = torch.cat((kept.to(x.dtype), x[:, :, None]), 2)
    written = slots != 0
    state[slots[written].long()] = inputs[written, :, 1:].to(state.dtype)
    return _convolved(list(inputs.unbind(2)), weight, bias, activation)


def short_conv_advance(
    x: torch.Tensor, state: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor
) -> None:
    """Write to slot ``slots[r]`` the state after the tokens ``[starts[r], starts[r] + counts[r])`` of ``x``, which is that
    of ``short_conv`` (all int32 ``[rows]``). No row is fresh, counts may be 0, and nothing is written to slot 0."""
    if x.is_cuda:
        _triton().short_conv_advance(x, state, slots, starts, counts)
        return
    kept = state[slots.long()]
    before = state.shape[2]
    source = counts[:, None] + torch.arange(before)  # from the beginning of the state on
    new = x[(starts[:, None] + source - before).clamp(min=0, max=len(x) - 1).long()].transpose(1, 2)
    old = kept.gather(2, source.clamp(max=before - 1).long()[:, None].expand_as(kept))
    written = slots != 0
    state[slots[written].long()] = torch.where((source < before)[:, None], old, new.to(state.dtype))[written]


def _convolved(
    inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None, activation: ConvActivation
) -> torch.Tensor:
    """Return the result from the ``inputs [tokens, channels]`` of each column of the weight."""
    total = inputs[0].new_zeros(inputs[0].shape, dtype=torch.float32) if bias is None else bias.float()
    for column, x in enumerate(inputs):
        total = total + x.float() * weight[:, column].float()
    return (functional.silu(total) if activation == "silu" else total).to(inputs[0].dtype)
