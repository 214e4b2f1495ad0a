"""Test the resolver: order of preference, stages, joint features, messages.

Run: pytest tests/core/test_plugins_resolver.py
"""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.config import Selection, dump
from dovetail.errors import ConfigError, PluginError, PluginLoadError, ResolutionError
from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, Constraints, Machine, Requirement, resolve
from dovetail.registry.resolution import CandidateVerdict, ChoiceRule, Stage

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


# order of preference


def test_priority_then_name(fakes):
    specs = [fakes.spec(K.ATTENTION, n, priority=p) for n, p in (("b", 5), ("a", 5), ("c", 1))]
    resolved = run(fakes, *specs)
    assert resolved.attention_decode.name == "a"
    assert resolved.resolution("attention.decode").rule is ChoiceRule.PRIORITY
    assert [c.spec.name for c in resolved.resolution("attention.decode").candidates] == ["a", "b", "c", "plain"]
    assert verdicts(resolved, "attention.decode")["b"] == (CandidateVerdict.PASSED_OVER, Stage.FEATURES)


def test_tuning_record_beats_priority_and_explicit_beats_both(fakes):
    specs = [fakes.spec(K.ATTENTION, "a", priority=9), fakes.spec(K.ATTENTION, "b"), fakes.spec(K.ATTENTION, "c")]
    tuning = {"attention.decode": ["c", "b"]}
    tuned = run(fakes, *specs, tuning=tuning)
    assert (tuned.attention_prefill.name, tuned.attention_decode.name) == ("a", "c")
    assert tuned.resolution("attention.decode").rule is ChoiceRule.TUNING
    explicit = run(fakes, *specs, sets=["attention=b"], tuning=tuning)
    assert explicit.attention_decode.name == "b"
    assert explicit.resolution("attention.decode").rule is ChoiceRule.EXPLICIT


def test_explicit_choice_never_falls_back(fakes):
    gone = fakes.spec(K.ATTENTION, "gone", requires=(Requirement("no-such-dist", ">=2", "pip install no-such-dist"),))
    text = refusal(fakes, gone, sets=["attention=gone"])
    assert "attention.prefill, attention.decode: cannot use what config names" in text
    assert (
        "attention 'gone' (fakes-dist 1.0), at stage requires: needs no-such-dist>=2; no-such-dist is not installed"
        in text
    )
    assert "To mend it: pip install no-such-dist" in text


def test_ordered_list_tries_in_order_and_records_why(fakes):
    gone = fakes.spec(K.ATTENTION, "gone", priority=99, requires=(Requirement("no-such-dist"),))
    resolved = run(fakes, gone, fakes.spec(K.ATTENTION, "other", priority=50), sets=["attention=[gone, plain]"])
    assert resolved.attention_decode.name == "plain"
    assert reasons(resolved, "attention.decode", "gone") == ["requires.missing"]
    assert verdicts(resolved, "attention.decode")["other"][0] is CandidateVerdict.PASSED_OVER


def test_auto_falls_to_the_next_usable(fakes):
    gone = fakes.spec(K.ATTENTION, "gone", priority=99, requires=(Requirement("no-such-dist"),))
    resolved = run(fakes, gone)
    assert resolved.attention_decode.name == "plain"
    assert verdicts(resolved, "attention.decode")["gone"] == (CandidateVerdict.REJECTED, Stage.REQUIRES)


# stages


def test_version_ranges_are_checked_against_what_is_installed(fakes):
    old = fakes.spec(K.ATTENTION, "old", requires=(Requirement("pluggy", ">=900"),))
    text = refusal(fakes, old, sets=["attention=old"])
    assert "needs pluggy>=900; pluggy 1." in text
    assert "pip install 'pluggy>=900'" in text
    assert run(fakes, fakes.spec(K.ATTENTION, "new", requires=(Requirement("pluggy", ">=1"),)), sets=["attention=new"])


def test_wrong_api_version_is_refused_with_both_versions(fakes):
    text = refusal(fakes, fakes.spec(K.CACHE, "ancient", api=(0, 1)), sets=["cache=ancient"])
    assert "at stage api: interface version 1.1; it was built for version 0.1 of the cache interface" in text


