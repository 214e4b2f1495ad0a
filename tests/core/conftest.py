"""Make plugins in memory: entry points, specs and config sections for tests of the control plane."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from pydantic import create_model

from dovetail.config import Config, PluginConfig, PluginsSection
from dovetail.config.sources import read
from dovetail.config.tree import validate
from dovetail.interfaces.cache import CacheGroup
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature
from dovetail.interfaces.model import ModelInfo
from dovetail.memory.pool import plain_page_bytes
from dovetail.memory.state_pool import bytes_per_slot
from dovetail.registry import ComponentKind, ComponentSpec, Registry, builtin, hookimpl, load_plugins
from dovetail.registry.targets import load_attribute

MODULE = "dovetail_fakes"
MIXER = frozenset(Feature(each.name) for each in BUILT_IN_FEATURES if each.namespace == "mixer")
ATTENTION = frozenset({Feature.ATTN_EXTEND, Feature.ATTN_DECODE, Feature.ATTN_MIXED, Feature.ATTN_VERIFY})


@dataclass(frozen=True)
class FakeDistribution:
    name: str
    version: str


@dataclass
class FakeEntry:
    """Stand in for an entry point; ``load`` returns a module made in memory, or raises."""

    name: str
    dist: FakeDistribution
    module: Any
    loads: list[str] = field(default_factory=list)

    @property
    def value(self) -> str:
        return f"{self.name}.plugin"

    def load(self) -> Any:
        self.loads.append(self.name)
        if isinstance(self.module, Exception):
            raise self.module
        return self.module


class Fakes:
    """Make entry points, specs and whole registries. Config classes are in a module that is importable by name."""

    def __init__(self, module: ModuleType, directory: Path) -> None:
        self.module = module
        self.directory = directory

    def entry(
        self, name: str, specs: Sequence[ComponentSpec] = (), dist: str = "", version: str = "1.0", **extra: Any
    ) -> FakeEntry:
        """Return a plugin that registers ``specs``; ``extra`` are further hooks by name."""
        module = ModuleType(f"fake_{name}")
        if specs:
            module.register_components = hookimpl(_returning(list(specs)))
        for hook, function in extra.items():
            setattr(module, hook, hookimpl(function))
        return FakeEntry(name, FakeDistribution(dist or f"{name}-dist", version), module)

    def broken(self, name: str, error: Exception) -> FakeEntry:
        """Return a plugin whose import raises."""
        return FakeEntry(name, FakeDistribution(f"{name}-dist", "1.0"), error)

    def put(self, name: str, value: Any) -> str:
        """Make ``value`` importable; returns its target."""
        setattr(self.module, name, value)
        return f"{MODULE}:{name}"

    def spec(self, kind: ComponentKind, name: str, fields: dict[str, Any] | None = None, **given: Any) -> ComponentSpec:
        """Return a spec with a config class that has ``fields`` in addition to ``kind``."""
        cls = create_model(f"{kind}_{name}", __base__=PluginConfig, kind=(Literal[name], name), **(fields or {}))
        values = {
            "target": self.put(f"{kind}_{name}_class", _stub(kind)),
            "config": self.put(f"{kind}_{name}_config", cls),
            "summary": f"a fake {kind}",
            **given,
        }
        if kind == ComponentKind.ATTENTION:
            values.setdefault("offers", ATTENTION)
        if kind == ComponentKind.CACHE:
            values.setdefault("api", builtin.CACHE.api)
        return ComponentSpec(kind=kind, name=name, **values)

    def model(self, **given: Any) -> ComponentSpec:
        """Register a model component that reads the fake checkpoint; ``given`` are fields of its ModelInfo."""
        info = {
            "architecture": "FakeForCausalLM",
            "vocab_size": 64,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 64,
            "context_len": 2048,
            "cache_groups": (CacheGroup(2, 2, 64),),
            **given,
        }
        describe = self.put("describe", lambda config: ModelInfo(**{**info, "config": config}))
        return self.spec(ComponentKind.MODEL, "fake", describe=describe, aliases=("FakeForCausalLM",))

    def basics(self) -> list[ComponentSpec]:
        """Return one plain component of every kind that must not be empty."""
        reuse = frozenset({Feature.CACHE_GROUPS, Feature.CACHE_REUSE})
        return [
            self.model(),
            self.spec(ComponentKind.ATTENTION, "plain"),
            self.spec(
                ComponentKind.CACHE, "tree", {"eviction": (Literal["lru", "lfu"], "lru")}, offers=reuse, priority=10
            ),
            self.spec(ComponentKind.CACHE, "none", offers=frozenset({Feature.CACHE_GROUPS})),
            self.spec(ComponentKind.POLICY, "fcfs", priority=10),
            self.spec(ComponentKind.MIXER, "steps", offers=MIXER),
            self.spec(
                ComponentKind.STORE,
                "pages",
                offers=frozenset(
                    {
                        Feature.STORE_FULL,
                        Feature.STORE_SLIDING,
                        Feature.STORE_LATENT,
                        Feature.STORE_STATE,
                        Feature.STORE_SLABS,
                    }
                ),
                api=(1, 1),
            ),
            self.spec(ComponentKind.EXECUTOR, "ranks", offers=frozenset({Feature.EXECUTOR_RANKS})),
        ]

    def registry(self, *specs: ComponentSpec, entries: Sequence[FakeEntry] = (), basics: bool = True) -> Registry:
        """Return a registry of the basics, ``specs``, and further entries."""
        mine = [*(self.basics() if basics else []), *specs]
        return load_plugins(PluginsSection(), [self.entry("fakes", mine), *entries])

    def config(self, registry: Registry, *sets: str) -> Config:
        """Return a config over the fake checkpoint."""
        return validate(read([], [f"model={self.directory}", *sets], {}), registry)


def _stub(kind: ComponentKind) -> object:
    """Return a class that implements the interface of a built-in kind and does nothing."""
    descriptor = next((descriptor for descriptor in builtin.KINDS if descriptor.kind == kind), None)
    if descriptor is None:
        return object
    interface = load_attribute(descriptor.interface, kind)

    def member(name: str) -> object:
        theirs = inspect.getattr_static(interface, name)
        return property(lambda self: 1) if isinstance(theirs, property) else lambda self, *args, **kwargs: None

    members = {name: member(name) for name in interface.__abstractmethods__}
    if kind == ComponentKind.STORE:
        members["__init__"] = lambda self, config, context: setattr(self, "context", context)
        members["page_bytes"] = lambda self, group, page_size: plain_page_bytes(group, page_size, self.context.dtype)
        members["slot_bytes"] = lambda self, group: bytes_per_slot(group, self.context.state_dtype)
    return type("Stub", (interface,), members)


def _returning(specs: list[ComponentSpec]) -> Callable[[], list[ComponentSpec]]:
    return lambda: specs


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Return a maker of plugins, with a checkpoint directory that holds only config.json."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    directory = tmp_path / "fake-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["FakeForCausalLM"]}))
    return Fakes(module, directory)
