"""Import what a spec names as "module:attribute"."""

from __future__ import annotations

import importlib
import re
from typing import Any

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
        raise PluginLoadError(f"{what}: {target!r} cannot be imported: {type(error).__name__}: {error}") from error
