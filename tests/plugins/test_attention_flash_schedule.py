"""Test which calls of flash_attn share a schedule, with a provider that notes them.

Run: python -m pytest tests/plugins/test_attention_flash_schedule.py
"""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch

from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail_attention.config import FlashAttnConfig
from dovetail_attention.flash_attn import backend
from dovetail_attention.flash_attn.providers import AttentionCall, OpenedProvider

Noted = tuple[AttentionStep, backend.FlashAttention, list[AttentionCall], list[torch.Tensor | None]]


def prepared(monkeypatch: pytest.MonkeyPatch, case: AttentionCase) -> Noted:
    """Return a step, a backend for it, the calls for which it makes schedules, and the schedules of its calls."""
    made: list[AttentionCall] = []
    used: list[torch.Tensor | None] = []

    def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        used.append(call.schedule)
        return call.q, call.q

    def schedule(call: AttentionCall) -> torch.Tensor:
        made.append(call)
        return torch.tensor(len(made))

    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(backend, "open_first", lambda *_, **__: (OpenedProvider("noted", attend), []))
    monkeypatch.setattr(backend, "open_schedule", lambda *_: schedule)
    step = AttentionStep(case, torch.device("cpu"))
    return step, backend.FlashAttention(FlashAttnConfig(), step.context()), made, used


def test_the_first_layer_of_a_plan_makes_the_schedule_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if that layer runs again without a new plan, as where a graph is warmed up and captured."""
    step, flash, made, used = prepared(monkeypatch, AttentionCase([30, 7, 0], [1, 1, 1]))
    layers = [replace(step.layer, layer_id=i) for i in (1, 0)]
    flash.plan_capture(step.batch)
    for count in (1, 2):
        for layer in layers:
            flash.forward(step.q, layer, step.batch)
        assert len(made) == count
    flash.plan(step.batch)
    flash.forward(step.q, layers[1], step.batch)
    assert [int(one) for one in used if one is not None] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase([0], [30], num_extend=1),
        AttentionCase([3] * 200, [1] * 200),
        AttentionCase([30, 7], [1, 1], window=9),
    ],
    ids=["prompt", "keys in one part", "window"],
)
def test_calls_that_gain_nothing_have_no_schedule(case: AttentionCase, monkeypatch: pytest.MonkeyPatch) -> None:
    step, flash, made, used = prepared(monkeypatch, case)
    flash.plan(step.batch)
    flash.forward(step.q, step.layer, step.batch)
    assert used == [None]
    assert not made
