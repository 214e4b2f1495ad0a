"""Make rows of tokens with states, and divide them among steps, for tests of operations that keep states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from dovetail.interfaces.mixer_shapes import DeltaGates, DeltaShape
from dovetail.interfaces.state_rows import StateRows

LENS = (150, 1, 0, 64, 3, 67)
"""Rows with several chunks, a whole one, fewer tokens than a convolution is wide, and none."""

FEW_LENS = (70, 1, 0, 3, 5)
"""Rows for interpreted kernels, which are slow."""

Op = Callable[[list[torch.Tensor], StateRows], torch.Tensor]
"""Compute tokens, given the tensors of each argument, ``[tokens, ...]``, and write states in place."""


@dataclass(frozen=True)
class StatefulRows:
    """Hold whole rows: the tensors of each argument of each row, and the slot of each row."""

    args: list[list[torch.Tensor]]
    slots: np.ndarray
    fresh: np.ndarray

    @classmethod
    def random(cls, make: Callable[[int], list[torch.Tensor]], lens: tuple[int, ...] = LENS) -> StatefulRows:
        """Return rows with slots in a random order. Every second row is fresh. ``make`` returns the arguments of a number
        of tokens."""
        slots = np.asarray(torch.randperm(len(lens)) + 1, np.int32)
        return cls([make(length) for length in lens], slots, np.arange(len(lens)) % 2 == 0)

    @property
    def lens(self) -> np.ndarray:
        return np.array([len(args[0]) for args in self.args], np.int32)

    def run(self, op: Op, cuts: list[int], device: str = "cpu") -> list[torch.Tensor]:
        """Run the rows in steps of up to ``cuts[i]`` tokens of each row (the last one repeats), and return the outputs of
        each row. Rows that have ended drop out."""
        done, outs, step = np.zeros(len(self.args), int), [[] for _ in self.args], 0
        while step == 0 or (done < self.lens).any():
            part = np.minimum(self.lens - done, cuts[min(step, len(cuts) - 1)])
            rows = [r for r in range(len(self.args)) if part[r] or step == 0]
            fresh = self.fresh[rows] & (done[rows] == 0)
            plan = StateRows.of(self.slots[rows], part[rows].astype(np.int32), fresh, device)
            pieces = [[arg[done[r] : done[r] + part[r]] for arg in self.args[r]] for r in rows]
            out = op([torch.cat(arg).to(device) for arg in zip(*pieces, strict=True)], plan)
            for r, piece in zip(rows, out.split(part[rows].tolist()), strict=True):
                outs[r].append(piece.cpu())
            done += part
            step += 1
        return [torch.cat(pieces) for pieces in outs]

    def run_each(self, step: Callable[..., torch.Tensor], device: str = "cpu") -> list[torch.Tensor]:
        """Run the rows token by token, rows that have ended as padding of slot 0, by ``step(args, slots)``."""
        outs: list[list[torch.Tensor]] = [[] for _ in self.args]
        for at in range(int(self.lens.max())):
            live = at < self.lens
            slots = torch.from_numpy(np.where(live, self.slots, 0).astype(np.int32)).to(device)
            args = [
                torch.stack(
                    [(arg[at] if on else torch.full(arg.shape[1:], 7.0)) for arg, on in zip(column, live, strict=True)]
                )
                for column in zip(*self.args, strict=True)
            ]
            out = step([arg.to(device) for arg in args], slots).cpu()
            for r in np.flatnonzero(live):
                outs[r].append(out[r])
        return [torch.stack(pieces) if pieces else torch.empty(0) for pieces in outs]


CHANNELS = 70


def in_arena(states: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Return a copy of ``states [slots, ...]`` as a view of memory in which other states, NaN here, lie between slots."""
    memory = states.new_full((len(states), 3, *states.shape[1:]), torch.nan).to(device)
    memory[:, 1] = states
    return memory[:, 1]