@pytest.mark.parametrize(
    ("constraints", "sets", "machine", "message"),
    [
        (Constraints(devices=("cuda",)), [], CPU, "allows device cuda; device is cpu. To mend it: device: cuda"),
        (
            Constraints(min_compute_capability=(10, 0)),
            [],
            H100,
            "needs compute capability at least 10.0; sm90 has 9.0",
        ),
        (
            Constraints(min_compute_capability=(8, 0), max_compute_capability=(8, 9)),
            [],
            H100,
            "needs compute capability at least 8.0 and at most 8.9; sm90 has 9.0",
        ),
        (
            Constraints(page_sizes=(64, 128)),
            ["memory.page_size=16"],
            CPU,
            "allows page_size 64, 128; page_size is 16. To mend it: memory.page_size: 64",
        ),
        (Constraints(head_dims=(128, 256)), [], CPU, "allows head_dim 128, 256; head_dim is 64"),
        (
            Constraints(dtypes=("bfloat16",)),
            [],
            CPU,
            "allows dtype bfloat16; dtype is float32. To mend it: model.dtype: bfloat16",
        ),
        (
            Constraints(kv_dtypes=("float16",)),
            ["memory.kv_dtype=bfloat16"],
            CPU,
            "allows kv_dtype float16; kv_dtype is bfloat16. To mend it: memory.kv_dtype: float16",
        ),
    ],
)
def test_constraints_say_what_is_allowed_what_was_given_and_what_mends_it(fakes, constraints, sets, machine, message):
    picky = fakes.spec(K.ATTENTION, "picky", constraints=constraints)
    text = refusal(fakes, picky, sets=["attention=picky", *sets], machine=machine)
    assert f"at stage constraints: {message}" in text
    assert run(fakes, picky, sets=sets, machine=machine).attention_decode.name == "plain"


def test_a_pool_of_8_bits_passes_over_who_does_not_read_it(fakes):
    sixteen = fakes.spec(K.ATTENTION, "sixteen", constraints=Constraints(kv_dtypes=("bfloat16",)), priority=9)
    reads = fakes.spec(K.ATTENTION, "reads", constraints=Constraints(kv_dtypes=("bfloat16", "fp8_e4m3")), priority=1)
    sets = ["memory.kv_dtype=fp8_e4m3", "model.dtype=bfloat16"]
    resolved = run(fakes, sixteen, reads, sets=sets, machine=H100)
    assert resolved.attention_prefill.name == resolved.attention_decode.name == "reads"
    assert reasons(resolved, "attention.decode", "sixteen") == ["constraints.kv_dtype"]
    text = refusal(fakes, sixteen, reads, sets=[*sets, "attention=sixteen"], machine=H100)
    assert "allows kv_dtype bfloat16; kv_dtype is fp8_e4m3. To mend it: memory.kv_dtype: bfloat16" in text
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9.*fp8_e5m2"):
        run(fakes, reads, sets=sets, machine=Machine.assume("sm80"))


def test_constraints_that_are_met_do_not_reject(fakes):
    constraints = Constraints(("cuda",), (9, 0), (9, 0), ("bfloat16",), ("bfloat16",), (64,), (16,))
    resolved = run(fakes, fakes.spec(K.ATTENTION, "picky", constraints=constraints, priority=1), machine=H100)
    assert resolved.attention_decode.name == "picky"


def test_every_empty_slot_is_reported_at_once(fakes):
    gone = Requirement("no-such-dist")
    specs = [fakes.spec(K.ATTENTION, "x", requires=(gone,)), fakes.spec(K.POLICY, "y", requires=(gone,))]
    text = refusal(fakes, *specs, sets=["attention=x", "policy=y"])
    assert "attention.prefill, attention.decode: cannot use" in text
    assert "policy: cannot use" in text


def test_probe_runs_last_and_only_for_what_would_be_chosen(fakes, monkeypatch):
    probed = []
    here = Machine("cpu", None, "cpu", "cpu")

    def probing(name, answer):
        def ask():
            probed.append(name)
            return answer

        return fakes.put(f"probe_{name}", ask)

    specs = [
        fakes.spec(K.CACHE, "first", priority=30, probe=probing("first", "its kernel does not run")),
        fakes.spec(K.CACHE, "second", priority=20, probe=probing("second", None)),
        fakes.spec(K.CACHE, "third", priority=15, probe=probing("third", None)),
    ]
    resolved = run(fakes, *specs, machine=here)
    assert resolved.cache.name == "second"
    assert probed == ["first", "second"]
    assert verdicts(resolved, "cache")["first"] == (CandidateVerdict.REJECTED, Stage.PROBE)
    assert verdicts(resolved, "cache")["second"] == (CandidateVerdict.CHOSEN, Stage.PROBE)
    assert "got" in resolved.resolution("cache").candidates[0].to_json()["reasons"][0]
    assert "its kernel does not run" in refusal(fakes, *specs, sets=["cache=first"], machine=here)
    probed.clear()
    assert run(fakes, *specs, machine=CPU).cache.name == "first"  # an assumed machine is not probed
    assert probed == []


def test_a_probe_is_handed_what_it_names(fakes):
    here = Machine("cpu", None, "cpu", "cpu")
    seen = []

    def ask(config, section):
        seen.append((config.memory.page_size, section.kind))

    spec = fakes.spec(K.CACHE, "asks", priority=30, probe=fakes.put("asking", ask))
    run(fakes, spec, sets=["memory.page_size=64"], machine=here)
    assert seen == [(64, "asks")]


