"""Store the weights of experts in the blocks of a GGUF file, or, if all are MXFP4, in the form of ``mxfp4``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dovetail.errors import ConfigError
from dovetail.gguf.block_types import TYPES, BlockType
from dovetail.gguf.mapping import expert_name
from dovetail.interfaces.expert_shapes import ExpertBlocks, ExpertWeights
from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.interfaces.quantization import ExpertsMethod, ExpertWeightsShape, ParameterShape, QuantizationContext
from dovetail.layers.expert_targets import FusedLayout, OneExpert
from dovetail.ops.mxfp4 import BLOCK
from dovetail.ops.packed_blocks import pack, row_bytes
from dovetail_quantization.gguf_blocks import check_columns, fill_random, in_bytes
from dovetail_quantization.gguf_cuda import Packed
from dovetail_quantization.mxfp4 import Mxfp4Experts, ScaleLimit

_ROWS = 16384
"""The number of rows of dummy weights that are packed at a time."""


class ExpertMatrix(NamedTuple):
    """Name a matrix of one expert in the checkpoint, ``[out, in]``, of which this rank has the share ``rows`` and ``columns``: it fills
    ``size`` rows of ``parameter`` from row ``start`` on."""

    name: str
    parameter: str
    start: int
    size: int
    rows: TensorShare | None = None
    columns: TensorShare | None = None

    def target(
        self, parameter: str, shares: tuple[TensorShare, ...], transform: WeightTransform | None
    ) -> WeightTarget:
        """Return the target of what is stored for the matrix."""
        return WeightTarget(parameter, self.start, self.size, shares, transform)


def layer_of(name: str) -> str:
    """Return the beginning of the names of a layer of experts, given the name of one of its tensors without ``.weight``."""
    layer, experts, _ = name.partition(".experts.")
    return layer if experts else name.rpartition(".")[0]


def matrices(name: str, weight: WeightTarget, shape: ExpertWeightsShape) -> Iterator[ExpertMatrix]:
    """Yield the matrices of experts in the checkpoint that fill ``weight``, a target of the unquantized tensor ``name`` of one expert or
    of all. Raises ``ConfigError`` for tensors that are stored otherwise than in GGUF files."""
    shares, begin = {share.dim: share for share in weight.shares}, weight.start or 0
    if weight.transform is None:
        assert weight.size is not None
        yield ExpertMatrix(name, weight.parameter, begin, weight.size, shares.get(0), shares.get(1))
        return
    layout = weight.transform.layout if isinstance(weight.transform, OneExpert) else FusedLayout()
    if layout.up_first:
        raise ConfigError(
            f"{name} is read through {weight.transform}, which is not implemented for blocks of GGUF; set quantization: none"
        )
    experts = shares.get(0)
    first, count = (0, shape.count) if experts is None else (experts.start, experts.size)
    if weight.parameter == "down":
        cut = shares.get(1 if layout.transposed else 2)
        for index in range(count):
            place = begin + index * shape.hidden_size
            own = None if cut is None else cut._replace(dim=1)
            yield ExpertMatrix(
                expert_name(name, first + index, "down_proj"), "down", place, shape.hidden_size, None, own
            )
        return
    cut = shares.get(2 if layout.transposed else 1)
    half, parts = None, ("gate_proj", "up_proj")
    if cut is not None and layout.interleaved:
        half = TensorShare(0, cut.start // 2, cut.size // 2, cut.whole // 2)
    elif cut is not None:  # rows of gate, or of up
        half = TensorShare(0, cut.start % (cut.whole // 2), cut.size, cut.whole // 2)
        parts = (parts[cut.start >= cut.whole // 2],)
    for index in range(count):
        for part in parts:
            yield ExpertMatrix(expert_name(name, first + index, part), "gate_up", begin, shape.size, half)
            begin += shape.size


class GgufExperts(ExpertsMethod):
    """Store a layer of experts as rows of blocks, uint8 ``[rows, bytes]``, on CUDA packed. Gate and up have one type."""

    def __init__(
        self, shape: ExpertWeightsShape, gate_up: BlockType, down: BlockType, context: QuantizationContext
    ) -> None:
        self.shape, self._packed = shape, context.device.type == "cuda"
        self._kinds = {"gate_up": (gate_up, shape.gate_up), "down": (down, shape.down)}
        for kind, (_, columns) in self._kinds.values():
            _check(shape, columns, kind)

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``ExpertsMethod``."""
        return {
            name: ParameterShape((rows, self._bytes(kind, columns)), torch.uint8)
            for name, (kind, (rows, columns)) in self._kinds.items()
        }

    def _bytes(self, kind: BlockType, columns: int) -> int:
        return row_bytes(kind, columns) if self._packed else kind.row_bytes(columns)

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``ExpertsMethod``."""
        for matrix in matrices(name, weight, self.shape):
            kind, (_, columns) = self._kinds[matrix.parameter]
            transform = Packed(kind.name, columns) if self._packed else None
            yield matrix.name, matrix.target(matrix.parameter, _stored_shares(matrix, kind), transform)

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``ExpertsMethod``."""
        for name, (kind, (_, columns)) in self._kinds.items():
            for rows in parameters[name].split(_ROWS):
                blocks = torch.empty(len(rows), kind.row_bytes(columns), dtype=torch.uint8, device=rows.device)
                fill_random(blocks.view(-1, kind.nbytes), kind, limit, generator)
                rows.copy_(pack(blocks, kind) if self._packed else blocks)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """See ``ExpertsMethod``."""
        count, kinds = self.shape.count, [kind.name for kind, _ in self._kinds.values()]
        return ExpertWeights(
            parameters["gate_up"].view(count, 2 * self.shape.size, -1),
            parameters["down"].view(count, self.shape.hidden_size, -1),
            format="gguf",
            blocks=ExpertBlocks(kinds[0], kinds[1], self._packed),
        )