def conv_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, before: torch.Tensor, silu: bool):
    """Return outputs and last inputs of one row, in float64. ``before [channels, width - 1]`` are its earlier inputs."""
    inputs = torch.cat((before.double().T, x.double()))
    outs = [
        (inputs[t : t + weight.shape[1]] * weight.double().T).sum(0) + (0 if bias is None else bias.double())
        for t in range(len(x))
    ]
    out = torch.stack(outs) if outs else x.double()
    return functional.silu(out) if silu else out, inputs[len(x) :].T


def conv_case(width: int, bias: bool, dtype: torch.dtype, lens: tuple[int, ...] = LENS):
    """Return rows, the weight, the bias and the states of 8 slots."""
    torch.manual_seed(0)
    rows = StatefulRows.random(lambda tokens: [torch.randn(tokens, CHANNELS).to(dtype)], lens)
    weight, given = torch.randn(CHANNELS, width).to(dtype), torch.randn(CHANNELS).to(dtype) if bias else None
    return rows, weight, given, torch.randn(8, CHANNELS, width - 1).to(dtype)


def check_conv(rows: StatefulRows, outs, state, weight, bias, before, silu: bool, tolerance: float) -> None:
    """Assert that ``outs`` of each row and the states after them follow from the states ``before``."""
    for (x,), slot, fresh, out in zip(rows.args, rows.slots, rows.fresh, outs, strict=True):
        start = torch.zeros_like(before[slot]) if fresh and len(x) else before[slot]
        expected, last = conv_reference(x, weight, bias, start, silu)
        if len(x):
            torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(state[slot].double(), last, atol=0, rtol=0)
    untouched = [slot for slot in range(8) if slot not in rows.slots]
    assert torch.equal(state[untouched], before[untouched])


