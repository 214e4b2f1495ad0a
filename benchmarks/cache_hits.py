"""Print how much of known workloads the radix cache finds, for models with several kinds of cache groups.

Run: python benchmarks/cache_hits.py
"""

from __future__ import annotations

from dovetail.interfaces.cache import CacheContext, CacheGroupKind, GroupDescriptor
from dovetail.testing.cache_model import FULL, STATE
from dovetail.testing.cache_workloads import Hits, agents, shared_prefixes, varying_prefixes
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache
from dovetail_cache.tree import RadixTree

SLIDING = GroupDescriptor(CacheGroupKind.SLIDING, 1024, num_bytes=5)
MODELS = {
    "full": (FULL,),
    "full, sliding(1024)": (FULL, SLIDING),
    "full, state": (FULL, STATE),
    "sliding(1024)": (SLIDING,),
    "state": (STATE,),
}


def make(context: CacheContext) -> RadixTree:
    """Return a new cache."""
    return RadixCache(RadixConfig(), context)


def row(workload: str, groups: str, hits: Hits) -> None:
    """Print one line of the table."""
    print(f"| {workload} | {groups} | {hits.found} of {hits.possible} | {100 * hits.rate:.1f} % |")


def main() -> None:
    """Print the table."""
    print("| workload | groups | requests found | prompt tokens found |\n|---|---|---|---|")
    for name, groups in MODELS.items():
        row("64 prompts share 100 tokens", name, shared_prefixes(make, groups, 100))
    for name, groups in MODELS.items():
        row("64 prompts share 1,400 to 1,600 tokens with one", name, varying_prefixes(make, groups))
    same = (17_000 + 5 * 8_000) // 6
    row("sessions, 57,000 bytes", "full, sliding(1024)", agents(make, MODELS["full, sliding(1024)"], (17_000, 8_000)))
    row("sessions, 57,000 bytes", "full for all layers", agents(make, (FULL,), (same,)))
    row("sessions, 17,000 pages, 140 snapshots", "full, state", agents(make, MODELS["full, state"], (17_000, 140)))
    row("sessions, 140 snapshots", "state", agents(make, MODELS["state"], (140,)))


if __name__ == "__main__":
    main()
