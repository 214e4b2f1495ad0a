"""Test the loader: policy before import, four endings, messages.

Run: pytest tests/core/test_plugins_loader.py
"""

from __future__ import annotations

from types import FunctionType
from typing import Literal

import pytest
from pydantic import create_model

from dovetail.config import PluginConfig, PluginsSection
from dovetail.errors import (
    ConfigError,
    DuplicateComponentError,
    PluginError,
    PluginLoadError,
    RequestError,
    UnknownComponentError,
)
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, ComponentSpec, PluginStatus, Requirement, hookimpl, load_plugins

CACHE = ComponentKind.CACHE


def _status(registry):
    return {record.name: record.status for record in registry.plugins}


@pytest.mark.parametrize(
    ("policy", "imported"),
    [
        (PluginsSection(), {"a", "b"}),
        (PluginsSection(deny=("a",)), {"b"}),
        (PluginsSection(deny=("A_dist",)), {"b"}),
        (PluginsSection(allow=("b",)), {"b"}),
        (PluginsSection(autoload=False), set()),
        (PluginsSection(autoload=False, require=("a",)), {"a"}),
        (PluginsSection(autoload=False, allow=("a",)), {"a"}),
    ],
)
def test_policy_applies_before_anything_is_imported(fakes, policy, imported):
    entries = [fakes.entry("a", [fakes.spec(CACHE, "x")]), fakes.entry("b", [fakes.spec(CACHE, "y")])]
    registry = load_plugins(policy, entries)
    assert {entry.name for entry in entries if entry.loads} == imported
    assert {name for name, status in _status(registry).items() if status is PluginStatus.LOADED} == imported
    assert all(status is PluginStatus.BLOCKED for name, status in _status(registry).items() if name not in imported)


@pytest.mark.parametrize("key", ["allow", "require"])
def test_unknown_name_in_a_list_is_an_error(fakes, key):
    with pytest.raises(ConfigError) as caught:
        load_plugins(PluginsSection(**{key: ("fancyy",)}), [fakes.entry("fancy")])
    text = str(caught.value)
    assert f"plugins.{key} names 'fancyy'" in text
    assert "installed: fancy, fancy-dist" in text
    assert "did you mean 'fancy'?" in text


def test_a_broken_plugin_does_not_stop_the_others(fakes):
    broken = fakes.broken("bad", ModuleNotFoundError("No module named 'fast_kernels'", name="fast_kernels"))
    registry = load_plugins(PluginsSection(), [broken, fakes.entry("good", [fakes.spec(CACHE, "x")])])
    record = registry.plugins[0]
    assert record.status is PluginStatus.FAILED
    assert record.reason == "ModuleNotFoundError: No module named 'fast_kernels'"
    assert record.fix == "pip install fast-kernels"
    assert "Traceback" in record.traceback
    assert registry.names("cache") == ["x"]


def test_a_required_plugin_that_fails_stops_startup_with_its_traceback(fakes):
    with pytest.raises(PluginLoadError) as caught:
        load_plugins(PluginsSection(require=("bad",)), [fakes.broken("bad", RuntimeError("boom"))])
    assert "plugins.require names 'bad' of bad-dist 1.0, which is failed: RuntimeError: boom" in str(caught.value)
    assert "Traceback" in str(caught.value)


def test_a_required_plugin_that_is_denied_stops_startup(fakes):
    with pytest.raises(PluginLoadError, match=r"which is blocked: plugins\.deny names it"):
        load_plugins(PluginsSection(require=("a",), deny=("a",)), [fakes.entry("a")])


@pytest.mark.parametrize(
    ("api", "who"), [((1, 1), "update the plugin"), ((3, 0), "update dovetail"), ((2, 9), "update dovetail")]
)
def test_wrong_api_version_is_incompatible_with_text(fakes, api, who):
    registry = load_plugins(PluginsSection(), [fakes.entry("old", [fakes.spec(CACHE, "x", api=api)])])
    (record,) = registry.plugins
    assert record.status is PluginStatus.INCOMPATIBLE
    version = ".".join(map(str, api))
    assert f"built for version {version} of the cache interface; this dovetail has 2.2: {who}" in record.reason