def test_a_probe_that_raises_is_a_reason(fakes):
    spec = fakes.spec(K.CACHE, "x", priority=99, probe=fakes.put("raising", lambda: 1 / 0))
    resolved = run(fakes, spec, machine=Machine("cpu", None, "cpu", "cpu"))
    assert resolved.cache.name == "tree"
    assert "ZeroDivisionError" in str(resolved.resolution("cache").candidates[0].reasons[0])


def test_a_config_module_that_breaks_rejects_only_its_component(fakes):
    resolved = run(fakes, fakes.spec(K.CACHE, "x", priority=99, config="no_such_module:C"))
    assert resolved.cache.name == "tree"
    assert reasons(resolved, "cache", "x") == ["config"]


# how the parts fit together


def test_tree_drafter_with_attention_without_tree_mask_is_refused_with_the_smallest_changes(fakes):
    specs = [
        fakes.spec(K.ATTENTION, "chains", offers=VERIFY),
        fakes.spec(K.ATTENTION, "trees", offers=TREE),
        fakes.spec(K.DRAFTER, "eagle", offers=DRAFT_TREE),
        fakes.spec(K.DRAFTER, "ngram", offers=DRAFT),
    ]
    text = refusal(fakes, *specs, sets=["attention=chains", "speculative=eagle"])
    assert "the chosen parts do not fit together" in text
    assert (
        "speculative 'eagle' needs attention.tree_mask; attention.decode is 'chains', which offers attention.decode, "
        "attention.extend, attention.mixed, attention.verify"
    ) in text
    fixes = text.partition("to mend it, set one of:")[2].split("\n  - ")[1:]
    assert set(fixes) == {"attention: trees", "speculative: none", "speculative: ngram"}
    for fix in fixes:  # each of the changes resolves the conflict
        key, _, value = fix.partition(": ")
        assert run(fakes, *specs, sets=["attention=chains", "speculative=eagle", f"{key}={value}"])


def test_auto_attention_follows_the_drafter(fakes):
    specs = [
        fakes.spec(K.ATTENTION, "quick", offers=PLAIN, priority=9),
        fakes.spec(K.ATTENTION, "trees", offers=TREE),
        fakes.spec(K.DRAFTER, "eagle", offers=DRAFT_TREE),
    ]
    assert run(fakes, *specs).attention_decode.name == "quick"
    resolved = run(fakes, *specs, sets=["speculative=eagle"])
    assert (resolved.attention_prefill.name, resolved.attention_decode.name) == ("trees", "trees")
    assert reasons(resolved, "attention.decode", "quick") == [
        "features.attention.verify",
        "features.attention.tree_mask",
    ]
    unmixed = run(fakes, *specs, sets=["speculative=eagle", "scheduler.mixed=false"])
    assert (unmixed.attention_prefill.name, unmixed.attention_decode.name) == ("quick", "trees")


def test_a_drafter_gets_along_with_overlap(fakes):
    ngram = fakes.spec(K.DRAFTER, "ngram", offers=DRAFT)
    for overlap in (True, False):
        chosen = run(fakes, ngram, sets=["speculative=ngram", f"scheduler.overlap={json.dumps(overlap)}"], machine=H100)
        assert chosen.config.scheduler.overlap is overlap
        assert (Feature.RUNTIME_OVERLAP in chosen.runtime) is overlap


def test_unlikely_drafts_are_left_out_where_the_drafter_says_which_they_are(fakes):
    specs = [
        fakes.spec(K.DRAFTER, "eagle", offers=DRAFT | {Feature.DRAFT_PROBS}),
        fakes.spec(K.DRAFTER, "ngram", offers=DRAFT),
    ]
    given = "scheduler.min_draft_probability=0.3"

    def least(*sets):
        return run(fakes, *specs, sets=sets).config.scheduler.min_draft_probability

    assert least("speculative=eagle") == least("speculative=ngram") == 0
    assert least("speculative=eagle", given) == 0.3
    assert least(given) == 0.3, "no drafts, none of them unlikely"
    text = refusal(fakes, *specs, sets=["speculative=ngram", given])
    assert "scheduler.min_draft_probability needs draft.probs; speculative is 'ngram', which offers draft.chain" in text
    fixes = text.partition("to mend it, set one of:")[2].split("\n  - ")[1:]
    assert set(fixes) == {"scheduler.min_draft_probability: 0", "speculative: none", "speculative: eagle"}
    assert run(fakes, *specs, sets=["speculative=auto", given]).drafter.name == "eagle"


def test_overlap_auto_is_off_on_cpu_and_can_be_asked_for(fakes):
    assert run(fakes).config.scheduler.overlap is False
    assert run(fakes, sets=["scheduler.overlap=true"]).config.scheduler.overlap is True
    assert Feature.RUNTIME_OVERLAP in run(fakes, sets=["scheduler.overlap=true"]).runtime


