"""Test that worker processes render chat templates as this process does, and end those that take too much.

.venv/bin/python -m pytest -q tests/core/test_template_renderer.py
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from dovetail.chat.requests import plain_message
from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError, PluginError, QueueFullError, RequestError
from dovetail.templates.chat_template import ChatTemplate
from dovetail.templates.renderer import TemplateProcess, TemplateRenderer
from dovetail.tokenizer import Tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
BODIES = {
    "ok": "{{ messages[0].content }}",
    "loop": LOOP,
    "power": "{{ (messages | length + 9) ** (10 ** 9) }}",
    "output": "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "memory": "{{ ('x' * (10 ** 11)) | length }}",
    "divide": "{{ 1 / 0 }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "filter": "{{ [1] | sum(start='a') }}",
    "refuse": "{{ raise_exception('no such role') }}",
    "wait": LOOP,
}
ODD = (
    "{% set kind = messages[0].content %}"
    + "".join(f"{{% {'if' if name == 'ok' else 'elif'} kind == '{name}' %}}{body}" for name, body in BODIES.items())
    + "{% else %}{{ kind }}{% endif %}"
)


async def in_thread(call: Callable[[], str]) -> str:
    return await asyncio.to_thread(call)


def with_renderer(
    source: str,
    work: Callable[[TemplateRenderer], Coroutine[Any, Any, Any]],
    seconds: float = 1,
    uses_uvloop: bool = False,
) -> Any:
    async def run() -> Any:
        template = ChatTemplate(source, {"bos_token": "<s>"})
        renderer = TemplateRenderer((template, template), seconds)
        renderer.start()
        try:
            await renderer.check()
            return await work(renderer)
        finally:
            renderer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uses_uvloop else None) as runner:
        return runner.run(run())


def chat(content: str, large: bool = False) -> tuple[dict[str, Any], bool, Any]:
    variables = {"messages": [{"role": "user", "content": content}], "tools": None, "add_generation_prompt": True}
    return variables, large, in_thread


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_takes_too_much_is_refused_and_others_are_served(large: bool):
    wrong = {
        "loop": "did not end within 1 s",
        "power": "did not end within 1 s",
        "output": "it writes 99980001 characters",
        "memory": "too much memory",
        "divide": "ZeroDivisionError",
        "recursion": "RecursionError",
        "filter": "TypeError",
        "refuse": "conversation: no such role",
    }

    async def work(renderer: TemplateRenderer) -> None:
        for name, words in wrong.items():
            with pytest.raises(RequestError, match=words) as caught:
                await renderer.render(*chat(name, large))
            assert caught.value.param == "messages"
            assert await renderer.render(*chat("é\ud800 <next>", large)) == "é\ud800 <next>"

    with_renderer(ODD, work)


def test_a_loop_does_not_stop_the_event_loop_nor_large_conversations():
    async def work(renderer: TemplateRenderer) -> None:
        looping = asyncio.ensure_future(renderer.render(*chat("loop")))
        assert await renderer.render(*chat("x" * 100_000)) == "x" * 100_000
        assert not looping.done()
        with pytest.raises(RequestError, match="did not end"):
            await looping

    with_renderer(ODD, work)


def test_long_conversations_are_sent_whole_under_uvloop():
    """It leaves descriptors for which it has waited so that they do not block."""

    async def work(renderer: TemplateRenderer) -> None:
        for _ in range(2):
            assert await renderer.render(*chat("x" * 3_000_000, True)) == "x" * 3_000_000

    with_renderer(ODD, work, seconds=30, uses_uvloop=True)


def test_conversations_that_wait_are_refused_when_the_server_stops():
    async def work(renderer: TemplateRenderer) -> None:
        tasks = [asyncio.ensure_future(renderer.render(*chat("loop"))) for _ in range(3)]
        await asyncio.sleep(0.01)
        renderer.close()
        for task in tasks:
            with pytest.raises(QueueFullError):
                await task
        with pytest.raises(QueueFullError, match="shutting down"):
            await renderer.render(*chat("late"))

    with_renderer(ODD, work, seconds=60)


def test_a_client_that_leaves_and_a_process_that_is_killed():
    async def work(renderer: TemplateRenderer) -> None:
        left = asyncio.ensure_future(renderer.render(*chat("x" * 50_000)))
        await asyncio.sleep(0)
        left.cancel()
        assert await renderer.render(*chat("next")) == "next"
        for large in (False, True):  # what a process has not answered is rendered by another
            (process,) = renderer._idle
            os.kill(process._process.pid, signal.SIGKILL)
            process._process.wait()
            assert await renderer.render(*chat("idle", large)) == "idle"
        task = asyncio.ensure_future(renderer.render(*chat("wait")))
        await asyncio.sleep(0)
        for _ in range(2):
            busy = await busy_process(renderer)
            os.kill(busy._process.pid, signal.SIGKILL)
            busy._process.wait()
        with pytest.raises(QueueFullError, match=r"status -9\); retry"):  # the second one was killed too
            await task
        assert await renderer.render(*chat("again")) == "again"
        with pytest.raises(PluginError, match="must be data"):
            await renderer.render({"tools": None, "f": lambda: 0}, False, in_thread)

    with_renderer(ODD, work, seconds=30)


async def busy_process(renderer: TemplateRenderer) -> TemplateProcess:
    """Wait until a process renders for longer than an instant, and return it."""
    while True:
        await asyncio.sleep(0.01)
        for process in [*renderer._running]:
            if (
                process.kill.alive
                and process.ready
                and process not in renderer._idle
                and process._process.poll() is None
            ):
                return process


def test_slow_conversations_of_one_tenant_do_not_delay_another():
    async def work(renderer: TemplateRenderer) -> None:
        def of(tenant: str, content: str) -> asyncio.Task[str]:
            return asyncio.ensure_future(renderer.render(*chat(content), tenant))

        slow = [of("slow", "loop") for _ in range(8)]
        await busy_process(renderer)
        for number in range(20):
            assert await of("other", f"a{number}") == f"a{number}"
            assert await of("third", f"b{number}") == f"b{number}"
        assert sum(task.done() for task in slow) <= 1
        assert len([process for process in renderer._running if process.kill.alive]) == 2
        renderer.close()
        assert all(
            isinstance(end, QueueFullError | RequestError)
            for end in await asyncio.gather(*slow, return_exceptions=True)
        )

    with_renderer(ODD, work, seconds=20)


def test_a_process_that_is_stopped_is_killed():
    async def work(renderer: TemplateRenderer) -> None:
        (process,) = renderer._idle
        os.kill(process._process.pid, signal.SIGSTOP)
        with pytest.raises(RequestError, match="did not end"):
            await renderer.render(*chat("x"))
        assert await renderer.render(*chat("again")) == "again"

    with_renderer(ODD, work, seconds=0.3)


def test_the_process_ends_with_its_server_even_in_a_loop():
    async def work(renderer: TemplateRenderer) -> int:
        (process,) = renderer._idle
        task = asyncio.ensure_future(renderer.render(*chat("loop")))
        await asyncio.sleep(0.1)
        process._conn.close()  # as when the server is killed
        task.cancel()
        return process._process.wait(30)

    assert with_renderer(ODD, work) in (-signal.SIGXCPU, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 9 ** (9 ** (9 ** 9)) }}", "cannot be compiled: .* did not end within 1 s"),
        ("{{ x | no_such_filter }}", "line 1: No filter named 'no_such_filter'"),
        ("{% if %}", "line 1"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ],
)
def test_templates_that_cannot_be_compiled_are_errors_of_the_start(source: str, words: str):
    async def nothing(renderer: TemplateRenderer) -> None:
        raise AssertionError("it was compiled")

    begin = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        with_renderer(source, nothing)
    assert time.monotonic() - begin < 60


def test_processes_render_what_this_process_renders():
    """Also the arguments of earlier calls, which are a mapping and a text."""
    tokenizer = Tokenizer.from_dir(locate("tiny"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  [1, "é"]}'}}
    given = [
        {"role": "user", "content": "hi <|im_end|>"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    messages = [plain_message(message, i) for i, message in enumerate(given)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    async def work() -> None:
        assert tokenizer.templates
        renderer = TemplateRenderer(tokenizer.templates, 5)
        for shown in (None, tools):
            rendering = tokenizer.chat_rendering(messages, shown)
            prompt = rendering.prompt(await renderer.render(rendering.variables, False, in_thread))
            assert prompt == tokenizer.apply_chat_template(messages, shown)
        renderer.close()

    asyncio.run(work())
