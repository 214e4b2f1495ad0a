"""Build a model from an architecture and its tensors, which the caller provides."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from dovetail.config.kv_scales import KV_SCALE
from dovetail.engine.declared import check_declared
from dovetail.engine.shards import check_filled, transformed
from dovetail.errors import ConfigError, WeightsError
from dovetail.interfaces.experts import ExpertsBackend
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.interfaces.quantization import ExpertWeightsShape, LinearMethod, LinearShape, Quantization
from dovetail.layers.base import deferred_weights, prepare_layers
from dovetail.layers.experts import Experts, use_backend
from dovetail.layers.linear import Linear

EXPERT_WEIGHTS = ("gate_up", "down")
"""The parameters of ``Experts`` that a quantization may replace."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


ModelClass = Callable[[ModelInfo, Mesh], ModelArchitecture]
"""A model class, or a function that builds its model."""


def build_model(
    model_class: ModelClass,
    info: ModelInfo,
    device: torch.device,
    dtype: torch.dtype,
    mesh: Mesh = SINGLE,
    quantization: Quantization | None = None,
    experts: ExpertsBackend | None = None,
    *,
    may_be_plain: bool = False,
) -> ModelArchitecture:
    """Build this rank's share of ``model_class`` for ``info`` on ``device`` in ``dtype``, for inference. Its weights
    are not loaded. ``quantization`` chooses how its linear layers store their weights, and ``experts`` makes the
    products of its layers of experts. Raises ``PluginLoadError`` if its
    layers need features, or keep states, that ``info`` does not declare, and ``ConfigError`` for a layer that cannot be
    quantized, and, unless ``may_be_plain``, if no layer is quantized or ``quantization`` refuses its layers."""
    with torch.device(device), _default_dtype(dtype), nullcontext() if quantization is None else deferred_weights():
        model = model_class(info, mesh)
    if quantization is not None:
        allocate(model, quantization, device, dtype)
        if not may_be_plain:
            _refuse_plain(model, quantization)
            quantization.check_layers()
    if experts is not None:
        use_backend(as_module(model), experts)
    as_module(model).eval().requires_grad_(False)
    check_declared(as_module(model), info, mesh.of_attention.tp.size)
    return model


def as_module(model: ModelArchitecture) -> nn.Module:
    """Return ``model`` typed as a ``torch.nn.Module``, which every architecture must also be."""
    assert isinstance(model, nn.Module), f"{type(model).__name__} must also be a torch.nn.Module"
    return model


