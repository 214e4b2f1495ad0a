"""Register the attention backends without importing any of them."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec, Constraints, Requirement

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2")

TORCH_NATIVE = ComponentSpec(
    kind=ComponentKind.ATTENTION,
    name="torch_native",
    target="dovetail_attention.torch_native:TorchNativeAttention",
    config="dovetail_attention.config:TorchNativeConfig",
    summary="PyTorch's kernels on any device; the reference on CUDA, the fast backend on CPU.",
    api=(1, 5),
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
            Feature.ATTN_LATENT,
            Feature.ATTN_EXPANDED,
            Feature.ATTN_SCALES,
        }
    ),
    constraints=Constraints(devices=("cpu", "cuda"), dtypes=DTYPES, kv_dtypes=KV_DTYPES),
)

FLASH_ATTN = ComponentSpec(
    kind=ComponentKind.ATTENTION,
    name="flash_attn",
    target="dovetail_attention.flash_attn.backend:FlashAttention",
    config="dovetail_attention.config:FlashAttnConfig",
    summary="FlashAttention-3 on Hopper, from whichever distribution is installed; FlashAttention-2 on Ampere and later.",
    api=(1, 3),
    offers=frozenset(
        {
            Feature.ATTN_EXTEND,
            Feature.ATTN_REHEARSAL,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_SLIDING_WINDOW,
            Feature.ATTN_SOFT_CAP,
            Feature.ATTN_GRAPH,
            Feature.ATTN_VERIFY_GRAPH,
            Feature.ATTN_SHARED_PREFIX,
            Feature.ATTN_BATCH_INVARIANT,
        }
    ),
    constraints=Constraints(
        devices=("cuda",),
        min_compute_capability=(8, 0),
        max_compute_capability=(9, 0),
        dtypes=("bfloat16", "float16"),
        kv_dtypes=("bfloat16", "float16"),
        head_dims=(64, 96, 128, 192, 256),
    ),
    priority=30,
    probe="dovetail_attention.flash_attn.backend:probe",
)


TRITON = ComponentSpec(
    kind=ComponentKind.ATTENTION,
    name="triton",
    target="dovetail_attention.triton.backend:TritonAttention",
    config="dovetail_attention.config:TritonConfig",
    summary="Dovetail's own kernels, for any head dim, page size and mask, on every GPU from Ampere on that Triton supports.",
    api=(1, 8),
    requires=(Requirement("triton", install="pip install triton"),),
    offers=frozenset(
        {
            Feature.ATTN_EXTEND,
            Feature.ATTN_REHEARSAL,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_TREE_MASK,
            Feature.ATTN_SLIDING_WINDOW,
            Feature.ATTN_SOFT_CAP,
            Feature.ATTN_SINKS,
            Feature.ATTN_LATENT,
            Feature.ATTN_EXPANDED,
            Feature.ATTN_SCALES,
            Feature.ATTN_GRAPH,
            Feature.ATTN_VERIFY_GRAPH,
            Feature.ATTN_SHARED_PREFIX,
            Feature.ATTN_SHARED_WINDOW,
            Feature.ATTN_BATCH_INVARIANT,
            Feature.ATTN_INVARIANT_WINDOW,
        }
    ),
    constraints=Constraints(devices=("cuda",), min_compute_capability=(8, 0), dtypes=DTYPES, kv_dtypes=KV_DTYPES),
    priority=10,
)


FLASHINFER = ComponentSpec(
    kind=ComponentKind.ATTENTION,
    name="flashinfer",
    target="dovetail_attention.flashinfer.backend:FlashInfer",
    config="dovetail_attention.config:FlashInferConfig",
    summary="FlashInfer's kernels on Ampere and later; kernels that are not built yet are compiled on first use.",
    api=(1, 3),
    requires=(Requirement("flashinfer-python", ">=0.6.15", "pip install flashinfer-python"),),
    offers=frozenset(
        {
            Feature.ATTN_EXTEND,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_TREE_MASK,
            Feature.ATTN_SLIDING_WINDOW,
            Feature.ATTN_SOFT_CAP,
            Feature.ATTN_GRAPH,
            Feature.ATTN_BATCH_INVARIANT,
            Feature.ATTN_INVARIANT_WINDOW,
        }
    ),
    constraints=Constraints(
        devices=("cuda",),
        min_compute_capability=(8, 0),
        dtypes=("bfloat16", "float16"),
        kv_dtypes=("bfloat16", "float16", "fp8_e4m3"),
        head_dims=(64, 128, 256),
    ),
    priority=20,
    probe="dovetail_attention.flashinfer.probe:probe",
)


FLASH_ATTN_MLA = ComponentSpec(
    kind=ComponentKind.ATTENTION,
    name="flash_attn_mla",
    target="dovetail_attention.flash_attn.latent:FlashAttentionLatent",
    config="dovetail_attention.config:FlashAttnMLAConfig",
    summary="FlashAttention-3 over latents (MLA) of 512 numbers with rotated keys of 64, on Hopper; few rows are decoded by triton's kernels.",
    api=(1, 4),
    requires=(Requirement("triton", install="pip install triton"),),
    offers=frozenset(
        {
            Feature.ATTN_EXTEND,
            Feature.ATTN_REHEARSAL,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_LATENT,
            Feature.ATTN_EXPANDED,
            Feature.ATTN_GRAPH,
            Feature.ATTN_VERIFY_GRAPH,
            Feature.ATTN_SHARED_PREFIX,
        }
    ),
    constraints=Constraints(
        devices=("cuda",),
        min_compute_capability=(9, 0),
        max_compute_capability=(9, 0),
        dtypes=("bfloat16", "float16"),
        kv_dtypes=("bfloat16", "float16"),
        latent_dims=((576, 512),),
    ),
    priority=20,
    probe="dovetail_attention.flash_attn.latent:probe",
)


FLASHINFER_MLA = ComponentSpec(
    kind=ComponentKind.ATTENTION,
    name="flashinfer_mla",
    target="dovetail_attention.flashinfer.latent:FlashInferLatent",
    config="dovetail_attention.config:FlashInferMLAConfig",
    summary="FlashInfer over latents (MLA) of 512 numbers with rotated keys of 64, on Ampere and later; without CUDA graphs.",
    api=(1, 4),
    requires=(Requirement("flashinfer-python", ">=0.6.15", "pip install flashinfer-python"),),
    offers=frozenset(
        {
            Feature.ATTN_EXTEND,
            Feature.ATTN_DECODE,
            Feature.ATTN_VERIFY,
            Feature.ATTN_MIXED,
            Feature.ATTN_LATENT,
            Feature.ATTN_EXPANDED,
        }
    ),
    constraints=Constraints(
        devices=("cuda",),
        min_compute_capability=(8, 0),
        dtypes=("bfloat16", "float16"),
        kv_dtypes=("bfloat16", "float16"),
        latent_dims=((576, 512),),
    ),
    priority=4,  # below triton, until it was measured
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of the attention backends of this distribution."""
    return (TORCH_NATIVE, TRITON, FLASH_ATTN, FLASHINFER, FLASH_ATTN_MLA, FLASHINFER_MLA)
