"""Test loads of adapters (LoRA) that are ended before they have finished: because the adapter is unloaded, or because the server
shuts down. Every command has one answer, and what had not begun to be read is not read.

.venv/bin/python -m pytest -q tests/e2e/test_adapter_loads.py
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from gated_engine import WAS_READ, add_gate, gated, run_gated_engine
from served_adapters import serve_adapters

from dovetail import LLM, SamplingParams
from dovetail.api.problems import NotFoundError
from dovetail.config import Config
from dovetail.engine import adapter_files
from dovetail.engine.adapters import EngineAdapters
from dovetail.errors import RequestError
from dovetail.loop import Loop
from dovetail.loop.adapters import AdapterLoader
from dovetail.messages import (
    AbortLoadsMsg,
    AbortMsg,
    Answer,
    CommandReply,
    GenerateMsg,
    LoadAdapterMsg,
    RequestFailed,
    ShutdownMsg,
    TokenOutput,
    UnloadAdapterMsg,
)
from dovetail.server.adapters import ServedAdapters
from dovetail.server.client import EngineClient
from dovetail.server.launch import running_server
from lora_adapters import write_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (256, 256)}
PARAMS = SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
SETTINGS = {"memory": {"kv_gib": 0.02}, "grammar": "none", "cache": "radix", "threads": 1}
SHUTDOWN = "the server is shutting down"
PATIENCE = 60.0


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Write adapters. The first is read once its FIFO was opened and closed, and the others wait for it."""
    for seed, name in enumerate("abcdk"):
        write_adapter(tmp_path / name, SHAPES, seed=seed)
    add_gate(tmp_path / "a")
    return {name: str(tmp_path / name) for name in "abcdk"}


