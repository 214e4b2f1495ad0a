"""Define the cases that every suite has: they test what must hold for a component of any kind before it is used."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import pytest
from pydantic import ValidationError

from dovetail.errors import UnknownComponentError
from dovetail.registry.readiness import readiness_fault
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed

if TYPE_CHECKING:
    from dovetail.config import PluginConfig
    from dovetail.registry.installed import RegisteredComponent

HEAVY = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "xgrammar",
    "llguidance",
    "outlines_core",
    "lmformatenforcer",
    "flashinfer",
    "flash_attn",
)
"""The packages that must not be imported when plugins are listed or a config is read."""

_PROBE = """
import importlib, json, sys
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
print(json.dumps(sorted(sys.modules)))
"""


class RegistrationTests:
    """Add the cases of registration to ``ComponentSuite``. They are skipped for a class that no plugin registers."""

    kind: ClassVar[ComponentKind]
    name: ClassVar[str]

    if TYPE_CHECKING:

        @property
        def component(self) -> RegisteredComponent: ...
        @property
        def spec(self) -> ComponentSpec: ...
        def config(self) -> PluginConfig: ...

    @property
    def entry(self) -> str:
        """Return the module that the component's entry point names."""
        component = self.component
        return next(
            record.target.partition(":")[0]
            for record in installed().plugins
            if (record.name, record.distribution) == (component.plugin, component.distribution)
        )

    def registered(self) -> ComponentSpec:
        """Return the spec of the installed component, or skip the test if it is not installed."""
        try:
            return self.component.spec
        except UnknownComponentError:
            pytest.skip(f"no plugin registers {self.name}")

    def test_listing_it_imports_nothing_heavy(self) -> None:
        """The modules that ``plugins list`` and a config need import neither torch, nor kernel libraries, nor the
        component itself. A parser's own module and the module that describes a model must not import these libraries
        either."""
        spec = self.registered()
        target = spec.target.partition(":")[0]
        parts = [self.entry, spec.config, *([spec.describe] if spec.describe else [])]
        light = self.component.descriptor.light_target
        loaded = imported_by([part.partition(":")[0] for part in (*parts, *([target] if light else []))])
        assert not loaded & set(HEAVY), f"imports {', '.join(sorted(loaded & set(HEAVY)))} before they are needed"
        assert light or target not in loaded, f"imports {target} before it is needed"

    def test_its_config_survives_serialization(self) -> None:
        """The config is unchanged after writing and reading it as JSON, in full and with only the values that differ
        from the defaults. An unknown key is refused."""
        self.registered()
        config = self.config()
        cls = type(config)
        for written in (config.model_dump_json(), config.model_dump_json(exclude_defaults=True)):
            assert cls.model_validate_json(written) == config, f"{cls.__name__} is not what it was after {written}"
        with pytest.raises(ValidationError):
            cls.model_validate({**config.model_dump(), "no_field_of_this_name": 1})

    def test_it_implements_its_interface(self) -> None:
        """The class is a subclass of its kind's interface, defines every abstract method with parameters that the core
        can call, and can be built with its default settings where that needs no device and no model."""
        self.registered()
        for requirement in self.spec.requires:
            if not list(importlib.metadata.distributions(name=requirement.distribution)):
                pytest.skip(f"{self.name} needs {requirement.distribution}, which is not installed")
        fault = readiness_fault(self.component)
        assert fault is None, fault

    def test_it_registers_the_same_specs_every_time(self) -> None:
        """If the hook is called again, it returns the same specs, and no name twice."""
        spec = self.registered()
        module = importlib.import_module(self.entry)
        first, second = ([*module.register_components()] for _ in range(2))
        assert first == second, "register_components returns other specs when it is called again"
        same = [other for other in first if (other.kind, other.name) == (spec.kind, spec.name)]
        assert len(same) == 1, f"register_components returns {spec.name} {len(same)} times"
        assert same == [spec]

    def test_it_can_be_sent_to_a_spawned_process(self) -> None:
        """Engines run in separate processes: a spawned process finds the same config and the same class."""
        spec, config = self.registered(), self.config()
        for requirement in spec.requires:
            if not list(importlib.metadata.distributions(name=requirement.distribution)):
                pytest.skip(f"{self.name} needs {requirement.distribution}, which is not installed")
        cls = load_attribute(spec.target, spec.name)
        there, target = in_spawned_process(pickle.dumps(config), spec.target)
        assert pickle.loads(there) == config, "the config differs in a spawned process"
        assert target == (cls.__module__, cls.__qualname__), "the class differs in a spawned process"


def imported_by(modules: Sequence[str]) -> frozenset[str]:
    """Return the names of all modules that a fresh interpreter has imported after ``modules``."""
    return _imported_by(tuple(modules))


@functools.cache
def _imported_by(modules: tuple[str, ...]) -> frozenset[str]:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", _PROBE, json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    return frozenset(json.loads(done.stdout.splitlines()[-1]))


def in_spawned_process(config: bytes, target: str) -> tuple[bytes, tuple[str, str]]:
    """Return the pickled ``config`` as a spawned process returns it, and the module and name of ``target`` in that
    process."""
    return _process().submit(_load_again, config, target).result()


def _load_again(config: bytes, target: str) -> tuple[bytes, tuple[str, str]]:
    cls = load_attribute(target, target)
    return pickle.dumps(pickle.loads(config)), (cls.__module__, cls.__qualname__)


@functools.cache
def _process() -> ProcessPoolExecutor:
    """Return one process for all components, because importing torch takes longer than everything else."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
