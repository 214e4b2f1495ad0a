"""Test loads of adapters (LoRA) whose files do not respond: they end with an error, and other loads go on.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_hung.py
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from gated_engine import add_gate, gated

from dovetail import LLM, SamplingParams
from dovetail.engine import read_thread
from dovetail.engine.adapters import EngineAdapters
from dovetail.loop import Loop
from dovetail.messages import CommandReply, GenerateMsg, LoadAdapterMsg, RequestFailed, UnloadAdapterMsg
from lora_adapters import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (256, 256)}
PARAMS = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
SETTINGS = {"memory": {"kv_gib": 0.02}, "grammar": "none", "threads": 1}
PATIENCE = 60.0


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Write an adapter ``hung``, which is read once a writer has opened and closed its FIFO, and another one."""
    monkeypatch.setattr(read_thread, "HUNG_SECONDS", 0.3)
    monkeypatch.setattr(EngineAdapters, "read", gated(EngineAdapters.read))
    for name in ("hung", "other"):
        write_adapter(tmp_path / name, SHAPES)
    gate = add_gate(tmp_path / "hung")
    yield {name: str(tmp_path / name) for name in ("hung", "other")}
    with suppress(OSError):  # no thread waits
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))


def answers_of(loop: Loop) -> list[Any]:
    answers: list[Any] = []
    deadline = time.monotonic() + PATIENCE
    while loop.has_work:
        assert time.monotonic() < deadline, "the load hangs"
        answers += loop.step()
    return answers


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_load_whose_file_does_not_respond_is_refused_and_others_go_on(paths):
    with LLM("tiny", **SETTINGS, adapters={"enabled": True}) as llm:
        loop = llm.loop
        for name, path in {"a": "hung", "b": "other", "c": "other"}.items():
            loop.handle(LoadAdapterMsg(name, name, paths[path]))
        found = {reply.call_id: reply.message for reply in answers_of(loop)}
        hung = f"{paths['hung']}/adapter_model.safetensors has not responded for 0.3 seconds; check its file system, and load the adapter again"
        assert found == {"a": hung, "b": "", "c": ""}
        assert llm.generate([1, 2, 3], PARAMS, adapter="b")[0].token_ids
        assert [*loop.scheduler.adapters.known] == ["b", "c"]


def test_what_a_file_holds_that_responds_late_is_dropped(paths):
    with LLM("tiny", **SETTINGS, adapters={"enabled": True}) as llm:
        images = cast(Any, llm.loop.executor).rank.adapters
        llm.loop.handle(LoadAdapterMsg("load", "hung", paths["hung"]))
        assert llm.loop.step() == []
        old = images._thread._thread
        (reply,) = answers_of(llm.loop)
        assert not reply.ok
        Path(paths["hung"], "gate").write_bytes(b"")
        old.join(PATIENCE)
        assert not old.is_alive()
        assert answers_of(llm.loop) == []
        assert (images._images, images._reading, llm.loop.scheduler.adapters.known) == ({}, {}, {})


def test_requests_whose_adapter_does_not_respond_end_with_an_error(paths):
    with LLM("tiny", **SETTINGS, adapters={"enabled": True}) as llm:
        msg = GenerateMsg("request", [1, 2, 3], PARAMS, 0, adapter="hung", adapter_directory=paths["hung"])
        llm.loop.handle(msg)
        (failed,) = answers_of(llm.loop)
        assert isinstance(failed, RequestFailed)
        assert "adapter_model.safetensors has not responded for 0.3 seconds" in failed.message
        llm.load_adapter("other", paths["other"])


def test_a_load_that_is_unloaded_while_its_file_does_not_respond_does_not_stop_others(paths):
    with LLM("tiny", **SETTINGS, adapters={"enabled": True}) as llm:
        images = cast(Any, llm.loop.executor).rank.adapters
        llm.loop.handle(LoadAdapterMsg("load", "hung", paths["hung"]))
        assert llm.loop.step() == []
        until(lambda: all(read.file for read in images._reading.values()))
        llm.loop.handle(UnloadAdapterMsg("unload", "hung"))
        llm.loop.handle(LoadAdapterMsg("next", "other", paths["other"]))
        answers = answers_of(llm.loop)
        assert all(isinstance(answer, CommandReply) for answer in answers)
        assert {answer.call_id: answer.ok for answer in answers} == {"load": False, "unload": True, "next": True}