@pytest.fixture
def loop(paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.setattr(EngineAdapters, "read", gated(EngineAdapters.read))
    with LLM("tiny", **SETTINGS, adapters={"enabled": True, "load": {"k": paths["k"]}}) as llm:
        yield llm.loop


def load(loop: Loop, *names: str, directory: str) -> None:
    """Begin to load adapters. The ``call_id`` of each command is its name, if it is the first."""
    for name in names:
        loop.handle(LoadAdapterMsg(f"load {name}", name, directory))


def load_four(loop: Loop, paths: dict[str, str]) -> Any:
    """Begin to load four adapters, and return the opened FIFO of the first, which is being read. The thread has the second next; it
    does not have the others yet."""
    for name in "abcd":
        load(loop, name, directory=paths[name])
    assert loop.step() == []
    return open(Path(paths["a"]) / "gate", "wb")


def finished(loop: Loop) -> list[Answer]:
    """Return the answers of all steps until nothing is left to do, and check that nothing is left of loads that were ended."""
    answers: list[Answer] = []
    while loop.has_work:
        answers += loop.step()
    loader, images = cast(Any, loop)._adapters, cast(Any, loop.executor).rank.adapters
    assert not images._reading
    assert images._images.keys() == loader._host.keys()
    assert images._images.keys() <= {adapter.key for adapter in loop.scheduler.adapters.known.values()}
    assert loop.scheduler.adapters.totals.failures == 0
    loop.scheduler.check_integrity()
    return answers


def replies(answers: list[Answer]) -> list[tuple[str, bool, str]]:
    assert all(isinstance(answer, CommandReply) for answer in answers)
    return [(one.call_id, one.ok, one.message) for one in answers if isinstance(one, CommandReply)]


def were_read(paths: dict[str, str]) -> str:
    return "".join(name for name, path in paths.items() if (Path(path) / WAS_READ).exists())


def unloaded(name: str) -> str:
    return f"the adapter {name!r} was unloaded before it was read"


def test_a_shutdown_without_draining_ends_every_load_and_reads_none_that_waits(loop, paths):
    with load_four(loop, paths):
        loop.handle(ShutdownMsg(drain=False))
        assert replies(loop.step()) == [(f"load {name}", False, SHUTDOWN) for name in "abcd"]
    assert finished(loop) == []
    assert were_read(paths) == "a", "the thread had begun with it"
    assert [*loop.scheduler.adapters.known] == ["k"]


def test_a_shutdown_without_draining_reads_no_adapter_for_requests_that_it_has_aborted(loop, paths):
    load(loop, "a", directory=paths["a"])
    loop.handle(GenerateMsg("request", [1, 2, 3], PARAMS, 0, adapter="k"))
    while len(cast(Any, loop)._adapters._reading) < 2:  # the request makes a step wait for its adapter
        assert loop.step() == []
    with open(Path(paths["a"]) / "gate", "wb"):
        loop.handle(ShutdownMsg(drain=False))
        aborted, *rest = loop.step()
        assert isinstance(aborted, TokenOutput)
        assert aborted.finish is not None
        assert replies(rest) == [("load a", False, SHUTDOWN)]
    assert finished(loop) == []
    assert were_read(paths) == "a"


def test_a_shutdown_with_draining_finishes_loads(loop, paths):
    with load_four(loop, paths):
        loop.handle(ShutdownMsg(drain=True))
    assert replies(finished(loop)) == [(f"load {name}", True, "") for name in "abcd"]
    assert were_read(paths) == "abcd"


def test_loads_are_ended_without_the_requests(loop, paths):
    gate = add_gate(Path(paths["k"]))
    loop.handle(GenerateMsg("request", [1, 2, 3], PARAMS, 0, adapter="k"))
    while not cast(Any, loop)._adapters._reading:
        assert loop.step() == []
    with gate.open("wb"):
        gate.unlink()
        load(loop, "b", directory=paths["b"])
        load(loop, "c", directory=paths["c"])
        assert loop.step() == []
        loop.handle(AbortLoadsMsg("end", "no more loads"))
        ended = [("load b", False, "no more loads"), ("load c", False, "no more loads")]
        assert replies(loop.step()) == [*ended, ("end", True, "")]
    outputs = finished(loop)
    assert [one.finish.kind.value for one in outputs if isinstance(one, TokenOutput) and one.finish] == ["length"]
    assert were_read(paths) == "k"
    assert (Path(paths["k"]) / WAS_READ).read_text() == "x", "it was read once"


@pytest.mark.parametrize(("begun", "times"), [(False, "x"), (True, "xx")])
def test_an_adapter_is_read_again_for_a_request_that_comes_after_its_read_was_ended(loop, paths, begun, times):
    """The thread has begun to read it, or not: then it reads another one."""
    gate = Path(paths["a"]) / "gate"
    if begun:
        gate = add_gate(Path(paths["k"]))
    else:
        load(loop, "a", directory=paths["a"])
    loop.handle(GenerateMsg("first", [1, 2, 3], PARAMS, 0, adapter="k"))
    while loop.scheduler.adapters.known["k"].key not in cast(Any, loop)._adapters._reading:
        assert loop.step() == []
    with gate.open("wb"):
        gate.unlink()
        loop.handle(AbortMsg("first"))
        loop.handle(AbortLoadsMsg("end", "no more loads"))
        loop.handle(GenerateMsg("second", [1, 2, 3], PARAMS, 0, adapter="k"))
    kinds = {one.rid: one.finish.kind.value for one in finished(loop) if isinstance(one, TokenOutput) and one.finish}
    assert kinds == {"first": "abort", "second": "length"}
    assert (Path(paths["k"]) / WAS_READ).read_text() == times


@pytest.mark.parametrize(("name", "read"), [("a", "abcd"), ("b", "acd"), ("c", "abd")])
def test_an_adapter_is_unloaded_before_it_was_read(loop, paths, name, read):
    """It is being read (a), it is the next of the thread (b), or the thread does not have it yet (c)."""
    with load_four(loop, paths):
        loop.handle(UnloadAdapterMsg("unload", name))
        expected = [(f"load {name}", False, unloaded(name)), ("unload", True, "0 requests go on with it")]
        assert replies(loop.step()) == expected
        loop.handle(UnloadAdapterMsg("again", name))
        assert replies(loop.step()) == [("again", False, f"there is no adapter {name!r}")]
    others = [other for other in "abcd" if other != name]
    assert replies(finished(loop)) == [(f"load {other}", True, "") for other in others]
    assert were_read(paths) == read
    assert [*loop.scheduler.adapters.known] == ["k", *others]
    load(loop, name, directory=paths["d"])
    assert replies(finished(loop)) == [(f"load {name}", True, "")]
    assert loop.scheduler.adapters.known[name].directory == paths["d"]


def test_the_order_of_a_load_and_an_unload_decides(loop, paths):
    """The load would replace an adapter, which is unloaded, too."""
    load(loop, "k", directory=paths["b"])
    loop.handle(UnloadAdapterMsg("unload", "k"))
    expected = [("load k", False, unloaded("k")), ("unload", True, "0 requests go on with it")]
    assert replies(finished(loop)) == expected
    assert not loop.scheduler.adapters.known
    load(loop, "k", directory=paths["c"])
    assert replies(finished(loop)) == [("load k", True, "")]
    loop.handle(UnloadAdapterMsg("unload", "k"))
    load(loop, "k", directory=paths["d"])
    assert replies(finished(loop)) == [("unload", True, "0 requests go on with it"), ("load k", True, "")]
    assert loop.scheduler.adapters.known["k"].directory == paths["d"]
    assert were_read(paths) == "cd"


def test_requests_go_on_with_an_adapter_whose_replacement_is_unloaded_before_it_was_read(loop, paths):
    loop.handle(GenerateMsg("request", [1, 2, 3], PARAMS, 0, adapter="k"))
    load(loop, "k", directory=paths["b"])
    loop.handle(UnloadAdapterMsg("unload", "k"))
    loop.handle(GenerateMsg("late", [1, 2, 3], PARAMS, 0, adapter="k", adapter_param="lora_path"))
    answers = finished(loop)
    assert replies([one for one in answers if isinstance(one, CommandReply)]) == [
        ("load k", False, unloaded("k")),
        ("unload", True, "1 requests go on with it"),
    ]
    assert [one.rid for one in answers if isinstance(one, TokenOutput) and one.finish] == ["request"]
    (refused,) = (one for one in answers if isinstance(one, RequestFailed))
    assert (refused.rid, refused.code, refused.param) == ("late", "unknown_adapter", "lora_path")
    assert were_read(paths) == "k"


@pytest.mark.parametrize("unload", [False, True])
def test_two_loads_of_one_name_wait(loop, paths, unload):
    with load_four(loop, paths):
        loop.handle(LoadAdapterMsg("first", "x", paths["c"]))
        loop.handle(LoadAdapterMsg("second", "x", paths["d"]))
        if unload:
            loop.handle(UnloadAdapterMsg("unload", "x"))
            ended = [("first", False, unloaded("x")), ("second", False, unloaded("x"))]
            assert replies(loop.step()) == [*ended, ("unload", True, "0 requests go on with it")]
    more = [] if unload else [("first", True, ""), ("second", True, "")]
    assert replies(finished(loop)) == [*((f"load {name}", True, "") for name in "abcd"), *more]
    known = loop.scheduler.adapters.known
    assert known.keys() == {*"abcdk"} if unload else known["x"].directory == paths["d"]


def test_commands_after_an_interrupt_of_the_wait_for_a_load_have_answers_of_their_own(paths, monkeypatch):
    """Ctrl-C in ``load_adapter`` does not end the load."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    def load_and_interrupt(llm: LLM, name: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.loop, "step", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.load_adapter(name, paths[name])

    with LLM("tiny", **SETTINGS, adapters={"enabled": True}) as llm:
        load_and_interrupt(llm, "b")
        with pytest.raises(RequestError, match="nowhere is no adapter"):
            llm.load_adapter("nowhere", "/nowhere")
        load_and_interrupt(llm, "c")
        llm.unload_adapter("c")
        assert [*llm.loop.scheduler.adapters.known] == ["b"]


def test_ctrl_c_ends_the_wait_for_a_load_between_two_steps(paths, monkeypatch):
    """It arrives while the loop asks the ranks whether they have read the adapter."""
    collect = AdapterLoader._collect

    def interrupted(loader: AdapterLoader) -> list[Answer]:
        monkeypatch.setattr(AdapterLoader, "_collect", collect)
        signal.raise_signal(signal.SIGINT)
        return collect(loader)

    with LLM("tiny", **SETTINGS, adapters={"enabled": True}) as llm:
        monkeypatch.setattr(AdapterLoader, "_collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.load_adapter("b", paths["b"])
        assert llm.loop.dead is None
        llm.load_adapter("c", paths["c"])
        assert [*llm.loop.scheduler.adapters.known] == ["b", "c"]


def test_a_read_ends_before_its_next_piece_when_the_engine_is_closed(tmp_path, monkeypatch):
    """Torch aborts a process that ends while a thread computes."""
    read, begun, count = adapter_files._read_tensor, threading.Event(), 0
    write_adapter(tmp_path / "many", {f"model.layers.{i}.self_attn.q_proj": (256, 256) for i in range(2)})

    def read_slowly(*args: Any) -> Any:
        nonlocal count
        count += 1
        begun.set()
        deadline = time.monotonic() + PATIENCE
        while not thread.closed and time.monotonic() < deadline:
            time.sleep(0.001)
        return read(*args)

    with LLM("tiny", **SETTINGS, adapters={"enabled": True}) as llm:
        thread = cast(Any, llm.loop.executor).rank.adapters._thread
        monkeypatch.setattr(adapter_files, "_read_tensor", read_slowly)
        load(llm.loop, "many", directory=str(tmp_path / "many"))
        assert llm.loop.step() == []
        assert begun.wait(PATIENCE)
    thread._thread.join(PATIENCE)
    assert (count, thread._thread.is_alive()) == (1, False)


def test_ranks_need_not_have_come_equally_far_when_a_load_is_ended(paths):
    """Each of two ranks reads on a thread of its own. Whatever these have begun, the answers are the same."""
    (Path(paths["a"]) / "gate").unlink()
    with LLM("tiny", **SETTINGS, parallel={"tp": 2}, adapters={"enabled": True}) as llm:
        for _ in range(20):
            load(llm.loop, "a", directory=paths["a"])
            load(llm.loop, "b", directory=paths["b"])
            answers = llm.loop.step()
            llm.loop.handle(UnloadAdapterMsg("unload", "b"))
            while llm.loop.has_work:
                answers += llm.loop.step()
            found = {call_id: ok for call_id, ok, _ in replies(answers)}
            assert (len(answers), found) == (3, {"load a": True, "load b": False, "unload": True})
            assert [*llm.loop.scheduler.adapters.known] == ["a"]
        assert llm.generate([1, 2, 3], PARAMS, adapter="a")[0].token_ids


# -- the server


def config_of(paths: dict[str, str], **server: object) -> Config:
    section = {"enabled": True, "load": {"k": paths["k"]}}
    server = {"port": 0, "log_level": "error", **server}
    plain = {"memory": SETTINGS["memory"], "threads": 1}
    return Config.model_validate({**plain, "adapters": section, "server": server})


def with_engine(paths: dict[str, str], check: Callable[[ServedAdapters, EngineClient], Awaitable[None]]) -> None:
    """Run ``check`` with an engine in a process of its own."""
    config = config_of(paths)
    serve_adapters(config, lambda: EngineClient(config, run_gated_engine), check)


async def begun(paths: dict[str, str]) -> Any:
    """Return the opened FIFO of the first adapter once the engine is about to read it."""
    return await asyncio.to_thread(open, Path(paths["a"]) / "gate", "wb")


async def results(*tasks: asyncio.Task[None]) -> list[str]:
    """Return the type and the text of each task's error, or "". A task that does not end fails the test."""
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE)
    return ["" if error is None else f"{type(error).__name__}: {error}" for error in ended]