def test_one_incompatible_component_leaves_its_plugin_loaded(fakes):
    specs = [fakes.spec(CACHE, "x", api=(1, 1)), fakes.spec(CACHE, "y")]
    registry = load_plugins(PluginsSection(), [fakes.entry("both", specs)])
    assert registry.plugins[0].status is PluginStatus.LOADED
    assert registry.get("cache", "x").status is PluginStatus.INCOMPATIBLE
    assert registry.get("cache", "y").status is PluginStatus.LOADED


def test_a_duplicate_name_breaks_nothing_until_it_is_selected(fakes, caplog):
    entries = [
        fakes.entry("a", [fakes.spec(CACHE, "x"), fakes.spec(CACHE, "y")]),
        fakes.entry("b", [fakes.spec(CACHE, "x"), fakes.spec(CACHE, "z")]),
    ]
    registry = load_plugins(PluginsSection(), entries)
    assert registry.names("cache") == ["y", "z"]
    assert "neither of them is used" in caplog.text
    for use in (registry.get, registry.config_class, registry.canonical):
        with pytest.raises(DuplicateComponentError) as caught:
            use("cache", "x")
    text = str(caught.value)
    assert "cache 'x' is claimed by plugin 'a' of a-dist 1.0 and plugin 'b' of b-dist 1.0" in text
    assert "plugins.deny: [b]" in text
    assert 'replace="a-dist"' in text


def test_replace_overrides_explicitly(fakes):
    entries = [fakes.entry("a", [fakes.spec(CACHE, "x")]), fakes.entry("b", [fakes.spec(CACHE, "x", replace="a-dist")])]
    assert load_plugins(PluginsSection(), entries).get("cache", "x").distribution == "b-dist"
    assert load_plugins(PluginsSection(), entries[::-1]).get("cache", "x").distribution == "b-dist"


def test_replacing_each_other_is_still_a_duplicate(fakes):
    entries = [
        fakes.entry("a", [fakes.spec(CACHE, "x", replace="b-dist")]),
        fakes.entry("b", [fakes.spec(CACHE, "x", replace="a-dist")]),
    ]
    with pytest.raises(DuplicateComponentError):
        load_plugins(PluginsSection(), entries).get("cache", "x")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "no_colon"}, "target is 'no_colon'; expected \"module:attribute\""),
        ({"priority": "high"}, "priority is 'high'; expected int"),
        ({"offers": {"cache.reuse"}}, "offers is {'cache.reuse'}; expected frozenset"),
        ({"api": (1,)}, "api is (1,); expected tuple[int, int]"),
        (
            {"requires": (Requirement("x", "1.2 or so"),)},
            "requires x with versions '1.2 or so'; expected a PEP 440 range",
        ),
        ({"kind": ComponentKind.POLICY}, "expected lower-case"),
    ],
)
def test_a_wrong_spec_is_refused_when_it_registers(fakes, given, message):
    values = {"kind": CACHE, "name": "x", "target": "m:a", "config": "m:a", "summary": "s", **given}
    if "kind" in given:
        values = {**values, "kind": CACHE, "name": "Wrong Name"}
    registry = load_plugins(PluginsSection(), [fakes.entry("wrong", [ComponentSpec(**values)])])
    (record,) = registry.plugins
    assert record.status is PluginStatus.FAILED
    assert message in record.reason
    assert registry.names("cache") == []


def test_a_spec_of_an_unknown_kind_is_refused_with_the_kinds_that_there_are(fakes):
    spec = fakes.spec(ComponentKind("cachee"), "x")
    registry = load_plugins(PluginsSection(), [fakes.entry("wrong", [spec])])
    assert "kind is 'cachee', which no plugin registers; kinds: attention, cache, grammar" in registry.plugins[0].reason
    assert "did you mean 'cache'?" in registry.plugins[0].reason


