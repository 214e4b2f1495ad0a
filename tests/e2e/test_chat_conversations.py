"""Test conversations, models, settings and errors of the chat page, in headless Chromium against a scripted server.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_chat_conversations.py
"""

import json
import re
from threading import Event
from typing import Any

from browser import Page, needs_browser
from chatting import MARKDOWN, click, figures, fill, last, rename, say, settled, texts, visit
from scripted_server import ScriptedServer

from dovetail.server.pages.routes import FOLDER


@needs_browser
def test_conversations_are_listed_renamed_continued_and_deleted(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
    fill(page, system="Be brief.")
    scripted.answer("first answer")
    say(page, "The first question, which is long enough for its title to be cut somewhere")
    click(page, "New conversation")
    fill(page, system="")
    scripted.answer("second answer")
    say(page, "Second")
    first, second = "The first question, which is long enough for its title to be…", "Second"
    assert texts(page, "nav .title") == [second, first]
    rename(page, "My title")
    assert page.run("document.activeElement.textContent") == "My title"
    click(page, "Rename")
    page.run("document.activeElement.value = 'no'")
    page.press("Escape")
    page.open(f"{scripted.url}/")
    page.until("document.querySelectorAll('article').length === 2")  # the open one
    assert texts(page, "nav .title") == ["My title", first]
    click(page, first)
    assert texts(page, ".text") == [
        "The first question, which is long enough for its title to be cut somewhere",
        "first answer",
    ]
    assert page.run("document.getElementById('system').value") == "Be brief."
    say(page, "Go on")
    assert scripted.bodies[-1]["messages"] == [
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
    page.open(f"{scripted.url}/")
    page.until("document.title !== 'Dovetail'")
    assert texts(page, "nav .title") == ["My title"]
    assert page.run("Object.keys(localStorage).length") == 1


@needs_browser
def test_conversations_are_exported(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
    page.run("URL.createObjectURL = (blob) => { blob.text().then((text) => (window.file = text)); return 'blob:none' }")
    page.run("HTMLAnchorElement.prototype.click = function () { window.named = this.download }")
    call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": "{}"}}
    scripted.answer({"reasoning_content": "I think."}, {"tool_calls": [call]})
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
def test_an_answer_goes_on_while_another_conversation_is_open(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
    go = Event()
    scripted.answer("begun ", go, "and ended")
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
    scripted.answer("part ", Event())
    say(page, "stop this", wait=False)
    page.until("[...document.querySelectorAll('.markdown')].at(-1).textContent.includes('part')")
    page.open(f"{scripted.url}/")
    page.until("document.querySelector('.error') !== null")
    assert last(page, ".error") == "The page was closed before the answer was complete."
    assert last(page, ".markdown").strip() == "part"


@needs_browser
def test_the_model_and_its_adapter_are_chosen(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
    assert not page.run("document.getElementById('models').checkVisibility()")
    say(page, "one model")
    assert scripted.bodies[-1]["model"] == "scripted"
    assert "model" not in figures(page)
    scripted.models = [{"id": "base", "root": "b"}, {"id": "other", "root": "o"}, {"id": "sql", "parent": "base"}]
    visit(page, scripted.url)
    assert texts(page, "#model-choice option") == ["base", "other"]
    assert texts(page, "#adapter option") == ["none", "sql"]
    say(page, "without an adapter")
    fill(page, adapter="sql")
    assert page.run("document.getElementById('model').textContent") == "base + sql"
    say(page, "with an adapter")
    assert [body["model"] for body in scripted.bodies[-2:]] == ["base", "sql"]
    assert figures(page)["model"] == "sql"
    click(page, "New conversation")
    fill(page, **{"model-choice": "other"})
    assert not page.run("document.getElementById('adapter').checkVisibility()")
    say(page, "another model")
    assert scripted.bodies[-1]["model"] == "other"
    page.open(f"{scripted.url}/")
    page.until("document.title === 'other · Dovetail'")
    click(page, "without an adapter")  # it goes on with what has answered last
    assert page.run("document.getElementById('model').textContent") == "base + sql"
    scripted.answers.append((404, {"error": {"message": "the model 'sql' does not exist", "param": "model"}}))
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
def test_breaks_of_the_connection_are_said_and_keep_what_has_arrived(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
    call = {"index": 0, "id": "c", "function": {"name": "half", "arguments": '{"a'}}
    scripted.answer("half an ", {"tool_calls": [call]}, "cut")
    say(page, "cut")
    assert last(page, ".error") == "The connection ended before the answer was complete. Is the server still running?"
    assert last(page).strip() == "half an"
    assert last(page, ".call") is None
    scripted.answer("some", {"error": {"message": "the engine has failed"}})
    say(page, "fail")
    assert last(page, ".error") == "the engine has failed"
    scripted.answers.append((503, "busy"))
    click(page, "Retry")
    settled(page)
    assert last(page, ".error") == '"busy" (status 503)'
    scripted.answer("still ", Event())
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
def test_on_a_phone_panels_cover_the_chat_and_take_the_focus(page: Page, scripted: ScriptedServer) -> None:
    page.look(390, 800)
    visit(page, scripted.url)
    scripted.answer(MARKDOWN)
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
def test_the_reasoning_is_folded_and_a_screen_reader_gets_the_whole_answer(
    page: Page, scripted: ScriptedServer
) -> None:
    visit(page, scripted.url)
    think, write = Event(), Event()
    scripted.answer({"reasoning_content": "First I think."}, think, "The answer", write, " is 4.")
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
    page.open(f"{scripted.url}/")
    page.until("document.querySelector('.markdown')?.textContent.trim() === 'The answer is 4.'")
    assert not page.run(is_open)


@needs_browser
def test_everything_is_reached_with_the_keyboard(page: Page, scripted: ScriptedServer) -> None:
    page.look(1300, 800)
    visit(page, scripted.url)
    scripted.answer("```\ncode\n```\n\n| a |\n|---|\n| b |\n\n[link](https://example.org)")
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
    page: Page, scripted: ScriptedServer
) -> None:
    visit(page, scripted.url)
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
    page.open(f"{scripted.url}/")
    page.until("document.title !== 'Dovetail'")
    assert set(texts(page, "nav .title")) == {"mine", "theirs"}
    click(page, "theirs")
    assert texts(page, ".text") == ["hi"]
    page.run("localStorage.removeItem('dovetail.conversation.0')")
    page.run("dispatchEvent(new StorageEvent('storage', { key: 'dovetail.conversation.0' }))")
    assert texts(page, "nav .title") == ["mine"]
    assert texts(page, "article") == []
    assert len(page.run("Object.keys(localStorage)")) == 5


@needs_browser
def test_the_end_stays_visible_until_the_user_scrolls_up(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
    more, end = Event(), Event()
    scripted.answer(*["line\n\n"] * 200, more, *["line\n\n"] * 200, end, *["line\n\n"] * 200)
    say(page, "lines", wait=False)
    distance = "(({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight)(document.getElementById('scroll'))"
    lines = "document.querySelectorAll('.assistant p:not(.hint)').length"
    page.until(f"{lines} === 200 && {distance} < 2")
    more.set()
    page.until(f"{lines} === 400 && {distance} < 2")
    page.run("document.getElementById('scroll').scrollTop = 1000")
    page.until("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
    end.set()
    settled(page)
    assert page.run(lines) == 600
    assert (
        page.run("document.getElementById('scroll').scrollTop") < 1100
    )  # the browser keeps what is visible in its place
