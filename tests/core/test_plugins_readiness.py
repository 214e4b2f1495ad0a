"""Test what ``plugins check`` and ``doctor`` find in a component that cannot be used, before anything selects it.

Run: python -m pytest tests/core/test_plugins_readiness.py
"""

from __future__ import annotations

import pytest

from dovetail.cli.plugins_check import _refuse_unready
from dovetail.errors import ConfigError, PluginLoadError
from dovetail.interfaces.cache import Match, PrefixCache
from dovetail.interfaces.parsers import ReasoningParser
from dovetail.interfaces.policy import SchedulePolicy
from dovetail.registry import ComponentKind
from dovetail.registry.readiness import readiness_fault
from dovetail.registry.samples import EmptyCache, for_grammar
from dovetail.testing.installed import installed

K = ComponentKind


class Sound(SchedulePolicy):
    def order(self, waiting, running):
        return list(waiting)


class Unrelated:
    def order(self, waiting, running):
        return list(waiting)


class Misspelt(SchedulePolicy):
    def ordr(self, waiting, running):
        return list(waiting)


class OneArgument(Sound):
    def __init__(self, config):
        pass


class OtherParameters(SchedulePolicy):
    def order(self, waiting):
        return list(waiting)


class NoMethod(Sound):
    order = None


class Asynchronous(SchedulePolicy):
    async def order(self, waiting, running):
        return list(waiting)


class FailsToBuild(Sound):
    def __init__(self, config, context):
        raise KeyError("patience")


class NeedsADevice(Sound):
    def __init__(self, config, context):
        raise ConfigError("needs a device")


class OtherNames(EmptyCache):
    def __init__(self, config, context):
        pass

    def match(self, tokens, tenant=""):
        return Match(0, tokens, None)


class NoProperty(EmptyCache):
    def __init__(self, config, context):
        pass

    def total(self):
        return 0


@pytest.mark.parametrize(
    ("kind", "cls", "said"),
    [
        (K.POLICY, Sound, None),
        (K.POLICY, NeedsADevice, None),
        (K.POLICY, Unrelated, "is no subclass of dovetail.interfaces.policy.SchedulePolicy"),
        (K.POLICY, lambda config, context: None, "expected a class"),
        (K.POLICY, Misspelt, "does not define order, which SchedulePolicy requires. Did you mean 'ordr'?"),
        (K.POLICY, OneArgument, "has the constructor (config); the core calls it with (config, context)"),
        (K.POLICY, OtherParameters, "defines order(self, waiting); the core calls it as SchedulePolicy.order("),
        (K.POLICY, NoMethod, "has None as order; SchedulePolicy has a method"),
        (K.POLICY, Asynchronous, "which has def, not async def"),
        (K.POLICY, FailsToBuild, "cannot be built with its default settings: KeyError: 'patience'"),
        (K.CACHE, OtherNames, "the core calls it as PrefixCache.match(self, tokens, namespace)"),
        (K.CACHE, NoProperty, "defines total as a method; PrefixCache has a property: put @property above it"),
        (K.REASONING_PARSER, ReasoningParser, "does not define gate, stream, which ReasoningParser requires"),
        (K.CACHE, PrefixCache, "does not define evict, evictable, "),
    ],
)
def test_a_class_that_cannot_be_used_is_found(fakes, kind, cls, said):
    spec = fakes.spec(kind, "mine", target=fakes.put("Mine", cls))
    fault = readiness_fault(fakes.registry(spec).get(kind, "mine"))
    assert (
        (fault is None) if said is None else (fault.startswith(f"{kind} 'mine' (fakes-dist 1.0): ") and said in fault)
    )
    assert fault is None or "\n" not in fault


@pytest.mark.parametrize(
    ("field", "target", "said"),
    [
        ("target", "dovetail_policies.simple:Fcsf", "has no attribute 'Fcsf'; did you mean 'Fcfs'?"),
        ("target", "dovetail_policies.simpel:Fcfs", "No module named 'dovetail_policies.simpel'"),
        ("config", "dovetail_fakes:Nothing", "cannot be imported"),
        ("probe", "dovetail.registry.samples:_SAMPLES", "cannot be imported"),
        ("probe", "dovetail.registry.loader:_REGISTERS", "is not a function"),
    ],
)
def test_a_target_that_cannot_be_imported_is_found(fakes, field, target, said):
    spec = fakes.spec(K.POLICY, "mine", **{field: target})
    fault = readiness_fault(fakes.registry(spec).get(K.POLICY, "mine"))
    assert fault is not None
    assert fault.startswith("policy 'mine' (fakes-dist 1.0): ")
    assert said in fault
    assert "\n" not in fault


def test_every_component_of_this_repository_whose_requirements_are_met_is_ready():
    light = [c for c in installed().every_component if not c.spec.requires]
    assert len(light) > 20
    assert [fault for fault in map(readiness_fault, light) if fault] == []


def test_the_sample_of_grammar_backends_has_a_vocabulary():
    context = for_grammar()
    assert context.vocab_size == len(context.token_bytes) > 256
    assert context.eos_token_ids


def test_a_cause_that_several_components_share_is_printed_once(fakes):
    specs = [fakes.spec(K.POLICY, name, target=f"no_such_module:{name.title()}") for name in ("one", "two")]
    specs.append(fakes.spec(K.CACHE, "three", target="no_such_module.other:Three"))
    specs.append(fakes.spec(K.CACHE, "four", target="dovetail.errors:Absent"))
    registry = fakes.registry(*specs)
    with pytest.raises(PluginLoadError) as caught:
        _refuse_unready([registry.get(spec.kind, spec.name) for spec in specs])
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("policy 'one'")
    assert lines[0].count("No module named 'no_such_module'") == 1
    assert lines[0].endswith("; the same holds for policy 'two', cache 'three'")
    assert lines[1].startswith("cache 'four'")
