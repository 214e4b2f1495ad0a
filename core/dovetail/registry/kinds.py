"""Collect the kinds and features that plugins register, and check them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dovetail.config.kinds import BUILT_IN, Sections
from dovetail.config.problems import suggest
from dovetail.config.sections import Config
from dovetail.errors import PluginLoadError, UnknownComponentError
from dovetail.interfaces.features import FeatureDescriptor
from dovetail.registry.specs import ComponentKind, KindDescriptor

SIDES = ("runtime", "kv", "model")
"""The namespaces of features that components do not offer in their specs: those of the runtime, the KV pool and the
model."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Kinds:
    """Hold the registered kinds and features, in order of registration. ``load_plugins`` makes it."""

    def __init__(self) -> None:
        self._kinds: dict[str, KindDescriptor] = {}
        self._features: dict[str, FeatureDescriptor] = {}
        self._kind_of: dict[str, KindDescriptor] = {}
        self._owners: dict[str, str] = dict.fromkeys(SIDES, "the runtime")

    def __iter__(self) -> Iterator[KindDescriptor]:
        return iter(self._kinds.values())

    def __contains__(self, kind: str) -> bool:
        return kind in self._kinds

    def __getitem__(self, kind: str) -> KindDescriptor:
        if kind not in self._kinds:
            names = list(self._kinds)
            raise UnknownComponentError(f"there is no kind {kind!r}; kinds: {', '.join(names)}{suggest(kind, names)}")
        return self._kinds[kind]

    @property
    def names(self) -> list[ComponentKind]:
        """Return the names of all kinds."""
        return [descriptor.kind for descriptor in self]

    @property
    def features(self) -> Mapping[str, FeatureDescriptor]:
        """Return every registered feature by its name."""
        return self._features

    @property
    def sections(self) -> Sections:
        """Return the config sections of the kinds that have one."""
        return tuple(descriptor.section for descriptor in self if descriptor.section is not None)

    @property
    def in_order(self) -> list[KindDescriptor]:
        """Return the kinds in the order in which they are resolved and explained."""
        return sorted(self, key=lambda descriptor: descriptor.order)

    def owner(self, namespace: str) -> KindDescriptor | None:
        """Return the kind whose components offer the features of a namespace; None for the runtime, the KV pool and the model."""
        return self._kind_of.get(namespace)

    def add(self, kinds: Iterable[KindDescriptor], features: Iterable[FeatureDescriptor], owner: str) -> None:
        """Register what the plugin ``owner`` brings. Raises ``PluginLoadError``, and then registers nothing."""
        kinds, features = tuple(kinds), tuple(features)
        faults = [
            *_each(kinds, KindDescriptor, "register_kinds"),
            *_each(features, FeatureDescriptor, "register_features"),
        ]
        if not faults:
            for descriptor in kinds:
                faults += self._kind_faults(descriptor)
            own = {namespace for descriptor in kinds for namespace in descriptor.namespaces}
            for feature in features:
                faults += self._feature_faults(feature, own)
        if faults:
            raise PluginLoadError("; ".join(faults))
        self._kinds |= {str(descriptor.kind): descriptor for descriptor in kinds}
        self._features |= {feature.name: feature for feature in features}
        self._kind_of |= {namespace: descriptor for descriptor in kinds for namespace in descriptor.namespaces}
        self._owners |= dict.fromkeys((n for descriptor in kinds for n in descriptor.namespaces), owner)

    def unknown_features(self, features: Iterable[str]) -> Iterator[str]:
        """Yield, for each feature that is not registered, a text that lists those of its namespace."""
        for feature in sorted(set(features) - self._features.keys()):
            namespace = feature.partition(".")[0]
            known = [name for name in self._features if name.partition(".")[0] == namespace]
            namespaces = list(dict.fromkeys(name.partition(".")[0] for name in self._features))
            text = f"registered features of {namespace}: {', '.join(known)}" if known else ""
            text = text or f"there is no namespace {namespace!r}; namespaces: {', '.join(namespaces)}"
            yield f"feature {feature!r} is not registered; {text}{suggest(feature, self._features)}"

    def _kind_faults(self, descriptor: KindDescriptor) -> Iterator[str]:
        kind, section = descriptor.kind, descriptor.section
        if not _NAME.fullmatch(kind):
            yield f"kind {kind!r} is not a name; expected lower-case letters, digits and underscores"
        if kind in self._kinds:
            yield f"kind {kind!r} is registered already"
        if not _TARGET.fullmatch(descriptor.interface):
            yield f'kind {kind!r} has the interface {descriptor.interface!r}; expected "module:attribute"'
        if section is None and not descriptor.named_at:
            yield f"kind {kind!r} has neither a section nor named_at, so no config could select its components"
        if section is not None and section.key != kind:
            yield f"kind {kind!r} has the section {section.key!r}; a section has the name of its kind"
        if section is not None and section not in BUILT_IN and section.key in Config.model_fields:
            yield f"kind {kind!r} would take the config key {section.key!r}, which Dovetail has itself"
        if descriptor.for_prompts and not (section is not None and section.of_server):
            yield f"kind {kind!r} is for_prompts, so its section must be of_server"
        for namespace in descriptor.namespaces:
            if namespace in self._owners:
                yield f"the namespace {namespace!r} of kind {kind!r} belongs to {self._owners[namespace]}"

    def _feature_faults(self, feature: FeatureDescriptor, own: set[str]) -> Iterator[str]:
        if not re.fullmatch(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*", feature.name):
            yield f"feature {feature.name!r} is not a name; expected a namespace and a word, as in attention.extend"
        if feature.name in self._features:
            yield f"feature {feature.name!r} is registered already"
        if feature.namespace not in own and feature.namespace not in self._owners:
            known = sorted({*own, *self._owners})
            yield f"feature {feature.name!r} is in no kind's namespace; namespaces: {', '.join(known)}"


def _each(values: Sequence[object], cls: type, hook: str) -> Iterator[str]:
    return (f"{hook} returned {value!r:.80}; expected {cls.__name__}" for value in values if not isinstance(value, cls))
