"""Test how a model is found. No network is used.

Run: pytest tests/core/test_checkpoint.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError


def test_hub_names_without_the_hub_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"'org/name'.*pip install 'dovetail\[hub\]'"):
        locate("org/name")


def test_a_directory_that_is_not_there_says_what_is_allowed(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is not a directory; allowed: .*'org/name'.*\(tiny\)"):
        locate(str(tmp_path / "absent"))
