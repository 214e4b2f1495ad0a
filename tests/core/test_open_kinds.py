"""Kinds and features that a plugin brings: registered, configured, negotiated and applied as the built-in ones are.

.venv/bin/python -m pytest -q tests/core/test_open_kinds.py
"""

from __future__ import annotations

import importlib
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config import Config, PluginsSection, config_hash, dump
from dovetail.config.kinds import BUILT_IN, KindSection
from dovetail.config.schema import config_schema
from dovetail.config.sources import Raw, SettingsSource, read
from dovetail.config.tree import validate
from dovetail.errors import (
    ConfigError,
    PluginError,
    PluginLoadError,
    RequestError,
    ResolutionError,
    UnknownComponentError,
)
from dovetail.experiment.online.configs import arm_configs
from dovetail.generation.prompts import PromptHooks, load_prompt_hooks
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature, FeatureDescriptor
from dovetail.interfaces.names import BuiltIn
from dovetail.registry import ComponentKind, KindDescriptor, Machine, RuntimeNeed, Selects, load_plugins, resolve
from dovetail.registry.builtin import KINDS
from dovetail.registry.installed import PluginStatus
from dovetail.registry.kinds import Kinds
from dovetail.registry.resolution import Reason, reported

CPU = Machine.assume("cpu")
SORTER = ComponentKind("sorter")
STABLE, FAST = Feature("sorter.stable"), Feature("sorter.fast")
FEATURES = (FeatureDescriptor(STABLE, "keeps the order of equals"), FeatureDescriptor(FAST, "sorts fast"))


class Sorts:
    """The interface of the kind."""

    def __init__(self, config: object, context: object) -> None:
        self.config = config


class Other:
    """A class that does not implement it."""


def one(**given: object) -> KindDescriptor:
    """A kind of which one component is chosen."""
    section = KindSection("sorter", "How things are sorted.", optional=True)
    fields: dict = {"section": section, "namespaces": ("sorter",), **given}
    return KindDescriptor(SORTER, "sorters", "dovetail_fakes:Sorts", **fields)


def several(**given: object) -> KindDescriptor:
    """The same, of which all that config names are used, on prompts."""
    section = KindSection("sorter", "What sorts.", optional=True, takes_all=True, of_server=True, default="none")
    return one(section=section, selects=Selects.LIST, for_prompts=True, **given)


def entry(fakes, kind=None, specs=(), features=FEATURES, name="sorters", **hooks):
    fakes.put("Sorts", Sorts)
    brought = [kind or one()]
    return fakes.entry(name, specs, register_kinds=lambda: brought, register_features=lambda: list(features), **hooks)


def registry_of(fakes, kind=None, *specs, extra=(), **hooks):
    return fakes.registry(*extra, entries=[entry(fakes, kind, specs, **hooks)])


def quick(fakes, name="quick", **given):
    return fakes.spec(SORTER, name, {"depth": (int, 3)}, target=fakes.put("Sorts", Sorts), **given)


# names and registration


def test_names_are_texts_and_the_built_in_ones_are_attributes():
    assert Feature.CACHE_REUSE == "cache.reuse"
    assert ComponentKind.DRAFTER == "speculative"
    assert type(Feature.CACHE_REUSE) is Feature
    assert pickle.loads(pickle.dumps(Feature.CACHE_REUSE)) == Feature.CACHE_REUSE
    assert {Feature("cache.reuse"), Feature.CACHE_REUSE, "cache.reuse"} == {"cache.reuse"}
    assert not [value for value in vars(Feature).values() if isinstance(value, BuiltIn)]


def test_the_built_in_kinds_and_features_are_registered_by_the_same_function():
    kinds = Kinds()
    kinds.add(KINDS, BUILT_IN_FEATURES, "Dovetail")
    assert kinds.names == [kind.kind for kind in KINDS]
    constants = {value for value in vars(Feature).values() if isinstance(value, Feature)}
    assert set(kinds.features) == constants
    with pytest.raises(PluginLoadError, match="kind 'cache' is registered already"):
        kinds.add([KINDS[1]], (), "another")