def test_a_server_ends_loads_of_a_name_that_is_unloaded(paths):
    async def check(served: ServedAdapters, engine: EngineClient) -> None:
        def loading(name: str, path: str) -> asyncio.Task[None]:
            return asyncio.ensure_future(served.load(name, paths[path], replace=True))

        first = loading("first", "a")
        with await begun(paths):
            loads = [loading("x", "b"), loading("x", "c"), loading("k", "d")]
            unloads = [asyncio.ensure_future(served.unload(name)) for name in ("x", "k", "x")]
            after = loading("x", "d")
            ended = await results(*loads, *unloads)
            text = "RequestError: the adapter {!r} was not loaded: it was unloaded before it was read"
            none = "NotFoundError: there is no adapter 'x'"
            assert ended == [*(text.format(name) for name in "xxk"), "", "", none]
            assert not first.done(), "no command has waited for the adapter that is being read"
        assert await results(first, after) == ["", ""]
        assert {name: card.directory for name, card in served.cards.items()} == {"first": paths["a"], "x": paths["d"]}
        assert (await engine.stats()).adapters_known == 2
        assert served.num_loading == 0
        with pytest.raises(NotFoundError, match="no adapter 'k'"):
            await served.unload("k")
        await served.unload("x")
        assert (await engine.stats()).adapters_known == 1

    with_engine(paths, check)
    assert were_read(paths) == "ad"


