"""Test how a model is found. No network is used.

Run: pytest tests/core/test_checkpoint.py
"""

from __future__ import annotations

import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError


def test_a_hub_name_is_downloaded_without_pickles_or_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    assert locate("org/name") == tmp_path
    (patterns,) = asked.values()
    wanted = ["config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    refused = ["pytorch_model.bin", "model.pt", "consolidated.pth", "training_args.pkl", "modeling_custom.py"]
    assert [name for name in wanted + refused if any(fnmatch(name, p) for p in patterns)] == wanted


def test_hub_names_without_the_hub_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"'org/name'.*pip install 'dovetail\[hub\]'"):
        locate("org/name")


def test_a_hub_that_does_not_answer_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(ConfigError, match=r"'org/name'.*check the name and the network.*no route to host"):
        locate("org/name")


def test_a_directory_that_is_not_there_says_what_is_allowed(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"is not a directory; allowed: .*'org/name'.*\(tiny\)"):
        locate(str(tmp_path / "absent"))