class Mxfp4GgufExperts(Mxfp4Experts):
    """Store a layer of experts in MXFP4 as ``Mxfp4Experts`` does, from the blocks of a GGUF file."""

    def __init__(self, shape: ExpertWeightsShape, context: QuantizationContext) -> None:
        super().__init__(shape, online=False, context=context)
        for _, columns in (shape.gate_up, shape.down):
            _check(shape, columns, TYPES["MXFP4"])

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``ExpertsMethod``."""
        for matrix in matrices(name, weight, self.shape):
            shares = _stored_shares(matrix, TYPES["MXFP4"])
            yield matrix.name, matrix.target(matrix.parameter, shares, Mxfp4Blocks())
            limit = ScaleLimit(matrix.name, self._dtype)
            yield matrix.name, matrix.target(f"{matrix.parameter}_scale", shares, Mxfp4Blocks(limit))


@dataclass(frozen=True, slots=True)
class Mxfp4Blocks(WeightTransform):
    """Read the codes of rows of blocks, ``[rows, in / 2]``, or with a limit of scales these, ``[rows, in / 32]``. A block is a scale,
    then 16 bytes of codes in the order of ``ops.mxfp4``."""

    scales: ScaleLimit | None = None

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """See ``WeightTransform``."""
        return (torch.uint8,)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        rows, columns = shape
        return (rows, (columns if self.scales else columns * 2 // BLOCK) * TYPES["MXFP4"].nbytes)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        blocks = tensor.unflatten(1, (-1, TYPES["MXFP4"].nbytes))
        return blocks[..., 1:].flatten(1) if self.scales is None else self.scales.check(blocks[..., 0])


def _check(shape: ExpertWeightsShape, columns: int, kind: BlockType) -> None:
    """Raise ``ConfigError`` if rows of ``columns`` columns cut a block."""
    if columns % kind.elements:
        raise ConfigError(
            f"the experts of {layer_of(shape.names[0])} have type {kind.name}, whose blocks have {kind.elements} columns, and {columns} columns "
            "on this rank are not a multiple of them; set parallel.experts: ep or parallel.tp to a smaller number if ranks divide them, or "
            "quantization: none"
        )


def _stored_shares(matrix: ExpertMatrix, kind: BlockType) -> tuple[TensorShare, ...]:
    if matrix.columns is not None:
        check_columns(matrix.name, matrix.columns.start, kind)
    columns = None if matrix.columns is None else in_bytes(matrix.columns, kind)
    return tuple(share for share in (matrix.rows, columns) if share is not None)
