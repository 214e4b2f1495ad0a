"""Compute recurrences of layers with a state token by token in float64, as references for the ops, with random inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from dovetail.interfaces.state_rows import StateRows
from dovetail.interfaces.state_space import ScanChannels, SSDHeads
from state_rows_cases import draft_rows, in_arena

SLOTS = 7


class Recurrence(NamedTuple):
    """Describe an operation: ``prompt`` and ``step`` as in ``ops``, ``naive`` for one token, and the shape of a state."""

    prompt: Callable[..., torch.Tensor]
    step: Callable[..., torch.Tensor]
    naive: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    parameters: Any
    shape: tuple[int, ...]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]  # of a number of tokens
    device: str


def ssd_case(
    prompt: Any,
    step: Any,
    heads: int,
    dim: int,
    groups: int,
    width: int,
    device: str = "cpu",
    limits: Any = (0.0, float("inf")),
) -> Recurrence:
    numbers = (-torch.rand(heads) * 4 - 0.1, torch.randn(heads), torch.randn(heads) - 1)
    parameters = SSDHeads(*(each.to(device) for each in numbers), limits=limits)

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        """Return x, dt, b and c, views as the layer has them."""
        packed = torch.randn(tokens, heads * dim + 2 * groups * width).to(device)
        x, b, c = packed.split([heads * dim, groups * width, groups * width], 1)
        dt = torch.randn(tokens, heads + 3).to(device)[:, :heads]
        return x.unflatten(1, (heads, dim)), dt, b.unflatten(1, (groups, width)), c.unflatten(1, (groups, width))

    return Recurrence(prompt, step, ssd_token, parameters, (heads, dim, width), inputs, device)


def ssd_token(
    x: Any, dt: Any, b: Any, c: Any, own: Mapping[str, Any], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a token and the state after it."""
    share = len(x) // len(b)
    b, c = b.repeat_interleave(share, 0), c.repeat_interleave(share, 0)
    size = functional.softplus(dt + own["dt_bias"]).clamp(*own["limits"])
    decay = torch.exp(size * own["a"])
    state = decay[:, None, None] * state + size[:, None, None] * x[:, :, None] * b[:, None, :]
    return (state * c[:, None, :]).sum(-1) + own["d"][:, None] * x, state


def scan_case(prompt: Any, step: Any, channels: int, width: int, device: str = "cpu") -> Recurrence:
    numbers = (-torch.rand(channels, width) * 4 - 0.1, torch.randn(channels), torch.randn(channels) - 1)
    parameters = ScanChannels(*(each.to(device) for each in numbers))

    def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
        """Return x, dt, b and c; b and c are views as the layer has them."""
        b, c = torch.randn(tokens, 2 * width + 3).to(device)[:, 3:].split(width, 1)
        x, dt = torch.randn(2, tokens, channels).to(device)
        return x, dt, b, c

    return Recurrence(prompt, step, scan_token, parameters, (channels, width), inputs, device)


