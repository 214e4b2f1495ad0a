"""Provide conformance suites, which plugin authors inherit, and references to compare with.

Importing this package makes pytest rewrite the assertions of its modules, so that a case that fails shows the values.
"""

from __future__ import annotations

import pkgutil
import sys

import pytest

_names = [f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)]
pytest.register_assert_rewrite(*(name for name in _names if name not in sys.modules))
