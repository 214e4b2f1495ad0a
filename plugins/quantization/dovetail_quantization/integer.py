"""Store weights as integers of 4 or 8 bits with scales, in one form, read from checkpoints of several formats."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.model import WeightTarget
from dovetail.interfaces.quantization import (
    ExpertsMethod,
    ExpertWeightsShape,
    LinearMethod,
    LinearProduct,
    LinearShape,
    ParameterShape,
    Quantization,
    QuantizationContext,
)
from dovetail.ops.integers import BLOCK, Integers, dequantize, held, numbers_of
from dovetail_quantization import humming_products
from dovetail_quantization.checkpoint import module_index, refuse_unused
from dovetail_quantization.humming_requirements import MULTIPLE, fits_groups, fits_sizes, listed_groups
from dovetail_quantization.integer_experts import IntegerExperts
from dovetail_quantization.integer_formats import IntegerActivations, IntegerLayout, Scheme, read_format
from dovetail_quantization.integer_products import in_order, make_product
from dovetail_quantization.integer_stored import stored_targets
from dovetail_quantization.integer_tensors import check_input_scales, fits_blocks

if TYPE_CHECKING:
    from dovetail_quantization.config import IntegerConfig

logger = logging.getLogger("dovetail.quantization")


class Integer(Quantization):
    """Choose integers for every linear layer and layer of experts that the checkpoint, or config, does not exclude."""

    def __init__(self, config: IntegerConfig, context: QuantizationContext) -> None:
        self._format = read_format(context.checkpoint, config)
        self._context, self._ignore = context, config.ignore
        self._humming = config.products == "humming"
        self._linear: list[IntegerLinear] = []  # with these products, the layers that may have them

    def check_modules(self, names: Collection[str]) -> None:
        """See ``Quantization``."""
        refuse_unused(self._ignore, names)

    def method(self, shape: LinearShape) -> LinearMethod | None:
        """See ``Quantization``."""
        scheme = self._format.scheme_of(shape.names, precise=shape.precise)
        if scheme is None:
            return None
        method = IntegerLinear(shape, scheme, self._context, humming=self._humming)
        if self._humming:
            self._linear.append(method)
        return method

    def check_layers(self) -> None:
        """See ``Quantization``."""
        if not self._humming:
            return
        others = [method for method in self._linear if not method.humming]
        if len(others) == len(self._linear):
            first = f"the first one is {others[0].text}" if others else "none is quantized"
            raise ConfigError(
                f"quantization.products is humming, which can be used for no linear layer of the model; {first}. Allowed: multiples of "
                f"{MULTIPLE} rows and columns on a rank, 4 bits with scales for each {listed_groups()} columns, and no columns in any order "
                "(act-order) that ranks divide. Set quantization.products to triton"
            )
        logger.info(
            "quantization.products is humming: %d linear layers have the products of humming-kernels, and %d those of triton",
            len(self._linear) - len(others),
            len(others),
        )
        self._linear.clear()

    def experts_method(self, shape: ExpertWeightsShape) -> ExpertsMethod | None:
        """See ``Quantization``."""
        scheme = self._format.scheme_of(shape.names)
        return None if scheme is None else IntegerExperts(shape, scheme, self._context)


class IntegerLinear(LinearMethod):
    """Store one layer as ``Integers``, but with ``scale`` and ``zero`` as ``[out, groups]``.

    If groups of columns may be in any order (act-order), ``group_of`` has the group of each column for each module, and
    ``order`` the columns in the order of groups. ``prepare`` sorts the columns of the codes once, in place. A rank that has
    a part of the inputs then holds the scales of all groups.

    With ``humming``, if the sizes of the weight allow it, ``prepare`` also brings the codes into the order of humming-kernels, in
    place; ``_sample`` has some of these codes, by which ``_codes`` knows whether they are in that order.
    """

    def __init__(
        self, shape: LinearShape, scheme: Scheme, context: QuantizationContext, *, humming: bool = False
    ) -> None:
        self.shape, self.scheme, self.context = shape, scheme, context
        self._sample: torch.Tensor | None = None
        group = scheme.group or shape.in_features
        divided = shape.whole_inputs not in (None, shape.in_features)
        whole = shape.whole_inputs or shape.in_features
        if not fits_blocks(shape.in_features, scheme.bits):
            raise ConfigError(
                f"{shape.names[0]} has {shape.in_features} columns on this rank; implemented for integers of 4 bits: multiples of 32. Set "
                "parallel.tp to a smaller number if ranks divide them, or leave the module out"
            )
        if scheme.group is not None and (whole % group or (shape.in_features % group and not scheme.ordered)):
            ranks = "; set parallel.tp to a smaller number" if divided and not whole % group else ""
            raise ConfigError(
                f"{shape.names[0]} has {shape.in_features} columns{' on this rank' if divided else ''}, which groups of {group} do not divide"
                f"{ranks or '; choose another group_size, or leave the module out'}"
            )
        if (
            scheme.activations is not IntegerActivations.WHOLE
            and context.device.type == "cuda"
            and (shape.in_features | shape.out_features) % 8
        ):
            raise ConfigError(
                f"{', '.join(shape.names)} is {shape.out_features} x {shape.in_features} on this rank; int8 products on CUDA need multiples "
                "of 8. Set parallel.tp to a smaller number, or leave the modules out"
            )
        self._all_groups = scheme.ordered and scheme.group is not None and divided
        fits = fits_groups(scheme.bits, scheme.group) and fits_sizes(shape.out_features, shape.in_features)
        self.humming = humming and fits and not self._all_groups
        self.groups = (whole if self._all_groups else shape.in_features) // group if scheme.group else 1

    @property
    def text(self) -> str:
        """Return the modules, the sizes and the scheme for errors."""
        shape = self.shape
        return f"{', '.join(shape.names)}, {shape.out_features} x {shape.in_features} on this rank, stored as {self.scheme}"

    def parameters(self) -> Mapping[str, ParameterShape]:
        """See ``LinearMethod``."""
        shape, scheme = self.shape, self.scheme
        rows, columns, modules = shape.out_features, shape.in_features, len(shape.names)
        codes = ((rows, columns), torch.int8) if scheme.bits == 8 else ((rows, columns // 2), torch.uint8)
        found = {
            "weight": ParameterShape(*codes),
            "scale": ParameterShape((rows, self.groups), torch.float32),
        }
        if scheme.zeros:
            found["zero"] = ParameterShape((rows, self.groups), torch.uint8)
        if scheme.indexed:
            found["group_of"] = ParameterShape((modules, columns), torch.int32)
            found["order"] = ParameterShape((modules, columns), torch.int32)
        if scheme.layout is IntegerLayout.PACKED:
            found["sizes"] = ParameterShape((modules, 2), torch.int64)
        if scheme.activations is IntegerActivations.STATIC:
            found["input_scale"] = ParameterShape((modules,), torch.float32)
        return found

    def targets(self, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
        """See ``LinearMethod``."""
        yield from stored_targets(name, weight, self.scheme, self.shape, all_groups=self._all_groups)
        if self.scheme.activations is IntegerActivations.STATIC:
            yield (
                f"{name}.input_scale",
                WeightTarget("input_scale", module_index(self.shape, weight), 1, check=check_input_scales),
            )

    def fill_dummy(self, parameters: Mapping[str, torch.Tensor], limit: float, generator: torch.Generator) -> None:
        """See ``LinearMethod``."""
        middle = 1 << self.scheme.bits - 1
        codes = parameters["weight"].view(torch.uint8)
        codes.random_(0, 256, generator=generator)
        parameters["scale"].fill_(limit / middle)
        fills = {"zero": middle, "group_of": -1, "order": -1, "input_scale": 1.0, "sizes": 0}
        for name, value in fills.items():
            if name in parameters:
                parameters[name].fill_(value)

    def prepare(self, parameters: Mapping[str, torch.Tensor]) -> LinearProduct:
        """See ``LinearMethod``."""
        static = parameters["input_scale"].max() if "input_scale" in parameters else None
        weight, order = self._held(parameters)
        if self.humming:
            if not humming_products.fits(weight):
                raise ConfigError(
                    f"quantization.products is humming, and {self.shape.names[0]} lists groups with different numbers of columns (g_idx), for "
                    "which it has no products; set it to triton"
                )
            return self._humming_product(weight, order, parameters["weight"])
        invariant = self.context.batch_invariant
        return make_product(
            weight, order, self.scheme.activations, static, self.context.dtype, batch_invariant=invariant
        )

    def dequantized(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See ``LinearMethod``."""
        weight, order = self._held(parameters)
        return in_order(dequantize(weight, self.context.dtype), order)

    def _humming_product(self, weight: Integers, order: torch.Tensor | None, stored: torch.Tensor) -> LinearProduct:
        """Return the product, whose codes take the place of those in ``stored`` unless columns were added."""
        words = humming_products.words_of(weight.codes)
        if weight.codes.shape == stored.shape:
            place = stored.view(-1).view(torch.int32).view_as(words)
            words = place.copy_(words)
            self._sample = _sample_of(stored).clone()
        return humming_products.HummingProduct(words, weight.scales, weight.zeros, order, self.context.dtype)

    def _codes(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the codes as ``ops.integers`` holds them: those in the parameter, or a copy."""
        codes = parameters["weight"]
        if self._sample is None or not _sample_of(codes).equal(self._sample):
            return codes
        return humming_products.codes_of(codes.view(-1).view(torch.int32).view(codes.shape[1] // 8, -1))

    def _held(self, parameters: Mapping[str, torch.Tensor]) -> tuple[Integers, torch.Tensor | None]:
        """Return the weight with sorted columns, and the columns of the input in that order, or None if they were sorted."""
        scales, zeros = parameters["scale"].mT.contiguous(), parameters.get("zero")
        if zeros is not None:
            middle = 1 << self.scheme.bits - 1
            zeros = None if (zeros == middle).all() else zeros.mT.contiguous()
        codes, group_of = self._codes(parameters), self._group_of(parameters)
        if group_of is None:
            return Integers(codes, scales, zeros), None
        order = parameters["order"][0]
        if not _ascending(group_of):
            parameters["group_of"].copy_(group_of[order].expand_as(parameters["group_of"]))
            for rows in codes.split(4096):
                rows.copy_(held(numbers_of(rows)[:, order], self.scheme.bits))
            group_of = parameters["group_of"][0]
        order = None if _ascending(order) else order
        if torch.equal(group_of, self._regular(group_of)):
            return Integers(codes, scales, zeros), order
        return padded(Integers(codes, scales, zeros), group_of, order)

    def _regular(self, group_of: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(len(group_of), dtype=torch.int32, device=group_of.device)
        return columns // (self.scheme.group or len(group_of))

    def _group_of(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the group of each column, or None if columns are in the order of groups and none were stored. Raises
        ``WeightsError`` for lists that cannot be those of this layer."""
        if "group_of" not in parameters:
            return None
        lists, names = parameters["group_of"], self.shape.names
        first = lists[0]
        for name, own in zip(names, lists, strict=True):
            if not own.equal(first) or not parameters["order"][0].equal(parameters["order"][names.index(name)]):
                raise WeightsError(
                    f"{names[0]} and {name} share a layer, and their columns are in different groups (g_idx); implemented: the same ones"
                )
        if (first == -1).all():
            return None
        if first.min() < 0 or first.max() >= self.groups:
            raise WeightsError(
                f"{names[0]} lists groups of columns (g_idx) that it has no scales for; convert the checkpoint again"
            )
        if not self.scheme.ordered and not first.equal(self._regular(first)):
            raise WeightsError(
                f"{names[0]} lists groups of columns (g_idx) in another order, and desc_act of its quantization_config is false; set it to true"
            )
        return first


def padded(weight: Integers, group_of: torch.Tensor, order: torch.Tensor | None) -> tuple[Integers, torch.Tensor]:
    """Return a weight of which a rank has any number of the columns of each group, in groups of ``BLOCK`` columns, of which
    those that fill up a group are zeros; and the column of the input for each of them. ``group_of`` is ascending."""
    codes, scales, zeros = weight
    counts = torch.bincount(group_of, minlength=len(scales))
    sizes = (counts + BLOCK - 1) // BLOCK * BLOCK
    starts, before = sizes.cumsum(0) - sizes, counts.cumsum(0) - counts
    groups = group_of.long()
    columns = torch.arange(len(groups), device=codes.device)
    places = starts[groups] + columns - before[groups]
    owners = torch.repeat_interleave(torch.arange(len(sizes), device=codes.device), sizes)
    whole = len(owners)
    numbers = (
        torch.full((len(codes), whole), 1 << weight.bits - 1, dtype=torch.uint8, device=codes.device)
        if zeros is None
        else zeros[owners].mT.contiguous()
    )
    numbers[:, places] = numbers_of(codes)
    inputs = torch.zeros(whole, dtype=torch.int32, device=codes.device)
    inputs[places] = columns.int() if order is None else order
    of_blocks = owners[::BLOCK]
    own_zeros = None if zeros is None else zeros[of_blocks]
    return Integers(held(numbers, weight.bits), scales[of_blocks], own_zeros), inputs


def _sample_of(codes: torch.Tensor) -> torch.Tensor:
    flat = codes.view(-1)
    return flat[:: max(1, len(flat) // 4096)]


def _ascending(tensor: torch.Tensor) -> bool:
    return bool((tensor[1:] >= tensor[:-1]).all())
