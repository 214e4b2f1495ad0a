"""Test that the engine plans steps with the chosen backend of layers with a state, and computes them with it.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_mixer_engine.py
"""

from __future__ import annotations

import pytest
from test_state_plans import make_engine, prompt_of

from dovetail.interfaces.mixer import MixerStep
from dovetail_mixers.torch_native import TorchMixers

__all__ = ["make_engine"]


def test_steps_are_planned_and_computed_by_the_chosen_backend(make_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tuple[list[int], int, list[int]]] = []
    computed = {"short_conv": 0, "short_conv_step": 0, "short_conv_advance": 0}

    def plan(self: TorchMixers, step: MixerStep) -> None:
        rows = [[] if each is None else each.lens.tolist() for each in (step.prompts, step.drafts)]
        plans.append((rows[0], len(step.decodes), rows[1]))

    def counted(name: str):
        original = getattr(TorchMixers, name)

        def call(self: TorchMixers, *given):
            computed[name] += 1
            return original(self, *given)

        return call

    monkeypatch.setattr(TorchMixers, "plan", plan)
    for name in computed:
        monkeypatch.setattr(TorchMixers, name, counted(name))
    run, reference = make_engine("lfm2")
    plans.clear()
    computed.update(dict.fromkeys(computed, 0))
    first, second = run.admit(prompt_of(9, 1), 20), run.admit(prompt_of(5, 2), 20)
    run.step([(first, 9)])
    run.step([(second, 5)], [first])
    run.step([], [first, second])
    run.step([], [first, second], [[3, 4], []])
    layers = run.engine.info.cache_groups[1].num_layers
    assert plans == [([9], 0, []), ([5], 1, []), ([], 2, []), ([], 0, [3, 1])]
    assert computed == {"short_conv": 3 * layers, "short_conv_step": 2 * layers, "short_conv_advance": layers}
    for request in (first, second):
        reference.check(request.tokens[: request.prompt_len].tolist(), request.output, request.logprobs)
    run.engine.close()
