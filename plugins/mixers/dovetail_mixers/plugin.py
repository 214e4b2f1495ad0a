"""Register the backends of layers with a state of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Constraints, Requirement

DTYPES = ("float32", "bfloat16", "float16")
EVERY_OPERATION = frozenset(
    {
        Feature.MIXER_SHORT_CONV,
        Feature.MIXER_GATED_DELTA,
        Feature.MIXER_KDA,
        Feature.MIXER_SSD,
        Feature.MIXER_SELECTIVE_SCAN,
        Feature.MIXER_DRAFTS,
        Feature.MIXER_BFLOAT16_STATES,
    }
)

TRITON = ComponentSpec(
    kind=ComponentKind.MIXER,
    name="triton",
    target="dovetail_mixers.triton:TritonMixers",
    config="dovetail_mixers.config:TritonMixerConfig",
    summary="Dovetail's own kernels on CUDA: prompts in chunks, decode steps that read and write each state once.",
    requires=(Requirement("triton", install="pip install triton"),),
    offers=EVERY_OPERATION | {Feature.MIXER_GRAPH, Feature.MIXER_SNAPSHOTS},
    constraints=Constraints(devices=("cuda",), dtypes=DTYPES),
    priority=20,
)

TORCH_NATIVE = ComponentSpec(
    kind=ComponentKind.MIXER,
    name="torch_native",
    target="dovetail_mixers.torch_native:TorchMixers",
    config="dovetail_mixers.config:TorchMixerConfig",
    summary="PyTorch on any device; the reference of other backends. It cannot be captured.",
    offers=EVERY_OPERATION | {Feature.MIXER_SNAPSHOTS},
    constraints=Constraints(devices=("cpu", "cuda"), dtypes=DTYPES),
    priority=10,
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of ``triton`` and ``torch_native``."""
    return (TRITON, TORCH_NATIVE)
