"""Find out where the matrices of an adapter (LoRA) go: which modules of a checkpoint may have an adapter, and which part of a slot
belongs to each."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dovetail.engine.adapter_stacks import ExpertStack, stack_of
from dovetail.engine.build import as_list, as_module
from dovetail.interfaces.model import ModelArchitecture, TensorShare, WeightTarget, WeightTransform
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.experts import Experts
from dovetail.layers.linear import Linear
from dovetail.layers.transforms import Transpose

if TYPE_CHECKING:
    import torch

    from dovetail.config.adapters import AdaptedKind

_ONE_EXPERT = re.compile(r"(?P<prefix>.+)\.(?P<expert>\d+)\.(?P<field>[^.]+)")
_DECODER_LAYER = re.compile(r"(.*?\blayers\.\d+)\..+")
NAMES: Mapping[str, str] = {"experts": "a weight of experts", "embedding": "an embedding", "head": "the head"}
"""What modules of each kind are called in errors."""


class Place(NamedTuple):
    """Describe where the matrices of one module go: to part ``part`` of a region, of whose rows of ``b`` they fill ``size`` from ``start``
    on, and of experts to those of ``expert``, counted from this rank's first one. ``inputs`` and ``outputs`` are this rank's
    shares of them, or None. ``rows`` (int64 ``[size]``) are the outputs that it takes, if they are not consecutive."""

    region: str
    part: int
    start: int
    size: int
    inputs: TensorShare | None = None
    outputs: TensorShare | None = None
    transform: WeightTransform | None = None
    expert: int = 0
    rows: torch.Tensor | None = None


class RegionShape(NamedTuple):
    """Describe what the adapters of a slot have for one product: ``a`` is ``[experts, parts, rank, inputs]`` and ``b [experts, outputs,
    rank]``, without the first dimension unless the product is one of experts. Of an embedding, ``a`` is ``[inputs, rank]``. ``parts`` are (start, size)
    of rows of ``b``."""

    kind: Literal["product", "embedding", "experts"]
    layer: Any
    inputs: int
    outputs: int
    parts: tuple[tuple[int, int], ...]
    experts: int = 1

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of ``a`` and ``b`` of slots of ``rank``."""
        if self.kind == "embedding":
            return (self.inputs, rank), (self.outputs, rank)
        lead = (self.experts,) if self.kind == "experts" else ()
        return (*lead, len(self.parts), rank, self.inputs), (*lead, self.outputs, rank)

    def sizes(self, rank: int) -> tuple[int, int]:
        """Return the numbers of elements of ``a`` and ``b``."""
        a, b = self.shapes(rank)
        return math.prod(a), math.prod(b)


@dataclass(slots=True)
class AdaptedModules:
    """Hold the modules of a model that may have adapters: their ``places``, which are none if another rank holds the module, their
    ``widths`` (inputs and outputs over all ranks) and their ``kinds``. ``refused`` has the other modules, and what they are. ``stacks``
    are the layers of experts, by the names of modules in transformers and in checkpoints; ``regions`` what slots have."""

    places: dict[str, list[Place]] = field(default_factory=dict)
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)
    kinds: dict[str, AdaptedKind] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    stacks: dict[str, ExpertStack] = field(default_factory=dict)
    regions: dict[str, RegionShape] = field(default_factory=dict)

    def stack(self, module: str) -> ExpertStack | None:
        """Return the layer of experts that ``module`` is. Names within a layer of the decoder vary between versions of transformers:
        ``block_sparse_moe.experts``, ``mlp.experts``."""
        found = self.stacks.get(module)
        layer = _DECODER_LAYER.fullmatch(module)
        if found is None and layer is not None and module.endswith(".experts"):
            found = self.stacks.get(layer[1])
        return found


