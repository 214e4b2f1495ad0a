"""Test how an ``LLM`` starts and ends.

Run: python -m pytest tests/e2e/test_llm.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail import LLM, ConfigError
from dovetail.registry import hookimpl, loader


@pytest.mark.parametrize("section", ["other", {"path": "other"}])
def test_a_model_given_twice_is_refused(section: object):
    with pytest.raises(ConfigError, match="given twice, as 'tiny'"):
        LLM("tiny", model=section)


def test_a_tokenizer_that_is_named_must_be_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.tokenizer is .*which is not a directory"):
        LLM("tiny", device="cpu", model={"tokenizer": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        LLM("tiny", device="cpu", model={"tokenizer": str(tmp_path)})


def test_plugins_hear_of_the_engine(monkeypatch: pytest.MonkeyPatch):
    heard: list[object] = []

    class Listener:
        @hookimpl
        def on_resolved(self, resolved: object) -> None:
            heard.append("resolved")

        @hookimpl
        def on_engine_start(self, info: dict[str, object]) -> None:
            heard.append(info["context_len"])

        @hookimpl
        def on_engine_stop(self) -> None:
            heard.append("stopped")

    class Entry:
        name, value, dist = "listener", "here:listener", None

        def load(self) -> object:
            return Listener()

    found = [*loader.installed_plugins(), Entry()]
    monkeypatch.setattr(loader, "installed_plugins", lambda: found)
    LLM("tiny", device="cpu", memory={"num_pages": 32}).close()
    assert heard == ["resolved", 31 * 16, "stopped"]  # page 0 holds nothing
