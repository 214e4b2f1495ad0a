"""Test what the chat page makes of answers, conversations, models and errors, in headless Chromium against a scripted server:
what a model, a user or a server writes is never markup or script.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_chat_conversations.py
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from browser import Page, needs_browser
from chatting import click, figures, fill, last, say, settled, visit
from hatchling.builders.wheel import WheelBuilder
from scripted_server import ScriptedServer, scripted_server

from dovetail.server.pages.routes import FOLDER

ROOT = Path(__file__).parents[2]
MARKDOWN = """\
# Title

Some **bold**, *slanted*, ~~gone~~ and `inline` text
with a line break, 5 < 6 &amp; [a link](https://example.org/a?b=1 "its title"), https://example.org/bare and server.py.

```python
def f(x):
    return x < 1 and "<b>"
```

1. one
   - nested
3. three

| left | right |
|:-----|------:|
| a    | **1** |

> quoted

![a chart](https://example.org/x.png)
"""
TAKEN = "document.title='taken'"
PAYLOADS = (
    f'<script>{TAKEN}</script>', f'<img src=x onerror="{TAKEN}">', f'<svg/onload="{TAKEN}">', f'<svg><script>{TAKEN}</script></svg>',
    f'<iframe srcdoc="<script>parent.{TAKEN}</script>"></iframe>', f'<a href="javascript:{TAKEN}">x</a>', f'[x](javascript:{TAKEN})',
    f'[x](JaVaScRiPt:{TAKEN})', f'[x](&#106;avascript:{TAKEN})', f'[x](java\tscript:{TAKEN})', f'[x]( javascript:{TAKEN})', f'[x](vbscript:{TAKEN})',
    f'[x](data:text/html,<script>{TAKEN}</script>)', '[x](/flush_cache)', '[x](//example.org)', '[x](blob:abc)', f'![x](javascript:{TAKEN})',
    '![x](/flush_cache)', '![x](https://example.org/x.png)', f'<style>@import "x"</style><style onload="{TAKEN}">', f'<details open ontoggle="{TAKEN}">',
    f'<math><mtext></p><style><img title="</style><img src=x onerror={TAKEN}>">', f'```<img/src=x/onerror={TAKEN}>\n</code></pre><script>{TAKEN}</script>\n```',
    f'[ref]\n\n[ref]: javascript:{TAKEN}', f'<javascript:{TAKEN}>', f'| <img src=x onerror={TAKEN}> |\n|---|\n| <b>x</b> |', f'[<img src=x onerror={TAKEN}>](https://example.org)',
    f'<form action="/flush_cache"><input autofocus onfocus="{TAKEN}"></form>', '<base href="https://example.org/">', '<meta http-equiv="refresh" content="0;url=https://example.org">',
    f'[![x](x)](javascript:{TAKEN})', '"><plaintext>', '<!--', '${7*7}{{7*7}}', f"'-{TAKEN}-'",
)  # fmt: skip
"""Texts that run a script, load something or leave the page where they are taken for markup."""

FOREIGN = "script:not([src]), iframe, object, embed, img, svg, style, form:not(#composer):not(.call), base, meta[http-equiv], math, video, audio, link:not([href^='ui/'])"
INERT = f"""[
    ...[...document.body.querySelectorAll("{FOREIGN}")].map((one) => one.outerHTML),
    ...[...document.querySelectorAll('*')].flatMap((one) => [...one.attributes].filter(({{ name }}) => /^on|^style$|^src/.test(name) && !one.matches('head *, #message')).map(({{ name }}) => `${{one.tagName}} ${{name}}`)),
    ...[...document.querySelectorAll('main a, nav a')].filter((one) => !/^(https?|mailto):/.test(one.getAttribute('href')) || !one.rel.includes('noopener')).map((one) => one.outerHTML),
    ...performance.getEntriesByType('resource').map(({{ name }}) => name.slice(location.origin.length)).filter((path) => !/^[/](ui[/]|v1[/]|favicon)/.test(path)),
]"""


@pytest.fixture(scope="module")
def scripted_url() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(scripted_url: ScriptedServer) -> ScriptedServer:
    """Return the scripted server as it is at first."""
    scripted_url.models = [{"id": "scripted"}]
    for made in (scripted_url.answers, scripted_url.bodies, scripted_url.paths):
        made.clear()
    return scripted_url


def texts(page: Page, what: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll('{what}')].map((one) => one.textContent)")


def test_the_vendored_library_is_the_published_one_small_and_in_the_wheel() -> None:
    vendor = FOLDER / "vendor"
    rows = [
        line.strip("| \n").split(" | ") for line in (vendor / "README.md").read_text().splitlines() if "mjs" in line
    ]
    names = {row[0]: row for row in rows if len(row) == 5}
    assert set(names) == {path.name for path in vendor.iterdir() if path.suffix == ".mjs"}
    for name, (_, package, version, _, digest) in names.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest
        assert f"{package} {version}" in (vendor / "LICENSE.txt").read_text()
        text = (vendor / name).read_text()
        assert not re.search(r"innerHTML|\beval\b|new Function|document\.|fetch\(|import\(", text)
    assert sum(path.stat().st_size for path in vendor.iterdir()) < 300_000
    files = {Path(file.distribution_path) for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    pages = Path("dovetail/server/pages")
    assert {pages / path.relative_to(FOLDER) for path in FOLDER.rglob("*.*") if path.suffix != ".pyc"} <= files


@needs_browser
def test_markdown_becomes_elements(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    server.answer(*(MARKDOWN[i : i + 7] for i in range(0, len(MARKDOWN), 7)))
    say(page, "**not** for the user's own text")
    assert texts(page, ".user .text") == ["**not** for the user's own text"]
    assert texts(page, ".user strong") == []
    assert texts(page, ".markdown .h1") == ["Title"]
    assert texts(page, "h1") == ["Dovetail"]  # a title in an answer is below the title of the page
    assert texts(page, ".markdown strong") == ["bold", "1"]
    assert texts(page, ".markdown em") + texts(page, ".markdown s") == ["slanted", "gone"]
    assert texts(page, ".markdown p code") == ["inline"]
    assert "5 < 6 & a link" in last(page)
    assert texts(page, ".code-block pre") == ['def f(x):\n    return x < 1 and "<b>"']
    assert texts(page, ".code-block figcaption span") == ["python"]
    assert texts(page, ".markdown ol > li ul > li") == ["nested"]
    assert texts(page, ".markdown th.right") == ["right"]
    assert texts(page, ".markdown blockquote p") == ["quoted"]
    links = page.run("[...document.querySelectorAll('.markdown a')].map((one) => [one.textContent, one.href, one.rel])")
    assert [link[:2] for link in links] == [
        ["a link", "https://example.org/a?b=1"], ["https://example.org/bare", "https://example.org/bare"],
    ]  # fmt: skip
    assert all("noreferrer" in link[2] for link in links)
    assert texts(page, ".markdown .image") == ["[Image: a chart]"]
    assert page.run(INERT) == []
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    for label, text in (("Copy code", 'def f(x):\n    return x < 1 and "<b>"'), ("Copy answer", MARKDOWN)):
        page.run(f"document.querySelector('[aria-label=\"{label}\"]').click()")
        page.until(f"document.querySelector('[aria-label=\"{label}\"]').textContent === 'Copied'")
        assert page.run("navigator.clipboard.readText()") == text
    page.run(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })"
    )  # a page without https
    page.run("document.execCommand = () => (window.copied = document.activeElement.value)")
    page.run("document.querySelector('[aria-label=\"Copy answer\"]').click()")
    page.until(f"window.copied === {json.dumps(MARKDOWN)}")


@needs_browser
def test_what_is_drawn_piece_by_piece_is_what_is_drawn_at_once(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    text = (
        MARKDOWN
        + "\n[later][x] text\n\n[x]: https://example.org/later\n\n    indented\n\n* a\n\n* b\n\n---\n\nTitle\n==\n"
        + "> " * 150
    )
    script = f"""import('./ui/markdown.js').then(({{ markdownView }}) => {{
        const text = {json.dumps(text)}, grown = markdownView(), differ = [];
        for (let upto = 1; upto <= text.length; upto += 1) {{
            const whole = markdownView();
            grown.show(text.slice(0, upto));
            whole.show(text.slice(0, upto));
            if (!grown.node.isEqualNode(whole.node)) differ.push(upto);
        }}
        const kept = grown.node.firstChild;
        grown.show(text + '\\n\\nmore');
        return [differ, kept === grown.node.firstChild, grown.node.querySelectorAll('a').length];
    }})"""
    assert page.run(script) == [[], True, 3]


@needs_browser
def test_texts_that_attack_the_page_are_inert(page: Page, server: ScriptedServer) -> None:
    everything = "\n\n".join(PAYLOADS)
    server.models = [{"id": f"m{PAYLOADS[1]}", "root": "r"}, {"id": PAYLOADS[0], "parent": f"m{PAYLOADS[1]}"}]
    visit(page, server.url)
    title = page.run("document.title")
    for payload in PAYLOADS:
        server.answer({"reasoning_content": payload}, payload)
        say(page, "go on")
    assert "<script>" in last(page, ".markdown") or "'-" in last(page, ".markdown")
    call = {"index": 0, "id": everything, "function": {"name": everything, "arguments": everything}}
    server.answer(*everything, {"reasoning_content": everything}, {"tool_calls": [call]})
    say(page, "all of it")
    assert PAYLOADS[0] in last(page, ".call")
    for status, body in ((400, {"error": {"message": everything, "param": PAYLOADS[0]}}), (500, everything)):
        server.answers.append((status, body))
        say(page, "refused")
        assert PAYLOADS[0] in last(page, ".error")
    assert page.run(INERT) == []
    for payload in PAYLOADS:
        page.run("document.getElementById('new').click()")
        page.run(f"document.getElementById('message').value = {json.dumps(payload)}")
        page.run("document.getElementById('send').click()")
        settled(page)
        rename(page, payload)
    assert "go on" in texts(page, "nav .title")
    page.open(f"{server.url}/")  # the titles and turns are read again
    page.until("document.title !== 'Dovetail'")
    assert {re.sub(r"\s+", " ", payload.replace("\n", "")).strip() for payload in PAYLOADS} < set(
        texts(page, "nav .title")
    )
    assert page.run(INERT) == []
    assert page.run("document.title") == title


def rename(page: Page, title: str) -> None:
    click(page, "Rename")
    page.run(f"document.querySelector('nav input').value = {json.dumps(title)}")
    page.press("Enter")


@needs_browser
def test_conversations_are_listed_renamed_continued_and_deleted(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    fill(page, system="Be brief.")
    server.answer("first answer")
    say(page, "The first question, which is long enough for its title to be cut somewhere")
    click(page, "New conversation")
    fill(page, system="")
    server.answer("second answer")
    say(page, "Second")
    first, second = "The first question, which is long enough for its title to be…", "Second"
    assert texts(page, "nav .title") == [second, first]
    rename(page, "My title")
    assert page.run("document.activeElement.textContent") == "My title"
    click(page, "Rename")
    page.run("document.activeElement.value = 'no'")
    page.press("Escape")
    page.open(f"{server.url}/")
    page.until("document.querySelectorAll('article').length === 2")  # the open one
    assert texts(page, "nav .title") == ["My title", first]
    click(page, first)
    assert texts(page, ".text") == [
        "The first question, which is long enough for its title to be cut somewhere",
        "first answer",
    ]
    assert page.run("document.getElementById('system').value") == "Be brief."
    say(page, "Go on")
    assert server.bodies[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The first question, which is long enough for its title to be cut somewhere"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "Go on"},
    ]
    assert texts(page, "nav .title") == [first, "My title"]
    click(page, "Delete")
    assert texts(page, "nav .title") == ["My title"]
    assert texts(page, "article") == []
    assert page.run("document.activeElement.textContent") == "Undo"
    page.press("Enter")
    assert texts(page, "nav .title") == [first, "My title"]
    assert len(texts(page, "article")) == 4
    click(page, "Delete")
    page.open(f"{server.url}/")
    page.until("document.title !== 'Dovetail'")
    assert texts(page, "nav .title") == ["My title"]
    assert page.run("Object.keys(localStorage).length") == 1


@needs_browser
def test_conversations_are_exported(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    page.run("URL.createObjectURL = (blob) => { blob.text().then((text) => (window.file = text)); return 'blob:none' }")
    page.run("HTMLAnchorElement.prototype.click = function () { window.named = this.download }")
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": "{}"}}
    server.answer({"reasoning_content": "I think."}, {"tool_calls": [call]})
    fill(page, system="Be brief.")
    say(page, "The weather: ../../etc?")
    page.run("document.querySelector('form.call input').value = 'sunny'")
    click(page, "Send results")
    settled(page)
    click(page, "Export")
    export = json.loads(page.until("window.file"))
    assert page.run("window.named") == "the-weather-etc.json"
    assert (export["title"], export["model"]) == ("The weather: ../../etc?", "scripted")
    sent = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    assert export["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "The weather: ../../etc?"},
        {"role": "assistant", "content": None, "tool_calls": [sent], "reasoning_content": "I think."},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "assistant", "content": "ok"},
    ]
    page.run("window.file = null")
    click(page, "Export all")
    assert json.loads(page.until("window.file")) == [export]


@needs_browser
def test_an_answer_goes_on_while_another_conversation_is_open(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    go = Event()
    server.answer("begun ", go, "and ended")
    say(page, "slow", wait=False)
    page.until("document.querySelector('.markdown')?.textContent.includes('begun')")
    click(page, "New conversation")
    say(page, "quick")
    assert last(page) == "ok"
    assert texts(page, "nav .title") == ["quick", "slow answering …"]
    go.set()
    page.until("![...document.querySelectorAll('nav .title')].some((one) => one.textContent.includes('answering'))")
    click(page, "slow")
    assert last(page) == "begun and ended"
    server.answer("part ", Event())
    say(page, "stop this", wait=False)
    page.until("[...document.querySelectorAll('.markdown')].at(-1).textContent.includes('part')")
    page.open(f"{server.url}/")
    page.until("document.querySelector('.error') !== null")
    assert last(page, ".error") == "The page was closed before the answer was complete."
    assert last(page, ".markdown").strip() == "part"


@needs_browser
def test_the_model_and_its_adapter_are_chosen(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    assert not page.run("document.getElementById('models').checkVisibility()")
    say(page, "one model")
    assert server.bodies[-1]["model"] == "scripted"
    assert "model" not in figures(page)
    server.models = [{"id": "base", "root": "b"}, {"id": "other", "root": "o"}, {"id": "sql", "parent": "base"}]
    visit(page, server.url)
    assert texts(page, "#model-choice option") == ["base", "other"]
    assert texts(page, "#adapter option") == ["none", "sql"]
    say(page, "without an adapter")
    fill(page, adapter="sql")
    assert page.run("document.getElementById('model').textContent") == "base + sql"
    say(page, "with an adapter")
    assert [body["model"] for body in server.bodies[-2:]] == ["base", "sql"]
    assert figures(page)["model"] == "sql"
    click(page, "New conversation")
    fill(page, **{"model-choice": "other"})
    assert not page.run("document.getElementById('adapter').checkVisibility()")
    say(page, "another model")
    assert server.bodies[-1]["model"] == "other"
    page.open(f"{server.url}/")
    page.until("document.title === 'other · Dovetail'")
    click(page, "without an adapter")  # it goes on with what has answered last
    assert page.run("document.getElementById('model').textContent") == "base + sql"
    server.answers.append((404, {"error": {"message": "the model 'sql' does not exist", "param": "model"}}))
    say(page, "gone")
    assert beside(page, "adapter") == "the model 'sql' does not exist (status 404)"


def beside(page: Page, setting: str) -> str | None:
    """Return what is visible beside a setting, if it is marked as wrong and described by that."""
    return page.run(f"""(() => {{
        const field = document.getElementById('{setting}'), problem = document.getElementById(field.getAttribute('aria-describedby'));
        return field.ariaInvalid === 'true' && problem.checkVisibility() ? problem.textContent : null;
    }})()""")


@needs_browser
def test_what_the_server_refuses_is_shown_beside_its_setting(page: Page, tiny_url: str) -> None:
    visit(page, tiny_url)
    wrong: dict[str, tuple[Any, str]] = {
        "top_p": ("0", "top_p is 0.0; allowed: a number in (0, 1]"),
        "max_tokens": ("99999999", "exceed the context"),
        "stops": ("x" * 1025, "stop is"),
        "schema": ({"type": "no such type"}, "no such type"),
        "tools": ([{"type": "function", "function": {"name": "a b"}}], "tools.0.function.name is 'a b'"),
        "further": ({"no_such_field": 1}, "no_such_field is not a field"),
    }
    for setting, (value, words) in wrong.items():
        fill(page, **{setting: value})
        say(page, "hello")
        assert words in (beside(page, setting) or ""), setting
        assert words in last(page, ".error")
        page.run("[...document.querySelectorAll('.row button')].at(-1).click()")  # Show ...
        assert page.run("document.activeElement.id") == setting
        fill(page, **{setting: ""})
        assert beside(page, setting) is None
    fill(page, temperature="-1")
    say(page, "not sent", wait=False)
    page.until("!document.getElementById('problem').hidden")
    assert beside(page, "temperature")
    fill(page, temperature="0", max_tokens="4")
    page.run("document.getElementById('message').focus()")
    page.press("Enter")
    settled(page)
    assert last(page, ".error") is None
    page.look(390, 800)
    fill(page, top_p="0")
    say(page, "on a phone")
    assert "top_p" in last(page, ".error")
    assert not page.run("document.getElementById('settings').checkVisibility()")
    click(page, "Show Top p")
    assert page.run("document.activeElement.id") == "top_p"
    assert beside(page, "top_p")


@needs_browser
def test_breaks_of_the_connection_are_said_and_keep_what_has_arrived(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    call = {"index": 0, "id": "c", "function": {"name": "half", "arguments": '{"a'}}
    server.answer("half an ", {"tool_calls": [call]}, "cut")
    say(page, "cut")
    assert last(page, ".error") == "The connection ended before the answer was complete. Is the server still running?"
    assert last(page).strip() == "half an"
    assert last(page, ".call") is None
    server.answer("some", {"error": {"message": "the engine has failed"}})
    say(page, "fail")
    assert last(page, ".error") == "the engine has failed"
    server.answers.append((503, "busy"))
    click(page, "Retry")
    settled(page)
    assert last(page, ".error") == '"busy" (status 503)'
    server.answer("still ", Event())
    say(page, "stop", wait=False)
    page.until("document.getElementById('stop').checkVisibility()")
    page.until("[...document.querySelectorAll('article')].at(-1).textContent.includes('still')")
    page.run("performance.now = ((now) => () => now() + 5000)(performance.now.bind(performance))")
    page.until("[...document.querySelectorAll('article')].at(-1).textContent.includes('Waiting: no text for ')")
    page.run("document.getElementById('stop').click()")
    settled(page)
    assert figures(page)["finish"] == "stopped by you"
    page.run("localStorage.clear()")
    page.run("localStorage.setItem('filler', 'x'.repeat(5 * 1024 * 1024 - 200))")
    say(page, "no space")
    assert "has no space" in page.run("document.getElementById('problem').textContent")
    assert last(page) == "ok"
    page.run("localStorage.clear()")


@needs_browser
def test_on_a_phone_panels_cover_the_chat_and_take_the_focus(page: Page, server: ScriptedServer) -> None:
    page.look(390, 800)
    visit(page, server.url)
    server.answer(MARKDOWN)
    say(page, "hello")
    for panel in ("chats", "settings"):
        page.run(f"document.getElementById('toggle-{panel}').click()")
        assert page.run("document.activeElement.id") == f"close-{panel}"
        assert page.run("document.querySelector('main').inert && document.querySelector('header').inert")
        box = page.run(
            f"(({{ x, y, width, height }}) => [x, y, width, height])(document.getElementById('{panel}').getBoundingClientRect())"
        )
        assert box == [0, 0, 390, 800]
        assert page.run("Math.max(innerWidth, document.documentElement.scrollWidth)") == 390
        page.press("Escape")
        assert page.run("document.activeElement.id") == f"toggle-{panel}"
        assert not page.run(f"document.getElementById('{panel}').checkVisibility()")
        assert not page.run("document.querySelector('main').inert")
    page.look(1300, 800)
    page.until(
        "document.getElementById('chats').checkVisibility() && document.getElementById('settings').checkVisibility()"
    )
    page.look(1000, 800)
    page.run("document.getElementById('toggle-chats').click(); document.getElementById('toggle-chats').click()")
    assert page.run("document.body.className") == "chats"  # there is no space for both


def test_colours_contrast_enough() -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1 for text."""
    css = (FOLDER / "page.css").read_text()
    schemes = [dict(re.findall(r"--(\w+): (#\w+)", rule)) for rule in re.findall(r":root \{[^}]*\}", css)]
    assert len(schemes) == 2
    for colours in schemes:
        for text in ("ink", "muted", "good", "bad", "accent"):
            for ground in ("page", "card", "code", "mine"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground, colours[text], colours[ground])
        assert contrast(colours["on"], colours["accent"]) >= 4.5


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@needs_browser
def test_the_reasoning_is_folded_and_a_screen_reader_gets_the_whole_answer(page: Page, server: ScriptedServer) -> None:
    visit(page, server.url)
    think, write = Event(), Event()
    server.answer({"reasoning_content": "First I think."}, think, "The answer", write, " is 4.")
    say(page, "2 + 2?", wait=False)
    is_open = "document.querySelector('.assistant .reasoning').open"
    page.until("document.querySelector('.assistant .reasoning div')?.textContent === 'First I think.'")
    assert page.run(is_open)
    assert page.run("document.getElementById('status').textContent") == "Answering …"
    think.set()
    page.until(f"!{is_open}")
    page.run("document.querySelector('.assistant .reasoning summary').click()")
    write.set()
    settled(page)
    assert page.run(is_open)  # the user has opened it
    assert page.run("document.getElementById('status').textContent") == "The answer is 4."
    assert page.run("document.getElementById('log').ariaLive") == "off"  # not every piece of it
    page.open(f"{server.url}/")
    page.until("document.querySelector('.markdown')?.textContent.trim() === 'The answer is 4.'")
    assert not page.run(is_open)


@needs_browser
def test_everything_is_reached_with_the_keyboard(page: Page, server: ScriptedServer) -> None:
    page.look(1300, 800)
    visit(page, server.url)
    server.answer("```\ncode\n```\n\n| a |\n|---|\n| b |\n\n[link](https://example.org)")
    say(page, "hello")
    name = "(({ ariaLabel, labels, textContent, tagName }) => ariaLabel || labels?.[0]?.firstChild.textContent.trim() || textContent.trim() || tagName)"
    reached = []
    while len(reached) < 60 and not reached.count("Chats") > 1:
        page.press("Tab")
        reached.append(page.run(f"{name}(document.activeElement)"))
    for control in ("New conversation", "Settings", "hello", "Rename", "Export", "Delete", "Export all", "Edit", "Copy code", "Code", "ab", "link",
                    "Copy answer", "Retry", "Your message", "Send", "System prompt", "Temperature", "Tools, further fields, API key"):  # fmt: skip
        assert control in reached, control
    page.run("[...document.querySelectorAll('nav button')].find((one) => one.textContent === 'Rename').focus()")
    page.press("Enter")
    page.type("x")
    page.press("Tab")  # leaving the field stores it
    assert page.until("document.querySelector('nav .title')?.textContent") == "x"


@needs_browser
def test_what_another_tab_changes_is_shown_and_damaged_values_are_left_alone(
    page: Page, server: ScriptedServer
) -> None:
    visit(page, server.url)
    say(page, "mine")
    stored = {"title": "theirs", "turns": [{"role": "user", "content": "hi"}]}
    damaged = [
        "no JSON",
        "null",
        json.dumps({"turns": [{"role": "user"}]}),
        json.dumps({"turns": [{"role": "assistant", "content": "", "calls": [{}]}]}),
    ]
    for i, text in enumerate([json.dumps(stored), *damaged]):
        page.run(f"localStorage.setItem('dovetail.conversation.{i}', {json.dumps(text)})")
        page.run(f"dispatchEvent(new StorageEvent('storage', {{ key: 'dovetail.conversation.{i}' }}))")
    assert set(texts(page, "nav .title")) == {"mine", "theirs"}
    page.open(f"{server.url}/")
    page.until("document.title !== 'Dovetail'")
    assert set(texts(page, "nav .title")) == {"mine", "theirs"}
    click(page, "theirs")
    assert texts(page, ".text") == ["hi"]
    page.run("localStorage.removeItem('dovetail.conversation.0')")
    page.run("dispatchEvent(new StorageEvent('storage', { key: 'dovetail.conversation.0' }))")
    assert texts(page, "nav .title") == ["mine"]
    assert texts(page, "article") == []
    assert len(page.run("Object.keys(localStorage)")) == 5