class DeltaCase:
    """Hold rows of queries, keys, values and gates of the gated delta rule, and the states of 8 slots."""

    def __init__(
        self,
        by_channel: bool,
        lens: tuple[int, ...] = LENS,
        dtype: torch.dtype = torch.float32,
        shape: DeltaShape = DeltaShape(key_heads=2, value_heads=4, key_dim=8, value_dim=12),  # noqa: B008
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype = shape, dtype
        per_gate = (shape.value_heads, shape.key_dim) if by_channel else (shape.value_heads,)
        self.rate, self.bias = torch.rand(shape.value_heads) * 2, torch.randn(per_gate)

        def make(tokens: int) -> list[torch.Tensor]:
            sizes = ((shape.width,), per_gate, (shape.value_heads,))
            return [torch.randn(tokens, *size).to(dtype) for size in sizes]

        self.rows = StatefulRows.random(make, lens)
        self.before = torch.randn(8, *shape.state)

    def gates(self, args: list[torch.Tensor]) -> DeltaGates:
        device = args[1].device
        return DeltaGates(args[1], args[2], self.rate.to(device), self.bias.to(device))

    def reference(self, args: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and the last state of one row, token by token in float64."""
        shape, state = self.shape, state.double()
        qkv, a, b = (arg.double() for arg in args)
        keys = shape.key_heads * shape.key_dim
        q, k = (x.unflatten(1, (shape.key_heads, -1)) for x in (qkv[:, :keys], qkv[:, keys : 2 * keys]))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(shape.value_heads // shape.key_heads, 1) for x in (q, k))
        v = qkv[:, 2 * keys :].unflatten(1, (shape.value_heads, -1))
        a = a if a.ndim == 3 else a[..., None]
        bias = self.bias.double().view(shape.value_heads, -1)
        decay = (-self.rate.double()[:, None] * functional.softplus(a + bias)).exp()[..., None]
        outs = []
        for t in range(len(qkv)):
            state = decay[t] * state
            change = b[t].sigmoid()[:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + torch.einsum("hk,hv->hkv", k[t], change)
            outs.append(torch.einsum("hk,hkv->hv", q[t], state) * shape.key_dim**-0.5)
        return torch.stack(outs) if outs else v, state

    def check(self, outs: list[torch.Tensor], state: torch.Tensor, tolerance: float, rounding: float = 0.0) -> None:
        """Assert that ``outs`` of each row and the states after them follow from the states before. ``rounding`` is the
        relative error of outputs."""
        for args, slot, fresh, out in zip(self.rows.args, self.rows.slots, self.rows.fresh, outs, strict=True):
            begin = torch.zeros_like(self.before[slot]) if fresh and len(args[0]) else self.before[slot]
            expected, last = self.reference(args, begin)
            if len(args[0]):
                torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance + rounding)
            torch.testing.assert_close(state[slot].double(), last, atol=tolerance, rtol=tolerance)
        untouched = [slot for slot in range(8) if slot not in self.rows.slots]
        assert torch.equal(state[untouched], self.before[untouched])


def draft_rows(slots: np.ndarray, lens: np.ndarray, device: str) -> StateRows:
    """Return rows of drafts, which do not write."""
    return StateRows.of(slots, lens, np.zeros(len(lens), bool), device, chunk=16, writes=False)


def check_conv_drafts(conv, advance, counts: list[int], device: str = "cpu") -> None:
    """Assert that a convolution of drafts leaves the states as they are, and that ``advance`` writes those after the first
    ``counts[r]`` tokens of row r. The first row pads the batch."""
    torch.manual_seed(0)
    lens, slots = np.array([5, 6, 7, 4], np.int32), np.array([0, 2, 1, 3], np.int32)
    x, weight, before = torch.randn(22, CHANNELS), torch.randn(CHANNELS, 4), torch.randn(5, CHANNELS, 3)
    state, rows = in_arena(before, device), draft_rows(slots, lens, device)
    out = conv(x.to(device), weight.to(device), None, state, rows).cpu()
    assert torch.equal(state.cpu(), before)
    advance(x.to(device), state, rows.slots, rows.indptr[:-1], torch.tensor(counts, dtype=torch.int32, device=device))
    for r, piece in enumerate(x.split(lens.tolist())):
        start = before[slots[r]] if r else torch.zeros_like(before[0])
        expected, _ = conv_reference(piece, weight, None, start, True)
        torch.testing.assert_close(out.split(lens.tolist())[r].double(), expected, atol=1e-5, rtol=1e-5)
        if r:
            _, last = conv_reference(piece[: counts[r]], weight, None, start, True)
            assert torch.equal(state[slots[r]].cpu().double(), last)
    assert torch.equal(state[[0, 4]].cpu(), before[[0, 4]])


def check_drafts(case: DeltaCase, rule, advance, device: str = "cpu", tolerance: float = 1e-5) -> None:
    """Assert that the gated delta rule over drafts leaves the states as they are, and that ``advance`` writes those after
    some of the tokens of each row, of which the first row pads the batch."""
    args = [torch.cat(column).to(device) for column in zip(*case.rows.args, strict=True)]
    lens, slots = case.rows.lens, case.rows.slots.copy()
    slots[0] = 0
    rows, state = draft_rows(slots, lens, device), in_arena(case.before, device)
    out = rule(args[0], case.gates(args), state, rows, case.shape).cpu().split(lens.tolist())
    assert torch.equal(state.cpu(), case.before)
    counts = lens - np.arange(len(lens)) % 3
    accepted = torch.from_numpy(counts).to(device)
    advance(args[0], case.gates(args), state, rows.slots, rows.indptr[:-1], accepted, case.shape)
    for r, own in enumerate(case.rows.args):
        begin = case.before[slots[r]] if r else torch.zeros_like(case.before[0])
        torch.testing.assert_close(out[r].double(), case.reference(own, begin)[0], atol=tolerance, rtol=tolerance)
        if r:
            _, last = case.reference([arg[: counts[r]] for arg in own], begin)
            torch.testing.assert_close(state[slots[r]].cpu().double(), last, atol=tolerance, rtol=tolerance)
    untouched = [slot for slot in range(8) if slot == 0 or slot not in slots]
    assert torch.equal(state[untouched].cpu(), case.before[untouched])