def allocate(model: ModelArchitecture, quantization: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Let ``quantization`` choose the method of each linear layer, and of each layer of experts, of a model that was
    built under ``deferred_weights``, and allocate the parameters. Raises ``ConfigError`` for a layer that cannot be
    quantized."""
    modules: dict[str, list[tuple[int, int, str]]] = {}  # of each layer: start, rows and name of the modules it holds
    experts: dict[str, dict[str, None]] = {}  # of each layer of experts: the tensors it holds, in order
    whole: dict[str, int] = {}  # the inputs of layers of which ranks have shares
    for name in list(model.tied_weights()):
        if quantization.stores_tied(name.removesuffix(".weight")):
            model.untie(name)
    tensors = model.weights_map()
    quantization.check_modules([name.removesuffix(".weight") for name in tensors])
    for name, entry in tensors.items():
        for target in as_list(entry):
            layer, _, field = target.parameter.rpartition(".")
            if field == "weight" and name.endswith(".weight"):
                place = (target.start or 0, target.size or -1, name.removesuffix(".weight"))
                modules.setdefault(layer, []).append(place)
                divided = [share.whole for share in target.shares if share.dim == 1]
                if divided and (target.transform is None or target.transform.orders_rows):
                    whole[layer] = divided[0]
            elif field in EXPERT_WEIGHTS:
                experts.setdefault(layer, {})[name.removesuffix(".weight")] = None
    for name, layer in as_module(model).named_modules():
        if isinstance(layer, Linear):
            held, (outputs, inputs) = sorted(modules.get(name, ())), layer.weight.shape
            rows = tuple(outputs if size < 0 else size for _, size, _ in held)
            shape = LinearShape(tuple(theirs for *_, theirs in held), rows, inputs, layer.precise, whole.get(name))
            layer.allocate(quantization.method(shape) if held else None, device, dtype)
        elif isinstance(layer, Experts):
            names, (_, size) = tuple(experts.get(name, ())), layer.down.shape
            own = ExpertWeightsShape(names, len(layer.held), layer.shape.hidden_size, size)
            layer.allocate(quantization.experts_method(own) if names else None, device, dtype)


def _refuse_plain(model: ModelArchitecture, quantization: Quantization) -> None:
    """Raise ``ConfigError`` if no layer of ``model`` is quantized."""
    layers = (layer for layer in as_module(model).modules() if isinstance(layer, Linear | Experts))
    if all(layer.method is None for layer in layers):
        raise ConfigError(
            f"quantization {type(quantization).__name__} leaves out every layer of {model.info.architecture}; set quantization: "
            "none, or another one"
        )


def expanded_targets(model: ModelArchitecture) -> dict[str, list[WeightTarget]]:
    """Return the targets of every tensor of the checkpoint, those of quantized layers included."""
    methods = _target_functions(model)
    found: dict[str, list[WeightTarget]] = {}
    for theirs, entry in model.weights_map().items():
        targets = as_list(entry)
        if not targets:
            found[theirs] = []
        for target in targets:
            for tensor, own in _stored_as(theirs, target, methods):
                found.setdefault(tensor, []).append(own)
    return found


TargetFunction = Callable[[str, WeightTarget], Iterator[tuple[str, WeightTarget]]]
"""Yield the tensors that a quantization stores for the tensor of an unquantized checkpoint, with their targets."""


def _target_functions(model: ModelArchitecture) -> dict[str, TargetFunction]:
    """Return the function ``targets`` of each quantized weight's method, by the parameter that it has in an unquantized
    model."""
    methods: dict[str, TargetFunction] = {}
    for name, layer in as_module(model).named_modules():
        if isinstance(layer, Linear) and layer.method is not None:
            methods[f"{name}.weight"] = partial(_linear_targets, layer.method)
        elif isinstance(layer, Experts) and layer.method is not None:
            methods |= {f"{name}.{own}": layer.method.targets for own in EXPERT_WEIGHTS}
    return methods


def _stored_as(
    name: str, target: WeightTarget, methods: Mapping[str, TargetFunction]
) -> Iterator[tuple[str, WeightTarget]]:
    """Yield the tensors of the checkpoint that fill ``target`` of an unquantized model's tensor ``name``, with their targets."""
    if target.parameter not in methods:
        yield name, target
        return
    layer, _, weight = target.parameter.rpartition(".")
    for tensor, own in methods[target.parameter](name, target._replace(parameter=weight)):
        yield tensor, own._replace(parameter=f"{layer}.{own.parameter}")


def _linear_targets(method: LinearMethod, name: str, weight: WeightTarget) -> Iterator[tuple[str, WeightTarget]]:
    return method.targets(name.removesuffix(".weight"), weight)


class WeightFiller:
    """Copy checkpoint tensors to the places that the model's ``weights_map`` names, and record which are missing.

    The constructor raises ``WeightsError`` if ``weights_map`` does not fill every row of every parameter exactly once.
    """

    def __init__(self, model: ModelArchitecture) -> None:
        self.model = model
        self.parameters = dict(as_module(model).named_parameters())
        self.targets = expanded_targets(model)
        self.used: set[str] = set()
        # modules of other ranks: a quantization may store further tensors of them
        self._others = {name.rpartition(".")[0] for name, targets in self.targets.items() if not targets}
        self._ignored = [re.compile(pattern) for pattern in model.ignored_weights()]
        check_complete(self.parameters, self.targets)

    def fill(self, name: str, read: Callable[[], torch.Tensor]) -> None:
        """Copy what this rank needs of the whole tensor that ``read`` returns into its places, converted to their
        dtype. If the model ignores the tensor, ``read`` is not called. Raises ``WeightsError``."""
        if self.uses(name):
            tensor = read()
            for target, place in self.places_for(name, tensor.shape, tensor.dtype):
                part = tensor
                for share in target.shares:
                    part = part.narrow(share.dim, share.start, share.size)
                transform = target.transform
                place.copy_(part if transform is None else transformed(name, part, transform, place))
                check_filled(name, place, target.check)
            self.used.add(name)

    def uses(self, name: str) -> bool:
        """Return True if the model has a place for the checkpoint's tensor ``name``, and False if it ignores the
        tensor, or if the tensor belongs to a module of another rank. Raises ``WeightsError`` if it does neither."""
        if name in self.targets:
            return True
        if self._belongs_to_others(name) or any(pattern.fullmatch(name) for pattern in self._ignored):
            return False
        if KV_SCALE.fullmatch(name):  # a store reads it, if it has scales
            return False
        stored = self._stored_instead(name)
        raise WeightsError(
            f"the checkpoint has tensor {name}, which the model does not know; check that config.json belongs to this checkpoint"
            if not stored
            else f"the checkpoint has tensor {name}, and its quantization stores that weight in {', '.join(stored)}; if the checkpoint "
            "does not quantize this module, its quantization_config must leave it out"
        )

    def _belongs_to_others(self, name: str) -> bool:
        """Return True if a tensor belongs to a module of another rank, also one such as ``module.weight.absmax``."""
        return any(part in self._others for part in accumulate(name.split(".")[:-1], "{}.{}".format))

    def _stored_instead(self, name: str) -> list[str]:
        """Return the tensors that a quantization reads in place of the tensor ``name``, if it does."""
        entry, methods = self.model.weights_map().get(name, []), _target_functions(self.model)
        return [tensor for target in as_list(entry) for tensor, _ in _stored_as(name, target, methods)]

    def places_for(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | str
    ) -> list[tuple[WeightTarget, torch.Tensor]]:
        """Return the targets of the checkpoint's tensor ``name`` with the rows that each fills, after checking that a
        tensor of this shape and dtype fits there. Raises ``WeightsError`` if it does not. The caller must fill the
        places and add ``name`` to ``used``."""
        found = [(target, self.place(target)) for target in self.targets[name]]
        for target, place in found:
            _check_shape(name, shape, target, place)
            transform = target.transform
            if transform is not None and transform.reads:
                if dtype not in transform.reads:
                    raise WeightsError(f"tensor {name} is {dtype}; supported: {', '.join(map(str, transform.reads))}")
                continue
            converts = place.dtype in FLOATS or (transform is not None and not transform.keeps_dtype)
            if dtype != place.dtype and not (dtype in FLOATS and converts):
                allowed = FLOATS if converts else (place.dtype,)
                raise WeightsError(f"tensor {name} is {dtype}; supported: {', '.join(map(str, allowed))}")
        return found

    def finish(self) -> None:
        """Check that no tensor is missing, fill the rows of those that may be, and prepare the layers. Raises
        ``WeightsError``."""
        self.check_present(self.used)
        for target in (one for name, found in self.targets.items() if name not in self.used for one in found):
            assert target.default is not None
            self.place(target).fill_(target.default)
        prepare_layers(as_module(self.model))

    def check_present(self, names: Container[str]) -> None:
        """Raise ``WeightsError`` unless ``names`` has every tensor that the model needs."""
        missing = [
            name
            for name, targets in self.targets.items()
            if name not in names and any(target.default is None for target in targets)
        ]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise WeightsError(f"the checkpoint lacks {len(missing)} tensors that the model needs: {shown}")

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor ``name``, of which this rank needs at least a part."""
        target = self.targets[name][0]
        return whole_shape(target, tuple(self.place(target).shape))

    def place(self, target: WeightTarget) -> torch.Tensor:
        """Return the rows of a parameter that ``target`` names."""
        parameter = self.parameters[target.parameter]
        if target.start is None or target.size is None:
            return parameter
        return parameter[target.start : target.start + target.size]


def as_list(target: WeightTarget | list[WeightTarget]) -> list[WeightTarget]:
    """Return an entry of ``weights_map`` as a list."""
    return [target] if isinstance(target, WeightTarget) else target


def whole_shape(target: WeightTarget, filled: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the checkpoint tensor of ``target``, which fills rows of shape ``filled``."""
    shape = list(filled if target.transform is None else target.transform.source_shape(filled))
    for share in target.shares:
        shape[share.dim] = share.whole
    return tuple(shape)


def _check_shape(name: str, shape: Sequence[int], target: WeightTarget, place: torch.Tensor) -> None:
    if target.transform is not None and target.transform.any_shape:
        return
    expected = whole_shape(target, tuple(place.shape))
    if tuple(shape) != expected and not math.prod(shape) == math.prod(expected) == 1:
        raise WeightsError(
            f"tensor {name} has shape {list(shape)}; the model expects {list(expected)} (parameter "
            f"{target.parameter}); check that config.json belongs to this checkpoint"
        )


def check_complete(
    parameters: Mapping[str, torch.Tensor], targets: Mapping[str, WeightTarget | list[WeightTarget]]
) -> None:
    """Raise ``WeightsError`` unless the targets cover every row of every parameter exactly once. An error means that
    the model's ``weights_map`` is wrong."""
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in parameters}
    for theirs, target in ((name, one) for name, entry in targets.items() for one in as_list(entry)):
        parameter, start, size = target[:3]
        if parameter not in ranges:
            close = difflib.get_close_matches(parameter, ranges, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise WeightsError(
                f"weights_map sends {theirs} to {parameter}, which is not a parameter of the model{hint}"
            )
        shape = tuple(parameters[parameter].shape)
        rows = _rows(parameters[parameter]) if size is None else size
        ranges[parameter].append((start or 0, rows))
        _check_shares(theirs, target, (rows, *shape[1:]) if shape else shape)
    for name, parts in ranges.items():
        end = 0
        for start, size in sorted(parts):
            if start != end:
                break
            end += size
        if end != _rows(parameters[name]) or end != sum(size for _, size in parts):
            raise WeightsError(
                f"weights_map fills parameter {name} of {_rows(parameters[name])} rows with (start, size) "
                f"{sorted(parts)}: every row must be filled once"
            )


def _rows(parameter: torch.Tensor) -> int:
    """Return the size of dimension 0, or 1 for a single number, which has none."""
    return parameter.shape[0] if parameter.ndim else 1


def _check_shares(theirs: str, target: WeightTarget, filled: tuple[int, ...]) -> None:
    """Raise ``WeightsError`` unless the shares of ``target`` are within their tensor and give what fills rows of shape
    ``filled``."""
    read = filled if target.transform is None else target.transform.source_shape(filled)
    dims = [share.dim for share in target.shares]
    for share in target.shares:
        dim, start, size, whole = share
        fits = dim in range(len(read)) and size == read[dim] and 0 <= start <= start + size <= whole
        if not fits or dims.count(dim) > 1:
            raise WeightsError(
                f"weights_map sends {share} of {theirs} to rows {list(filled)} of {target.parameter}: a share must be within the "
                "tensor, have the size of the rows that it fills, and be the only one of its dimension"
            )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