def adapted_modules(model: ModelArchitecture) -> AdaptedModules:
    """Return the modules of ``model`` that may have adapters, of all kinds."""
    found = AdaptedModules()
    layers = dict(as_module(model).named_modules())
    of_experts: dict[str, list[tuple[str, list[WeightTarget]]]] = {}
    for name, targets in _targets(model, layers):
        module = name.removesuffix(".weight")
        owners = {target.parameter.rpartition(".")[0] for target in targets}
        if not targets and not _ONE_EXPERT.fullmatch(module):
            found.refused[module] = NAMES["experts"]  # of other ranks
        elif not targets or any(isinstance(layers.get(owner), Experts) for owner in owners):
            of_experts.setdefault(_expert_key(module, owners), []).append((name, targets))
        else:
            for target in targets:
                owner, _, parameter = target.parameter.rpartition(".")
                _add_layer(found, module, target, owner, layers.get(owner) if parameter == "weight" else None)
    for module in found.refused.keys() & found.places.keys():
        del found.places[module]
    _number_parts(found)
    for owner, layer in layers.items():
        if isinstance(layer, Experts):
            _add_experts(found, owner, layer, of_experts)
    return found


def _targets(model: ModelArchitecture, layers: Mapping[str, Any]) -> Sequence[tuple[str, list[WeightTarget]]]:
    """Return the tensors of the checkpoint and their targets, and the tied head, which has no tensor of its own."""
    found = [(name, as_list(entry)) for name, entry in model.weights_map().items()]
    head = next((name for name, layer in layers.items() if isinstance(layer, LMHead) and layer.tied), None)
    if head is not None:
        found += [(name, [layers[head].target(f"{head}.weight")]) for name in model.tied_weights()]
    return found


def _add_layer(found: AdaptedModules, module: str, target: WeightTarget, owner: str, layer: Any) -> None:
    """Add a module that is, or belongs to, a linear layer or an embedding, or note why it may have no adapter."""
    place = _place_of(target, owner, layer) if isinstance(layer, Linear | Embedding) else None
    if isinstance(layer, Linear) and not layer.adaptable:
        found.refused[module] = "used in other ways than by a product, or computed in float32"
    elif place is None:
        known = isinstance(layer, Linear | Embedding)
        found.refused[module] = "stored in an order that adapters cannot follow" if known else "no linear layer"
    elif isinstance(layer, Embedding):
        rows, hidden = layer.weight.shape
        found.kinds[module] = "embedding"
        found.places[module] = [Place(owner, 0, 0, hidden, inputs=place.outputs)]
        found.widths[module] = place.outputs.whole if place.outputs else rows, hidden
        found.regions[owner] = RegionShape("embedding", layer, rows, hidden, ((0, hidden),))
    else:
        found.kinds[module] = "head" if isinstance(layer, LMHead) else "linear"
        found.places.setdefault(module, []).append(place)
        found.widths[module] = _widths(place, layer)
        found.regions.setdefault(owner, RegionShape("product", layer, layer.in_features, layer.out_features, ()))


def _widths(place: Place, layer: Linear) -> tuple[int, int]:
    inputs = place.inputs.whole if place.inputs else layer.in_features
    if place.outputs:
        return inputs, place.outputs.whole
    return inputs, place.size if place.transform is None else place.transform.source_shape((place.size, 1))[0]


def _place_of(target: WeightTarget, owner: str, layer: Linear | Embedding) -> Place | None:
    """Return where the matrices of a module go whose weight goes to ``target``; None if they cannot."""
    transform, shares = target.transform, {share.dim: share for share in target.shares}
    if isinstance(transform, Transpose):
        transform, shares = None, {1 - dim: share for dim, share in shares.items()}
    start = target.start or 0
    outputs = layer.out_features if isinstance(layer, Linear) else len(layer.weight)
    size = outputs if target.size is None else target.size
    if transform is not None:
        width = 3  # whatever the width, only rows may change
        shape = transform.source_shape((size, width))
        if not transform.keeps_dtype or len(shape) != 2 or shape[1] != width:
            return None
    return Place(owner, 0, start, size, shares.get(1), shares.get(0), transform)