def test_prefix_aware_policy_without_reuse_is_refused(fakes):
    lpm = fakes.spec(K.POLICY, "lpm", offers=frozenset({Feature.POLICY_PREFIX_AWARE}), priority=99)
    text = refusal(fakes, lpm, sets=["policy=lpm", "cache=none"])
    assert "policy 'lpm' needs cache.reuse (it orders requests by what the prefix cache holds)" in text
    assert "cache is 'none', which offers nothing" in text
    assert "  - cache: tree" in text
    assert "  - policy: fcfs" in text
    assert run(fakes, lpm, sets=["cache=none"]).policy.name == "fcfs"
    assert run(fakes, lpm, sets=["policy=lpm"]).cache.name == "tree"


def test_mixed_batches_need_an_attention_that_mixes(fakes):
    simple = fakes.spec(K.ATTENTION, "simple", offers=PLAIN - {Feature.ATTN_MIXED})
    text = refusal(fakes, simple, sets=["attention=simple"])
    assert "scheduler.mixed needs attention.mixed" in text
    assert "  - scheduler.mixed: false" in text
    assert run(fakes, simple, sets=["attention=simple", "scheduler.mixed=false"])
    resolved = run(fakes, simple, sets=["attention.decode=simple"])  # decode batches are never mixed
    assert (resolved.attention_prefill.name, resolved.attention_decode.name) == ("plain", "simple")


def test_what_the_model_needs(fakes):
    needs = frozenset({Feature.ATTN_SLIDING_WINDOW})
    windowed = fakes.spec(K.ATTENTION, "windowed", offers=PLAIN | needs)
    registry = fakes.registry(windowed)
    fakes.model(needs=needs)
    resolved = resolve(fakes.config(registry), registry, CPU)
    assert resolved.attention_decode.name == "windowed"
    assert reasons(resolved, "attention.prefill", "plain") == ["features.attention.sliding_window"]
    with pytest.raises(ResolutionError, match=r"model 'FakeForCausalLM' needs attention\.sliding_window"):
        resolve(fakes.config(registry, "attention=plain"), registry, CPU)


def test_drafts_over_recurrent_state_need_state_rollback(fakes):
    registry = fakes.registry(fakes.spec(K.DRAFTER, "ngram", offers=DRAFT))
    fakes.model(cache_groups=(CacheGroup(1, 2, 64), CacheGroup(1, 1, 64, CacheGroupKind.STATE)))
    with pytest.raises(ResolutionError) as caught:
        resolve(fakes.config(registry, "speculative=ngram"), registry, CPU)
    text = str(caught.value)
    assert "needs kv.state_rollback (the model keeps recurrent state); the kv offers kv.rollback" in text
    assert text.endswith("set one of:\n  - speculative: none")


def test_drafter_needs_a_grammar_that_rolls_back(fakes):
    specs = [
        fakes.spec(K.GRAMMAR, "forward", priority=9),
        fakes.spec(K.GRAMMAR, "back", offers=ROLLBACK),
        fakes.spec(K.DRAFTER, "ngram", offers=DRAFT),
    ]
    assert run(fakes, *specs).grammar.name == "forward"
    assert run(fakes, *specs, sets=["speculative=ngram"]).grammar.name == "back"
    alone = run(fakes, specs[0], specs[2], sets=["speculative=ngram"])
    assert alone.grammar is None
    assert reasons(alone, "grammar", "forward") == ["features.grammar.rollback"]


def names(resolved):
    automatic = [c.kind for c in resolved.config.grammar.candidates]
    return [c.name for c in resolved.grammars], automatic


def test_every_usable_grammar_backend_is_kept_in_order_of_preference(fakes):
    specs = [
        fakes.spec(K.GRAMMAR, "b", priority=5, offers=ROLLBACK),
        fakes.spec(K.GRAMMAR, "a", priority=1, offers=ROLLBACK),
        fakes.spec(K.GRAMMAR, "c", priority=9),
        fakes.spec(K.GRAMMAR, "gone", priority=99, requires=(Requirement("no-such-dist"),)),
        fakes.spec(K.DRAFTER, "ngram", offers=DRAFT),
    ]
    resolved = run(fakes, *specs)
    assert names(resolved) == (["c", "b", "a"], ["c", "b", "a"])
    found = {name: verdict for name, (verdict, _) in verdicts(resolved, "grammar").items()}
    available = CandidateVerdict.AVAILABLE
    assert found == {"c": CandidateVerdict.CHOSEN, "b": available, "a": available, "gone": CandidateVerdict.REJECTED}
    assert names(run(fakes, *specs, sets=["grammar=a"])) == (["a", "c", "b"], ["a"])
    assert names(run(fakes, *specs, sets=["grammar={backend: [a, b], timeout: 3}"])) == (["a", "b", "c"], ["a", "b"])
    drafting = run(fakes, *specs, sets=["speculative=ngram"])
    assert names(drafting) == (["b", "a"], ["b", "a"])
    assert reasons(drafting, "grammar", "c") == ["features.grammar.rollback"]
    assert names(run(fakes, *specs, sets=["grammar=none"])) == ([], [])