@pytest.mark.parametrize("field", ["offers", "needs"])
def test_a_feature_that_is_not_registered_is_refused_with_those_of_its_namespace(fakes, field):
    def reason(name):
        spec = fakes.spec(CACHE, "x", **{field: frozenset({Feature(name)})})
        return load_plugins(PluginsSection(), [fakes.entry("wrong", [spec])]).plugins[0].reason

    assert f"{field}: feature 'cache.reuze' is not registered; registered features of cache: cache.reuse," in reason(
        "cache.reuze"
    )
    assert "did you mean 'cache.reuse'?" in reason("cache.reuze")
    assert "there is no namespace 'cash'; namespaces: attention, cache," in reason("cash.reuse")


@pytest.mark.parametrize("returned", [None, 3, ["text"]])
def test_a_hook_that_returns_no_specs_is_refused(fakes, returned):
    registry = load_plugins(PluginsSection(), [fakes.entry("wrong", register_components=lambda: returned)])
    assert registry.plugins[0].status is PluginStatus.FAILED
    assert "expected" in registry.plugins[0].reason


def _wings():
    return []


def _takes_too_much(registry, surprise):
    return None


def test_unknown_hooks_and_arguments_are_incompatible_and_leave_nothing_behind(fakes):
    entries = [
        fakes.entry("hooks", register_wings=_wings),
        fakes.entry("arguments", register_metrics=_takes_too_much, on_engine_stop=lambda: "here"),
        fakes.entry("good", [fakes.spec(CACHE, "x")]),
    ]
    registry = load_plugins(PluginsSection(), entries)
    reasons = {record.name: record.reason for record in registry.plugins}
    assert "register_wings" in reasons["hooks"]
    assert "surprise" in reasons["arguments"]
    assert [record.status for record in registry.plugins] == [
        PluginStatus.INCOMPATIBLE,
        PluginStatus.LOADED,
        PluginStatus.INCOMPATIBLE,
    ]
    assert registry.hooks.register_metrics(registry=None) == []
    assert registry.hooks.on_engine_stop() == []


def test_one_module_under_two_names_keeps_the_first(fakes):
    first = fakes.entry("a", [fakes.spec(CACHE, "x")])
    second = fakes.entry("b")
    second.module = first.module
    registry = load_plugins(PluginsSection(), [first, second])
    assert _status(registry) == {"a": PluginStatus.LOADED, "b": PluginStatus.INCOMPATIBLE}
    assert registry.names("cache") == ["x"]


def test_a_plugin_of_the_interface_with_a_hook_for_each_kind_is_refused_with_the_hook_that_replaces_them(fakes):
    spec = fakes.spec(ComponentKind.POLICY, "mine")
    old = fakes.entry("old", register_policies=lambda: [spec], register_apis=lambda: [spec])
    registry = fakes.registry(entries=[old])
    (record,) = [record for record in registry.plugins if record.name == "old"]
    assert record.status is PluginStatus.INCOMPATIBLE
    assert record.reason.startswith("it implements register_apis, register_policies, which this dovetail does not call")
    assert record.reason.endswith("Components of every kind are returned by register_components")
    assert "mine" not in registry.names(ComponentKind.POLICY)


def test_a_hook_that_is_misspelt_is_refused_with_the_name_it_resembles(fakes):
    registry = fakes.registry(entries=[fakes.entry("typo", on_promt=lambda prompt: None)])
    (record,) = [record for record in registry.plugins if record.name == "typo"]
    assert record.reason.endswith("did you mean 'on_prompt'?")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("register_components", "on_resolved"),
            "it defines register_components without @hookimpl, so nothing calls it",
        ),
        (
            ("register_component",),
            "no hook, and defines register_component without @hookimpl; did you mean 'register_c",
        ),
        (("helper",), ""),
    ],
)
def test_a_forgotten_mark_of_a_hook_is_said_to_be_that(fakes, names, said):
    entry = fakes.entry("a")
    for name in names:
        function = FunctionType(_wings.__code__, vars(entry.module), name)
        setattr(entry.module, name, hookimpl(function) if name == "on_resolved" else function)
    (record,) = load_plugins(PluginsSection(), [entry]).plugins
    assert said in record.reason
    assert (record.status is PluginStatus.INCOMPATIBLE) == bool(said)


