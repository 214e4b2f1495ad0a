"""Test how the resolver fits the chosen components together: joint features, drafters, grammars, batch invariance.

Run: pytest tests/core/test_plugins_joint_features.py
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError, ResolutionError
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.features import Feature
from dovetail.interfaces.mixer_shapes import StateShape
from dovetail.registry import Machine, Requirement, resolve
from dovetail.registry.resolution import CandidateVerdict, Stage
from dovetail.registry.specs import Constraints

sys.path.insert(0, str(Path(__file__).parent))
from resolving import CPU, DRAFT, DRAFT_TREE, H100, PLAIN, ROLLBACK, TREE, VERIFY, K, reasons, refusal, run, verdicts

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
    fixes = text.partition("to fix it, set one of:")[2].split("\n  - ")[1:]
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
    fixes = text.partition("to fix it, set one of:")[2].split("\n  - ")[1:]
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
    assert "cache is 'none', which offers cache.groups" in text
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


def test_latents_need_a_backend_that_reads_them(fakes):
    """Whatever the model declares. Head dims of kernels for plain keys do not matter for latents."""
    dims = Constraints(head_dims=(64, 128))
    reads = fakes.spec(K.ATTENTION, "reads_latents", offers=PLAIN | {Feature.ATTN_LATENT}, constraints=dims)
    registry = fakes.registry(reads)
    group = CacheGroup(2, 1, 576, CacheGroupKind.LATENT, value_dim=512)
    fakes.model(cache_groups=(group,), head_dim=576, num_kv_heads=1)
    resolved = resolve(fakes.config(registry), registry, CPU)
    assert resolved.attention_prefill.name == resolved.attention_decode.name == "reads_latents"
    assert reasons(resolved, "attention.decode", "plain") == ["features.attention.latent"]
    with pytest.raises(
        ResolutionError, match=r"needs attention\.latent \(it keeps latents instead of keys and values\)"
    ):
        resolve(fakes.config(registry, "attention=plain"), registry, CPU)


@pytest.mark.parametrize("kind", [CacheGroupKind.SLIDING, CacheGroupKind.STATE])
def test_models_with_windows_or_states_need_a_cache_of_such_groups(fakes, kind):
    registry = fakes.registry(fakes.spec(K.CACHE, "simple", priority=50))
    fakes.model(
        cache_groups=(
            CacheGroup(1, 2, 64),
            CacheGroup(1, 2, 64, kind, 8)
            if kind is CacheGroupKind.SLIDING
            else CacheGroup.of_states(1, (StateShape((3,)),)),
        )
    )
    resolved = resolve(fakes.config(registry), registry, CPU)
    assert resolved.cache.name == "tree"
    assert reasons(resolved, "cache", "simple") == ["features.cache.groups"]
    said = rf"needs cache\.groups \(it has groups of kind {kind}\)"
    with pytest.raises(ResolutionError, match=said):
        resolve(fakes.config(registry, "cache=simple"), registry, CPU)
    fakes.model()
    assert resolve(fakes.config(registry), registry, CPU).cache.name == "simple"


def test_a_backend_of_certain_latents_serves_no_other_model(fakes):
    offers = PLAIN | {Feature.ATTN_LATENT}
    some = fakes.spec(
        K.ATTENTION, "some", offers=offers, constraints=Constraints(latent_dims=((576, 512),)), priority=9
    )
    registry = fakes.registry(some, fakes.spec(K.ATTENTION, "every", offers=offers))
    for head_dim, value_dim, chosen in ((576, 512, "some"), (160, 128, "every")):
        group = CacheGroup(2, 1, head_dim, CacheGroupKind.LATENT, value_dim=value_dim)
        fakes.model(cache_groups=(group,), head_dim=head_dim, num_kv_heads=1)
        assert resolve(fakes.config(registry), registry, CPU).attention_decode.name == chosen
    fakes.model()
    resolved = resolve(fakes.config(registry), registry, CPU)
    assert resolved.attention_decode.name != "some"
    assert reasons(resolved, "attention.decode", "some") == ["constraints.latent_dims"]
    with pytest.raises(
        ResolutionError, match="serves latents of 576 with 512 of values only; the model keeps keys and values"
    ):
        resolve(fakes.config(registry, "attention=some"), registry, CPU)


def test_a_drafter_with_a_cache_of_its_own_needs_a_target_with_pages(fakes):
    own_cache = frozenset({Feature.KV_DRAFT_CACHE})
    registry = fakes.registry(
        fakes.spec(K.DRAFTER, "ngram", offers=DRAFT), fakes.spec(K.DRAFTER, "heads", offers=DRAFT, needs=own_cache)
    )
    states = CacheGroup.of_states(1, (StateShape((3,)),))
    full = CacheGroup(1, 2, 64)
    for groups in ((full,), (full, states)):
        fakes.model(cache_groups=groups)
        for drafter in ("ngram", "heads"):
            assert resolve(fakes.config(registry, f"speculative={drafter}"), registry, CPU).drafter is not None
    fakes.model(cache_groups=(states,))
    assert resolve(fakes.config(registry, "speculative=ngram"), registry, CPU).drafter is not None
    with pytest.raises(ResolutionError) as caught:
        resolve(fakes.config(registry, "speculative=heads"), registry, CPU)
    text = str(caught.value)
    assert "speculative 'heads' needs kv.draft_cache; the kv offers kv.rollback, kv.state_rollback" in text
    assert text.endswith("set one of:\n  - speculative: ngram\n  - speculative: none")


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
    assert "policy 'needy' needs cache.namespaces; cache is 'tree', which offers cache.groups, cache.reuse" in text


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
    stores = fakes.spec(K.STORE, "pages", offers=frozenset({Feature.STORE_FULL}))
    specs = [fakes.model(), fakes.spec(K.EXECUTOR, "ranks"), stores]
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
    assert "batch_invariant needs one attention backend, with the same settings, for both phases" in text
    assert "attention.prefill is 'firm', attention.decode is 'solid'" in text
    fixes = set(text.partition("to fix it, set one of:")[2].split("\n  - ")[1:])
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
