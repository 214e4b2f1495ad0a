"""Test hand-made conflicts: each refusal names the two parts, the feature, and the smallest change that resolves it.

Run: pytest tests/core/test_explain_conflicts.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from dovetail.cli import main
from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.registry import ComponentKind, Constraints, Machine, resolve

K = ComponentKind
PLAIN = frozenset({Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED})
VERIFY = PLAIN | {Feature.ATTN_VERIFY}
TREE = VERIFY | {Feature.ATTN_TREE_MASK}
CHAIN = frozenset({Feature.DRAFT_CHAIN})
TREES = frozenset({Feature.DRAFT_CHAIN, Feature.DRAFT_TREE})


@dataclass(frozen=True)
class Conflict:
    """Describe a conflict. ``parts`` and ``feature`` must be named; ``fixes`` are all of the smallest changes, and
    each of them resolves it."""

    sets: tuple[str, ...]
    parts: tuple[str, str]
    feature: str
    fixes: frozenset[str]
    machine: Machine = field(default_factory=lambda: Machine.assume("cpu"))
    model: dict = field(default_factory=dict)


CONFLICTS = {
    "a tree of drafts over attention without tree masks": Conflict(
        ("speculative=trees", "attention=chains"),
        ("speculative 'trees'", "'chains'"),
        "attention.tree_mask",
        frozenset({"attention: treelike", "speculative: ngram", "speculative: none"}),
    ),
    "drafts over attention that cannot verify": Conflict(
        ("speculative=ngram", "attention=simple"),
        ("speculative 'ngram'", "'simple'"),
        "attention.verify",
        frozenset({"attention: chains", "attention: treelike", "attention: plain", "speculative: none"}),
    ),
    "an order by cached prefixes without a cache": Conflict(
        ("policy=lpm", "cache=none"),
        ("policy 'lpm'", "cache is 'none'"),
        "cache.reuse",
        frozenset({"cache: tree", "policy: fcfs"}),
    ),
    "drafts under a grammar that cannot go back": Conflict(
        ("speculative=ngram", "grammar=forward", "attention=plain"),
        ("speculative 'ngram'", "grammar is 'forward'"),
        "grammar.rollback",
        frozenset({"grammar: back", "grammar: none", "speculative: none"}),
    ),
    "trees of drafts over recurrent state": Conflict(
        ("speculative=trees", "attention=treelike"),
        ("speculative 'trees'", "model 'FakeForCausalLM' keeps recurrent state"),
        "drafts that are chains",
        frozenset({"speculative: ngram", "speculative: none"}),
        model={"cache_groups": (CacheGroup(1, 2, 64), CacheGroup.of_states(1, (StateShape((3,)),)))},
    ),
    "graphs over attention that cannot be captured": Conflict(
        ("graphs.decode=true", "attention=plain"),
        ("graphs.decode", "'plain'"),
        "attention.graph",
        frozenset({"graphs.decode: false", "attention: captured", "attention.decode: captured"}),
        machine=Machine.assume("sm90"),
    ),
    "an 8-bit pool under attention that reads 16 bits": Conflict(
        ("memory.kv_dtype=fp8_e4m3", "model.dtype=bfloat16", "attention=sixteen"),
        ("attention 'sixteen'", "kv_dtype is fp8_e4m3"),
        "kv_dtype",
        frozenset({"memory.kv_dtype: bfloat16", "attention: captured"}),
        machine=Machine.assume("sm90"),
    ),
    "phases of two backends where bits must not depend on the step": Conflict(
        ("batch_invariant=true", "attention.prefill=invariant", "attention.decode=captured"),
        ("attention.prefill is 'invariant'", "attention.decode is 'captured'"),
        "attention.batch_invariant",
        frozenset({"batch_invariant: false"}),
        machine=Machine.assume("sm90"),
        model={"offers": frozenset({Feature.MODEL_BATCH_INVARIANT})},
    ),
    "forced text where drafts would stand": Conflict(
        ("grammar.jump_forward=true", "grammar.backend=back", "speculative=ngram", "attention=plain"),
        ("speculative 'ngram'", "grammar.jump_forward is true"),
        "grammar.jump_forward",
        frozenset({"grammar.jump_forward: false", "speculative: none"}),
    ),
}


def installed(fakes):
    """Register a part for every conflict, and one that resolves it."""
    offers = frozenset({Feature.GRAMMAR_ROLLBACK, Feature.GRAMMAR_JUMP_FORWARD})
    cuda = {"constraints": Constraints(devices=("cuda",))}
    return fakes.registry(
        fakes.spec(K.ATTENTION, "simple", offers=PLAIN, priority=-1),
        fakes.spec(K.ATTENTION, "chains", offers=VERIFY, priority=-1),
        fakes.spec(K.ATTENTION, "treelike", offers=TREE, priority=-1),
        fakes.spec(K.ATTENTION, "captured", offers=VERIFY | {Feature.ATTN_GRAPH}, priority=-1, **cuda),
        fakes.spec(K.ATTENTION, "sixteen", constraints=Constraints(kv_dtypes=("bfloat16", "float32")), priority=-2),
        fakes.spec(K.ATTENTION, "invariant", api=(1, 3), offers=TREE | {Feature.ATTN_BATCH_INVARIANT}, priority=-3),
        fakes.spec(K.DRAFTER, "ngram", offers=CHAIN),
        fakes.spec(K.DRAFTER, "trees", offers=TREES),
        fakes.spec(K.POLICY, "lpm", offers=frozenset({Feature.POLICY_PREFIX_AWARE})),
        fakes.spec(K.GRAMMAR, "forward"),
        fakes.spec(K.GRAMMAR, "back", offers=offers),
    )


def refusal(fakes, registry, conflict):
    with pytest.raises((ResolutionError, ConfigError)) as caught:
        resolve(fakes.config(registry, *conflict.sets), registry, conflict.machine)
    return str(caught.value)


def fixes_in(text):
    """Return every ``key: value`` that a refusal proposes."""
    found = re.findall(r"(?:^  - |fix it: |[Ss]et | or )((?:[a-z_]+\.)?[a-z_]+: [a-z0-9_]+)", text, re.MULTILINE)
    for kind, names in re.findall(r"that can be used here: (\w+): (.*)", text):
        found += [f"{kind}: {name}" for name in names.split(", ")]
    return set(found)


@pytest.mark.parametrize("title", CONFLICTS)
def test_a_refusal_names_both_parts_the_feature_and_the_change(fakes, title):
    conflict = CONFLICTS[title]
    registry = installed(fakes)
    fakes.model(**conflict.model)
    text = refusal(fakes, registry, conflict)
    for wanted in (*conflict.parts, conflict.feature):
        assert wanted in text, text
    found = fixes_in(text)
    assert conflict.fixes <= found, f"{found}\n{text}"
    for fix in found:  # each proposal alone resolves the conflict
        key, _, value = fix.partition(": ")
        assert resolve(fakes.config(registry, *conflict.sets, f"{key}={value}"), registry, conflict.machine), fix


def test_a_pair_of_changes_where_no_single_one_does(fakes):
    registry = installed(fakes)
    sets = ("speculative=ngram", "attention=simple", "policy=lpm", "cache=none")
    conflict = Conflict(sets, ("speculative 'ngram'", "policy 'lpm'"), "cache.reuse", frozenset())
    text = refusal(fakes, registry, conflict)
    assert "attention.verify" in text
    assert "cache.reuse" in text
    pairs = re.findall(r"^  - (\S+: \S+) and (\S+: \S+)$", text, re.MULTILINE)
    assert pairs
    for pair in pairs:
        changes = [fix.replace(": ", "=") for fix in pair]
        assert resolve(fakes.config(registry, *sets, *changes), registry, conflict.machine)


def test_the_command_reports_it_with_the_parts_of_this_project(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "--assume", "sm90", "--set", "speculative=eagle3_tree", "--set", "attention=flash_attn"])
    assert ended.value.code == 2
    text = capsys.readouterr().err
    for wanted in ("speculative 'eagle3_tree'", "'flash_attn'", "attention.tree_mask", "- speculative: eagle3"):
        assert wanted in text


def test_jump_forward_names_the_backends_that_can(fakes):
    registry = installed(fakes)
    conflict = Conflict(("grammar.jump_forward=true", "grammar.backend=forward"), ("", ""), "", frozenset())
    back = "grammar.backend: back"
    without = fakes.registry(fakes.spec(K.GRAMMAR, "forward"))
    text = refusal(fakes, without, conflict)
    assert "in use: grammar 'forward'" in text
    assert text.endswith("set grammar.jump_forward: false")
    assert resolve(
        fakes.config(registry, "grammar.jump_forward=true", back.replace(": ", "=")), registry, conflict.machine
    )


def test_groups_of_states_before_others_are_refused_and_named(fakes):
    registry, states = installed(fakes), CacheGroup.of_states(1, (StateShape((3,)),))
    fakes.model(cache_groups=(states, CacheGroup(1, 2, 64)))
    with pytest.raises(ResolutionError, match="of which those of states are the last") as caught:
        resolve(fakes.config(registry), registry, Machine.assume("cpu"))
    assert "has groups of kind state, full" in str(caught.value)