def test_loads_of_one_name_wait_for_each_other(paths):
    """The second is refused, as it would be if it came later."""

    async def check(served: ServedAdapters, engine: EngineClient) -> None:
        first = asyncio.ensure_future(served.load("x", paths["a"], replace=False))
        second = asyncio.ensure_future(served.load("x", paths["b"], replace=False))
        other = asyncio.ensure_future(served.load("y", paths["c"], replace=False))
        (await begun(paths)).close()
        loaded = "RequestError: the adapter 'x' is loaded already; unload it first, or set load_inplace"
        assert await results(first, second, other) == ["", loaded, ""]
        assert {name: card.directory for name, card in served.cards.items()} == {
            "k": paths["k"],
            "x": paths["a"],
            "y": paths["c"],
        }

    with_engine(paths, check)


def test_the_answers_to_a_load_and_to_the_unload_cross(paths):
    """The engine has read the adapter when it is unloaded, and the server does not know that yet."""

    async def check(served: ServedAdapters, engine: EngineClient) -> None:
        command, answered = engine.command, asyncio.Event()

        async def late(msg: Any) -> CommandReply:
            reply = await command(msg)
            if isinstance(msg, LoadAdapterMsg):
                assert reply.ok
                answered.set()
                await gone.wait()
            return reply

        engine.command, gone = late, asyncio.Event()
        load = asyncio.ensure_future(served.load("x", paths["b"], replace=False))
        await asyncio.wait_for(answered.wait(), PATIENCE)
        await served.unload("x")
        gone.set()
        (ended,) = await results(load)
        assert "was not loaded: it was unloaded before it was read" in ended
        assert [*served.cards] == ["k"]
        assert (await engine.stats()).adapters_known == 1

    with_engine(paths, check)


