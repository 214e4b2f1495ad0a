"""Test what remains of an adapter (LoRA) that is unloaded or replaced: its requests go on with it, wherever they wait, and its memory
is freed when the last of them has ended.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_unloaded.py
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from gated_engine import add_gate
from served_adapters import serve_adapters

from dovetail import LLM, SamplingParams
from dovetail.config import Config
from dovetail.errors import EngineDeadError, RequestError
from dovetail.experiment.online.arms import ArmsClient
from dovetail.experiment.online.configs import arm_configs
from dovetail.messages import AbortLoadsMsg, GenerateMsg, HeldAdapterMsg, LoadAdapterMsg, UnloadAdapterMsg
from dovetail.registry.loader import load_plugins
from dovetail.server.adapters import ServedAdapters
from dovetail.server.client import EngineClient
from dovetail.server.engine_process import run_engine
from dovetail.server.engines import EngineHandle
from lora_adapters import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 704)}
PARAMS = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
SETTINGS = {"memory": {"kv_gib": 0.02}, "threads": 1}
PROMPT = [1, 2, 3]
COUNT = 8
PATIENCE = 60.0


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("unloaded")
    for seed, name in enumerate("ab"):
        write_adapter(directory / name, SHAPES, seed=seed, size=1.0)
    return {name: str(directory / name) for name in "ab"}


@pytest.fixture(scope="module")
def tokens(paths: dict[str, str]) -> dict[str, list[int]]:
    """Return the tokens of each adapter, and check that they differ."""
    with LLM("tiny", **SETTINGS, grammar="none", adapters={"enabled": True, "load": paths}) as llm:
        found = {name: llm.generate(PROMPT, PARAMS, adapter=name)[0].token_ids for name in paths}
    assert found["a"] != found["b"]
    return found


def with_engine(paths: dict[str, str], check: Callable[[ServedAdapters, EngineClient], Awaitable[None]]) -> None:
    """Run ``check`` with an engine process that gets two requests at a time, has a queue of four, and serves the adapter ``x``."""
    section = {"enabled": True, "load": {"x": paths["a"]}}
    limits, server = {"max_running": 1, "max_waiting": 4}, {"port": 0, "log_level": "error"}
    config = Config.model_validate({**SETTINGS, "adapters": section, "scheduler": limits, "server": server})
    serve_adapters(config, lambda: EngineClient(config), check)


def request_of(served: ServedAdapters, rid: str) -> GenerateMsg:
    return GenerateMsg(rid, PROMPT, PARAMS, 0, adapter="x", adapter_directory=served.directory("x", "model"))


async def collected(engine: EngineHandle, msgs: list[GenerateMsg]) -> dict[str, list[int]]:
    """Return the tokens of each request."""
    found: dict[str, list[int]] = {msg.rid: [] for msg in msgs}
    stream = engine.open(msgs[0].rid, msgs)
    while stream.open or stream.unread:
        for output in await stream.__anext__():
            found[output.rid] += output.token_ids
    stream.close()
    return found


@pytest.mark.parametrize("then", ["unload", "unload and load", "replace"])
def test_requests_that_wait_in_the_server_keep_the_adapter_that_is_unloaded(paths, tokens, then):
    """Two of them are in the engine and the others, more than its queue takes, wait in the server. The engine does not get to know the
    adapter again by them."""

    async def check(served: ServedAdapters, engine: EngineClient) -> None:
        early = asyncio.ensure_future(collected(engine, [request_of(served, f"early/{i}") for i in range(COUNT)]))
        while not engine.num_open:
            await asyncio.sleep(0)
        if "unload" in then:
            await served.unload("x")
        if then != "unload":
            await served.load("x", paths["b"], replace=then == "replace")
            late = await collected(engine, [request_of(served, f"late/{i}") for i in range(COUNT)])
            assert [*late.values()] == [tokens["b"]] * COUNT
        assert [*(await early).values()] == [tokens["a"]] * COUNT
        stats = await engine.stats()
        assert stats.adapters_known == len(served.cards) == (then != "unload")

    with_engine(paths, check)


def test_an_adapter_is_unloaded_while_there_is_no_engine(paths):
    """The next engine learns of adapters from requests, and none can name this one any more."""

    async def check(served: ServedAdapters, engine: EngineClient) -> None:
        await engine.stop()
        with pytest.raises(EngineDeadError):
            await served.load("y", paths["b"], replace=False)
        await served.unload("x")
        assert not served.cards

    with_engine(paths, check)


def test_requests_whose_adapter_is_unloaded_while_they_are_prepared_are_refused(paths):
    config = Config.model_validate({"adapters": {"enabled": True, "load": {"x": paths["a"]}}})
    served = ServedAdapters(config, cast(Any, None))
    msgs = [GenerateMsg("plain", PROMPT, PARAMS, 0), request_of(served, "adapted")]
    served.check_loaded(msgs)
    del served.cards["x"]
    served.check_loaded(msgs[:1])
    with pytest.raises(RequestError, match="model names the adapter 'x', which was unloaded"):
        served.check_loaded(msgs)


def test_the_memory_of_an_unloaded_adapter_is_freed_when_its_last_request_has_ended(paths):
    """An engine process makes no step as long as its loop has no work."""
    with LLM("tiny", **SETTINGS, grammar="none", adapters={"enabled": True, "load": {"x": paths["a"]}}) as llm:
        loop = llm.loop
        table, images = loop.scheduler.adapters, cast(Any, loop.executor).rank.adapters
        loop.handle(GenerateMsg("request", PROMPT, PARAMS, 0, adapter="x"))
        while not table.stats()["adapters_running"]:
            loop.step()
        loop.handle(UnloadAdapterMsg("unload", "x"))
        loop.step()
        assert (table.stats()["adapters_resident"], len(images._images)) == (1, 1)
        while loop.has_work:
            loop.step()
        assert (table.stats()["adapters_resident"], len(images._images)) == (0, 0)


@pytest.mark.parametrize("end", ["keep", "drop", "unload", "abort", "load again"])
def test_an_adapter_that_is_held_is_not_known_before_the_server_says_so(paths, tokens, end):
    """It would replace one of its name, which has a request."""
    held = LoadAdapterMsg("load", "x", paths["b"], hold=True)
    ends = {
        "keep": HeldAdapterMsg("end", "x", keep=True),
        "drop": HeldAdapterMsg("end", "x", keep=False),
        "unload": UnloadAdapterMsg("end", "x"),
        "abort": AbortLoadsMsg("end", "no more loads"),
        "load again": held,
    }
    with LLM("tiny", **SETTINGS, grammar="none", adapters={"enabled": True, "load": {"x": paths["a"]}}) as llm:
        loop = llm.loop
        table, images = loop.scheduler.adapters, cast(Any, loop.executor).rank.adapters

        def answered(msg: Any) -> list[bool]:
            """Return the answers to a command, once no memory is left to be freed."""
            loop.handle(msg)
            answers: list[Any] = []
            while loop.has_work:
                answers += loop.step()
            return [answer.ok for answer in answers]

        assert answered(held) == [True]
        assert llm.generate(PROMPT, PARAMS, adapter="x")[0].token_ids == tokens["a"]
        assert len(images._images) == 2
        assert answered(ends[end]) == [True]
        assert answered(HeldAdapterMsg("late", "x", keep=True)) == [end == "load again"]
        known = {"unload": None, "keep": "b", "load again": "b"}.get(end, "a")
        assert len(images._images) == len(table.known) == (known is not None)
        if known:
            assert llm.generate(PROMPT, PARAMS, adapter="x")[0].token_ids == tokens[known]


@pytest.mark.parametrize("replace", [False, True])
def test_an_adapter_that_one_arm_of_an_experiment_refuses_is_loaded_in_none(paths, tokens, tmp_path, replace):
    write_adapter(tmp_path / "large", SHAPES, rank=8)

    async def run() -> None:
        section = {"enabled": True, "load": {"x": paths["a"]}, "max_rank": 8}
        arms = {"arms": {"small": {"adapters": {"max_rank": 4}}}, "split": {"base": 1, "small": 1}}
        config = Config.model_validate({**SETTINGS, "adapters": section, "experiment": arms, "server": {"port": 0}})
        engines = ArmsClient(config, arm_configs(config, load_plugins(config.plugins)), run_engine, str)
        await engines.start()
        try:
            served = ServedAdapters(config, engines)
            with pytest.raises(RequestError, match=r"arm small: .* has rank 8; allowed: at most 4"):
                await served.load("x" if replace else "y", str(tmp_path / "large"), replace=replace)
            assert (await engines.stats()).adapters_known == 2, "each arm has an adapter x of its own"
            for arm in engines.arms.values():
                msg = request_of(served, f"after {arm.name}")
                assert await collected(arm.client, [msg]) == {msg.rid: tokens["a"]}
            await served.unload("x")
            assert (await engines.stats()).adapters_known == 0
        finally:
            await engines.stop()

    asyncio.run(run())


def with_shadow(paths: dict[str, str], check: Callable[[ServedAdapters, ArmsClient], Awaitable[None]]) -> None:
    """Run ``check`` with two arms that serve the adapter ``x``, of which ``other`` gets the shadow of every request."""
    section = {"enabled": True, "load": {"x": paths["a"]}}
    shadow = {"arm": "other", "percent": 100, "tokens_per_minute": 10_000}
    arms = {"arms": {"other": {"memory": {"kv_gib": 0.03}}}, "shadow": shadow}
    config = Config.model_validate({**SETTINGS, "adapters": section, "experiment": arms, "server": {"port": 0}})
    found = arm_configs(config, load_plugins(config.plugins))
    serve_adapters(config, lambda: ArmsClient(config, found, run_engine, str), check)


async def outcomes(engines: ArmsClient) -> dict[str, int]:
    """Return the outcomes of shadow requests, once there is another than "sent"."""
    assert engines.shadow is not None
    while not engines.shadow.outcomes().keys() - {"sent"}:
        await asyncio.sleep(0)
    return engines.shadow.outcomes()


def test_the_shadow_of_a_request_does_not_make_an_arm_know_an_unloaded_adapter_again(paths, tokens):
    async def check(served: ServedAdapters, engines: ArmsClient) -> None:
        assert await collected(engines, [request_of(served, "first")]) == {"first": tokens["a"]}
        await served.unload("x")  # before the shadow is sent
        assert await outcomes(engines) == {"dropped_adapter": 1}
        assert (await engines.stats()).adapters_known == 0

    with_shadow(paths, check)


@pytest.mark.parametrize("early", [False, True])
def test_the_shadow_of_a_request_is_not_computed_with_the_adapter_that_replaces_its_own(paths, tokens, early):
    """The shadow arm has replaced the adapter, and the other arm has not yet. The request was sent before the load or during it."""

    async def check(served: ServedAdapters, engines: ArmsClient) -> None:
        base, other = engines.arms["base"].client, engines.arms["other"].client
        commands, replaced, goes_on = (base.command, other.command), asyncio.Event(), asyncio.Event()

        async def late(msg: Any) -> Any:
            if isinstance(msg, HeldAdapterMsg):
                await goes_on.wait()
            return await commands[0](msg)

        async def noted(msg: Any) -> Any:
            reply = await commands[1](msg)
            if isinstance(msg, HeldAdapterMsg):
                replaced.set()
            return reply

        base.command, other.command = late, noted
        requests = [asyncio.ensure_future(collected(engines, [request_of(served, "first")]))] if early else []
        while early and not engines.num_open:
            await asyncio.sleep(0)
        load = asyncio.ensure_future(served.load("x", paths["b"], replace=True))
        await replaced.wait()
        requests = requests or [asyncio.ensure_future(collected(engines, [request_of(served, "first")]))]
        assert await requests[0] == {"first": tokens["a"]}
        assert await outcomes(engines) == {"dropped_adapter": 1}
        goes_on.set()
        await load
        assert await collected(engines, [request_of(served, "second")]) == {"second": tokens["b"]}
        while "equal" not in (found := await outcomes(engines)):
            await asyncio.sleep(0)
        assert found == {"dropped_adapter": 1, "sent": 1, "equal": 1}

    with_shadow(paths, check)


def test_a_program_ends_while_a_read_hangs(paths, tmp_path: Path):
    write_adapter(tmp_path / "slow", SHAPES)
    gate = add_gate(tmp_path / "slow")
    program = tmp_path / "program.py"
    program.write_text(f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from gated_engine import gated
from dovetail import LLM
from dovetail.engine.adapters import EngineAdapters
from dovetail.messages import LoadAdapterMsg

EngineAdapters.read = gated(EngineAdapters.read)
with LLM("tiny", memory={{"kv_gib": 0.02}}, threads=1, grammar="none", adapters={{"enabled": True}}) as llm:
    llm.loop.handle(LoadAdapterMsg("load", "slow", {str(gate.parent)!r}))
    llm.loop.step()
    writer = os.open({str(gate)!r}, os.O_WRONLY)  # opened once the read has begun, and never closed
print("closed")
""")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
