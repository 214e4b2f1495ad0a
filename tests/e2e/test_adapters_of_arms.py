"""Test adapters (LoRA) that are loaded and unloaded while the arms of an experiment serve.

.venv/bin/python -m pytest -q tests/e2e/test_adapters_of_arms.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
from served_adapters import serve_adapters

from dovetail import SamplingParams
from dovetail.config import Config
from dovetail.errors import RequestError
from dovetail.experiment.online.arms import ArmsClient
from dovetail.experiment.online.configs import arm_configs
from dovetail.messages import GenerateMsg, LoadAdapterMsg
from dovetail.registry.loader import load_plugins
from dovetail.server.adapters import ServedAdapters
from dovetail.server.engine_process import run_engine
from lora_adapters import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 704)}
PARAMS = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Write two adapters, and a large one, which the arm ``small`` refuses."""
    directory = tmp_path_factory.mktemp("arms")
    for seed, (name, rank) in enumerate({"a": 4, "b": 4, "large": 8}.items()):
        write_adapter(directory / name, SHAPES, seed=seed, rank=rank, size=1.0)
    return {name: str(directory / name) for name in ("a", "b", "large")}


def with_arms(paths: dict[str, str], check: Callable[[ServedAdapters, ArmsClient], Awaitable[None]]) -> None:
    """Run ``check`` with the arms ``base`` and ``small``, which serve the adapter ``x``."""
    section = {"enabled": True, "load": {"x": paths["a"]}, "max_rank": 8}
    arms = {"arms": {"small": {"adapters": {"max_rank": 4}}}, "split": {"base": 1, "small": 1}}
    settings = {"memory": {"kv_gib": 0.02}, "threads": 1, "server": {"port": 0, "log_level": "error"}}
    config = Config.model_validate({**settings, "adapters": section, "experiment": arms})
    found = arm_configs(config, load_plugins(config.plugins))
    serve_adapters(config, lambda: ArmsClient(config, found, run_engine, str), check)


def request_of(served: ServedAdapters, rid: str, adapter: str = "x") -> GenerateMsg:
    return GenerateMsg(rid, PROMPT, PARAMS, 0, adapter=adapter, adapter_directory=served.directory(adapter, "model"))


async def tokens_of(client: Any, msg: GenerateMsg) -> list[int]:
    found: list[int] = []
    with closing(client.open(msg.rid, [msg])) as stream:
        while stream.open or stream.unread:
            outputs = await stream.__anext__()
            found += [token for output in outputs for token in output.token_ids]
    return found


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("path", ["b", "large"])
def test_an_adapter_is_served_once_all_arms_have_read_it(paths, name, path):
    """The arm ``base`` has read it earlier than ``small``, which refuses the large one. It replaces an adapter (x), or is new (y)."""

    async def check(served: ServedAdapters, engines: ArmsClient) -> None:
        base, small = (engines.arms[name].client for name in ("base", "small"))
        commands, was_read, goes_on = (base.command, small.command), asyncio.Event(), asyncio.Event()

        async def early(msg: Any) -> Any:
            reply = await commands[0](msg)
            was_read.set()
            return reply

        async def late(msg: Any) -> Any:
            await goes_on.wait()
            return await commands[1](msg)

        async def tokens() -> list[list[int]]:
            return [await tokens_of(client, request_of(served, "request")) for client in (base, small)]

        before = await tokens()
        base.command, small.command = early, late
        load = asyncio.ensure_future(served.load(name, paths[path], replace=True))
        await was_read.wait()
        assert await tokens() == before, "the new adapter computes for a request"
        assert [*served.cards] == ["x"], "requests for the new adapter are accepted"
        goes_on.set()
        if path == "large":
            with pytest.raises(RequestError, match=r"arm small: .* has rank 8; allowed: at most 4"):
                await load
        else:
            await load
        replaced = (name, path) == ("x", "b")
        first, second = await tokens()
        assert first == second
        assert (first != before[0]) == replaced
        known = 1 + ((name, path) == ("y", "b"))
        assert [(await client.stats()).adapters_known for client in (base, small)] == [known, known]
        if name in served.cards:
            assert await tokens_of(engines, request_of(served, "new", name))

    with_arms(paths, check)


@pytest.mark.parametrize("begun", [False, True])
def test_an_arm_that_is_being_stopped_takes_no_part_in_loads(paths, begun):
    """It is stopped before the load or during it, and would refuse the adapter. It unloads adapters."""

    async def check(served: ServedAdapters, engines: ArmsClient) -> None:
        base, small = (engines.arms[name].client for name in ("base", "small"))
        open_stream = small.open("open", [request_of(served, "open")])
        command, asked, goes_on = small.command, asyncio.Event(), asyncio.Event()

        async def late(msg: Any) -> Any:
            if isinstance(msg, LoadAdapterMsg):
                asked.set()
                await goes_on.wait()
            return await command(msg)

        small.command = late
        if not begun:
            engines.stop_arm("small")
        load = asyncio.ensure_future(served.load("y", paths["large"], replace=False))
        if begun:
            await asked.wait()
            engines.stop_arm("small")
        goes_on.set()
        await load
        assert asked.is_set() == begun
        assert await tokens_of(base, request_of(served, "after", "y"))
        assert (engines.arms["small"].state, (await small.stats()).adapters_known) == ("stopping", 1)
        await served.unload("x")
        assert [(await client.stats()).adapters_known for client in (base, small)] == [1, 0]
        open_stream.close()

    with_arms(paths, check)
