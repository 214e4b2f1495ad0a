"""Import what a spec names as "module:attribute"."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any, TypeGuard

from dovetail.config.problems import suggest
from dovetail.errors import PluginLoadError

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The form of a target."""


def load_attribute(target: str, what: str) -> Any:
    """Return the object that ``target`` names; ``what`` names its owner in the error. Raises ``PluginLoadError``,
    whose cause is the plugin's own exception."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        hint = suggest(attribute, vars(error.obj)) if _lacks(error, attribute) else ""
        raise PluginLoadError(
            f"{what}: {target!r} cannot be imported: {type(error).__name__}: {error}{hint}"
        ) from error


def _lacks(error: Exception, attribute: str) -> TypeGuard[AttributeError]:
    """Return True if ``error`` states that a module does not have ``attribute``."""
    return isinstance(error, AttributeError) and error.name == attribute and isinstance(error.obj, ModuleType)
