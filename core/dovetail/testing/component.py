"""How a conformance suite finds the component it tests."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.config import PluginConfig, PluginsSection
from dovetail.interfaces.features import Feature
from dovetail.registry.installed import RegisteredComponent, Registry
from dovetail.registry.loader import load_plugins
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail.registry.targets import load_attribute
from dovetail.testing.registration import RegistrationTests


@functools.cache
def installed() -> Registry:
    """Every installed plugin, loaded once."""
    return load_plugins(PluginsSection())


class ComponentSuite(RegistrationTests):
    """Base of the suites. A subclass sets ``name`` (and ``settings``, if the defaults are not what is to be tested).

    Each case says by ``require`` or ``proves`` which features its passing speaks for: they stand among the case's
    ``user_properties``, from which ``dovetail plugins check`` makes its report.
    """

    kind: ClassVar[ComponentKind]
    name: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    """Fields of the component's config section."""

    _item: pytest.Item | None = None

    @pytest.fixture(autouse=True)
    def _case(self, request: pytest.FixtureRequest) -> None:
        """The case that runs, for ``proves``."""
        self._item = request.node
        request.node.user_properties.append(("component", f"{self.kind}/{self.name}"))

    @property
    def component(self) -> RegisteredComponent:
        """The installed component. Raises ``UnknownComponentError``."""
        return installed().get(self.kind, self.name)

    @property
    def spec(self) -> ComponentSpec:
        """What the component says about itself."""
        return self.component.spec

    def config(self) -> PluginConfig:
        """The component's config section, validated from ``settings``."""
        return installed().config_class(self.kind, self.name).model_validate({"kind": self.name, **self.settings})

    def build(self, context: Any) -> Any:
        """A new instance of the component for ``context`` (the Context of its interface)."""
        return load_attribute(self.spec.target, self.component.label)(self.config(), context)

    def offers(self, feature: Feature) -> bool:
        """True if the component declares ``feature``."""
        return feature in self.spec.offers

    def require(self, feature: Feature) -> None:
        """Skip the test unless the component declares ``feature``; it proves it if it passes."""
        if not self.offers(feature):
            pytest.skip(f"{self.name} does not declare {feature}")
        self.proves(feature)

    def proves(self, *features: Feature) -> None:
        """Say that this case proves ``features``, if it passes."""
        if self._item is not None:
            self._item.user_properties += [("feature", feature.value) for feature in features]
