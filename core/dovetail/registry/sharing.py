"""Decide whether decode rows read a prefix that they share once for all of them."""

from __future__ import annotations

from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.registry.resolution import Resolved


def why_not_shared(resolved: Resolved) -> str | None:
    """Return why the scheduler does not order decode rows by the prefixes that they share, or None if it does.

    The config must enable it, the prefix cache report shared prefixes, and the attention backend read them once. Every layer
    must read the whole past, in one cache group. With a drafter, rows have several queries. With ``batch_invariant``, the
    bits of a row must not depend on what other rows share.
    """
    config, model = resolved.config, resolved.model_info
    attention, cache = resolved.attention_decode.spec, resolved.cache.spec
    windows = Feature.ATTN_SLIDING_WINDOW in model.needs
    missing = {
        "scheduler.shared_prefixes is false": not config.scheduler.shared_prefixes,
        "batch_invariant is true": config.batch_invariant,
        "speculative is not none": resolved.drafter is not None,
        f"cache {cache.name!r} does not offer {Feature.CACHE_SHARED_PREFIXES}": Feature.CACHE_SHARED_PREFIXES
        not in cache.offers,
        f"attention.decode {attention.name!r} does not offer {Feature.ATTN_SHARED_PREFIX}": Feature.ATTN_SHARED_PREFIX
        not in attention.offers,
        "parallel.attention is data": config.parallel.attention == "data",
        "layers of the model have a sliding window": windows,
        f"the model has {len(model.cache_groups)} cache groups": len(model.cache_groups) != 1,
        "layers of the model keep states instead of the past": any(
            group.kind is CacheGroupKind.STATE for group in model.cache_groups
        ),
    }
    return next((reason for reason, holds in missing.items() if holds), None)
