"""Load the installed plugins once for all suites."""

from __future__ import annotations

import functools

from dovetail.config import PluginsSection
from dovetail.registry.installed import Registry
from dovetail.registry.loader import load_plugins


@functools.cache
def installed() -> Registry:
    """Return the registry of every installed plugin. Plugins are loaded once."""
    return load_plugins(PluginsSection())