def test_settings_beside_the_grammar_backend_survive_and_resolve_again(fakes):
    registry = fakes.registry(fakes.spec(K.GRAMMAR, "a"), fakes.spec(K.GRAMMAR, "b"))
    config = fakes.config(registry, "grammar={backend: b, timeout: 3, isolation: thread}")
    first = resolve(config, registry, CPU)
    assert (first.config.grammar.timeout, first.config.grammar.isolation) == (3, "thread")
    second = resolve(first.config, registry, CPU)
    assert (second.config, names(second)) == (first.config, (["b", "a"], ["b"]))
    assert fakes.config(registry, "grammar.timeout=4").grammar.is_auto


def test_grammar_auto_with_nothing_usable_keeps_the_reasons(fakes):
    gone = fakes.spec(K.GRAMMAR, "xg", requires=(Requirement("no-such-dist", "", "pip install no-such-dist"),))
    resolved = run(fakes, gone)
    assert resolved.grammar is None
    assert resolved.config.grammar.disabled
    resolution = resolved.resolution("grammar")
    assert resolution.note == "nothing installed can be used"
    assert "pip install no-such-dist" in str(resolution.candidates[0].reasons[0])
    assert run(fakes, gone, sets=["grammar=none"]).resolution("grammar").note == "switched off by config"


def test_declared_needs_of_any_part_count(fakes):
    needy = fakes.spec(K.POLICY, "needy", needs=frozenset({Feature.CACHE_NAMESPACES}))
    text = refusal(fakes, needy, sets=["policy=needy"])
    assert "policy 'needy' needs cache.namespaces; cache is 'tree', which offers cache.reuse" in text


FEATURES = [Feature.ATTN_VERIFY, Feature.ATTN_TREE_MASK, Feature.ATTN_MIXED]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offers=st.lists(st.frozensets(st.sampled_from(FEATURES)), min_size=1, max_size=3),
    drafts=st.lists(st.booleans(), max_size=2),
    policies=st.lists(st.booleans(), min_size=1, max_size=2),
    caches=st.lists(st.booleans(), min_size=1, max_size=2),
    mixed=st.booleans(),
)
def test_auto_finds_a_fit_exactly_if_brute_force_does(fakes, offers, drafts, policies, caches, mixed):
    """The reference is an independent reading of the rules, over all combinations of the installed components."""
    reuse = frozenset({Feature.CACHE_REUSE})
    aware = frozenset({Feature.POLICY_PREFIX_AWARE})
    base = frozenset({Feature.ATTN_EXTEND, Feature.ATTN_DECODE})
    specs = [fakes.model()]
    specs += [fakes.spec(K.ATTENTION, f"a{i}", offers=base | o) for i, o in enumerate(offers)]
    specs += [fakes.spec(K.DRAFTER, f"d{i}", offers=DRAFT_TREE if t else DRAFT) for i, t in enumerate(drafts)]
    specs += [fakes.spec(K.POLICY, f"p{i}", offers=aware if p else frozenset()) for i, p in enumerate(policies)]
    specs += [fakes.spec(K.CACHE, f"c{i}", offers=reuse if c else frozenset()) for i, c in enumerate(caches)]
    registry = fakes.registry(*specs, basics=False)
    names = [f"d{i}" for i in range(len(drafts))]
    config = fakes.config(
        registry, f"speculative={json.dumps(names or 'none')}", f"scheduler.mixed={str(mixed).lower()}"
    )

    def fits(draft, prefill, decode, policy, cache):
        extra = {Feature.ATTN_VERIFY} if draft is not None else set()
        extra |= {Feature.ATTN_TREE_MASK} if draft else set()
        return decode >= extra and (not mixed or prefill >= extra | {Feature.ATTN_MIXED}) and (cache or not policy)

    expected = [
        chosen
        for chosen in itertools.product(
            range(len(drafts)) if drafts else [None], *map(range, map(len, [offers, offers, policies, caches]))
        )
        if fits(
            drafts[chosen[0]] if drafts else None,
            offers[chosen[1]],
            offers[chosen[2]],
            policies[chosen[3]],
            caches[chosen[4]],
        )
    ]
    if not expected:
        with pytest.raises(ResolutionError):
            resolve(config, registry, CPU)
        return
    got = resolve(config, registry, CPU)
    chosen = (
        got.drafter and int(got.drafter.name[1]),
        int(got.attention_prefill.name[1]),
        int(got.attention_decode.name[1]),
        int(got.policy.name[1]),
        int(got.cache.name[1]),
    )
    assert chosen in expected
    # preference: drafter, then prefill, decode, cache, policy, each by name here
    order = [(c[0] or 0, c[1], c[2], c[4], c[3]) for c in expected]
    assert ((chosen[0] or 0), chosen[1], chosen[2], chosen[4], chosen[3]) == min(order)


# batch invariance

INVARIANT = PLAIN | {Feature.ATTN_BATCH_INVARIANT}
INVARIANT_SETS = ("batch_invariant=true", "graphs.decode=false")


