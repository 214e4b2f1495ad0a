"""Define the steps with which the suite of attention backends compares: rows of every kind, alone and together."""

from __future__ import annotations

from dovetail.interfaces.features import Feature
from dovetail.testing.attention_reference import AttentionCase

EXTEND, DECODE, MIXED = Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED
VERIFY, TREE, WINDOW = Feature.ATTN_VERIFY, Feature.ATTN_TREE_MASK, Feature.ATTN_SLIDING_WINDOW
SOFT_CAP, SINKS = Feature.ATTN_SOFT_CAP, Feature.ATTN_SINKS
SHARED_PREFIX, GRAPH, LATENT = Feature.ATTN_SHARED_PREFIX, Feature.ATTN_GRAPH, Feature.ATTN_LATENT

STEPS: dict[str, tuple[AttentionCase, tuple[Feature, ...]]] = {
    "extend": (AttentionCase([0, 0, 0, 0], [1, 5, 33, 16], num_extend=4), (EXTEND,)),
    "extend after a prefix": (AttentionCase([4, 7, 16, 0, 61], [12, 1, 3, 8, 40], num_extend=5), (EXTEND,)),
    "decode": (AttentionCase([0, 3, 4, 15, 16, 17, 63, 130], [1] * 8), (DECODE,)),
    "decode one row": (AttentionCase([37], [1]), (DECODE,)),
    "mixed": (AttentionCase([0, 20, 9, 31, 0], [19, 6, 1, 1, 1], num_extend=2), (MIXED,)),
    "verify chains": (
        AttentionCase([11, 30, 4, 15], [4, 4, 1, 3], trees=[[-1, 0, 1], [-1, 0, 1], [], [-1, 0]]),
        (VERIFY,),
    ),
    "verify and extend": (
        AttentionCase([0, 8, 11, 30], [21, 40, 4, 1], num_extend=2, trees=[[-1, 0, 1], []]),
        (VERIFY, MIXED),
    ),
    "trees": (
        AttentionCase([9, 0, 40, 15], [6, 4, 1, 6], trees=[[-1, -1, 0, 0, 1], [-1, -1, -1], [], [-1, 0, 0, 1, 2]]),
        (VERIFY, TREE),
    ),
    "one tree": (AttentionCase([50], [8], trees=[[-1, -1, 0, 0, 1, 3, 3]]), (VERIFY, TREE)),
    "blocks in place of trees": (
        AttentionCase([9, 0, 40, 3], [6, 4, 2, 16], trees=[[*range(-1, n)] for n in (4, 2, 0, 14)], blocks=True),
        (VERIFY, TREE),
    ),
    "trees and extend": (
        AttentionCase([0, 5, 22, 13], [3, 45, 5, 1], num_extend=2, trees=[[-1, 0, 0, 1], []]),
        (VERIFY, TREE, MIXED),
    ),
}

SHARED_STEPS: dict[str, AttentionCase] = {
    "one group": AttentionCase([64, 70, 90, 65], [1] * 4, groups=[(4, 64)]),
    "groups and single rows": AttentionCase(
        [66, 65, 80, 5, 130, 129, 0, 48, 49, 50], [1] * 10, groups=[(3, 64), (1, 0), (2, 128), (1, 0), (3, 48)]
    ),
    "a group of one": AttentionCase([70, 33, 32], [1] * 3, groups=[(1, 64), (2, 32)]),
    "padding": AttentionCase([40, 33, 12, 50, 0, 0, 0], [1] * 7, groups=[(2, 32), (1, 0), (1, 0)], padding=3),
    "no row shares": AttentionCase([3, 40, 0], [1] * 3, groups=[]),
    "many rows": AttentionCase([16 + row % 19 for row in range(70)], [1] * 70, groups=[(65, 16), (5, 16)]),
}

REPLAYS: tuple[tuple[list[int], list[tuple[int, int]]], ...] = (
    ([70, 65, 300, 0, 17, 16, 15], [(3, 64)]),
    ([299, 299, 299, 290, 299, 280, 299, 299], [(4, 160), (4, 272)]),
    ([5], []),
    ([33, 32, 260, 257, 256], [(2, 32), (3, 256)]),
)
"""Prefixes and groups of decode steps that are replayed one after the other in a graph of ``GRAPH_ROWS`` rows."""
GRAPH_ROWS = 9


def only_phase(phase: Feature) -> dict[str, tuple[AttentionCase, tuple[Feature, ...]]]:
    """Return the steps that need no other phase than this one."""
    return {name: entry for name, entry in STEPS.items() if entry[1] == (phase,)}
