"""Provide a kind of component, ``sorter``, that a plugin brings in tests, with features and components."""

from __future__ import annotations

from dovetail.config.kinds import KindSection
from dovetail.interfaces.features import Feature, FeatureDescriptor
from dovetail.registry import ComponentKind, KindDescriptor, Machine, Selects

CPU = Machine.assume("cpu")
SORTER = ComponentKind("sorter")
STABLE, FAST = Feature("sorter.stable"), Feature("sorter.fast")
FEATURES = (FeatureDescriptor(STABLE, "keeps the order of equals"), FeatureDescriptor(FAST, "sorts fast"))


class Sorts:
    """The interface of the kind."""

    def __init__(self, config: object, context: object) -> None:
        self.config = config


class Other:
    """A class that does not implement it."""


def one(**given: object) -> KindDescriptor:
    """A kind of which one component is chosen."""
    section = KindSection("sorter", "How things are sorted.", optional=True)
    fields: dict = {"section": section, "namespaces": ("sorter",), **given}
    return KindDescriptor(SORTER, "sorters", "dovetail_fakes:Sorts", **fields)


def several(**given: object) -> KindDescriptor:
    """The same, of which all that config names are used, on prompts."""
    section = KindSection("sorter", "What sorts.", optional=True, takes_all=True, of_server=True, default="none")
    return one(section=section, selects=Selects.LIST, for_prompts=True, **given)


def entry(fakes, kind=None, specs=(), features=FEATURES, name="sorters", **hooks):
    fakes.put("Sorts", Sorts)
    brought = [kind or one()]
    return fakes.entry(name, specs, register_kinds=lambda: brought, register_features=lambda: list(features), **hooks)


def registry_of(fakes, kind=None, *specs, extra=(), **hooks):
    return fakes.registry(*extra, entries=[entry(fakes, kind, specs, **hooks)])


def quick(fakes, name="quick", **given):
    return fakes.spec(SORTER, name, {"depth": (int, 3)}, target=fakes.put("Sorts", Sorts), **given)
