"""Register the quantizations of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Constraints

FP8 = ComponentSpec(
    kind=ComponentKind.QUANTIZATION,
    name="fp8",
    target="dovetail_quantization.fp8:Fp8",
    config="dovetail_quantization.config:Fp8Config",
    describe="dovetail_quantization.fp8_formats:describe",
    expert_format="dovetail_quantization.fp8_formats:expert_format",
    summary="FP8 weights (E4M3) with scales per tensor, row or block, from checkpoints or while loading.",
    api=(1, 1),
    offers=frozenset({Feature.QUANTIZATION_EXPERTS}),
    constraints=Constraints(min_compute_capability=(8, 9)),
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the spec of ``fp8``."""
    return (FP8,)