@pytest.mark.parametrize(
    ("kind", "features", "said"),
    [
        (one(namespaces=("cache",)), (), "the namespace 'cache' of kind 'sorter' belongs to Dovetail"),
        (one(namespaces=("runtime",)), (), "the namespace 'runtime' of kind 'sorter' belongs to the runtime"),
        (one(section=None), (), "kind 'sorter' has no section, so no config could select its components"),
        (one(section=KindSection("sort", "")), (), "a section has the name of its kind"),
        (one(for_prompts=True), (), "is for_prompts, so its section must be of_server"),
        (replace(one(), kind=ComponentKind("Sorter")), (), "kind 'Sorter' is not a name"),
        (
            replace(one(), kind=ComponentKind("memory"), section=KindSection("memory", "")),
            (),
            "would take the config key 'memory', which Dovetail has itself",
        ),
        (replace(one(), interface="sorts"), (), "has the interface 'sorts'; expected \"module:attribute\""),
        (
            one(),
            (FeatureDescriptor("sort.x", ""),),
            "feature 'sort.x' is in no kind's namespace; namespaces: attention",
        ),
        (one(), (FeatureDescriptor("sorter", ""),), "feature 'sorter' is not a name"),
        (one(), (FeatureDescriptor("cache.reuse", ""),), "feature 'cache.reuse' is registered already"),
        ("sorter", (), "register_kinds returned 'sorter'; expected KindDescriptor"),
        (replace(one(), interface="a..b:C"), (), "has the interface 'a..b:C'; expected \"module:attribute\""),
        (replace(one(), interface=None), (), "register_kinds: 'sorter' is wrong: interface is None; expected str"),
        (replace(one(), kind="sorter"), (), "kind is 'sorter'; expected ComponentKind"),
        (one(check="sorts"), (), "has the check 'sorts'; expected \"module:attribute\""),
        (one(order="first"), (), "order is 'first'; expected int"),
        (one(namespaces="sorter"), (), "namespaces is 'sorter'; expected tuple[str, ...]"),
        (one(namespaces=("Sorter",)), (), "the namespace 'Sorter' of kind 'sorter' is not a name"),
        (one(namespaces=("sorter", "sorter")), (), "namespace 'sorter' is given 2 times; give it once"),
        (one(section="sorter"), (), "section is 'sorter'; expected dovetail.config.kinds.KindSection | None"),
        (one(section=KindSection("sorter", "", default="quick")), (), "section.default is 'quick'; expected"),
        (one(section=KindSection("sorter", "", default="none")), (), "has the default 'none', so it must be optional"),
        (one(section=KindSection("sorter", "", phases=("a", "b"))), (), "sets phases, which only built-in kinds can"),
        (one(one_for_all_phases="batch_invariant"), (), "sets one_for_all_phases, which only built-in kinds can have"),
        (one(section=None, named_at="model.arch"), (), "kind 'sorter' has no section, so no config could select"),
        (
            replace(several(), selects=Selects.SERVED),
            (),
            "is for_prompts and its selects is SERVED; allowed: ONE, LIST",
        ),
        (replace(several(), selects=Selects.ONE_AND_OTHERS), (), "is for_prompts and its selects is ONE_AND_OTHERS"),
        (one(selects=Selects.BY_CHECKPOINT), (), "is selected by the checkpoint, which only the kind 'model' can be"),
        (one(runtime_needs=(RuntimeNeed(Feature("sorter.odd")),)), (), "'sorter.odd', which is not registered"),
        (
            one(runtime_needs=(RuntimeNeed(STABLE, when="scheduler.odd"),)),
            FEATURES,
            "'scheduler.odd' is not a setting that is negotiated; allowed: scheduler.overlap",
        ),
        (
            one(),
            (FeatureDescriptor(STABLE, "", also=(("scheduler.odd", "decode"),)),),
            "feature 'sorter.stable': 'scheduler.odd' is not a setting that is negotiated",
        ),
        (one(), (FEATURES[0], FEATURES[0]), "feature 'sorter.stable' is given 2 times; give it once"),
        (one(), (FeatureDescriptor(None, ""),), "register_features: None is wrong: name is None; expected str"),
    ],
)
def test_what_cannot_be_registered_is_refused_whole(fakes, kind, features, said):
    registry = fakes.registry(entries=[entry(fakes, kind, features=features)])
    record = next(record for record in registry.plugins if record.name == "sorters")
    assert said in record.reason
    assert "sorter" not in registry.kinds
    assert not [name for name in registry.kinds.features if name.startswith("sort")]


