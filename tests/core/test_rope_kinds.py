"""Test rotations of a part of each head, and longrope, against transformers.

Run: python -m pytest tests/core/test_rope_kinds.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from dovetail.errors import ConfigError
from dovetail.interfaces.mesh import SINGLE
from dovetail.layers.linear import ColumnLinear
from dovetail.layers.rope import RopeConfig, RopeKind, read_rope
from dovetail.layers.rotary import Rotary
from dovetail.layers.transforms import SplitHalves
from dovetail.ops.rotary import apply_rotary
from dovetail.testing.ranks import thread_meshes

SHORT, LONG = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


def yarn(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, **settings}}


def longrope(**settings: Any) -> dict[str, Any]:
    section = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG, **settings}
    return {"rope_parameters": section, "original_max_position_embeddings": 64}


def test_both_formats_at_once_must_agree() -> None:
    """A ``rope_scaling`` of model.overrides beside the ``rope_parameters`` of the checkpoint is not ignored."""
    given = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}
    same = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_rope(given | same, 16, 64) == read_rope(given, 16, 64)
    for other in ({"type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 2.0}, {"beta_fast": 8}):
        with pytest.raises(ConfigError, match=r"rope_scaling is .*, and rope_parameters .*allowed: one of them"):
            read_rope(given | {"rope_scaling": other}, 16, 64)


@pytest.mark.parametrize(("head_dim", "partial"), [(12, 0.5), (16, 0.25), (16, 0.75), (8, 1.0)])
def test_a_part_of_each_head_is_rotated_as_transformers_does(head_dim: int, partial: float) -> None:
    """The products of rotated queries and keys are equal: their elements are in another order."""
    torch.manual_seed(0)
    rope = read_rope({"rope_theta": 100.0, "partial_rotary_factor": partial}, head_dim, 64, partial=1.0)
    assert rope.rotary_dim == int(head_dim * partial)
    positions, x = torch.tensor([0, 5, 63]), torch.randn(3, 2, head_dim)
    order = SplitHalves(head_dim, rope.rotary_dim).order
    got = apply_rotary(x[..., order].contiguous(), *Rotary(rope).forward(positions))
    angles = positions[:, None] * 100.0 ** -(torch.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    angles = torch.cat((angles, angles), -1)[None]
    q, k = (x[:, head][None, None] for head in range(2))
    expected_q, expected_k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    expected = torch.stack((expected_q[0, 0], expected_k[0, 0]), 1)
    torch.testing.assert_close(got @ got.mT, expected @ expected.mT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got, expected[..., order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", [{}, {"factor": 8.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("context_len", [64, 256])
def test_longrope_is_that_of_transformers(given: dict[str, float], context_len: int) -> None:
    """The context that is served chooses the factors; the scale of cosines follows from the config alone."""
    config = longrope(**given)
    built = transformers.Phi3Config(
        hidden_size=48, num_attention_heads=4, max_position_embeddings=256, pad_token_id=0, **config
    )
    rope = read_rope({**config, "max_position_embeddings": 256}, 12, 256)
    assert rope.kind is RopeKind.LONGROPE
    assert rope.context_len == 256
    served = replace(rope, context_len=context_len)
    frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](built, torch.device("cpu"), seq_len=context_len)
    torch.testing.assert_close(torch.from_numpy(served.inverse_frequencies()), frequencies, rtol=1e-6, atol=0)
    assert served.scale == pytest.approx(scale)


def test_longrope_may_have_a_scale_for_each_set_of_factors() -> None:
    rope = read_rope(longrope(short_mscale=1.1, long_mscale=1.3), 12, 256)
    assert rope.scale == 1.3
    assert replace(rope, context_len=64).scale == 1.1


def test_the_first_name_of_longrope_is_known() -> None:
    old = {"rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG}, "rope_theta": 1e4}
    assert read_rope({**old, "original_max_position_embeddings": 64}, 12, 256) == read_rope(longrope(), 12, 256)


@pytest.mark.parametrize(
    ("config", "partial", "message"),
    [
        (longrope(long_factor=[1.0] * 5), None, r"long_factor \(rope_parameters\) .* needed: a list of 6 numbers"),
        (longrope(short_factor=[0.0] * 6), None, "short_factor"),
        (longrope(short_factor=None), None, "needs 'short_factor'"),
        (longrope(attention_factor=-1), None, "attention_factor .* allowed: a number above 0"),
        ({"partial_rotary_factor": 0.5}, None, "partial_rotary_factor .* is 0.5; implemented: 1.0"),
        ({"partial_rotary_factor": 1.5}, 1.0, "partial_rotary_factor .* is 1.5; implemented: a number up to 1"),
        ({"partial_rotary_factor": 0.25}, 1.0, "of which 3 elements are rotated"),
        ({"partial_rotary_factor": "half"}, 1.0, "partial_rotary_factor .* is 'half'; allowed: a number above 0"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, None, "rope_parameters has type \\['yarn'\\]"),
        ({"rope_theta": "large"}, None, "rope_theta"),
        ({"original_max_position_embeddings": [8]}, None, "original_max_position_embeddings"),
        (yarn(beta_fast="x"), None, "beta_fast"),
        (yarn(mscale="1", mscale_all_dim=1), None, "mscale"),
        (yarn(attention_factor=[]), None, "attention_factor"),
        (yarn(original_max_position_embeddings=-4), None, "original_max_position_embeddings"),
        (yarn(factor=float("inf")), None, "factor"),
        (yarn(rope_theta=1), None, "rope_theta"),
    ],
)
def test_what_cannot_be_rotated_is_refused(config: dict[str, Any], partial: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rope(config, 12, 256, partial)


def test_a_tensor_of_several_projections_fills_each_in_its_order() -> None:
    """The targets of a fused tensor give every rank what those of separate tensors give it."""
    parts = {"q": 24, "k": 12, "v": 12}
    whole = torch.arange(48.0)
    separate = dict(zip(parts, whole.split(list(parts.values())), strict=True))
    order = SplitHalves(6, 4)
    for mesh in [SINGLE, *thread_meshes(2)]:
        layer = ColumnLinear(3, parts, mesh, unit=6, bias=True, transforms={"q": order, "k": order})
        targets = layer.fused_targets("bias")
        assert [target.parameter for target in targets] == ["bias"] * 3
        for name, target in zip(parts, targets, strict=True):
            (share,) = target.shares
            assert share.whole == 48
            expected, values = layer.target("bias", name), separate[name]
            for one in expected.shares:
                values = values[one.start : one.start + one.size]
            assert whole[share.start : share.start + share.size].equal(values)
            assert target[1:3] == expected[1:3]
            assert target.transform == expected.transform == (None if name == "v" else order)


def test_the_default_rotates_whole_heads() -> None:
    assert read_rope({}, 12, 64) == RopeConfig(12, 10000.0, 64, 64)
    assert read_rope({}, 12, 64, partial=0.5).rotary_dim == 6
