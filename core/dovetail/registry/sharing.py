"""Decide whether decode rows read a prefix that they share once for all of them."""

from __future__ import annotations

from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.registry.resolution import Resolved

LEAST_WINDOW = 1024
"""The shortest window in which reading shared keys once can pay: in shorter ones, rows soon see few of them."""


def why_not_shared(resolved: Resolved) -> str | None:
    """Return why the scheduler does not order decode rows by the prefixes that they share, or None if it does.

    The config must enable it, the prefix cache report shared prefixes, and the attention backend read them once in the first
    cache group of the model that has pages. The other groups follow where ``shares_windows`` allows it. With a drafter, rows have several
    queries. With ``batch_invariant``, the bits of a row must not depend on what other rows share.
    """
    config, model = resolved.config, resolved.model_info
    attention, cache = resolved.attention_decode.spec, resolved.cache.spec
    paged = [group for group in model.cache_groups if group.kind is not CacheGroupKind.STATE]
    kinds = [group.kind for group in paged]
    whole = [kind in (CacheGroupKind.FULL, CacheGroupKind.LATENT) for kind in kinds]
    window = paged[0].window if paged else None
    windows = Feature.ATTN_SLIDING_WINDOW in model.needs and CacheGroupKind.SLIDING not in kinds
    missing = {
        "scheduler.shared_prefixes is false": not config.scheduler.shared_prefixes,
        "batch_invariant is true": config.batch_invariant,
        "speculative is not none": resolved.drafter is not None,
        f"cache {cache.name!r} does not offer {Feature.CACHE_SHARED_PREFIXES}": Feature.CACHE_SHARED_PREFIXES
        not in cache.offers,
        f"attention.decode {attention.name!r} does not offer {Feature.ATTN_SHARED_PREFIX}": Feature.ATTN_SHARED_PREFIX
        not in attention.offers,
        "parallel.attention is data": config.parallel.attention == "data",
        "the model has no cache group with pages": not paged,
        f"the first cache group has a window of {window} tokens, less than {LEAST_WINDOW}": window is not None
        and window < LEAST_WINDOW,
        f"attention.decode {attention.name!r} does not offer {Feature.ATTN_SHARED_WINDOW}": window is not None
        and not shares_windows(resolved, window),
        "a sliding cache group of the model comes before the full or latent one": any(whole) and not whole[0],
        "layers with a sliding window are in a full cache group": windows,
    }
    return next((reason for reason, holds in missing.items() if holds), None)


def shares_windows(resolved: Resolved, window: int | None) -> bool:
    """Return True if decode rows may read shared keys once in layers with this window."""
    offers = resolved.attention_decode.spec.offers
    return window is not None and window >= LEAST_WINDOW and Feature.ATTN_SHARED_WINDOW in offers
