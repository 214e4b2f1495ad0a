"""The control plane: plugins are found, parts are chosen, everything becomes a plain object before the first step."""

from dovetail.plugins.hookspecs import ENTRY_POINT_GROUP, hookimpl
from dovetail.plugins.loader import load_plugins
from dovetail.plugins.machine import Machine
from dovetail.plugins.registry import PluginRecord, PluginStatus, RegisteredComponent, Registry
from dovetail.plugins.resolution import Chosen, Resolution, Resolved
from dovetail.plugins.resolver import resolve
from dovetail.plugins.setup import setup
from dovetail.plugins.specs import ComponentKind, ComponentSpec, Constraints, Requirement, Stability

__all__ = [
    "ENTRY_POINT_GROUP",
    "Chosen",
    "ComponentKind",
    "ComponentSpec",
    "Constraints",
    "Machine",
    "PluginRecord",
    "PluginStatus",
    "RegisteredComponent",
    "Registry",
    "Requirement",
    "Resolution",
    "Resolved",
    "Stability",
    "hookimpl",
    "load_plugins",
    "resolve",
    "setup",
]
