"""Check whether the kernels that ``batch_invariant`` needs can be used, without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail_attention.config import FlashInferConfig


def probe(section: FlashInferConfig, config: Config) -> str | None:
    """Return why ``fa3``, which does not divide keys, cannot serve all rows of this config. None if it can or need
    not."""
    if not config.batch_invariant:
        return None
    if section.variant == "fa2":
        return (
            "batch_invariant is true and attention.variant is fa2, whose tiles depend on the batch; allowed: auto, fa3"
        )
    if config.memory.kv_dtype.startswith("fp8"):
        return (
            f"batch_invariant is true and memory.kv_dtype is {config.memory.kv_dtype}; the fa3 kernels that batch_invariant needs "
            "read keys of the model's dtype"
        )
    return None
