"""Run clients of every API at once, as benchmarks/load_apis.py does for longer, and check that it detects the errors
that it is written for.

.venv/bin/python -m pytest -q tests/e2e/test_api_load.py
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from load_apis import TEXTS, Load, settled
from load_protocols import PROTOCOLS, Chat, Native

sys.path.pop(0)


def test_nothing_is_lost_or_crossed(tiny_url: str):
    load = Load(tiny_url, "tiny", texts=TEXTS[:2])
    asyncio.run(load.run(14, 3.0))
    tally = load.tally
    assert tally.wrong == []
    assert tally.sent == tally.ended
    assert set(tally.answered) <= {protocol.name for protocol in PROTOCOLS}
    assert tally.answered.total() >= 7
    assert asyncio.run(settled(tiny_url)) == []


def test_the_text_of_another_is_noticed(tiny_url: str):
    class Deaf(Native):
        def body(self, model: str, prompt: str, text: str) -> dict[str, Any]:
            return super().body(model, prompt, TEXTS[1] if text == TEXTS[0] else TEXTS[0])

    load = Load(tiny_url, "tiny", [Deaf()], TEXTS[:2])
    asyncio.run(load.run(1, 0.2))
    assert load.tally.wrong
    assert all("asked for" in wrong for wrong in load.tally.wrong)


def test_nonsense_that_is_answered_is_noticed(tiny_url: str):
    class Polite(Chat):
        def nonsense(self, model: str) -> list[bytes | dict[str, Any]]:
            return [{**self.body(model, "a", "b"), "stream": False}]

    load = Load(tiny_url, "tiny", [Polite()], TEXTS[:1])
    asyncio.run(load.run(8, 1.5))
    assert any("is answered 200" in wrong for wrong in load.tally.wrong)