def test_a_server_that_shuts_down_ends_all_loads(paths):
    async def check(served: ServedAdapters, engine: EngineClient) -> None:
        names = [("first", "a"), ("second", "b"), ("second", "c"), ("third", "d")]
        loads = [asyncio.ensure_future(served.load(name, paths[path], replace=True)) for name, path in names]
        with await begun(paths):
            await served.end_loads()
            text = "DrainingError: the adapter {!r} was not loaded: the server is shutting down"
            assert await results(*loads) == [text.format(name) for name, _ in names]
        assert [*served.cards] == ["k"]
        await served.load("late", paths["b"], replace=False)  # the service refuses it, which knows that it is draining

    with_engine(paths, check)
    assert were_read(paths) == "ab"


def test_a_server_that_drains_loads_no_more_adapters(paths):
    """A request, whose adapter is being read, keeps it from ending."""
    gate, found = add_gate(Path(paths["k"])), {}

    def post(name: str, path: str, body: dict[str, Any]) -> None:
        found[name] = httpx.post(f"{url}{path}", json=body, timeout=PATIENCE)

    def load_twice() -> None:
        for name in ("open", "late"):
            post(name, "/load_lora_adapter", {"lora_name": name, "lora_path": paths["b"]})
        os.close(opened)

    request = {"input_ids": [1, 2, 3], "lora_path": "k", "sampling_params": {"max_new_tokens": 2}}
    with running_server(config_of(paths, drain_seconds=PATIENCE), target=run_gated_engine) as url:
        threads = [
            threading.Thread(target=post, args=("request", "/generate", request)),
            threading.Thread(target=load_twice),
        ]
        threads[0].start()
        opened = os.open(gate, os.O_WRONLY)
        threads[1].start()
    for thread in threads:
        thread.join(PATIENCE)
    assert {name: answer.status_code for name, answer in found.items()} == {"open": 503, "late": 503, "request": 200}
    assert found["late"].json()["error"]["message"] == "the server is shutting down and accepts no more requests"


def test_a_load_is_answered_while_the_server_shuts_down(paths):
    """No request is open, and the load is not waited for."""
    answers: list[httpx.Response] = []
    opened: list[int] = []

    def load_first(url: str) -> None:
        body = {"lora_name": "first", "lora_path": paths["a"]}
        answers.append(httpx.post(f"{url}/load_lora_adapter", json=body, timeout=PATIENCE))
        os.close(opened[0])

    with running_server(config_of(paths, drain_seconds=PATIENCE), target=run_gated_engine) as url:
        thread = threading.Thread(target=load_first, args=(url,))
        thread.start()
        opened.append(os.open(Path(paths["a"]) / "gate", os.O_WRONLY))
    thread.join(PATIENCE)
    (answer,) = answers
    assert answer.status_code == 503
    assert "the adapter 'first' was not loaded: the server is shutting down" in answer.text


def test_the_error_of_an_unloaded_adapter_names_the_field(paths):
    served = ServedAdapters(config_of(paths), cast(Any, None))
    assert served.directory("k", "lora_path") == paths["k"]
    with pytest.raises(
        RequestError, match="lora_path names the adapter 'x', which was unloaded; load it again"
    ) as caught:
        served.directory("x", "lora_path")
    assert caught.value.param == "lora_path"
