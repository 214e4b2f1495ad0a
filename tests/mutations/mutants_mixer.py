"""Define broken backends of layers with a state."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from mutant import Mutant, Suite

from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer import MixerBackend, MixerContext, MixerStep
from dovetail.interfaces.state_rows import StateRows
from dovetail.ops.mixers import TorchMixer
from dovetail.registry.specs import ComponentSpec
from dovetail.testing.mixer import MixerSuite


class WritesPadding(TorchMixer):
    def short_conv(self, x: Any, weight: Any, bias: Any, state: Any, rows: Any, activation: Any = "silu") -> Any:
        state[0] = 0
        return super().short_conv(x, weight, bias, state, rows, activation)

    def short_conv_step(self, x: Any, weight: Any, bias: Any, state: Any, slots: Any, activation: Any = "silu") -> Any:
        state[0] = 0
        return super().short_conv_step(x, weight, bias, state, slots, activation)


class IgnoresFresh(TorchMixer):
    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        rows = dataclasses.replace(rows, fresh=torch.zeros_like(rows.fresh))
        return super().ssd(x, dt, b, c, heads, state, rows)


class AlwaysFresh(TorchMixer):
    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        rows = dataclasses.replace(rows, fresh=torch.ones_like(rows.fresh))
        return super().ssd(x, dt, b, c, heads, state, rows)


class TakesStatesForContiguous(TorchMixer):
    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        natural = torch.as_strided(state, state.shape, torch.empty(state.shape, device="meta").stride())
        return super().ssd(x, dt, b, c, heads, natural, rows)


class ChangesItsInput(TorchMixer):
    def selective_scan(self, x: Any, dt: Any, b: Any, c: Any, channels: Any, state: Any, rows: Any) -> Any:
        out = super().selective_scan(x, dt, b, c, channels, state, rows)
        x.mul_(2)
        return out


class ForgetsStates(TorchMixer):
    def gated_delta_step(self, qkv: Any, gates: Any, state: Any, slots: Any, shape: Any) -> Any:
        return super().gated_delta_step(qkv, gates, state.clone(), slots, shape)


class AnswersInFloat32(TorchMixer):
    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        return super().ssd(x, dt, b, c, heads, state, rows).float()


class AlwaysActivates(TorchMixer):
    def short_conv(self, x: Any, weight: Any, bias: Any, state: Any, rows: Any, activation: Any = "silu") -> Any:
        return super().short_conv(x, weight, bias, state, rows)


class WritesDrafts(TorchMixer):
    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        return super().ssd(x, dt, b, c, heads, state, dataclasses.replace(rows, writes=True))


class AcceptsTooMany(TorchMixer):
    def ssd_advance(
        self, x: Any, dt: Any, b: Any, heads: Any, state: Any, slots: Any, starts: Any, counts: Any
    ) -> None:
        super().ssd_advance(x, dt, b, heads, state, slots, starts, counts + 1)


class AdvancesPadding(TorchMixer):
    def ssd_advance(
        self, x: Any, dt: Any, b: Any, heads: Any, state: Any, slots: Any, starts: Any, counts: Any
    ) -> None:
        super().ssd_advance(x, dt, b, heads, state, slots, starts, counts)
        state[0] = 0


class KeepsTheFirstPlan(TorchMixer):
    first: StateRows | None = None

    def plan(self, step: MixerStep) -> None:
        self.first = self.first or step.prompts

    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        return super().ssd(x, dt, b, c, heads, state, self.first)  # type: ignore[arg-type]


class WritesOnlyFloat32(TorchMixer):
    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        return super().ssd(x, dt, b, c, heads, state.float(), rows)  # a copy, unless they are float32


class SavesNothing(TorchMixer):
    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        return super().ssd(x, dt, b, c, heads, state, dataclasses.replace(rows, saves=None))


class KeepsTheSlotsOfItsCapture(TorchMixer):
    kept: torch.Tensor

    def plan_capture(self, step: MixerStep) -> None:
        self.kept = step.decodes.clone()

    def ssd_step(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, slots: Any) -> Any:
        own = self.kept if len(slots) == len(self.kept) else slots
        return super().ssd_step(x, dt, b, c, heads, state, own)


class KeepsTheRowsOfItsCapture(TorchMixer):
    kept: StateRows

    def plan_capture(self, step: MixerStep) -> None:
        assert step.drafts is not None
        tensors = ("slots", "indptr", "fresh", "chunk_rows", "chunk_starts", "first_chunks")
        clones = {name: getattr(step.drafts, name).clone() for name in tensors}
        self.kept = dataclasses.replace(step.drafts, **clones)

    def ssd(self, x: Any, dt: Any, b: Any, c: Any, heads: Any, state: Any, rows: Any) -> Any:
        return super().ssd(x, dt, b, c, heads, state, self.kept)


def suite(backend: type[TorchMixer], *features: Feature) -> Suite:
    class Suite(MixerSuite):
        name = "torch_native"
        device = "cpu"

        @property
        def spec(self) -> ComponentSpec:
            return dataclasses.replace(super().spec, offers=super().spec.offers | set(features))

        def make(self, context: MixerContext) -> MixerBackend:
            return backend()

    return Suite


SOUND = suite(TorchMixer)
CAPTURED = suite(TorchMixer, Feature.MIXER_GRAPH)
PROMPTS, DRAFTS = "test_prompts_are_the_recurrence", "test_rejected_drafts_leave_no_trace"
SSD, CONV = [("ssd",)], [("short_conv",)]
SOME = [("ssd", (1, 1, 2, 1, 0))]

MUTANTS = [
    Mutant("writes to the slot of padding", PROMPTS, suite(WritesPadding), SOUND, CONV, "a slot was changed"),
    Mutant("continues fresh rows", PROMPTS, suite(IgnoresFresh), SOUND, SSD),
    Mutant("begins every row with zeros", PROMPTS, suite(AlwaysFresh), SOUND, SSD),
    Mutant("takes strided states for contiguous ones", PROMPTS, suite(TakesStatesForContiguous), SOUND, SSD),
    Mutant("changes its input", PROMPTS, suite(ChangesItsInput), SOUND, [("selective_scan",)], "was changed"),
    Mutant("does not write states", "test_decode_steps_are_the_recurrence", suite(ForgetsStates), SOUND, [("kda",)], "a state is wrong"),
    Mutant("writes to the slot of padding", "test_decode_steps_are_the_recurrence", suite(WritesPadding), SOUND, CONV, "a slot was changed"),
    Mutant("begins every row with zeros", "test_rows_may_be_divided", suite(AlwaysFresh), SOUND, SSD, "divided"),
    Mutant("saves nothing", "test_states_within_prompts_are_saved", suite(SavesNothing), SOUND, SSD, "a state is wrong"),
    Mutant("writes only states of float32", "test_states_may_be_bfloat16", suite(WritesOnlyFloat32), SOUND, SSD, "a state is wrong"),
    Mutant("answers in float32", "test_inputs_may_have_16_bits", suite(AnswersInFloat32), SOUND, [("ssd", torch.bfloat16)]),
    Mutant("always activates", "test_convolutions_have_any_width_and_may_have_no_activation", suite(AlwaysActivates), SOUND),
    Mutant("writes the states of drafts", DRAFTS, suite(WritesDrafts), SOUND, SOME, "a slot was changed"),
    Mutant("accepts a draft more than it should", DRAFTS, suite(AcceptsTooMany), SOUND, SOME),
    Mutant("advances padding", DRAFTS, suite(AdvancesPadding), SOUND, SOME, "a slot was changed"),
    Mutant("keeps its first plan", "test_plans_are_followed", suite(KeepsTheFirstPlan), SOUND, SSD),
    Mutant("keeps the slots of its capture", "test_graphs_of_decode_steps", suite(KeepsTheSlotsOfItsCapture, Feature.MIXER_GRAPH), CAPTURED, SSD),
    Mutant("keeps the rows of its capture", "test_graphs_of_drafts", suite(KeepsTheRowsOfItsCapture, Feature.MIXER_GRAPH), CAPTURED, SSD),
]  # fmt: skip
