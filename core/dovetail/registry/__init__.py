"""Find plugins and choose components, before the first step."""

from dovetail.registry.hookspecs import ENTRY_POINT_GROUP, hookimpl
from dovetail.registry.installed import PluginRecord, PluginStatus, RegisteredComponent, Registry
from dovetail.registry.loader import load_plugins
from dovetail.registry.machine import Machine
from dovetail.registry.resolution import Chosen, Resolution, Resolved
from dovetail.registry.resolver import resolve
from dovetail.registry.setup import setup
from dovetail.registry.specs import (
    ComponentKind,
    ComponentSpec,
    Constraints,
    KindDescriptor,
    Requirement,
    RuntimeNeed,
    Selects,
    Stability,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "Chosen",
    "ComponentKind",
    "ComponentSpec",
    "Constraints",
    "KindDescriptor",
    "Machine",
    "PluginRecord",
    "PluginStatus",
    "RegisteredComponent",
    "Registry",
    "Requirement",
    "Resolution",
    "Resolved",
    "RuntimeNeed",
    "Selects",
    "Stability",
    "hookimpl",
    "load_plugins",
    "resolve",
    "setup",
]
