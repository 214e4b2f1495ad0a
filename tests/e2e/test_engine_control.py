"""Test that the engine's steps can be paused, and that its ranks can be profiled.

.venv/bin/python -m pytest -q tests/e2e/test_engine_control.py
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.messages import (
    AbortMsg,
    CommandReply,
    ContinueMsg,
    EngineStats,
    GenerateMsg,
    PauseMsg,
    StartProfileMsg,
    StatsRequestMsg,
    StopProfileMsg,
    TokenOutput,
)

PROMPTS = ([5, 6, 7, 8], [9, 10, 11], [12] * 40)


def tokens_of(llm: LLM, pauses: frozenset[int]) -> dict[str, list[int]]:
    """Return the tokens of each prompt if the loop is paused and continued before the steps ``pauses``."""
    loop = llm.loop
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    for i, ids in enumerate(PROMPTS):
        loop.handle(GenerateMsg(str(i), ids, params, seed=i))
    found: dict[str, list[int]] = {str(i): [] for i in range(len(PROMPTS))}

    def step() -> None:
        for answer in loop.step():
            if isinstance(answer, TokenOutput):
                found[answer.rid] += answer.token_ids

    number = 0
    while loop.has_work:
        if number in pauses:
            loop.handle(PauseMsg("p"))
            step()  # commits what is in flight
            before = {rid: list(ids) for rid, ids in found.items()}
            assert not loop.has_work
            assert not loop.has_step_in_flight
            assert not loop.idle()
            step()
            assert found == before
            loop.handle(ContinueMsg("c"))
        step()
        number += 1
    return found


@pytest.mark.parametrize(
    "sections",
    [{}, {"scheduler": {"overlap": True}}, {"speculative": "ngram", "scheduler": {"draft": "always", "overlap": True}}],
    ids=["plain", "overlap", "drafts"],
)
def test_paused_requests_generate_the_same_tokens(sections: dict[str, Any]) -> None:
    llm = LLM("tiny", threads=1, cache="none", **sections)
    expected = tokens_of(llm, frozenset())
    assert all(len(ids) == 12 for ids in expected.values())
    assert tokens_of(llm, frozenset({0, 1, 4})) == expected
    llm.close()


def test_profiles_are_written_and_end_by_themselves(tmp_path: Path) -> None:
    llm = LLM("tiny", threads=1)
    loop = llm.loop

    def reply() -> CommandReply:
        (answer,) = (a for a in loop.step() if isinstance(a, CommandReply))
        return answer

    loop.handle(StopProfileMsg("none"))
    assert not reply().ok
    loop.handle(StartProfileMsg("a", str(tmp_path / "made" / "first"), 60.0, num_steps=3, activities=("cpu",)))
    assert reply().ok
    loop.handle(StartProfileMsg("b", str(tmp_path / "second"), 60.0))
    assert "is running" in reply().message
    llm.generate("hello", SamplingParams(max_new_tokens=8, temperature=0))
    loop.handle(StopProfileMsg("c"))
    stopped = reply()
    (file,) = stopped.files
    assert stopped.ok
    assert [Path(file)] == list((tmp_path / "made").iterdir())
    assert Path(file).name.startswith("first-")
    trace = json.loads(gzip.decompress(Path(file).read_bytes()))
    assert any(event.get("name", "").startswith("aten::") for event in trace["traceEvents"])
    (tmp_path / "file").write_text("")
    loop.handle(StartProfileMsg("d", str(tmp_path / "file" / "third"), 60.0))
    assert reply().ok
    loop.handle(StopProfileMsg("e", "another prefix"))
    reply()
    loop.handle(StopProfileMsg("f", str(tmp_path / "file" / "third")))
    failed = reply()
    assert (failed.ok, failed.files) == (False, ())
    assert "was not written" in failed.message
    llm.close()


def test_a_paused_request_can_be_aborted() -> None:
    llm = LLM("tiny", threads=1)
    loop = llm.loop
    loop.handle(PauseMsg("p"))
    loop.handle(GenerateMsg("r", [5, 6], SamplingParams(max_new_tokens=4), seed=0))
    loop.handle(StatsRequestMsg("s"))
    (stats,) = (answer for answer in loop.step() if isinstance(answer, EngineStats))
    assert (stats.paused, stats.waiting) == (1, 1)
    loop.handle(AbortMsg("r"))
    (output,) = loop.step()
    assert isinstance(output, TokenOutput)
    assert output.finish is not None
    llm.close()


def test_the_first_output_says_how_long_the_request_waited() -> None:
    llm = LLM("tiny", threads=1, scheduler={"max_running": 1, "overlap": False})
    loop = llm.loop
    for rid in ("first", "second"):
        loop.handle(GenerateMsg(rid, [5, 6], SamplingParams(max_new_tokens=4, ignore_eos=True), seed=0))
    waits: dict[str, list[float | None]] = {"first": [], "second": []}
    while loop.has_work:
        for answer in loop.step():
            assert isinstance(answer, TokenOutput)
            waits[answer.rid].append(answer.queue_seconds)
    assert [[seconds is not None for seconds in waits[rid]] for rid in waits] == [[True, False, False, False]] * 2
    assert (waits["second"][0] or 0) > (waits["first"][0] or 0)
    llm.close()
