"""Test which steps replay a captured sampler.

.venv/bin/python -m pytest -q tests/core/test_decode_runner.py
"""

from types import SimpleNamespace

import numpy as np
import pytest

from dovetail.engine.runners import DecodeGraphRunner, Launched


class Sampler:
    def __init__(self, settings):
        self.settings = settings

    def settings_of(self, batch):
        return self.settings

    def sample(self, batch, logits, masks):
        return "kernel by kernel"


class Graphs:
    def sample(self, graph, rows, settings):
        return "captured"


@pytest.mark.parametrize(
    ("simple", "capturable", "batch_invariant", "expected"),
    [
        (True, True, False, "captured"),
        (False, True, False, "captured"),
        (False, False, False, "kernel by kernel"),
        (True, True, True, "captured"),
        (False, True, True, "kernel by kernel"),  # log-probabilities have the same bits in every step
    ],
)
def test_a_batch_invariant_engine_replays_only_filters_and_random_numbers(
    simple, capturable, batch_invariant, expected
):
    settings = SimpleNamespace(simple=simple, capturable=capturable)
    runner = DecodeGraphRunner(Graphs(), Sampler(settings), batch_invariant=batch_invariant)
    batch = SimpleNamespace(slots=np.ones(3, np.int32))
    assert runner.sample(batch, Launched(runner, None, None), None) == expected