def invariant_registry(fakes, *more, model=True):
    """Register two backends that offer batch invariance, and two that ``auto`` prefers otherwise."""
    registry = fakes.registry(
        fakes.spec(K.ATTENTION, "quick", priority=9, offers=VERIFY),
        fakes.spec(
            K.ATTENTION, "firm", {"split": (int, 4)}, priority=5, api=(1, 3), offers=INVARIANT | {Feature.ATTN_VERIFY}
        ),
        fakes.spec(K.ATTENTION, "solid", priority=1, api=(1, 3), offers=INVARIANT | TREE),
        fakes.spec(K.DRAFTER, "ngram", offers=DRAFT),
        fakes.spec(K.DRAFTER, "eagle", offers=DRAFT_TREE),
        *more,
    )
    fakes.model(offers=frozenset({Feature.MODEL_BATCH_INVARIANT} if model else ()))
    return registry


def invariant(fakes, registry, *sets, machine=H100, **given):
    return resolve(fakes.config(registry, *INVARIANT_SETS, *sets), registry, machine, **given)


def invariant_refusal(fakes, registry, *sets):
    with pytest.raises(ResolutionError) as caught:
        invariant(fakes, registry, *sets)
    return str(caught.value)


def test_batch_invariance_chooses_a_backend_that_offers_it(fakes):
    registry = invariant_registry(fakes)
    assert resolve(fakes.config(registry), registry, H100).attention_decode.name == "quick"
    resolved = invariant(fakes, registry)
    assert resolved.config.batch_invariant
    assert (resolved.attention_prefill.name, resolved.attention_decode.name) == ("firm", "firm")
    assert set(reasons(resolved, "attention.decode", "quick")) == {"features.attention.batch_invariant"}
    assert verdicts(resolved, "attention.prefill")["solid"] == (CandidateVerdict.PASSED_OVER, Stage.FEATURES)
    assert invariant(fakes, registry, "speculative=ngram").drafter.name == "ngram"


def test_batch_invariance_has_one_backend_for_both_phases(fakes):
    registry = invariant_registry(fakes)
    for phase in ("prefill", "decode"):
        follows = invariant(fakes, registry, f"attention.{phase}={{kind: firm, split: 2}}")
        assert follows.attention_prefill.name == follows.attention_decode.name == "firm"
        assert follows.attention_prefill.config.split == follows.attention_decode.config.split == 2
    text = invariant_refusal(fakes, registry, "attention.prefill=firm", "attention.decode=solid")
    assert "batch_invariant needs one attention backend, of the same settings, for both phases" in text
    assert "attention.prefill is 'firm', attention.decode is 'solid'" in text
    fixes = set(text.partition("to mend it, set one of:")[2].split("\n  - ")[1:])
    assert fixes == {
        "batch_invariant: false",
        "attention: firm",
        "attention: solid",
        "attention.prefill: solid",
        "attention.decode: firm",
    }
    both = ("attention.prefill={kind: firm, split: 2}", "attention.decode={kind: firm, split: 3}")
    assert "is 'firm' with {'split': 2}, attention.decode is 'firm' with {'split': 3}" in invariant_refusal(
        fakes, registry, *both
    )
    assert invariant(fakes, registry, "attention={kind: firm, split: 2}").attention_decode.config.split == 2


def test_batch_invariance_is_refused_over_attention_that_does_not_offer_it(fakes):
    registry = invariant_registry(fakes)
    text = invariant_refusal(fakes, registry, "attention=quick")
    for phase in ("prefill", "decode"):
        assert f"batch_invariant needs attention.batch_invariant; attention.{phase} is 'quick'" in text
    for fix in ("batch_invariant: false", "attention: firm", "attention: solid"):
        assert f"  - {fix}" in text
    assert "attention: plain" not in text


def test_batch_invariance_takes_trees_of_drafts_over_pages_of_one_token(fakes):
    registry = invariant_registry(fakes)
    with pytest.raises(ConfigError) as error:
        invariant(fakes, registry, "speculative=eagle")
    assert "speculative 'eagle', whose drafts may be trees, and memory.page_size is 16; allowed with trees: 1" in str(
        error.value
    )
    assert invariant(fakes, registry, "speculative=eagle", "memory.page_size=1").drafter.name == "eagle"


def test_batch_invariance_needs_a_model_that_offers_it(fakes):
    text = invariant_refusal(fakes, invariant_registry(fakes, model=False))
    assert "batch_invariant needs model.batch_invariant; the model offers nothing" in text
    assert text.endswith("set one of:\n  - batch_invariant: false")


