"""Resolve configs over plugins made in memory, and return the verdicts. Tests of the resolver share this module."""

from __future__ import annotations

import pytest

from dovetail.errors import ResolutionError
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, Machine, resolve

K = ComponentKind
CPU = Machine.assume("cpu")
H100 = Machine.assume("sm90")
PLAIN = frozenset({Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED})
VERIFY = PLAIN | {Feature.ATTN_VERIFY}
TREE = VERIFY | {Feature.ATTN_TREE_MASK}
DRAFT = frozenset({Feature.DRAFT_CHAIN})
DRAFT_TREE = frozenset({Feature.DRAFT_CHAIN, Feature.DRAFT_TREE})
ROLLBACK = frozenset({Feature.GRAMMAR_ROLLBACK})


def run(fakes, *specs, sets=(), machine=CPU, tuning=None, entries=()):
    registry = fakes.registry(*specs, entries=entries)
    return resolve(fakes.config(registry, *sets), registry, machine, tuning=tuning)


def refusal(fakes, *specs, sets=(), machine=CPU, entries=()):
    with pytest.raises(ResolutionError) as caught:
        run(fakes, *specs, sets=sets, machine=machine, entries=entries)
    return str(caught.value)


def verdicts(resolved, slot):
    return {c.spec.name: (c.verdict, c.stage) for c in resolved.resolution(slot).candidates}


def reasons(resolved, slot, name):
    (candidate,) = (c for c in resolved.resolution(slot).candidates if c.spec.name == name)
    return [r.code for r in candidate.reasons]
