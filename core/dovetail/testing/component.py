"""Find the component that a conformance suite tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from dovetail.config import PluginConfig
from dovetail.interfaces.features import Feature
from dovetail.registry.installed import RegisteredComponent
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail.registry.targets import load_attribute
from dovetail.testing.installed import installed
from dovetail.testing.registration import RegistrationTests


class ComponentSuite(RegistrationTests):
    """Provide what all suites share. A subclass sets ``name``, and ``settings`` to test other settings than the
    defaults.

    Each case states by ``require`` or ``proves`` which features it proves if it passes. They are stored in the case's
    ``user_properties``, from which ``dovetail plugins check`` makes its report.
    """

    kind: ClassVar[ComponentKind]
    name: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    """Set these fields of the component's config section."""

    _item: pytest.Item | None = None

    @pytest.fixture(autouse=True)
    def _case(self, request: pytest.FixtureRequest) -> None:
        """Store the running case, for ``proves``."""
        self._item = request.node
        request.node.user_properties.append(("component", f"{self.kind}/{self.name}"))

    @property
    def component(self) -> RegisteredComponent:
        """Return the installed component. Raises ``UnknownComponentError``."""
        return installed().get(self.kind, self.name)

    @property
    def spec(self) -> ComponentSpec:
        """Return the spec that the component has registered."""
        return self.component.spec

    def config(self) -> PluginConfig:
        """Return the component's config section, validated from ``settings``."""
        return installed().config_class(self.kind, self.name).model_validate({"kind": self.name, **self.settings})

    def build(self, context: Any) -> Any:
        """Return a new instance of the component for ``context`` (the Context of its interface)."""
        return load_attribute(self.spec.target, self.component.label)(self.config(), context)

    def offers(self, feature: Feature) -> bool:
        """Return True if the component declares ``feature``."""
        return feature in self.spec.offers

    def require(self, feature: Feature) -> None:
        """Skip the test unless the component declares ``feature``. If the test passes, it proves the feature."""
        if not self.offers(feature):
            pytest.skip(f"{self.name} does not declare {feature}")
        self.proves(feature)

    def proves(self, *features: Feature) -> None:
        """State that this case proves ``features`` if it passes."""
        if self._item is not None:
            self._item.user_properties += [("feature", str(feature)) for feature in features]
