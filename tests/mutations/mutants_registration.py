"""Define plugins that are broken before they do anything: policies that work, except for what every suite requires of
its component."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import mutated_heavy
import mutated_twice
from mutant import Mutant
from mutated_config import BoundConfig, ForgetfulConfig, LaxConfig

from dovetail.config.plugin import PluginConfig
from dovetail.registry import builtin
from dovetail.registry.installed import RegisteredComponent
from dovetail.registry.specs import ComponentSpec
from dovetail.registry.targets import load_attribute
from dovetail.testing.policy import PolicySuite


class Sound(PolicySuite):
    """Use the component as it is installed."""

    name = "fcfs"


class Planted(PolicySuite):
    """Describe a component that is not installed."""

    name = "twice"
    module: ClassVar[str] = "mutated_twice"
    planted: ClassVar[ComponentSpec] = mutated_twice.SPEC
    settings: ClassVar[Mapping[str, Any]] = {}

    @property
    def component(self) -> RegisteredComponent:
        return RegisteredComponent(self.planted, "mutated", "1", self.module, builtin.POLICY)

    @property
    def entry(self) -> str:
        return self.module

    def config(self) -> PluginConfig:
        return load_attribute(self.planted.config, self.name).model_validate(self.settings)


class Heavy(Planted):
    name = "heavy"
    module = "mutated_heavy"
    planted = mutated_heavy.SPEC


class ImportsItself(Planted):
    """Name the module of the component itself as the entry point."""

    planted = replace(mutated_twice.SPEC, target="mutated_twice:register_components")


class Forgetful(Planted):
    planted = replace(mutated_twice.SPEC, config=f"mutated_config:{ForgetfulConfig.__name__}")
    settings: ClassVar = {"patience": 5}


class Lax(Planted):
    planted = replace(mutated_twice.SPEC, config=f"mutated_config:{LaxConfig.__name__}")


class Bound(Planted):
    planted = replace(mutated_twice.SPEC, config=f"mutated_config:{BoundConfig.__name__}")


class Unrelated(Planted):
    """Name a class that is no policy."""

    planted = replace(mutated_twice.SPEC, target="mutated_config:TwiceConfig")


class Misspelt(Planted):
    planted = replace(mutated_twice.SPEC, target="dovetail_policies.simple:Fcsf")


INTERFACE = "test_it_implements_its_interface"
COST, TRIP = "test_listing_it_imports_nothing_heavy", "test_its_config_survives_serialization"
MUTANTS = [
    Mutant("imports torch when it registers", COST, Heavy, Sound, says="imports torch"),
    Mutant("imports its component when it registers", COST, ImportsItself, Sound, says="imports mutated_twice"),
    Mutant("has a setting that is not serialized", TRIP, Forgetful, Sound, says="is not what it was"),
    Mutant("accepts unknown keys", TRIP, Lax, Sound, says="DID NOT RAISE"),
    Mutant("names a class that is no subclass of the interface", INTERFACE, Unrelated, Sound, says="no subclass"),
    Mutant("misspells its class", INTERFACE, Misspelt, Sound, says="did you mean"),
    Mutant(
        "registers twice if the hook is called twice", "test_it_registers_the_same_specs_every_time", Planted, Sound
    ),
    Mutant(
        "has a config that cannot be pickled", "test_it_can_be_sent_to_a_spawned_process", Bound, Sound, says="pickle"
    ),
]