@pytest.mark.parametrize(
    ("machine", "got"),
    [("cpu", "device is cpu"), ("sm80", "sm80 has 8.0"), ("sm100", "sm100 has 10.0")],
)
def test_batch_invariance_is_refused_where_it_has_not_been_shown(fakes, machine, got):
    with pytest.raises(ConfigError) as caught:
        invariant(fakes, invariant_registry(fakes), machine=Machine.assume(machine))
    text = str(caught.value)
    assert text.startswith("batch_invariant is true, which needs CUDA of compute capability 9.0")
    assert text.endswith(f"; {got}. Set batch_invariant: false")


# the model


def test_architecture_that_no_plugin_implements(fakes):
    (fakes.directory / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    text = refusal(fakes)
    assert "has architectures ['OtherForCausalLM'], which no installed model component implements" in text
    assert "implemented: FakeForCausalLM" in text
    assert run(fakes, sets=["model.arch=fake"]).model.name == "fake"


def test_overrides_reach_describe_and_describe_errors_are_reported(fakes):
    registry = fakes.registry()
    config = fakes.config(registry, "model.overrides={hidden_act: relu}")
    assert resolve(config, registry, CPU).model_info.config == {
        "architectures": ["FakeForCausalLM"],
        "hidden_act": "relu",
    }
    fakes.put("describe", lambda checkpoint: checkpoint["hidden_size"])
    with pytest.raises(
        ResolutionError, match=r"model 'fake' \(fakes-dist 1.0\): can read this config.json; KeyError: 'hidden_size'"
    ):
        resolve(config, registry, CPU)


def test_a_model_directory_without_config_json(fakes, tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        run(fakes, sets=[f"model={tmp_path}"])


def test_context_len_is_bounded_by_the_model(fakes):
    assert run(fakes).config.model.context_len == 2048
    assert run(fakes, sets=["model.context_len=100"]).config.model.context_len == 100
    with pytest.raises(ConfigError, match=r"model\.context_len is 4096; allowed: at most 2048"):
        run(fakes, sets=["model.context_len=4096"])


# the result


def test_config_of_the_result_is_new_and_concrete(fakes):
    registry = fakes.registry()
    config = fakes.config(registry)
    resolved = resolve(config, registry, H100)
    assert config.scheduler.overlap == "auto"
    concrete = resolved.config
    assert concrete.model.dtype == concrete.memory.kv_dtype == "bfloat16"
    assert (concrete.device, concrete.scheduler.overlap, concrete.model.arch) == ("cuda:0", True, "fake")
    assert concrete.model.served_name == "fake-model"
    assert concrete.speculative == Selection(disabled=True)
    assert "auto" not in json.dumps({k: v for k, v in dump(concrete).items() if k != "plugins"})
    assert resolve(config, registry, CPU).config.model.dtype == "float32"


def test_resolving_the_result_again_changes_nothing(fakes):
    ngram = fakes.spec(K.DRAFTER, "ngram", {"depth": (int, 3)}, offers=DRAFT)
    registry = fakes.registry(ngram)
    config = fakes.config(registry, "speculative={kind: ngram, depth: 5}")
    first = resolve(config, registry, H100)
    second = resolve(first.config, registry, H100)
    assert second.config == first.config
    assert second.chosen == first.chosen


def test_to_json_is_json_and_holds_every_candidate(fakes):
    resolved = run(fakes, fakes.spec(K.ATTENTION, "gone", requires=(Requirement("no-such-dist"),)))
    tree = json.loads(json.dumps(resolved.to_json()))
    slots = {r["slot"]: r for r in tree["resolutions"]}
    assert set(tree["chosen"]) == {
        "model",
        "attention.prefill",
        "attention.decode",
        "cache",
        "policy",
        "grammar",
        "speculative",
        "tool_parser",
        "reasoning_parser",
    }
    assert set(slots) == {*tree["chosen"], "api"}
    assert tree["apis"] == []
    assert {c["name"] for c in slots["attention.decode"]["candidates"]} == {"plain", "gone"}
    assert slots["attention.decode"]["chosen"] == "plain"
    assert len(tree["config_hash"]) == 64


def test_one_info_line_per_part(fakes, caplog):
    caplog.set_level("INFO", logger="dovetail.registry")
    run(fakes, sets=["cache=none"])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 10  # every slot
    assert "cache: none, explicit" in lines
    assert "grammar: none, priority; nothing installed can be used" in lines


# hooks


def test_adjust_candidates_may_reorder_and_veto(fakes):
    seen = []

    def adjust(kind, request, candidates):
        seen.append((kind, request.phase))
        if kind == K.CACHE:
            candidates.reverse()
        for candidate in candidates:
            if candidate.spec.name == "fcfs":
                candidate.veto("not on Sundays")

    specs = [fakes.spec(K.POLICY, "late")]
    resolved = run(fakes, *specs, entries=[fakes.entry("adjuster", adjust_candidates=adjust)])
    assert resolved.cache.name == "none"
    assert resolved.resolution("cache").rule is ChoiceRule.ADJUSTED
    assert resolved.policy.name == "late"
    assert verdicts(resolved, "policy")["fcfs"] == (CandidateVerdict.REJECTED, Stage.POLICY)
    assert (K.ATTENTION, "prefill") in seen
    assert (K.CACHE, None) in seen
    text = refusal(fakes, *specs, sets=["policy=fcfs"], entries=[fakes.entry("adjuster", adjust_candidates=adjust)])
    assert "at stage policy: no plugin objects; not on Sundays" in text


def test_adjust_candidates_cannot_reorder_an_explicit_list(fakes):
    def adjust(kind, request, candidates):
        candidates.reverse()

    resolved = run(fakes, sets=["cache=[tree, none]"], entries=[fakes.entry("adjuster", adjust_candidates=adjust)])
    assert resolved.cache.name == "tree"


def test_adjust_candidates_may_not_remove_and_its_errors_are_plugin_errors(fakes):
    def removes(kind, request, candidates):
        candidates.clear()

    def raises(kind, request, candidates):
        raise KeyError("oops")

    with pytest.raises(PluginError, match=r"added or removed candidates for attention\.prefill"):
        run(fakes, entries=[fakes.entry("bad", adjust_candidates=removes)])
    with pytest.raises(PluginError, match="adjust_candidates raised KeyError: 'oops'"):
        run(fakes, entries=[fakes.entry("bad", adjust_candidates=raises)])


def test_on_resolved_is_called_with_the_result(fakes):
    seen = []
    resolved = run(fakes, entries=[fakes.entry("watcher", on_resolved=lambda resolved: seen.append(resolved))])
    assert seen == [resolved]


# building


def test_chosen_builds_its_class_with_its_own_config(fakes):
    class Backend(AttentionBackend):
        def __init__(self, config, context):
            self.given = (config, context)

        def plan(self, batch): ...

        def forward(self, q, layer, batch): ...

    spec = fakes.spec(K.ATTENTION, "real", {"x": (int, 1)}, target=fakes.put("Backend", Backend))
    chosen = run(fakes, spec, sets=["attention={kind: real, x: 7}"]).attention_decode
    built = chosen.build("context")
    assert isinstance(built, Backend)
    assert built.given[0].x == 7
    assert built.given[1] == "context"


def test_target_that_cannot_be_imported_chains_its_cause(fakes):
    chosen = run(
        fakes, fakes.spec(K.ATTENTION, "real", target="no_such_module:X"), sets=["attention=real"]
    ).attention_decode
    with pytest.raises(
        PluginLoadError, match=r"attention 'real' \(fakes-dist 1.0\): 'no_such_module:X' cannot be imported"
    ) as caught:
        chosen.load()
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_target_of_the_wrong_interface_shows_both_sides(fakes):
    spec = fakes.spec(K.ATTENTION, "real", target=fakes.put("NotABackend", dict))
    chosen = run(fakes, spec, sets=["attention=real"]).attention_decode
    with pytest.raises(PluginLoadError, match=r"is <class 'dict'>; expected a subclass of .*AttentionBackend"):
        chosen.load()


# machines


def test_machines():
    assert Machine.assume("sm90") == Machine("cuda", (9, 0), "sm90", "cuda:0", True)
    assert Machine.assume("SM_100").compute_capability == (10, 0)
    assert Machine.assume("cpu").device_type == "cpu"
    with pytest.raises(ConfigError, match="--assume is 'h100'; allowed: cpu, or sm and a compute capability"):
        Machine.assume("h100")
    assert Machine.detect("cpu") == Machine("cpu", None, "cpu", "cpu")


def test_a_cuda_device_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"device is 'cuda:99', but torch .* sees only cpu"):
        Machine.detect("cuda:99")


@pytest.mark.parametrize("setting", ["graphs.decode=true", "graphs.piecewise_tokens=64"])
def test_graphs_are_refused_on_a_device_that_has_none(fakes, setting):
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        run(fakes, sets=[setting])
    run(fakes, sets=["graphs.decode=auto", "graphs.piecewise_tokens=0"])


def test_batch_invariance_is_not_believed_of_a_backend_for_which_it_meant_less(fakes):
    old = fakes.spec(K.ATTENTION, "old", priority=20, api=(1, 2), offers=INVARIANT | TREE)
    registry = invariant_registry(fakes, old)
    assert invariant(fakes, registry).attention_decode.name == "firm"
    assert "batch_invariant needs attention.batch_invariant; attention.decode is 'old'" in invariant_refusal(
        fakes, registry, "attention=old"
    )


def test_batch_invariance_takes_no_float32(fakes):
    with pytest.raises(ConfigError, match=r"model\.dtype is float32; allowed: bfloat16, float16"):
        invariant(fakes, invariant_registry(fakes), "model.dtype=float32")


def test_batch_invariance_ignores_records_of_other_kernels(fakes):
    registry = invariant_registry(fakes)
    tuning = {"attention.prefill": ["solid"], "attention.decode": ["solid"]}
    assert invariant(fakes, registry, tuning=tuning).attention_decode.name == "firm"
