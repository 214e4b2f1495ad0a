"""Kinds and features that a plugin brings: registered and configured as the built-in ones are.

.venv/bin/python -m pytest -q tests/core/test_open_kinds.py
"""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.config import PluginsSection, config_hash, dump
from dovetail.config.kinds import BUILT_IN, KindSection
from dovetail.config.schema import config_schema
from dovetail.config.sources import Raw, SettingsSource, read
from dovetail.config.tree import validate
from dovetail.errors import (
    ConfigError,
    PluginLoadError,
    UnknownComponentError,
)
from dovetail.experiment.online.configs import arm_configs
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature, FeatureDescriptor
from dovetail.interfaces.names import BuiltIn
from dovetail.registry import ComponentKind, RuntimeNeed, Selects, load_plugins, resolve
from dovetail.registry.builtin import KINDS
from dovetail.registry.installed import PluginStatus
from dovetail.registry.kinds import Kinds

sys.path.insert(0, str(Path(__file__).parent))
from sorters import CPU, FEATURES, STABLE, Sorts, entry, one, quick, registry_of, several

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
        fakes.config(registry, "xyzzy=quick")
    assert f"plugins. Kinds of plugins that did not load are not known: {absent} [--set xyzzy=quick]" in str(
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