def test_a_plugin_registers_a_kind_once(fakes):
    fakes.put("Sorts", Sorts)
    twice = fakes.entry("sorters", register_kinds=lambda: [one(), one(namespaces=())])
    (record,) = [record for record in fakes.registry(entries=[twice]).plugins if record.name == "sorters"]
    assert record.reason == "kind 'sorter' is given 2 times; give it once"


def test_of_two_plugins_that_register_one_kind_the_second_fails_and_both_are_named(fakes):
    registry = fakes.registry(entries=[entry(fakes, name="sorters"), entry(fakes, name="tidy")])
    record = next(record for record in registry.plugins if record.name == "tidy")
    taken = "is registered already, by sorters-dist; deny one of the two plugins (plugins.deny)"
    assert f"kind 'sorter' {taken}; feature 'sorter.stable' {taken}" in record.reason
    assert "sorter" in registry.kinds


def test_a_plugin_may_extend_a_kind_of_another_that_is_registered_after_it(fakes):
    odd = FeatureDescriptor("sorter.odd", "sorts odd numbers")
    kind = one(runtime_needs=(RuntimeNeed(Feature("list.long")),))
    lists = replace(one(namespaces=("list",)), kind=ComponentKind("list"), section=KindSection("list", ""))
    entries = [
        fakes.entry("a", register_features=lambda: [odd]),
        entry(fakes, kind, name="b"),
        fakes.entry(
            "c", register_kinds=lambda: [lists], register_features=lambda: [FeatureDescriptor("list.long", "is long")]
        ),
    ]
    registry = fakes.registry(entries=entries)
    assert {record.status for record in registry.plugins} == {PluginStatus.LOADED}
    assert {"sorter.odd", "list.long"} <= registry.kinds.features.keys()


def test_a_key_that_no_kind_has_is_answered_with_the_plugins_that_did_not_load(fakes):
    policy = PluginsSection(deny=("sorters",))
    hooks = fakes.entry("hooks", on_engine_stop=lambda: None)
    registry = load_plugins(policy, [fakes.entry("fakes", fakes.basics()), hooks, entry(fakes)])
    absent = "sorters of sorters-dist (blocked: plugins.deny names it)"
    with pytest.raises(ConfigError) as caught:
        fakes.config(registry, "sorter=quick")
    assert f"plugins. Kinds of plugins that did not load are not known: {absent} [--set sorter=quick]" in str(
        caught.value
    )
    with pytest.raises(ConfigError) as caught:
        fakes.config(registry, "schedular=quick")
    assert absent not in str(caught.value), "the key resembles another"
    with pytest.raises(UnknownComponentError) as caught:
        registry.get(ComponentKind.POLICY, "quick")
    assert str(caught.value).endswith(f"installed: fcfs. Plugins that did not load: {absent}"), (
        "a plugin may be hooks alone"
    )


def test_a_feature_may_be_added_to_a_built_in_namespace(fakes):
    added = FeatureDescriptor("cache.compressed", "keeps pages compressed")
    spec = fakes.spec(ComponentKind.CACHE, "small", offers=frozenset({Feature("cache.compressed")}), priority=-1)
    needs = frozenset({Feature("cache.compressed")})
    sorter = quick(fakes, needs=needs)
    registry = registry_of(fakes, None, sorter, spec, features=(*FEATURES, added))
    resolved = resolve(fakes.config(registry, "sorter=quick"), registry, CPU)
    assert resolved.cache.name == "small", "the only cache that offers it"


def test_another_plugin_may_bring_a_component_of_the_kind_whatever_their_order(fakes):
    entries = [fakes.entry("a_first", [quick(fakes)]), entry(fakes, name="z_last")]
    registry = load_plugins(PluginsSection(), entries)
    assert registry.names("sorter") == ["quick"]
    alone = load_plugins(PluginsSection(), [fakes.entry("a_first", [quick(fakes)])])
    assert "kind is 'sorter', which no plugin registers" in alone.plugins[0].reason


