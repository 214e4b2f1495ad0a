"""Register a plugin that `benchmarks/ab_self.py` installs for its own processes: attention that is slow on purpose, and
interpreted kernels.

The interpreted kernels are the Triton kernels on a CPU.
"""

from __future__ import annotations

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Constraints

PLAIN = frozenset({Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED})


@hookimpl
def register_components() -> list[ComponentSpec]:
    """Return ``slowed`` and ``triton_interpreted``."""
    return [
        ComponentSpec(
            kind=ComponentKind.ATTENTION,
            name="slowed",
            target="abplugin_attention:Slowed",
            config="abplugin_config:SlowedConfig",
            summary="torch_native, and every step takes a tenth longer.",
            offers=PLAIN,
            priority=-100,
        ),
        ComponentSpec(
            kind=ComponentKind.ATTENTION,
            name="triton_interpreted",
            target="dovetail_attention.triton.backend:TritonAttention",
            config="abplugin_config:InterpretedConfig",
            summary="The kernels of triton under TRITON_INTERPRET=1.",
            api=(1, 2),
            offers=PLAIN,
            constraints=Constraints(devices=("cpu",)),
            priority=-100,
        ),
    ]
