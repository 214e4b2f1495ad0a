"""The suites find components by their entry points, so this package must be installed: pip install -e ."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items) -> None:
    try:
        distribution("dovetail-prompt-rewriters")
    except PackageNotFoundError:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason="dovetail-prompt-rewriters is not installed: pip install -e ."))
