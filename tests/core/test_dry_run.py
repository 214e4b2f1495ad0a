"""Test the forward passes that end after the first layers, with attention of both kinds.

.venv/bin/python -m pytest -q tests/core/test_dry_run.py
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dovetail.engine.dry_run import first_layers
from dovetail.interfaces.attention import AttentionLayer, ProjectedRows
from dovetail.interfaces.model import ModelArchitecture
from dovetail.types import Attends, Batch

LAYERS = 5


class Counting(Attends):
    """Attend by a kernel for projected rows, or not, and count the calls."""

    def __init__(self, *, projected: bool) -> None:
        self.projected, self.calls = projected, list[str]()

    def forward(self, q: torch.Tensor, layer: Any, batch: Batch) -> torch.Tensor:
        self.calls.append("forward")
        return q

    def forward_projected(self, rows: Any, layer: Any, batch: Batch) -> torch.Tensor | None:
        if self.projected:
            self.calls.append("projected")
        return rows.qkv if self.projected else None


def forward(batch: Batch) -> torch.Tensor:
    x = torch.ones(1, 2, 4)
    for index in range(LAYERS):
        layer, attends = AttentionLayer(index, 1.0), batch.attn[0]
        rows = ProjectedRows(x, x, x, None, x)
        found = attends.forward_projected(rows, layer, batch)
        x = attends.forward(x, layer, batch) if found is None else found
    return x


@pytest.mark.parametrize("projected", [True, False])
def test_a_pass_ends_at_the_attention_after_the_first_layers(projected: bool) -> None:
    attends = Counting(projected=projected)
    batch = cast("Batch", SimpleNamespace(attn=(attends,), own=None, input_ids=torch.zeros(1)))
    model = cast("ModelArchitecture", SimpleNamespace(forward=forward, info=SimpleNamespace(hidden_size=4)))
    first_layers(model, batch, LAYERS + 1)
    assert len(attends.calls) == LAYERS
    attends.calls.clear()
    assert first_layers(model, batch, 2).shape == (1, 4)
    assert len(attends.calls) - projected == 2, "a projected row attends before its layer is counted"
    assert set(attends.calls) == {"projected" if projected else "forward"}
    assert batch.attn == (attends,)
