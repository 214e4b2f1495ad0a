"""Register the backends of experts of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Constraints, Requirement

DTYPES = ("float32", "bfloat16", "float16")
EVERY_LAYER = frozenset(
    {
        Feature.EXPERTS_PLAIN,
        Feature.EXPERTS_FP8_ROWS,
        Feature.EXPERTS_FP8_BLOCKS,
        Feature.EXPERTS_MXFP4,
        Feature.EXPERTS_INT4,
        Feature.EXPERTS_INT8,
        Feature.EXPERTS_GGUF,
        Feature.EXPERTS_BIAS,
        Feature.EXPERTS_SWIGLU,
        Feature.EXPERTS_SCALED_INPUT,
        Feature.EXPERTS_UNGATED,
        Feature.EXPERTS_ADAPTERS,
    }
)

TRITON = ComponentSpec(
    kind=ComponentKind.EXPERTS,
    name="triton",
    target="dovetail_experts.backends:TritonExperts",
    config="dovetail_experts.config:TritonExpertsConfig",
    summary="Dovetail's own kernels on CUDA: pairs sorted by expert, one kernel for gate, up and activation, one for down.",
    api=(1, 1),
    requires=(Requirement("triton", install="pip install triton"),),
    offers=EVERY_LAYER | {Feature.EXPERTS_GRAPH, Feature.EXPERTS_REHEARSAL, Feature.EXPERTS_BATCH_INVARIANT},
    constraints=Constraints(devices=("cuda",), dtypes=DTYPES),
    priority=10,
)

TORCH_NATIVE = ComponentSpec(
    kind=ComponentKind.EXPERTS,
    name="torch_native",
    target="dovetail_experts.backends:TorchExperts",
    config="dovetail_experts.config:TorchExpertsConfig",
    summary="PyTorch's grouped products on the CPU, and compiled ones for few rows.",
    api=(1, 1),
    offers=EVERY_LAYER,
    constraints=Constraints(devices=("cpu",), dtypes=DTYPES),
    priority=10,
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of ``triton`` and ``torch_native``."""
    return (TRITON, TORCH_NATIVE)