def scan_token(
    x: Any, dt: Any, b: Any, c: Any, own: Mapping[str, Any], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size = functional.softplus(dt + own["dt_bias"])[:, None]
    state = torch.exp(size * own["a"]) * state + size * b * x[:, None]
    return (state * c).sum(-1) + own["d"] * x, state


def exact(value: Any) -> Any:
    return value.double().cpu() if isinstance(value, torch.Tensor) else value


def rows_of(slots: list[int], lens: list[int], fresh: list[bool], chunk: int, device: str = "cpu") -> StateRows:
    return StateRows.of(np.array(slots, np.int32), np.array(lens, np.int32), np.array(fresh), device, chunk)


def naive(case: Recurrence, inputs: tuple[torch.Tensor, ...], state: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Return the outputs of rows, float64, and change ``state``, float64."""
    inputs = tuple(exact(each) for each in inputs)
    parameters = {field.name: exact(getattr(case.parameters, field.name)) for field in fields(case.parameters)}
    out, begin = [], 0
    for length, slot, fresh in zip(rows.lens.tolist(), rows.slots.tolist(), rows.fresh.tolist(), strict=True):
        own = torch.zeros_like(state[0]) if fresh or not slot else state[slot]
        for t in range(begin, begin + length):
            result, own = case.naive(*(each[t] for each in inputs), parameters, own)
            out.append(result)
        if slot and length:
            state[slot] = own
        begin += length
    return torch.stack(out)


def check_prompts(case: Recurrence, chunk: int, dtype: torch.dtype, tolerance: float, lens: list[int]) -> None:
    """Check rows of ``lens``, the first continued, the second fresh, the last padding, against the reference."""
    slots = [*(3, 5, 1, 6, 2, 4)[: len(lens) - 1], 0]
    fresh = [index % 2 == 1 for index in range(len(lens))]
    rows = rows_of(slots, lens, fresh, chunk, case.device)
    inputs = tuple(each.to(dtype) for each in case.inputs(sum(lens)))
    state = in_arena(torch.randn(SLOTS, *case.shape), case.device)
    state[0] = float("nan")
    state[5] = float("nan")  # of a fresh row
    expected_state = exact(state)
    expected = naive(case, inputs, expected_state, rows)
    got = case.prompt(*inputs, case.parameters, state, rows)
    assert got.dtype is dtype
    close(got, expected, tolerance)
    close(state[1:], expected_state[1:], tolerance)
    assert state[0].isnan().all()  # nothing is written to the slot of padding


def check_steps(case: Recurrence, dtype: torch.dtype, tolerance: float) -> None:
    """Check one token of each of five rows, of which two are padding, against the reference."""
    slots = torch.tensor([2, 0, 6, 1, 0], dtype=torch.int32, device=case.device)
    inputs = tuple(each.to(dtype) for each in case.inputs(5))
    state = in_arena(torch.randn(SLOTS, *case.shape), case.device)
    state[0] = float("nan")
    expected_state = exact(state)
    expected = naive(case, inputs, expected_state, rows_of(slots.tolist(), [1] * 5, [False] * 5, 16))
    got = case.step(*inputs, case.parameters, state, slots)
    assert got.dtype is dtype
    close(got, expected, tolerance)
    close(state[1:], expected_state[1:], tolerance)
    assert state[0].isnan().all()


def check_division(case: Recurrence, chunk: int, tokens: int, cuts: list[int], tolerance: float) -> None:
    """Check that a row gives the same outputs and the same last state whole, in prompts that end at ``cuts`` while
    another row runs beside it, and token by token."""
    inputs = case.inputs(tokens)
    whole, parts, single = torch.zeros(3, SLOTS, *case.shape, device=case.device)
    expected = case.prompt(*inputs, case.parameters, whole, rows_of([4], [tokens], [True], chunk, case.device))
    divided = []
    for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
        beside = case.inputs(5)
        joined = tuple(torch.cat((left, right[begin:end])) for left, right in zip(beside, inputs, strict=True))
        rows = rows_of([2, 4], [5, end - begin], [False, begin == 0], chunk, case.device)
        divided.append(case.prompt(*joined, case.parameters, parts, rows)[5:])
    close(torch.cat(divided), expected, tolerance)
    close(parts[4], whole[4], tolerance)
    slots = torch.tensor([4], dtype=torch.int32, device=case.device)
    steps = [case.step(*(each[t : t + 1] for each in inputs), case.parameters, single, slots) for t in range(tokens)]
    close(torch.cat(steps), expected, tolerance)
    close(single[4], whole[4], tolerance)


def check_drafts(case: Recurrence, advance: Any, lens: list[int], counts: list[int], tolerance: float) -> None:
    """Check that rows of drafts, of which the first pads the batch, leave the states as they are, and that ``advance`` writes
    those after the first ``counts[r]`` tokens of row r."""
    rows = draft_rows(np.array([0, 5, 2, 6, 1, 3], np.int32)[: len(lens)], np.array(lens, np.int32), case.device)
    inputs = case.inputs(sum(lens))
    before = torch.randn(SLOTS, *case.shape)
    before[4] = float("nan")  # of no row
    state = in_arena(before, case.device)
    expected = naive(case, inputs, exact(before), rows)
    close(case.prompt(*inputs, case.parameters, state, rows), expected, tolerance)
    torch.testing.assert_close(state.cpu(), before, rtol=0, atol=0, equal_nan=True)
    accepted = torch.tensor(counts, dtype=torch.int32, device=case.device)
    advance(*inputs[:3], case.parameters, state, rows.slots, rows.indptr[:-1], accepted)
    last = exact(before)
    for r, slot in enumerate(rows.slots.tolist()):
        own = tuple(each[(begin := int(rows.indptr[r])) : begin + counts[r]] for each in inputs)
        if slot and counts[r]:
            naive(case, own, last, rows_of([slot], [counts[r]], [False], 16))
    changed = [slot for r, slot in enumerate(rows.slots.tolist()) if slot and counts[r]]
    close(state[changed], last[changed], tolerance)
    kept = [slot for slot in range(SLOTS) if slot not in changed]
    torch.testing.assert_close(state[kept].cpu(), before[kept], rtol=0, atol=0, equal_nan=True)


def check_gated_norm(
    op: Any, groups: int, size: int, norm_first: bool, dtype: torch.dtype, tolerance: float, device: str = "cpu"
) -> None:
    """Check a gated norm over views of a wider tensor against float64."""
    torch.manual_seed(0)
    packed = torch.randn(5, 2 * groups * size + 3).to(device, dtype)
    x, gate = packed[:, :-3].chunk(2, 1)
    weight = torch.randn(groups * size).to(device, dtype)
    opened, values = functional.silu(exact(gate)), exact(x)
    values = values if norm_first else values * opened
    each = values.unflatten(1, (groups, size))
    normed = (each * (each.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(1) * exact(weight)
    got = op(x, gate, weight, 1e-5, size, norm_first=norm_first)
    assert got.dtype is dtype
    close(got, normed * opened if norm_first else normed, tolerance)


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Check that errors are at most ``tolerance`` times the largest of 1, the expected number, and the root mean square of
    the expected vector along the last dimension: a number that is small because large ones cancel is as wrong as they
    are."""
    got, expected = got.double().cpu(), expected.double().cpu()
    size = expected.square().mean(-1, keepdim=True).sqrt().clamp(min=1.0)
    errors = (got - expected).abs() / torch.maximum(size, expected.abs())
    assert (errors <= tolerance).all(), f"the largest error is {errors.max():.3g}, {tolerance:g} is allowed"
