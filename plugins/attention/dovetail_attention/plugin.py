"""Entry module of the attention plugins: what there is, without importing any of it."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.plugins.hookspecs import hookimpl
from dovetail.plugins.specs import ComponentKind, ComponentSpec, Constraints

TORCH_NATIVE = ComponentSpec(
    kind=ComponentKind.ATTENTION,
    name="torch_native",
    target="dovetail_attention.torch_native:TorchNativeAttention",
    config="dovetail_attention.config:TorchNativeConfig",
    summary="PyTorch's own kernels on any device; the reference on CUDA, the fast one on CPU.",
    offers=frozenset(
        {
            Feature.ATTN_EXTEND,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_TREE_MASK,
            Feature.ATTN_SLIDING_WINDOW,
            Feature.ATTN_SOFT_CAP,
            Feature.ATTN_SINKS,
        }
    ),
    constraints=Constraints(devices=("cpu", "cuda"), dtypes=("float32", "bfloat16", "float16")),
)


@hookimpl
def register_attention_backends() -> Sequence[ComponentSpec]:
    """The backends of this distribution."""
    return (TORCH_NATIVE,)
