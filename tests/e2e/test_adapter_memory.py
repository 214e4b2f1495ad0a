"""Test how many adapters (LoRA) are kept in host memory, and what ``dovetail explain`` shows of it.

.venv/bin/python -m pytest -q tests/e2e/test_adapter_memory.py
"""

from __future__ import annotations

from typing import Any, cast

import pytest

from dovetail import LLM, SamplingParams
from dovetail.cli.explain_adapters import adapters_line, explain_adapters
from dovetail.config.adapters import AdaptersSection
from dovetail.errors import ConfigError
from dovetail.loop import adapters as loading
from dovetail.loop.adapters import GIB, most_in_host_memory
from dovetail.messages import CommandReply, GenerateMsg, LoadAdapterMsg, TokenOutput
from lora_adapters import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (256, 256)}
PARAMS = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("host_gib", "max_host", "usable", "most"),
    [
        (10.0, 32, None, 10),
        (10.5, 4, None, 4),
        (None, 32, 40 * GIB, 10),
        (None, 4, 40 * GIB, 4),
        (None, 32, GIB, 1),
        (None, 32, None, 32),
    ],
)
def test_the_smaller_of_both_bounds_holds(monkeypatch, host_gib, max_host, usable, most):
    monkeypatch.setattr(loading, "usable_memory", lambda: usable)
    assert most_in_host_memory(AdaptersSection(host_gib=host_gib, max_host=max_host), 16, GIB) == most


def test_less_memory_than_for_one_adapter_is_refused():
    with pytest.raises(
        ConfigError, match=r"host_gib is 0.5, and one adapter of rank 16 takes 1 GiB .* set a larger adapters.host_gib"
    ):
        most_in_host_memory(AdaptersSection(host_gib=0.5), 16, GIB)
    with pytest.raises(ValueError, match="host_gib"):
        AdaptersSection(host_gib=0)


def test_adapters_in_host_memory_take_no_more_than_the_config_allows(tmp_path):
    load = {}
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, SHAPES, seed=seed)
        load[name] = str(tmp_path / name)
    plain = {"memory": {"kv_gib": 0.02}, "grammar": "none", "cache": "radix"}
    section = {"enabled": True, "load": load, "max_resident": 1}
    with LLM("tiny", **plain, adapters=section) as llm:
        (size,) = (own for _, own in llm.loop.executor.call("adapters", ["describe"]))
    with LLM("tiny", **plain, adapters={**section, "host_gib": 2.5 * size / GIB}) as llm:
        for name in "abcab":
            llm.generate([1, 2, 3], PARAMS, adapter=name)
        loader, images = cast(Any, llm.loop)._adapters, cast(Any, llm.loop.executor).rank.adapters._images
        assert [adapter.name for adapter in loader._host.values()] == ["a", "b"]
        assert len(images) == 2


@pytest.mark.parametrize("most", [1, 2])
def test_adapters_that_are_loaded_together_take_no_more_than_the_config_allows(tmp_path, monkeypatch, most):
    """Requests wait for four adapters, and four more are loaded: those of requests are read first once they are known to be absent."""
    load = {}
    for seed, name in enumerate("abcdefgh"):
        write_adapter(tmp_path / name, SHAPES, seed=seed)
        load[name] = str(tmp_path / name)
    known = {name: load[name] for name in "abcd"}
    section = {"enabled": True, "load": known, "max_resident": 4, "max_host": most}
    with LLM("tiny", memory={"kv_gib": 0.02}, grammar="none", cache="radix", adapters=section) as llm:
        loop, held, answers = llm.loop, [], []
        for name in "abcd":
            loop.handle(GenerateMsg(name, [1, 2, 3], PARAMS, 0, adapter=name))
        for name in "efgh":
            loop.handle(LoadAdapterMsg(name, name, load[name]))
        images = cast(Any, loop.executor).rank.adapters
        call, read = loop.executor.call, []

        def counted(method: str, command: list[Any]) -> Any:
            read.extend(command[2:3] if command[0] == "read" else ())
            return call(method, command)

        monkeypatch.setattr(loop.executor, "call", counted)
        while loop.has_work:
            answers += loop.step()
            held.append(len(images._images) + len(images._reading))
        assert max(held) == most
        assert read[most : most + 4] == [load[name] for name in "abcd"]
        assert [answer.ok for answer in answers if isinstance(answer, CommandReply)] == [True] * 4
        assert {answer.rid for answer in answers if isinstance(answer, TokenOutput) and answer.finish} == {*"abcd"}
        assert loop.stats().adapters_known == 8


def test_explain_shows_what_an_engine_takes_for_an_adapter():
    sets = {"adapters": {"enabled": True, "max_rank": 8, "max_host": 3}, "memory": {"kv_gib": 0.02}, "grammar": "none"}
    with LLM("tiny", **sets) as llm:
        ((rank, size),) = llm.loop.executor.call("adapters", ["describe"])
        shown = explain_adapters(llm.resolved)
    assert shown is not None
    assert (shown["rank"], shown["bytes"], shown["most_host"]) == (rank, size, 3)
    assert adapters_line({**shown, "bytes": GIB >> 2, "ranks": 2}) == (
        "an adapter of rank up to 8 of linear takes 0.25 GiB on each of 2 ranks: 8 on the device take 2 GiB on each of 2 ranks, "
        "up to 3 in host memory 1.5 GiB"
    )
