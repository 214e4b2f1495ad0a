"""Test when a decoder layer leaves one token to ``OneRow``.

.venv/bin/python -m pytest -q tests/core/test_decoder_layer.py
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from dovetail.interfaces.mesh import SINGLE
from dovetail.layers.attention import AttentionShape
from dovetail.layers.decoder import DecoderLayer, DecoderShape
from dovetail.ops.parts import Summed

NOTHING = cast(Any, None)


class Doubled(nn.Module):
    """Stand in for attention and for the MLP."""

    def parts_forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return 2 * x


class Unchanged(nn.Module):
    """Stand in for norms: they return what they get, and add in place."""

    def add_forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return (x if residual is None else x.add_(residual)), x


class OneToken:
    """Stand in for ``OneRow``."""

    def takes(self, x: Any, residual: torch.Tensor | None) -> bool:
        return len(x) == 1

    def forward(self, stream: torch.Tensor, *_: Any) -> torch.Tensor:
        return stream + 100


@pytest.fixture
def layer() -> DecoderLayer:
    made = DecoderLayer(DecoderShape(AttentionShape(8, 2, 1, 4), 16, 1e-5), 0, SINGLE)
    made.attn, made.mlp = cast(Any, Doubled()), cast(Any, Doubled())
    made.attn_norm = made.mlp_norm = cast(Any, Unchanged())
    return made


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_norm_may_return_its_input(layer: DecoderLayer, tokens: int) -> None:
    """That ``enter`` returns one tensor twice leaves nothing to ``OneRow`` if there is none."""
    x = torch.ones(tokens, 8)
    added, stream = layer.forward(*layer.enter(x), NOTHING, NOTHING)
    assert torch.equal(stream, torch.full((tokens, 8), 3.0))
    assert torch.equal(cast(Any, added), torch.full((tokens, 8), 6.0))


def test_one_token_is_left_to_one_row(layer: DecoderLayer) -> None:
    layer._one_row = cast(Any, OneToken())
    added, stream = layer.forward(*layer.enter(torch.ones(1, 8)), NOTHING, NOTHING)
    assert isinstance(added, Summed)
    assert added.total is stream
    assert torch.equal(stream, torch.full((1, 8), 101.0))
