"""Collect the kinds and features that plugins register, and check them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dovetail.config.kinds import BUILT_IN, KindSection, Sections
from dovetail.config.plugin import Selection
from dovetail.config.problems import suggest
from dovetail.config.sections import Config
from dovetail.errors import PluginLoadError, UnknownComponentError
from dovetail.interfaces.features import FeatureDescriptor
from dovetail.registry.field_types import type_faults
from dovetail.registry.negotiable import SETTINGS
from dovetail.registry.specs import ComponentKind, KindDescriptor, RuntimeNeed, Selects
from dovetail.registry.targets import TARGET

RUNTIME_NAMESPACES = ("runtime", "kv", "model")
"""The namespaces of the features that the runtime, the KV pool and the model offer, and not the specs of components."""

NAME = re.compile(r"[a-z][a-z0-9_]*")
"""The form of the name of a kind, a namespace or a component."""


class Kinds:
    """Hold the registered kinds and features, in order of registration. ``load_plugins`` makes it."""

    def __init__(self) -> None:
        self._kinds: dict[str, KindDescriptor] = {}
        self._features: dict[str, FeatureDescriptor] = {}
        self._kind_of: dict[str, KindDescriptor] = {}
        self._owners: dict[str, str] = dict.fromkeys(RUNTIME_NAMESPACES, "the runtime")
        self._registrants: dict[str, str] = {}  # of each kind and feature

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
        """Register the kinds and features of the plugin ``owner``. If one of them is wrong, registers nothing and
        raises ``PluginLoadError``."""
        kinds, features = tuple(kinds), tuple(features)
        faults = [
            *_type_faults(kinds, KindDescriptor, "register_kinds"),
            *_type_faults(features, FeatureDescriptor, "register_features"),
        ]
        faults = faults or [*self._kinds_faults(kinds), *self._features_faults(kinds, features)]
        if faults:
            raise PluginLoadError("; ".join(faults))
        self._kinds |= {str(descriptor.kind): descriptor for descriptor in kinds}
        self._features |= {feature.name: feature for feature in features}
        self._kind_of |= {namespace: descriptor for descriptor in kinds for namespace in descriptor.namespaces}
        self._owners |= dict.fromkeys((n for descriptor in kinds for n in descriptor.namespaces), owner)
        self._registrants |= dict.fromkeys((*self._names(kinds), *(feature.name for feature in features)), owner)

    @staticmethod
    def _names(kinds: Iterable[KindDescriptor]) -> Iterator[str]:
        return (str(descriptor.kind) for descriptor in kinds)

    def unknown_features(self, features: Iterable[str]) -> Iterator[str]:
        """Yield a text for each feature that is not registered, which lists the registered features of its
        namespace."""
        for feature in sorted(set(features) - self._features.keys()):
            namespace = feature.partition(".")[0]
            known = [name for name in self._features if name.partition(".")[0] == namespace]
            namespaces = list(dict.fromkeys(name.partition(".")[0] for name in self._features))
            text = f"registered features of {namespace}: {', '.join(known)}" if known else ""
            text = text or f"there is no namespace {namespace!r}; namespaces: {', '.join(namespaces)}"
            yield f"feature {feature!r} is not registered; {text}{suggest(feature, self._features)}"

    def _kinds_faults(self, kinds: Sequence[KindDescriptor]) -> Iterator[str]:
        yield from _repeated("kind", self._names(kinds))
        yield from _repeated("namespace", (name for descriptor in kinds for name in descriptor.namespaces))
        for descriptor in kinds:
            if descriptor.kind in self._kinds:
                yield self._taken("kind", descriptor.kind)
                continue
            yield from _form_faults(descriptor)
            yield from _section_faults(descriptor)
            for namespace in descriptor.namespaces:
                if namespace in self._owners:
                    owner = self._owners[namespace]
                    yield f"the namespace {namespace!r} of kind {descriptor.kind!r} belongs to {owner}"

    def _features_faults(self, kinds: Sequence[KindDescriptor], features: Sequence[FeatureDescriptor]) -> Iterator[str]:
        own = {namespace for descriptor in kinds for namespace in descriptor.namespaces}
        yield from _repeated("feature", (feature.name for feature in features))
        for feature in features:
            yield from self._feature_faults(feature, own)
        known = {*self._features, *(feature.name for feature in features)}
        for descriptor in kinds:
            for need in descriptor.runtime_needs:
                if need.feature not in known:
                    yield f"kind {descriptor.kind!r} has a RuntimeNeed of {need.feature!r}, which is not registered"

    def _feature_faults(self, feature: FeatureDescriptor, own: set[str]) -> Iterator[str]:
        if not re.fullmatch(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*", feature.name):
            yield f"feature {feature.name!r} is not a name; expected a namespace and a word, as in attention.extend"
        if feature.name in self._features:
            yield self._taken("feature", feature.name)
        if feature.namespace not in own and feature.namespace not in self._owners:
            known = sorted({*own, *self._owners})
            yield f"feature {feature.name!r} is in no kind's namespace; namespaces: {', '.join(known)}"
        settings = [setting for setting, _ in feature.also] + [feature.setting] * bool(feature.setting)
        yield from (f"feature {feature.name!r}: {text}" for text in _unknown_settings(settings))

    def _taken(self, what: str, name: str) -> str:
        owner = self._registrants[name]
        remedy = "choose another name" if owner == "Dovetail" else "deny one of the two plugins (plugins.deny)"
        return f"{what} {name!r} is registered already, by {owner}; {remedy}"


def _form_faults(descriptor: KindDescriptor) -> Iterator[str]:
    kind = descriptor.kind
    if not NAME.fullmatch(kind):
        yield f"kind {kind!r} is not a name; expected lower-case letters, digits and underscores"
    for field in ("interface", "rules", "check", "screen", "concerns", "suite", "scaffold", "sample_context"):
        target = getattr(descriptor, field)
        if (target or field == "interface") and not TARGET.fullmatch(target):
            yield f'kind {kind!r} has the {field} {target!r}; expected "module:attribute"'
    for namespace in descriptor.namespaces:
        if not NAME.fullmatch(namespace):
            yield (
                f"the namespace {namespace!r} of kind {kind!r} is not a name; expected lower-case letters, digits and "
                "underscores"
            )
    switches = [need.when for need in descriptor.runtime_needs if need.when]
    yield from (f"kind {kind!r}: {text}" for text in _unknown_settings(switches))


def _section_faults(descriptor: KindDescriptor) -> Iterator[str]:
    kind, section = descriptor.kind, descriptor.section
    if descriptor.for_prompts and not (section is not None and section.of_server):
        yield f"kind {kind!r} is for_prompts, so its section must be of_server"
    if descriptor.for_prompts and descriptor.selects in (Selects.ONE_AND_OTHERS, Selects.SERVED):
        yield (
            f"kind {kind!r} is for_prompts and its selects is {descriptor.selects.name}; allowed: ONE, LIST and BY_TEMPLATE, "
            "because all selected components act on every prompt"
        )
    if kind != ComponentKind.MODEL and descriptor.selects is Selects.BY_CHECKPOINT:
        yield f"kind {kind!r} is selected by the checkpoint, which only the kind 'model' can be; set selects"
    if section is None:
        if kind != ComponentKind.MODEL:
            yield f"kind {kind!r} has no section, so no config could select its components; set section"
        return
    if section.key != kind:
        yield f"kind {kind!r} has the section {section.key!r}; a section has the name of its kind"
    if section.default == "none" and not section.optional:
        yield f"the section of kind {kind!r} has the default 'none', so it must be optional"
    if section in BUILT_IN:
        return
    if section.key in Config.model_fields:
        yield f"kind {kind!r} would take the config key {section.key!r}, which Dovetail has itself"
    own_form = [
        field
        for field, given in (
            ("phases", section.phases),
            ("settings", section.settings),
            ("selection", section.selection is not Selection),
            ("one_for_all_phases", descriptor.one_for_all_phases),
        )
        if given
    ]
    if own_form:
        yield (
            f"kind {kind!r} sets {', '.join(own_form)}, which only built-in kinds can have; put settings into the "
            "components' own config classes"
        )


def _unknown_settings(settings: Iterable[str]) -> Iterator[str]:
    for setting in settings:
        if setting not in SETTINGS:
            yield f"{setting!r} is not a setting that is negotiated; allowed: {', '.join(SETTINGS)}"


def _repeated(what: str, names: Iterable[str]) -> Iterator[str]:
    counts = Counter(names)
    return (f"{what} {name!r} is given {count} times; give it once" for name, count in counts.items() if count > 1)


def _type_faults(values: Sequence[object], cls: type, hook: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, cls):
            yield f"{hook} returned {value!r:.80}; expected {cls.__name__}"
            continue
        name = value.kind if isinstance(value, KindDescriptor) else getattr(value, "name", "")
        for field, part in _parts(value):
            yield from (f"{hook}: {name!r:.80} is wrong: {field}{text}" for text in type_faults(part))


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    """Yield a descriptor and the dataclass instances in it, each with the prefix of its fields' names in messages."""
    yield "", value
    if isinstance(value, KindDescriptor):
        if isinstance(value.section, KindSection):
            yield "section.", value.section
        needs = value.runtime_needs if isinstance(value.runtime_needs, tuple) else ()
        yield from (("runtime_needs.", need) for need in needs if isinstance(need, RuntimeNeed))
