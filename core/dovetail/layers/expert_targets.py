"""Name the tensors of experts in checkpoints, in the layouts that Hugging Face writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.layers.transforms import Reshape

if TYPE_CHECKING:
    from dovetail.layers.experts import Experts

ExpertTargets = Iterator[tuple[str, WeightTarget | list[WeightTarget]]]
"""Yield names in a checkpoint and the targets of their tensors, for ``weights_map``."""

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
"""The names of an expert's projections in most checkpoints; Mixtral's are w1, w3 and w2."""


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """Describe tensors that hold all experts. Gate and up are one tensor ``[experts, 2 * size, hidden]`` and down is
    ``[experts, hidden, size]``; biases are ``[experts, 2 * size]`` and ``[experts, hidden]``.

    ``transposed``: the last two dimensions are exchanged (Llama 4, gpt-oss). ``interleaved``: rows of gate and up
    alternate (gpt-oss), otherwise the rows of gate are the first half. ``up_first``: up precedes gate.
    """

    transposed: bool = False
    interleaved: bool = False
    up_first: bool = False


@dataclass(frozen=True, slots=True)
class OneExpert(WeightTransform):
    """Read what a fused tensor holds of one expert, ``[1, rows, columns]`` or the bias ``[1, rows]``, in a layout.
    ``pairs`` stands for rows of gate and up; without it, the rows keep their order."""

    layout: FusedLayout
    pairs: bool = False

    @property
    def keeps_dtype(self) -> bool:
        """See ``WeightTransform``."""
        return True

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return (1, *(reversed(shape) if self.layout.transposed else shape))

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        rows = tensor[0].T if self.layout.transposed and tensor.ndim == 3 else tensor[0]
        if not self.pairs:
            return rows
        gate, up = (rows[1::2], rows[0::2]) if self.layout.up_first else (rows[0::2], rows[1::2])
        return torch.cat((gate, up))


def expert_targets(
    layer: Experts, checkpoint_prefix: str, parameter_prefix: str, names: tuple[str, str, str] = GATE_UP_DOWN
) -> ExpertTargets:
    """Yield the targets of checkpoints with tensors of their own for each expert, such as
    ``{checkpoint_prefix}.7.gate_proj.weight``. ``names`` are those of gate, up and down; experts without a gate have no tensors
    with the first. ``parameter_prefix`` is the name of ``layer`` in the model. The tensors of other ranks' experts have no
    targets."""
    size, share, rows = layer.shape.size, layer.share, layer.shape.rows
    for expert in range(layer.shape.routing.num_experts):
        local = expert - layer.held.start if expert in layer.held else None
        for part, name in enumerate(names[-rows - 1 :]):
            for field in ("weight", "bias") if layer.shape.bias else ("weight",):
                suffix = "_bias" if field == "bias" else ""
                if local is None:
                    target: WeightTarget | list[WeightTarget] = []
                elif part < rows:
                    cut = _part(0, share, size)
                    start = (rows * local + part) * len(share)
                    target = WeightTarget(f"{parameter_prefix}.gate_up{suffix}", start, len(share), cut)
                else:
                    cut = () if suffix else _part(1, share, size)
                    hidden = layer.shape.hidden_size
                    target = WeightTarget(f"{parameter_prefix}.down{suffix}", local * hidden, hidden, cut)
                yield f"{checkpoint_prefix}.{expert}.{name}.{field}", target


def fused_expert_targets(
    layer: Experts,
    checkpoint_prefix: str,
    parameter_prefix: str,
    layout: FusedLayout = FusedLayout(),
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    bias_names: tuple[str, str] = ("gate_up_proj_bias", "down_proj_bias"),
) -> ExpertTargets:
    """Yield the targets of checkpoints whose tensors hold all experts, such as ``{checkpoint_prefix}.gate_up_proj``.
    ``names`` are those of the weights of gate and up and of down; Granite's are ``input_linear.weight`` and
    ``output_linear.weight``."""
    yield f"{checkpoint_prefix}.{names[0]}", _gate_up(layer, f"{parameter_prefix}.gate_up", layout, bias=False)
    yield f"{checkpoint_prefix}.{names[1]}", _down(layer, f"{parameter_prefix}.down", layout)
    if layer.shape.bias:
        yield f"{checkpoint_prefix}.{bias_names[0]}", _gate_up(layer, f"{parameter_prefix}.gate_up_bias", layout, True)
        experts, hidden = _part(0, layer.held, layer.shape.routing.num_experts), layer.shape.hidden_size
        whole = WeightTarget(f"{parameter_prefix}.down_bias", None, None, experts, Reshape((len(layer.held), hidden)))
        yield f"{checkpoint_prefix}.{bias_names[1]}", whole


def _gate_up(layer: Experts, parameter: str, layout: FusedLayout, bias: bool) -> WeightTarget | list[WeightTarget]:
    size, share, number, hidden = (
        layer.shape.size,
        layer.share,
        layer.shape.routing.num_experts,
        layer.shape.hidden_size,
    )
    if not (layout.interleaved or layout.up_first or (layout.transposed and not bias)) and len(share) == size:
        shape = (len(layer.held), 2 * size) if bias else (len(layer.held), 2 * size, hidden)
        return WeightTarget(parameter, None, None, _part(0, layer.held, number), Reshape(shape))
    layout = FusedLayout(layout.transposed and not bias, layout.interleaved, layout.up_first)
    dim = 2 if layout.transposed else 1
    found: list[WeightTarget] = []
    for local, expert in enumerate(layer.held):
        start, one = local * 2 * len(share), TensorShare(0, expert, 1, number)
        if layout.interleaved:
            cut = TensorShare(dim, 2 * share.start, 2 * len(share), 2 * size)
            found.append(WeightTarget(parameter, start, 2 * len(share), (one, cut), OneExpert(layout, pairs=True)))
            continue
        for part in range(2):
            half = size * (part ^ layout.up_first)
            cut = TensorShare(dim, half + share.start, len(share), 2 * size)
            transform = (
                OneExpert(layout)
                if layout.transposed
                else Reshape((1, len(share)) if bias else (1, len(share), hidden))
            )
            found.append(WeightTarget(parameter, start + part * len(share), len(share), (one, cut), transform))
    return found


def _down(layer: Experts, parameter: str, layout: FusedLayout) -> WeightTarget | list[WeightTarget]:
    size, share, number, hidden = (
        layer.shape.size,
        layer.share,
        layer.shape.routing.num_experts,
        layer.shape.hidden_size,
    )
    if not layout.transposed:
        cut = (*_part(0, layer.held, number), *_part(2, share, size))
        return WeightTarget(parameter, None, None, cut, Reshape((len(layer.held), hidden, len(share))))
    return [
        WeightTarget(
            parameter,
            local * hidden,
            hidden,
            (TensorShare(0, expert, 1, number), *_part(1, share, size)),
            OneExpert(layout),
        )
        for local, expert in enumerate(layer.held)
    ]


def _part(dim: int, share: range, whole: int) -> tuple[TensorShare, ...]:
    """Return the share ``share`` of ``whole`` entries of a dimension, unless it is all of them."""
    return () if len(share) == whole else (TensorShare(dim, share.start, len(share), whole),)
