"""Test that layers with a state and drafts, some of which are accepted, continue as if the rejected ones had not been.

Run: python -m pytest tests/core/test_delta_net.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.interfaces.mesh import SINGLE
from dovetail.interfaces.mixer_shapes import DeltaShape
from dovetail.interfaces.state_rows import StateRows
from dovetail.layers.base import prepare_layers
from dovetail.layers.delta_net import DeltaNetShape, GatedDeltaNet
from dovetail.layers.mamba import Mamba2Mixer, Mamba2Shape
from dovetail.layers.mamba1 import Mamba1Mixer, Mamba1Shape
from dovetail.layers.short_conv import GatedShortConv
from dovetail.layers.states import StepStates

HIDDEN = 20
NONE = torch.zeros(0, dtype=torch.int32)


Mixer = GatedDeltaNet | Mamba1Mixer | Mamba2Mixer | GatedShortConv
LAYERS: dict[str, Callable[[], Mixer]] = {
    "gated delta net": lambda: GatedDeltaNet(DeltaNetShape(HIDDEN, DeltaShape(2, 4, 8, 12), 4, 1e-5), 0, SINGLE),
    "Mamba-2": lambda: Mamba2Mixer(
        Mamba2Shape(HIDDEN, 4, 8, 2, 12, 4, 1e-5, multipliers=(1.1, 0.9, 1.2, 0.8, 1)), 0, SINGLE
    ),
    "Mamba": lambda: Mamba1Mixer(Mamba1Shape(HIDDEN, 24, 8, 6, 4, 1e-5), 0, SINGLE),
    "gated short convolution": lambda: GatedShortConv(HIDDEN, 3, 0, SINGLE),
}


def make_layer(name: str = "gated delta net") -> Mixer:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3)
    prepare_layers(layer)
    return layer


def memory_of(layer: Mixer) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(torch.zeros(4, *each.shape) for each in layer.state_shapes)]


def rows_of(slots: list[int], lens: list[int], *, fresh: bool = False, writes: bool = True) -> StateRows:
    of_slots, of_lens = np.array(slots, np.int32), np.array(lens, np.int32)
    return StateRows.of(of_slots, of_lens, np.full(len(slots), fresh), chunk=64 if writes else 16, writes=writes)


def forward(layer: Mixer, x: torch.Tensor, states: StepStates) -> torch.Tensor:
    return layer.out.forward(layer.mix(x, states, None))


@torch.no_grad()
def alone(layer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a whole row."""
    return forward(layer, x, StepStates(memory_of(layer), rows_of([1], [len(x)], fresh=True), NONE))


@torch.no_grad()
@pytest.mark.parametrize("accepted", [[1, 4], [3, 2], [5, 1]], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_rejected_drafts_leave_no_trace(name: str, accepted: list[int]) -> None:
    layer = make_layer(name)
    memory = memory_of(layer)
    prompts = [torch.randn(9, HIDDEN), torch.randn(70, HIDDEN)]
    forward(layer, torch.cat(prompts), StepStates(memory, rows_of([3, 1], [9, 70], fresh=True), NONE))
    drafts = [torch.randn(5, HIDDEN), torch.randn(4, HIDDEN)]
    newcomer = torch.randn(6, HIDDEN)
    step = StepStates(memory, rows_of([2], [6], fresh=True), NONE, rows_of([3, 1], [5, 4], writes=False))
    out = forward(layer, torch.cat((newcomer, *drafts)), step).split([6, 5, 4])
    torch.testing.assert_close(out[0], alone(layer, newcomer), atol=1e-5, rtol=1e-5)
    for got, prompt, draft in zip(out[1:], prompts, drafts, strict=True):
        expected = alone(layer, torch.cat((prompt, draft)))[len(prompt) :]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    step.advance(torch.tensor(accepted, dtype=torch.int32))
    following = torch.randn(2, HIDDEN)
    got = forward(layer, following, StepStates(memory, None, torch.tensor([3, 1], dtype=torch.int32)))
    for index, count in enumerate(accepted):
        text = torch.cat((prompts[index], drafts[index][:count], following[index : index + 1]))
        torch.testing.assert_close(got[index], alone(layer, text)[-1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_layer_that_keeps_nothing_cannot_advance() -> None:
    step: Any = StepStates(memory_of(make_layer()), None, NONE, rows_of([1], [2], writes=False))
    with pytest.raises(AssertionError, match="does not implement drafts"):
        step.advance(torch.tensor([1], dtype=torch.int32))
