"""Register the quantizations of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Constraints

if TYPE_CHECKING:
    from dovetail.registry.hookspecs import Candidate, ResolveRequest

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

MXFP4 = ComponentSpec(
    kind=ComponentKind.QUANTIZATION,
    name="mxfp4",
    target="dovetail_quantization.mxfp4:Mxfp4",
    config="dovetail_quantization.config:Mxfp4Config",
    describe="dovetail_quantization.mxfp4_formats:describe",
    expert_format="dovetail_quantization.mxfp4_formats:expert_format",
    summary="MXFP4 weights of experts with 16-bit activations, from checkpoints like those of gpt-oss or while loading.",
    api=(1, 1),
    offers=frozenset({Feature.QUANTIZATION_EXPERTS}),
    constraints=Constraints(min_compute_capability=(8, 0)),
)

INTEGER = ComponentSpec(
    kind=ComponentKind.QUANTIZATION,
    name="integer",
    target="dovetail_quantization.integer:Integer",
    config="dovetail_quantization.config:IntegerConfig",
    describe="dovetail_quantization.integer_formats:describe",
    expert_format="dovetail_quantization.integer_formats:expert_format",
    probe="dovetail_quantization.humming_requirements:probe",
    summary="Integer weights of 4 or 8 bits from AWQ, GPTQ and compressed-tensors checkpoints, or rounded while loading.",
    api=(1, 1),
    offers=frozenset({Feature.QUANTIZATION_EXPERTS, Feature.QUANTIZATION_BATCH_INVARIANT}),
)

GGUF = ComponentSpec(
    kind=ComponentKind.QUANTIZATION,
    name="gguf",
    target="dovetail_quantization.gguf:Gguf",
    config="dovetail_quantization.config:GgufConfig",
    describe="dovetail_quantization.gguf_formats:describe",
    expert_format="dovetail_quantization.gguf_formats:expert_format",
    summary="Weights of linear layers and experts in the blocks of GGUF files.",
    api=(1, 1),
    offers=frozenset({Feature.QUANTIZATION_EXPERTS, Feature.QUANTIZATION_BATCH_INVARIANT}),
)

BITSANDBYTES = ComponentSpec(
    kind=ComponentKind.QUANTIZATION,
    name="bitsandbytes",
    target="dovetail_quantization.bnb:Bitsandbytes",
    config="dovetail_quantization.config:BitsandbytesConfig",
    describe="dovetail_quantization.bnb_formats:describe",
    expert_format="dovetail_quantization.bnb_formats:expert_format",
    summary="Weights of 4 bits (NF4, FP4) and of LLM.int8 from checkpoints written with bitsandbytes.",
    api=(1, 1),
    offers=frozenset({Feature.QUANTIZATION_EXPERTS, Feature.QUANTIZATION_BATCH_INVARIANT}),
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of ``fp8``, ``mxfp4``, ``integer``, ``gguf`` and ``bitsandbytes``."""
    return (FP8, MXFP4, INTEGER, GGUF, BITSANDBYTES)


@hookimpl
def adjust_candidates(kind: ComponentKind, request: ResolveRequest, candidates: list[Candidate]) -> None:
    """Veto ``integer`` if its products cannot be used on the machine, which may be assumed, or with the config."""
    if kind != ComponentKind.QUANTIZATION:
        return
    from dovetail_quantization.config import IntegerConfig
    from dovetail_quantization.humming_requirements import refusal

    machine = request.machine
    for candidate in candidates:
        if isinstance(candidate.config, IntegerConfig):
            reason = refusal(
                candidate.config, request.config, machine.compute_capability, machine.device_name, request.dtype
            )
            if reason is not None:
                candidate.veto(reason)
