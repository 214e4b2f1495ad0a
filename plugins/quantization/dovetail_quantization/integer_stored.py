"""Name the tensors with which checkpoints store a weight as integers, and where they go."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.interfaces.quantization import LinearShape
from dovetail_quantization.checkpoint import module_index
from dovetail_quantization.integer_formats import IntegerLayout, Scheme
from dovetail_quantization.integer_tensors import (
    Index,
    Packing,
    Rounded,
    ScaleRows,
    Sizes,
    Unpacked,
    Whole,
    check_rounded,
    check_scales,
    share_of,
)

Targets = Iterator[tuple[str, WeightTarget]]


def stored_targets(name: str, weight: WeightTarget, scheme: Scheme, shape: LinearShape, *, all_groups: bool) -> Targets:
    """Yield the tensors of module ``name`` and their targets (see ``LinearMethod.targets``). With ``all_groups`` this rank
    needs the scales of all groups of columns, whichever columns it has."""
    inner = weight.transform
    if scheme.layout is IntegerLayout.ONLINE:
        yield from rounded_targets(f"{name}.weight", weight, scheme, shape.in_features)
        return
    if inner is not None and not inner.orders_rows:
        raise ConfigError(f"{name} is read through {inner}, which is not implemented for stored integers")
    yield from matrix_targets(name, weight, scheme, all_groups=all_groups)
    if scheme.indexed:
        columns = tuple(share._replace(dim=0) for share in weight.shares if share.dim == 1)
        first = 0 if all_groups else _first_group(columns, scheme)
        module = module_index(shape, weight)
        tensor = f"{name}.g_idx" if scheme.layout is IntegerLayout.GPTQ else f"{name}.weight_g_idx"
        default = None if scheme.ordered else -1.0
        yield tensor, WeightTarget("group_of", module, 1, columns, Index(first), default=default)
        yield tensor, WeightTarget("order", module, 1, columns, Index(sorts=True), default=default)
    if scheme.layout is IntegerLayout.PACKED:
        rows, columns = shape.out_features if weight.size is None else weight.size, shape.in_features
        yield sizes_target(name, weight, "sizes", module_index(shape, weight), (rows, columns))


def matrix_targets(
    name: str,
    weight: WeightTarget,
    scheme: Scheme,
    *,
    all_groups: bool = False,
    scale: str = "scale",
    zero: str = "zero",
) -> Targets:
    """Yield the tensors of codes, scales and zero points. The latter go to the parameters ``scale`` and ``zero``."""
    inner, bits, shares = weight.transform, scheme.bits, weight.shares
    divided = [_group_share(name, share, scheme) for share in shares if share.dim == 0 or not all_groups]
    scales = tuple(share for share in divided if share is not None)
    if scheme.layout in (IntegerLayout.AWQ, IntegerLayout.GPTQ):
        awq = scheme.layout is IntegerLayout.AWQ
        codes = Packing(bits, 1 if awq else 0, transposed=True, interleaved=awq)
        zeros = Packing(bits, 1, transposed=True, interleaved=awq, added=scheme.missing)
        tensors = (f"{name}.qweight", f"{name}.scales", f"{name}.qzeros")
        of_scales = ScaleRows(inner, transposed=True)
    else:
        codes, zeros = Packing(bits, 1), Packing(bits, 0)
        packed = scheme.layout is IntegerLayout.PACKED
        tensors = (f"{name}.weight{'_packed' if packed else ''}", f"{name}.weight_scale", f"{name}.weight_zero_point")
        of_scales = ScaleRows(inner, single=scheme.by_tensor)
    plain = scheme.layout is IntegerLayout.PLAIN
    of_codes: WeightTransform = Whole(tensors[0], bits, "codes", inner) if plain else Unpacked(codes, "codes", inner)
    stored = shares if plain else tuple(_packed_share(tensors[0], share, codes) for share in shares)
    yield tensors[0], weight._replace(shares=stored, transform=of_codes)
    own = () if scheme.by_tensor else tuple(_turned(share, of_scales.transposed) for share in scales)
    yield tensors[1], weight._replace(parameter=scale, shares=own, transform=of_scales, check=check_scales)
    if scheme.zeros:
        of_zeros: WeightTransform = (
            Whole(tensors[2], bits, "zeros", inner) if plain else Unpacked(zeros, "zeros", inner)
        )
        own = scales if plain else tuple(_packed_share(tensors[2], share, zeros) for share in scales)
        yield tensors[2], weight._replace(parameter=zero, shares=own, transform=of_zeros)


def rounded_targets(name: str, weight: WeightTarget, scheme: Scheme, columns: int, scale: str = "scale") -> Targets:
    """Yield the targets of a weight that is quantized while it is read."""
    group, inner = scheme.group or columns, weight.transform
    yield name, weight._replace(transform=Rounded(scheme.bits, group, columns, "codes", inner))
    scales = Rounded(scheme.bits, group, columns, "scales", inner)
    yield name, weight._replace(parameter=scale, transform=scales, check=check_rounded)


def _turned(share: TensorShare, transposed: bool) -> TensorShare:
    return share._replace(dim=1 - share.dim) if transposed else share


def _packed_share(name: str, share: TensorShare, packing: Packing) -> TensorShare:
    """Return the share of a packed tensor for a share of the numbers ``[out, in]``."""
    share = _turned(share, packing.transposed)
    return share_of(name, share, packing.each if share.dim == packing.dim else 1, share.dim)


def _group_share(name: str, share: TensorShare, scheme: Scheme) -> TensorShare | None:
    """Return the share of scales ``[out, groups]``; None if all of them are needed."""
    if share.dim == 0:
        return share
    return None if scheme.group is None else share_of(f"{name}, whose scales", share, scheme.group, 1)


def _first_group(columns: tuple[TensorShare, ...], scheme: Scheme) -> int:
    return columns[0].start // scheme.group if columns and scheme.group else 0


def sizes_target(
    name: str, weight: WeightTarget, parameter: str, module: int, own: tuple[int, int]
) -> tuple[str, WeightTarget]:
    """Return the tensor with the sizes of a packed weight, of which a rank has ``own`` rows and columns, and its target."""
    sizes = [*own]
    for share in weight.shares:
        sizes[share.dim] = share.whole
    check = _SizesAre(sizes[0], sizes[1]).check
    return f"{name}.weight_shape", WeightTarget(parameter, module, 1, (), Sizes(), check, default=0.0)


class _SizesAre:
    """Check the sizes that a checkpoint lists of a packed weight."""

    def __init__(self, rows: int, columns: int) -> None:
        self._expected = torch.tensor((rows, columns))

    def check(self, sizes: torch.Tensor) -> str | None:
        """See ``WeightTarget``."""
        if sizes.cpu().equal(self._expected[None]):
            return None
        return f"says {sizes[0].tolist()}, and the model's weight is {self._expected.tolist()}; check that config.json belongs to this checkpoint"
