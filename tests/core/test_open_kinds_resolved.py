"""Kinds and features that a plugin brings: negotiated, and applied to prompts, as the built-in ones are.

.venv/bin/python -m pytest -q tests/core/test_open_kinds_resolved.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.config import Config
from dovetail.errors import (
    ConfigError,
    PluginError,
    PluginLoadError,
    RequestError,
    ResolutionError,
)
from dovetail.generation.prompts import PromptHooks, load_prompt_hooks
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, RuntimeNeed, resolve
from dovetail.registry.resolution import Reason, reported

sys.path.insert(0, str(Path(__file__).parent))
from sorters import CPU, FAST, STABLE, Other, Sorts, one, quick, registry_of, several

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
        ResolutionError, match=r"sorter 'wanting' needs cache\.reuse; cache is 'none', which offers cache.groups"
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
    assert (resolved.lists["sorter"], resolved.resolutions[-1].note) == ((), "config names none")
    assert "sorter" not in resolved.chosen
    assert resolved.to_json()["lists"] == {"logits_processor": [], "sorter": []}


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
        (fails, PluginError, "on_prompt of plugin 'sorters' of sorters-dist 1.0 raised ValueError: broken"),
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