def test_the_page_about_plugins_lists_the_built_in_kinds():
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(dovetail\.interfaces\.[\w.]+)` \| `([\w.]+)` \|$", page, re.MULTILINE)
    assert rows == [(k.kind, k.interface.replace(":", "."), k.suite.replace(":", ".")) for k in KINDS]
    for descriptor in KINDS:
        module, _, name = descriptor.suite.partition(":")
        assert getattr(importlib.import_module(module), name).kind == descriptor.kind


# config


def test_its_section_is_a_key_of_the_config(fakes):
    registry = registry_of(fakes, None, quick(fakes), quick(fakes, "slow"))
    config = fakes.config(registry, "sorter=quick", "sorter.depth=5")
    (chosen,) = config.kinds["sorter"].candidates
    assert (chosen.kind, chosen.depth) == ("quick", 5)
    assert dump(config)["sorter"] == {"kind": "quick", "depth": 5}
    assert validate(Raw((SettingsSource("again", dump(config)),)), registry) == config
    assert pickle.loads(pickle.dumps(fakes.config(registry))) == fakes.config(registry)
    assert dump(fakes.config(registry))["sorter"] == "auto"
    replaced = fakes.config(registry, "sorter={kind: quick, depth: 5}", "sorter=slow")
    assert dump(replaced)["sorter"] == {"kind": "slow", "depth": 3}, "another component replaces the section whole"


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["sorter=quik"], "no sorter component is called 'quik'; installed: quick; did you mean 'quick'?"),
        (["sorter.depth=5"], "sorter has no `kind`"),
        (
            ["sorter={kind: quick, dept: 5}"],
            "sorter.dept is not a key of sorter 'quick' (sorters-dist 1.0); allowed: depth",
        ),
        (["sortr=quick"], "sortr is not a key of the config; allowed: model,"),
        (["sortr=quick"], "did you mean 'sorter'?"),
        (["kinds={sorter: {}}"], "kinds is not a key of the config"),
        (["sorter=[]"], "sorter is an empty list; allowed: one of auto, none, quick"),
    ],
)
def test_what_is_wrong_with_it_is_said(fakes, sets, said):
    registry = registry_of(fakes, None, quick(fakes))
    with pytest.raises(ConfigError) as caught:
        fakes.config(registry, *sets)
    assert said in str(caught.value)
    assert "[--set " in str(caught.value), "where it was set"


def test_the_key_is_unknown_where_the_kind_is_not_installed(fakes):
    with pytest.raises(ConfigError, match="sorter is not a key of the config"):
        fakes.config(fakes.registry(), "sorter=quick")


def test_an_unused_kind_leaves_the_hash_alone(fakes):
    with_it, without = registry_of(fakes, several(), quick(fakes)), fakes.registry()
    assert config_hash(fakes.config(with_it)) == config_hash(fakes.config(without))
    assert config_hash(fakes.config(with_it, "sorter=quick")) != config_hash(fakes.config(without))


def test_the_schema_has_it(fakes):
    registry = registry_of(fakes, None, quick(fakes))
    schema = config_schema(registry)["properties"]
    assert schema["sorter"]["description"] == "How things are sorted."
    assert {"enum": ["quick"]} in schema["sorter"]["anyOf"]
    assert "kinds" not in schema


SETS = ["=quick", ".depth=4", "=auto", "={kind: other, depth: 1}", "=[quick, {kind: other}]", ".kind=other"]


@given(st.lists(st.sampled_from(SETS)))
def test_sources_merge_alike_for_built_in_and_other_sections(sets):
    sections = (*BUILT_IN, KindSection("sorter", ""))
    trees = [read([], [key + text for text in sets], {}).with_sections(sections).tree for key in ("cache", "sorter")]
    assert trees[0].get("cache") == trees[1].get("sorter")


@pytest.mark.parametrize("of_server", [False, True])
def test_arms_of_one_server_differ_in_sections_of_the_engine_only(fakes, of_server):
    section = KindSection("sorter", "How things are sorted.", optional=True, of_server=of_server)
    registry = registry_of(fakes, one(section=section), quick(fakes))
    arms = "experiment={arms: {a: {sorter: {kind: quick, depth: 8}}}, split: {base: 1, a: 1}}"
    config = fakes.config(registry, arms, "sorter=quick")
    if of_server:
        with pytest.raises(
            ConfigError, match=r"experiment\.arms\.a\.sorter would differ between the arms of one server"
        ):
            arm_configs(config, registry)
    else:
        depths = {name: arm.kinds["sorter"].candidates[0].depth for name, arm in arm_configs(config, registry).items()}
        assert depths == {"base": 3, "a": 8}


# negotiation


def chosen(fakes, registry, *sets):
    return resolve(fakes.config(registry, *sets), registry, CPU)


def test_one_component_is_chosen_by_priority(fakes):
    registry = registry_of(fakes, None, quick(fakes), quick(fakes, "better", priority=5))
    resolved = chosen(fakes, registry)
    assert resolved.part("sorter").name == "better"
    assert resolved.chosen["sorter"].name == "better"
    assert resolved.resolutions[-1].slot == "sorter"
    assert [c.verdict.value for c in resolved.resolutions[-1].candidates] == ["chosen", "passed over"]
    assert resolved.config.kinds["sorter"].candidates[0].kind == "better"
    assert chosen(fakes, registry, "sorter=none").part("sorter") is None
    assert isinstance(resolved.part("sorter").build(None), Sorts)


def test_needs_go_both_ways(fakes):
    picky = fakes.spec(ComponentKind.POLICY, "picky", needs=frozenset({STABLE}))
    stable = quick(fakes, "stable", offers=frozenset({STABLE}), priority=-5)
    registry = registry_of(fakes, None, quick(fakes), stable, extra=[picky])
    assert chosen(fakes, registry).part("sorter").name == "quick"
    assert chosen(fakes, registry, "policy=picky").part("sorter").name == "stable"
    with pytest.raises(ResolutionError) as caught:
        chosen(fakes, registry, "policy=picky", "sorter=quick")
    assert "policy 'picky' needs sorter.stable; sorter is 'quick', which offers nothing" in str(caught.value)
    assert "  - sorter: stable" in str(caught.value)
    wanting = quick(fakes, "wanting", needs=frozenset({Feature.CACHE_REUSE}))
    registry = registry_of(fakes, None, wanting)
    assert chosen(fakes, registry, "sorter=wanting").cache.name == "tree"
    with pytest.raises(
        ResolutionError, match=r"sorter 'wanting' needs cache\.reuse; cache is 'none', which offers nothing"
    ):
        chosen(fakes, registry, "sorter=wanting", "cache=none")


def test_what_the_runtime_needs_of_the_kind_is_data(fakes):
    kind = one(runtime_needs=(RuntimeNeed(FAST, when="scheduler.mixed"), RuntimeNeed(STABLE)))
    registry = registry_of(fakes, kind, quick(fakes, offers=frozenset({STABLE})))
    with pytest.raises(ResolutionError) as caught:
        chosen(fakes, registry, "sorter=quick")
    assert "scheduler.mixed needs sorter.fast" in str(caught.value)
    assert "  - scheduler.mixed: false" in str(caught.value)
    assert chosen(fakes, registry, "sorter=quick", "scheduler.mixed=false")
    assert chosen(fakes, registry, "sorter=none"), "nothing is needed of a part that is off"


def test_rules_and_checks_are_functions_of_the_kind(fakes):
    def rules(situation):
        if situation.candidate("sorter") is not None and situation.candidate("policy").spec.name == "late":
            yield Reason("sorter.late", "a sorter comes too late", "the policy is late")

    def check(config, slots, combo):
        if combo["sorter"] is not None and config.threads == 7:
            raise ConfigError("threads is 7; a sorter allows 6. Set threads: 6")

    kind = one(rules=fakes.put("rules", rules), check=fakes.put("check", check))
    registry = registry_of(fakes, kind, quick(fakes), extra=[fakes.spec(ComponentKind.POLICY, "late")])
    assert chosen(fakes, registry).part("sorter").name == "quick"
    assert chosen(fakes, registry, "policy=late").part("sorter") is None, "it may stay empty"
    with pytest.raises(ResolutionError, match="a sorter comes too late; the policy is late"):
        chosen(fakes, registry, "policy=late", "sorter=quick")
    with pytest.raises(ConfigError, match="Set threads: 6"):
        chosen(fakes, registry, "threads=7")


def test_versions_of_its_interface_are_compared(fakes):
    kind = one(api=(2, 1))
    registry = registry_of(fakes, kind, quick(fakes, api=(2, 1)), quick(fakes, "newer", api=(2, 2)))
    assert registry.get("sorter", "quick").incompatible is None
    assert (
        "built for version 2.2 of the sorter interface; this dovetail has 2.1"
        in registry.get("sorter", "newer").incompatible
    )
    with pytest.raises(ResolutionError, match=r"at stage api: interface version 2\.1"):
        chosen(fakes, registry, "sorter=newer")


def test_a_class_that_does_not_implement_the_interface_is_refused(fakes):
    registry = registry_of(fakes, None, replace(quick(fakes), target=fakes.put("Other", Other)))
    with pytest.raises(PluginLoadError, match="expected a subclass of"):
        chosen(fakes, registry, "sorter=quick").part("sorter").load()


def test_a_list_is_used_whole_and_in_order(fakes):
    first, second = quick(fakes, "first"), quick(fakes, "second", priority=3)
    registry = registry_of(fakes, several(), first, second)
    assert [c.name for c in chosen(fakes, registry, "sorter=[first, second]").lists["sorter"]] == ["first", "second"]
    assert [c.name for c in chosen(fakes, registry, "sorter=auto").lists["sorter"]] == ["second", "first"]
    resolved = chosen(fakes, registry)
    assert (resolved.lists["sorter"], resolved.resolutions[-1].note) == ((), "switched off by config")
    assert "sorter" not in resolved.chosen
    assert resolved.to_json()["lists"] == {"sorter": []}


def test_of_a_list_that_config_leaves_open_what_does_not_fit_is_left_out(fakes):
    odd = quick(fakes, "odd", needs=frozenset({FAST}), priority=9)
    registry = registry_of(fakes, several(), quick(fakes), odd)
    resolved = chosen(fakes, registry, "sorter=auto")
    assert [c.name for c in resolved.lists["sorter"]] == ["quick"]
    (rejected,) = (c for c in resolved.resolutions[-1].candidates if c.spec.name == "odd")
    assert rejected.verdict.value == "rejected"
    assert "sorter 'odd' needs sorter.fast" in str(rejected.reasons[0])
    with pytest.raises(
        ResolutionError, match=r"sorter 'odd' needs sorter\.fast; sorter is '\[quick, odd\]', which offers nothing"
    ):
        chosen(fakes, registry, "sorter=[quick, odd]")
    helped = registry_of(fakes, several(), quick(fakes, "able", offers=frozenset({FAST})), odd)
    with pytest.raises(ResolutionError) as caught:
        chosen(fakes, helped, "sorter=odd")
    assert "  - sorter: [able, odd]\n  - sorter: [odd, able]" in str(caught.value)


# prompts


def hooks_of(fakes, on_prompt, *sets):
    specs = [quick(fakes, "first"), quick(fakes, "second")]
    registry = registry_of(fakes, several(), *specs, on_prompt=on_prompt)
    config = fakes.config(registry, *sets)
    resolved = resolve(config, registry, CPU)
    return load_prompt_hooks({"resolved": resolved.to_json()}, config, registry)


def test_the_hook_gets_each_prompt_and_the_components_of_config(fakes):
    def on_prompt(prompt, parts):
        names = [f"{part.config.kind}{part.config.depth}" for part in parts["sorter"]]
        if prompt.text is not None:
            prompt.text += " ".join(names)
        else:
            prompt.messages = [*prompt.messages, {"role": "user", "content": names[0]}]

    hooks = hooks_of(fakes, on_prompt, "sorter=[{kind: second, depth: 8}, first]")
    assert hooks.text("x ") == "x second8 first3"
    assert hooks.messages([]) == [{"role": "user", "content": "second8"}]


def test_without_such_a_plugin_prompts_are_untouched(fakes):
    messages = [{"role": "user", "content": "x"}]
    for hooks in (PromptHooks(), PromptHooks(fakes.registry())):
        assert hooks.messages(messages) is messages
        assert hooks.text("x") == "x"


def test_errors_of_the_hook_are_the_plugins_or_the_requests(fakes):
    def refuses(prompt):
        raise RequestError("no such prompt here")

    def fails(prompt):
        raise ValueError("broken")

    def forgets(prompt):
        prompt.text = None

    for hook, error, said in (
        (refuses, RequestError, "no such prompt"),
        (fails, PluginError, "on_prompt raised ValueError: broken"),
        (forgets, PluginError, "set the text of a prompt to None"),
    ):
        with pytest.raises(error, match=said):
            hooks_of(fakes, hook).text("x")


def test_another_process_finds_the_same_components(fakes):
    registry = registry_of(fakes, None, quick(fakes), quick(fakes, "better", priority=5))
    config = fakes.config(registry, "sorter=[{kind: better, depth: 9}, quick]")
    resolved = resolve(config, registry, CPU).to_json()
    (found,) = reported(resolved, "sorter", config, registry)
    assert (found.name, found.config.depth) == ("better", 9)
    (found,) = reported(resolved, "cache", Config(), registry)
    assert found.name == "tree"