def _number_parts(found: AdaptedModules) -> None:
    """Number the parts of each region in the order of their rows."""
    ranges: dict[str, dict[int, int]] = {}
    for place in (one for places in found.places.values() for one in places):
        ranges.setdefault(place.region, {})[place.start] = place.size
    order = {region: sorted(starts.items()) for region, starts in ranges.items()}
    for region in [region for region in found.regions if region not in order]:
        del found.regions[region]
    for region, parts in order.items():
        found.regions[region] = found.regions[region]._replace(parts=tuple(parts))
    for module, places in found.places.items():
        numbered = [place._replace(part=order[place.region].index((place.start, place.size))) for place in places]
        found.places[module] = numbered


def _expert_key(module: str, owners: Collection[str]) -> str:
    """Return the layer of a tensor of experts: the name of the layer, or, of a tensor of another rank's expert, that of its module
    without the expert."""
    one = _ONE_EXPERT.fullmatch(module)
    return one["prefix"] if one is not None and not owners else next(iter(owners), module)


def _add_experts(
    found: AdaptedModules, owner: str, layer: Experts, tensors: Mapping[str, Sequence[tuple[str, list[WeightTarget]]]]
) -> None:
    """Add the modules of a layer of experts: each projection of each expert, and the layer, whose parameters are the experts'."""
    shape, share, held = layer.shape, len(layer.share), layer.held
    gates = tuple((part * share, share) for part in range(shape.rows))
    up, down = f"{owner}.gate_up", f"{owner}.down"
    found.regions[up] = RegionShape("experts", layer, shape.hidden_size, shape.rows * share, gates, len(held))
    found.regions[down] = RegionShape("experts", layer, share, shape.hidden_size, ((0, shape.hidden_size),), len(held))
    prefixes: set[str] = set()
    whole: list[WeightTarget] = []
    for name, targets in tensors.get(owner, ()):
        module = name.removesuffix(".weight")
        one = _ONE_EXPERT.fullmatch(module)
        if one is None:
            prefix, _, _ = module.rpartition(".")
            prefixes |= {prefix, f"{prefix}.experts"} | ({module} if name.endswith(".weight") else set())
            found.refused[module] = NAMES["experts"]
            whole += targets
        elif name.endswith(".weight") and len(targets) == 1:
            prefixes.add(one["prefix"])
            place = _place_of_expert(targets[0], up, down, layer)
            found.places[module], found.kinds[module] = [place], "experts"
            found.widths[module] = (
                (shape.hidden_size, shape.size) if place.region == up else (shape.size, shape.hidden_size)
            )
    _add_others(found, layer, [entry for prefix in prefixes for entry in tensors.get(prefix, ())])
    stack = stack_of(layer, up, down, whole)
    in_decoder = {match[1] for prefix in prefixes if (match := _DECODER_LAYER.fullmatch(prefix)) is not None}
    found.stacks |= dict.fromkeys(prefixes | in_decoder, stack)


def _add_others(found: AdaptedModules, layer: Experts, tensors: Sequence[tuple[str, list[WeightTarget]]]) -> None:
    """Add the modules of the experts of other ranks, which are as wide as those of this rank's experts."""
    for name, _ in tensors:
        module = name.removesuffix(".weight")
        one = _ONE_EXPERT.fullmatch(module)
        if one is not None and name.endswith(".weight"):
            widths = found.widths[f"{one['prefix']}.{layer.held.start}.{one['field']}"]
            found.places[module], found.widths[module], found.kinds[module] = [], widths, "experts"


def _place_of_expert(target: WeightTarget, up: str, down: str, layer: Experts) -> Place:
    """Return where the matrices of one projection of one expert go."""
    assert target.start is not None
    assert target.size is not None
    shares = {share.dim: share for share in target.shares}
    if target.parameter.endswith(".down"):
        return Place(down, 0, 0, target.size, shares.get(1), expert=target.start // layer.shape.hidden_size)
    expert, start = divmod(target.start, layer.shape.rows * len(layer.share))
    return Place(up, start // len(layer.share), start, target.size, None, shares.get(0), expert=expert)
