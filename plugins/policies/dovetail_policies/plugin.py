"""Register the schedule policies of this package. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.features import Feature
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec

FCFS = ComponentSpec(
    kind=ComponentKind.POLICY,
    name="fcfs",
    target="dovetail_policies.simple:Fcfs",
    config="dovetail_policies.config:FcfsConfig",
    summary="First come, first served.",
    priority=10,
)

PRIORITY = ComponentSpec(
    kind=ComponentKind.POLICY,
    name="priority",
    target="dovetail_policies.simple:Priority",
    config="dovetail_policies.config:PriorityConfig",
    summary="Highest request priority first, with ageing.",
)

LPM = ComponentSpec(
    kind=ComponentKind.POLICY,
    name="lpm",
    target="dovetail_policies.lpm:LongestPrefixMatch",
    config="dovetail_policies.config:LpmConfig",
    summary="Longest cached prefix first, with a bound on waiting.",
    offers=frozenset({Feature.POLICY_PREFIX_AWARE}),
    needs=frozenset({Feature.CACHE_REUSE}),
)

DFS_WEIGHT = ComponentSpec(
    kind=ComponentKind.POLICY,
    name="dfs_weight",
    target="dovetail_policies.dfs_weight:DfsWeight",
    config="dovetail_policies.config:DfsWeightConfig",
    summary="Requests that share a prefix one after another, the largest groups first, with a bound on waiting.",
    needs=frozenset({Feature.CACHE_REUSE}),
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of ``fcfs``, ``priority``, ``lpm`` and ``dfs_weight``."""
    return (FCFS, PRIORITY, LPM, DFS_WEIGHT)
