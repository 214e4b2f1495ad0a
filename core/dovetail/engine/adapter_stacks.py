"""Read the matrices that PEFT writes for a parameter of all experts of a layer.

PEFT saves one matrix ``a`` and one ``b`` for a parameter ``[experts, x, y]``. Since version 0.20, ``a`` belongs to the inputs of the
experts and ``b`` to their outputs; before, they may be exchanged, depending on the order of the parameter's dimensions. The names of
the tensors do not say which parameter is meant: a layer of which two are adapted has them nested in one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.engine.peft import MOST_RANK, PeftConfig, StackedLowRank
from dovetail.errors import WeightsError
from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.layers.expert_targets import OneExpert

if TYPE_CHECKING:
    from dovetail.layers.experts import Experts

FIELDS = ("gate_up_proj", "down_proj")
"""The names of the parameters in transformers."""
_SAME_ORDER = (0, 20)
"""The version of PEFT from which on ``a`` belongs to the inputs."""


class ExpertStack(NamedTuple):
    """Describe a layer of experts: its ``layer``, the regions ``up`` and ``down`` of a slot, and for each part of ``up`` the rows of the parameter
    ``gate_up_proj`` that this rank has (int64)."""

    layer: Experts
    up: str
    down: str
    parts: tuple[torch.Tensor, ...]

    @property
    def widths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the numbers of inputs and outputs of the parameters ``FIELDS``."""
        shape = self.layer.shape
        return (shape.hidden_size, 2 * shape.size), (shape.size, shape.hidden_size)

    @property
    def share(self) -> TensorShare | None:
        """Return this rank's share of the inputs of ``down_proj``, or None if it has all of them."""
        own, whole = self.layer.share, self.layer.shape.size
        return None if len(own) == whole else TensorShare(1, own.start, len(own), whole)


class Side(NamedTuple):
    """Describe a pair of matrices: which of ``FIELDS`` it is for, whether they are exchanged, its rank and its scale."""

    field: int
    exchanged: bool
    rank: int
    scale: float


def stack_of(layer: Experts, up: str, down: str, targets: Sequence[WeightTarget]) -> ExpertStack:
    """Return the layer of experts whose regions are ``up`` and ``down``. ``targets`` are those of tensors that hold all experts, if the checkpoint has
    such tensors."""
    size, share = layer.shape.size, layer.share
    rows = torch.cat([torch.arange(share.start, share.stop) + part * size for part in range(2)])
    for target in (each for each in targets if each.parameter == up):
        if target.start is None or target.size is None or target.start >= len(rows):
            continue  # all experts at once, in this order, or another expert, whose order is the same
        transposed = isinstance(target.transform, OneExpert) and target.transform.layout.transposed
        dim = 2 if transposed else 1
        order = torch.arange(2 * size).reshape((1, 1, -1) if transposed else (1, -1, 1))
        for cut in (each for each in target.shares if each.dim == dim):
            order = order.narrow(dim, cut.start, cut.size)
        if target.transform is not None:
            order = target.transform.apply(order, (target.size, 1))
        rows[target.start : target.start + target.size] = order.flatten()
    return ExpertStack(layer, up, down, rows.chunk(2))


def sides_of(stack: ExpertStack, module: str, pairs: Sequence[StackedLowRank], config: PeftConfig) -> list[Side]:
    """Return what each of the ``pairs`` of a module is. Raises ``WeightsError`` if one does not fit the layer, or if that is not
    known."""
    if stack.layer.shape.ungated:
        raise WeightsError(
            f"{pairs[0].a.file} has {pairs[0].a.name:.200}, an adapter of a parameter of all experts; implemented for experts without a "
            "gate: adapters of the projections of each expert"
        )
    possible = [_possible(stack, module, pair) for pair in pairs]
    known = {fits[0][1] for fits in possible if len(fits) == 1}
    found: list[Side] = []
    for fits, pair in zip(possible, pairs, strict=True):
        if len(fits) > 1 and len(known) != 1 and config.version < _SAME_ORDER:
            raise WeightsError(
                f"{pair.a.file}: the matrices of {module:.200} have as many inputs as outputs, and PEFT {'.'.join(map(str, config.version)) or 'before 0.18'} "
                "does not tell which is which; allowed: adapters saved by PEFT 0.20 or later"
            )
        field, exchanged = fits[0] if len(fits) == 1 else (fits[0][0], known == {True})
        if any(side.field == field for side in found):
            raise WeightsError(f"{pair.a.file} has matrices of {FIELDS[field]} of {module:.200} twice")
        found.append(_side(stack, module, pair, config, field, exchanged))
    return found


def _possible(stack: ExpertStack, module: str, pair: StackedLowRank) -> list[tuple[int, bool]]:
    """Return the parameters that the matrices fit, each with whether they are exchanged."""
    given = pair.a.shape[1], pair.b.shape[0]
    fits = [
        (field, exchanged)
        for field, widths in enumerate(stack.widths)
        for exchanged in (False, True)
        if given == (widths[::-1] if exchanged else widths)
    ]
    if not fits:
        raise WeightsError(
            f"{pair.a.file}: the matrices of {module:.200} have {given[0]} inputs and {given[1]} outputs; the model has "
            + " and ".join(f"{w[0]} and {w[1]} ({name})" for name, w in zip(FIELDS, stack.widths, strict=True))
        )
    return fits


def _side(
    stack: ExpertStack, module: str, pair: StackedLowRank, config: PeftConfig, field: int, exchanged: bool
) -> Side:
    key, experts = f"{module}.{FIELDS[field]}", stack.layer.shape.routing.num_experts
    if key not in config.parameters_of(module):
        raise WeightsError(f"{pair.a.file} has matrices of {key:.200}, which target_parameters does not name")
    rank = config.rank_of(key)
    if not pair.a.shape[0] == pair.b.shape[1] == rank * experts:
        raise WeightsError(
            f"{pair.a.file}: {key:.200} has matrices of {list(pair.a.shape)} and {list(pair.b.shape)}; the rank in adapter_config.json "
            f"is {rank}, and the model has {experts} experts"
        )
    assert rank <= MOST_RANK
    return Side(field, exchanged, rank, config.scale_of(key))


def expert_matrices(
    a: torch.Tensor, b: torch.Tensor, side: Side, expert: int, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of one expert, ``[rank, in]`` and ``[out, rank]``."""
    first, second = a.unflatten(0, (experts, side.rank))[expert], b.unflatten(1, (side.rank, experts))[:, :, expert]
    return (second.T, first.T) if side.exchanged else (first, second)
