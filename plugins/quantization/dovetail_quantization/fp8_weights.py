"""Provide what FP8 weights of linear layers and of experts have in common: transforms of tensors, and shares and checks of
scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.model import TensorShare, WeightTransform

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of E4M3."""
_ROWS = 4096
"""The number of rows that are held in float32 at a time."""


def fill_codes(weight: torch.Tensor, scale: torch.Tensor, limit: float, generator: torch.Generator) -> None:
    """Fill codes and scales so that the weight is uniform between ``-limit`` and ``limit``."""
    for rows in weight.split(_ROWS):
        values = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        rows.copy_(values.uniform_(-LARGEST, LARGEST, generator=generator))
    scale.fill_(limit / LARGEST)


def check_codes(codes: torch.Tensor) -> str | None:
    """Check codes (``WeightTarget.check``): E4M3 has two codes for NaN."""
    nan = any(((rows.view(torch.uint8) & 127) == 127).any() for rows in codes.split(_ROWS))
    return "has FP8 codes that are NaN; convert the checkpoint again" if nan else None


def check_scales(scales: torch.Tensor) -> str | None:
    """Check the scales of weights."""
    if scales.isfinite().all():
        return None
    return "has FP8 scales that are not finite numbers; convert the checkpoint again"


def check_input_scales(scales: torch.Tensor) -> str | None:
    """Check scales of activations, by which these are divided."""
    if (scales.isfinite() & (scales > 0)).all():
        return None
    return "has FP8 scales that are not finite numbers above 0; convert the checkpoint again"


def check_computed(scales: torch.Tensor) -> str | None:
    """Check the scales that ``RowScales`` computed."""
    return None if scales.isfinite().all() else "has numbers that are infinite or NaN, and these cannot be quantized"


@dataclass(frozen=True, slots=True)
class QuantizeRows(WeightTransform):
    """Divide each row of a weight by its scale (see ``RowScales``) and round it to FP8, after ``inner``."""

    inner: WeightTransform | None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape if self.inner is None else self.inner.source_shape(shape)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        weight = _after(self.inner, tensor, shape)
        result = torch.empty(shape, dtype=FP8, device=weight.device)
        for rows, place in zip(weight.split(_ROWS), result.split(_ROWS), strict=True):
            whole = rows.float()
            place.copy_(whole / _row_scales(whole))
        return result


@dataclass(frozen=True, slots=True)
class RowScales(WeightTransform):
    """Compute the scale of each row of a weight with ``columns`` columns, after ``inner``: its largest magnitude divided
    by the largest FP8 number."""

    columns: int
    inner: WeightTransform | None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        whole = (shape[0], self.columns)
        return whole if self.inner is None else self.inner.source_shape(whole)

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        weight = _after(self.inner, tensor, (shape[0], self.columns))
        return torch.cat([_row_scales(rows.float()) for rows in weight.split(_ROWS)])


def _after(inner: WeightTransform | None, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor if inner is None else inner.apply(tensor, shape)


def _row_scales(weight: torch.Tensor) -> torch.Tensor:
    """Return the scales ``[rows, 1]`` of a float32 weight. A row of zeros has the scale 1, one with NaN the scale NaN."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest / LARGEST)


def blocks_of(count: int, size: int) -> int:
    """Return the number of blocks of ``size`` that ``count`` rows or columns have."""
    return -(-count // size)


def block_share(name: str, share: TensorShare, block: int) -> TensorShare:
    """Return the share of the scales for a share of the weight."""
    dim, start, size, whole = share
    if start % block or (size % block and start + size < whole):
        raise ConfigError(
            f"{name} is divided into parts of {size} of {whole}, for projections that share the tensor or for ranks, and blocks of "
            f"{block} do not divide these; if parallel.tp is above 1, set it to a smaller number"
        )
    return TensorShare(dim, start // block, blocks_of(size, block), blocks_of(whole, block))
