"""Test which APIs a server serves.

.venv/bin/python -m pytest -q tests/core/test_api_choice.py
"""

import pytest

from dovetail.errors import ResolutionError
from dovetail.registry.api_choice import choose_apis
from dovetail.registry.resolution import ChoiceRule
from dovetail.registry.specs import ComponentKind, Requirement


def test_auto_is_all_that_can_be_served(fakes):
    registry = fakes.registry(
        fakes.spec(ComponentKind.API, "one"),
        fakes.spec(ComponentKind.API, "two"),
        fakes.spec(ComponentKind.API, "absent", requires=(Requirement("no-such-dist"),)),
    )
    apis, resolution = choose_apis(fakes.config(registry), registry)
    assert [api.name for api in apis] == ["one", "two"]
    assert (resolution.chosen, resolution.rule) == ("one, two", ChoiceRule.PRIORITY)
    (absent,) = (candidate for candidate in resolution.candidates if not candidate.usable)
    assert "no-such-dist is not installed" in str(absent.reasons[0])


def test_a_list_is_these_in_its_order(fakes):
    names = ("one", "two", "three")
    registry = fakes.registry(*(fakes.spec(ComponentKind.API, name) for name in names))
    apis, resolution = choose_apis(fakes.config(registry, "api=[three, one]"), registry)
    assert [api.name for api in apis] == ["three", "one"]
    assert resolution.rule is ChoiceRule.EXPLICIT


def test_none_is_none(fakes):
    registry = fakes.registry(fakes.spec(ComponentKind.API, "one"))
    apis, resolution = choose_apis(fakes.config(registry, "api=none"), registry)
    assert (apis, resolution.note) == ((), "switched off by config")


def test_one_that_was_named_and_cannot_be_served_stops_the_start(fakes):
    registry = fakes.registry(fakes.spec(ComponentKind.API, "absent", requires=(Requirement("no-such-dist"),)))
    with pytest.raises(ResolutionError, match=r"api: cannot serve what config names\n.*absent.*no-such-dist"):
        choose_apis(fakes.config(registry, "api=absent"), registry)