@pytest.mark.parametrize("hook", ["register_componets", "register_metric"])
def test_a_misspelt_hook_gets_a_suggestion(fakes, hook):
    (record,) = load_plugins(PluginsSection(), [fakes.entry("a", **{hook: _wings})]).plugins
    assert f"it implements {hook}, which this dovetail does not call" in record.reason
    assert "did you mean 'register_" in record.reason


@pytest.mark.parametrize(("error", "raised"), [(KeyError("k"), PluginError), (RequestError("no"), RequestError)])
def test_a_hook_that_fails_names_its_plugin(fakes, error, raised):
    def fails():
        raise error

    registry = load_plugins(PluginsSection(), [fakes.entry("good"), fakes.entry("bad", on_engine_stop=fails)])
    with pytest.raises(raised) as caught:
        registry.hooks.on_engine_stop()
    text = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "the hook on_engine_stop of plugin 'bad' of bad-dist 1.0" in text


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'dovetail.plugins'", name="dovetail.plugins"),
        ImportError("cannot import name 'Feature' from 'dovetail.types'", name="dovetail.types"),
    ],
)
def test_a_plugin_for_another_version_of_dovetail_is_to_be_updated(fakes, error):
    (record,) = [
        record for record in fakes.registry(entries=[fakes.broken("old", error)]).plugins if record.name == "old"
    ]
    assert record.fix == "pip install --upgrade old-dist, or update dovetail"


def test_unknown_component_lists_names_close_matches_and_absent_plugins(fakes):
    entries = [fakes.entry("a", [fakes.spec(CACHE, "radix")]), fakes.broken("b", RuntimeError("boom"))]
    registry = load_plugins(PluginsSection(), entries)
    with pytest.raises(UnknownComponentError) as caught:
        registry.get("cache", "radx")
    text = str(caught.value)
    assert "no cache component is called 'radx'; installed: radix; did you mean 'radix'?" in text
    assert "b of b-dist (failed: RuntimeError: boom)" in text


def test_aliases_stand_for_their_component_unless_ambiguous(fakes):
    specs = [fakes.spec(CACHE, "x", aliases=("old", "both")), fakes.spec(CACHE, "y", aliases=("both",))]
    registry = load_plugins(PluginsSection(), [fakes.entry("a", specs)])
    assert registry.canonical("cache", "old") == "x"
    with pytest.raises(UnknownComponentError, match="alias of several components; choose one of: x, y"):
        registry.get("cache", "both")


def test_config_class_must_carry_the_name_of_its_component(fakes):
    other = create_model("Other", __base__=PluginConfig, kind=(Literal["y"], "y"))
    spec = fakes.spec(CACHE, "x", config=fakes.put("Other", other))
    registry = load_plugins(PluginsSection(), [fakes.entry("a", [spec])])
    with pytest.raises(PluginLoadError) as caught:
        registry.config_class("cache", "x")
    assert "has `kind: typing.Literal['y'] = 'y'`; expected `kind: Literal['x'] = 'x'`" in str(caught.value)


def test_config_module_that_cannot_be_imported_names_its_distribution_and_cause(fakes):
    registry = load_plugins(PluginsSection(), [fakes.entry("a", [fakes.spec(CACHE, "x", config="no_such_module:C")])])
    with pytest.raises(
        PluginLoadError, match=r"cache 'x' \(a-dist 1\.0\): 'no_such_module:C' cannot be imported"
    ) as caught:
        registry.config_class("cache", "x")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
