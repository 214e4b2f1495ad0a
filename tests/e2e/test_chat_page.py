"""Test the page at / and the page at /docs: their parts, and their behaviour in headless Chromium.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_chat_page.py
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from browser import Page, needs_browser
from chatting import click, figures, fill, last, say, settled, visit

from conftest import config_with
from dovetail.config.tenants import key_digest
from dovetail.server.launch import running_server
from dovetail.server.pages.routes import FOLDER, HEADERS, PAGES
from dovetail.server.tenants.keys import new_key

SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
KEYS = {name: new_key() for name in ("member", "boss")}
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script> <b>bold</b>"


def test_every_file_of_the_folder_is_served_and_names_nothing_outside(fake: httpx.Client) -> None:
    files = (path for path in FOLDER.rglob("*") if path.suffix not in (".py", ".pyc", "") and path.name != "README.md")
    assert set(PAGES.values()) == {path.relative_to(FOLDER).as_posix() for path in files}
    for path in PAGES:
        answer = fake.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(("text/", "image/svg+xml"))
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        if "/vendor/" in path:
            continue
        text = answer.text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|[\"'(]//|@import|url\(|data:[a-z]+/", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|\son\w+=", text
        ), path
        assert not re.search(r"<style|<script(?![^>]*\bsrc=)| style=", text), path


def test_the_policy_lets_nothing_in() -> None:
    rules = dict(rule.split(" ", 1) for rule in HEADERS["content-security-policy"].split("; "))
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules) == {
        "default-src", "script-src", "style-src", "img-src", "connect-src", "base-uri", "form-action", "frame-ancestors", "trusted-types",
    }  # fmt: skip
    assert set(rules.values()) == {"'none'", "'self'"}
    assert rules["default-src"] == rules["frame-ancestors"] == rules["trusted-types"] == "'none'"


def test_the_pages_are_no_part_of_the_described_api(fake: httpx.Client) -> None:
    paths = fake.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
    assert not paths.keys() & PAGES.keys()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a server that requires keys, whose engine repeats the prompt."""
    from fake_engine import run_fake_engine

    member, boss = ([key_digest(key.encode())] for key in KEYS.values())
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps({"tenants": {"member": {"keys": member}}, "admins": {"boss": {"keys": boss}}}))
    with running_server(config_with(keys=str(file), drain_seconds=1), target=run_fake_engine) as url:
        yield url


@needs_browser
def test_a_streamed_answer_with_its_figures_and_the_second_turn_finds_the_first_in_the_cache(
    page: Page, tiny_url: str
) -> None:
    visit(page, tiny_url)
    fill(page, temperature="0", max_tokens="40")
    say(page, "What is the capital of France?")
    assert "Paris" in last(page)
    first = figures(page)
    assert first["finish"] == "stop"
    assert int(first["output"]) > 3
    assert re.fullmatch(r"[\d.,]+ ms", first["to first token"])
    assert float(first["tokens/s"].replace(",", "")) > 0
    say(page, "And of Italy?")
    second = figures(page)
    assert int(second["cached"]) >= 16
    assert int(second["prompt"]) > int(first["prompt"]) + int(first["output"])
    assert page.run("document.querySelectorAll('article').length") == 4
    page.open(f"{tiny_url}/")  # the messages survive a reload
    page.until("document.querySelectorAll('article').length === 4")
    assert page.run("document.getElementById('temperature').value") == "0"
    assert figures(page) == second


@needs_browser
def test_a_schema_gives_json_and_a_wrong_one_is_not_sent(page: Page, tiny_url: str) -> None:
    visit(page, tiny_url)
    fill(page, temperature="0", max_tokens="60", schema=json.dumps(SCHEMA)[:-1])
    say(page, "The capital of France as JSON", wait=False)
    page.until("!document.getElementById('problem').hidden")
    assert "Not sent. JSON schema of the answer: This is not JSON" in page.run(
        "document.getElementById('problem').textContent"
    )
    assert page.run("document.activeElement.id + ' ' + document.activeElement.ariaInvalid") == "schema true"
    assert page.run("document.querySelectorAll('article').length") == 0
    assert page.run("document.getElementById('message').value") == "The capital of France as JSON"  # nothing is lost
    fill(page, schema=SCHEMA)
    page.run("document.getElementById('message').focus()")
    page.press("Enter")
    settled(page)
    assert isinstance(json.loads(last(page))["city"], str)
    assert figures(page)["JSON"] == "valid"
    fill(page, schema={"type": "no such type"})
    say(page, "Again")
    assert "schema" in last(page, ".error")
    assert "(status 400)" in last(page, ".error")


@needs_browser
def test_reasoning_stands_apart_and_calls_are_shown_and_answered(page: Page, tiny_url: str) -> None:
    visit(page, tiny_url)
    fill(page, temperature="0", max_tokens="120", further={"chat_template_kwargs": {"enable_thinking": True}})
    say(page, "What is 2 + 3?")
    assert "5" in last(page, ".reasoning div")
    assert "think" not in last(page)
    click(page, "New conversation")
    fill(page, further="", tools=[WEATHER])
    say(page, "What is the weather in Paris?")
    assert last(page, ".call code") == "get_weather"
    assert json.loads(last(page, ".call pre")) == {"city": "Paris"}
    assert figures(page)["finish"] == "tool_calls"
    page.run("document.querySelector('form.call input').value = 'sunny'")
    click(page, "Send results")
    settled(page)
    assert page.run("[...document.querySelectorAll('article')].map((one) => one.classList[0])") == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert page.run("document.querySelector('article.tool .text').textContent") == "sunny"
    assert page.run("document.querySelector('.error') === null")


@needs_browser
def test_the_panel_shows_each_part_and_why(page: Page, tiny_url: str) -> None:
    visit(page, tiny_url)
    page.run("document.getElementById('parts').open = true")
    page.until("document.querySelector('.part') !== null")
    parts = page.run("[...document.querySelectorAll('.part')].map((one) => one.innerText)")
    (cache,) = [part for part in parts if part.startswith("cache: radix")]
    assert "by priority" in cache
    text = page.run("document.getElementById('plugins').textContent")
    assert "device is cpu" in text  # why a backend for GPUs was not taken


@needs_browser
def test_a_server_with_keys(page: Page, keyed: str) -> None:
    page.open(f"{keyed}/docs")
    page.run("sessionStorage.clear(); localStorage.clear()")
    page.open(f"{keyed}/")
    page.until("!document.getElementById('problem').hidden")
    assert "(status 401) Give an API key" in page.run("document.getElementById('problem').textContent")
    assert page.run("document.getElementById('key').checkVisibility()")
    say(page, "hello")
    assert "status 401" in last(page, ".error")
    fill(page, key=KEYS["member"])
    page.until("document.title !== 'Dovetail' && document.getElementById('problem').hidden")
    click(page, "Retry")
    settled(page)
    assert "hello" in last(page)
    page.run("document.getElementById('parts').open = true")
    page.until("document.querySelector('#plugins .error') !== null")
    assert "needs an admin key" in page.run("document.getElementById('plugins').textContent")
    fill(page, key=KEYS["boss"])
    page.until("document.querySelector('.part') !== null")
    assert KEYS["member"] not in page.run("JSON.stringify(localStorage) + document.cookie")
    assert KEYS["boss"] not in page.run("document.documentElement.outerHTML + location.href")


@needs_browser
def test_text_that_looks_like_html_is_text(page: Page, fake_url: str) -> None:
    visit(page, fake_url)
    title = page.run("document.title")
    say(page, HOSTILE)
    assert "<img src=x onerror=" in last(page)
    assert "<b>bold</b>" in last(page)
    assert page.run("document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert page.run("document.title") == title
    refused = (
        "(() => { try { document.createElement('p').innerHTML = '<b>x</b>'; return false } catch { return true } })()"
    )
    assert page.run(refused)  # even if the page tried
    assert page.trouble.pop().startswith("This document requires 'TrustedHTML'")


@needs_browser
def test_stop_edit_and_retry(page: Page, fake_url: str) -> None:
    visit(page, fake_url)
    fill(page, further={"cache_salt": "slow", "ignore_eos": True}, max_tokens="1500")
    say(page, "one two three", wait=False)
    page.until("[...document.querySelectorAll('article')].at(-1)?.textContent.includes('two')")
    assert page.run("document.querySelector('.busy').ariaBusy") == "true"
    page.press("Escape")
    settled(page)
    assert figures(page)["finish"] == "stopped by you"
    assert "two" in last(page)
    while httpx.get(f"{fake_url}/server_info").json()["open_requests"]:  # the server notices it
        time.sleep(0.02)
    fill(page, further="", max_tokens="200")
    click(page, "Edit")
    assert page.run("document.getElementById('message').value") == "one two three"
    page.press("Escape")
    assert page.run("document.getElementById('message').value") == ""
    click(page, "Edit")
    page.press("Enter", shift=True)
    page.type("four")
    page.press("Enter")
    settled(page)
    assert page.run("document.querySelectorAll('article').length") == 2
    assert "four" in last(page)
    assert page.run("document.querySelector('.user .text').textContent").split() == ["one", "two", "three", "four"]
    before = last(page)
    click(page, "Retry")
    settled(page)
    assert last(page) == before
    assert page.run("document.querySelectorAll('article').length") == 2


@needs_browser
def test_errors_are_said_and_stay(page: Page, fake_url: str) -> None:
    visit(page, fake_url)
    fill(page, further={"cache_salt": "status:400"})
    say(page, "hello")
    assert last(page, ".error") == "scripted refusal (status 400)"
    fill(page, further="")
    say(page, "again")
    errors = "[...document.querySelectorAll('.error')].map((one) => one.textContent)"
    assert page.run(errors) == ["scripted refusal (status 400)"]
    assert "again" in last(page)
    page.call("Network.enable")
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    click(page, "Retry")
    settled(page)
    assert "cannot be reached" in last(page, ".error")
    page.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    click(page, "Retry")
    settled(page)
    assert "again" in last(page)


@needs_browser
@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_and_follows_the_scheme(page: Page, fake_url: str, width: int, tmp_path: Path) -> None:
    from matplotlib.image import imread

    for dark in (False, True):
        page.look(width, 700, dark)
        visit(page, fake_url)
        say(page, "a " * 20 + "x" * 150)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(
            "document.getElementById('scroll').scrollWidth <= document.getElementById('scroll').clientWidth"
        )
        picture = tmp_path / f"{dark}.png"
        page.picture(picture)
        brightness = imread(picture)[..., :3].mean()
        assert brightness < 0.35 if dark else brightness > 0.8


@needs_browser
def test_every_control_has_a_name(page: Page, fake_url: str) -> None:
    visit(page, fake_url)
    nameless = "[...document.querySelectorAll('input, textarea, button')].filter((one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim()))"
    assert page.run(f"{nameless}.map((one) => one.id)") == []


@needs_browser
def test_docs_show_every_route(page: Page, fake_url: str) -> None:
    paths = httpx.get(f"{fake_url}/openapi.json").json()["paths"]
    page.open(f"{fake_url}/docs")
    page.until("document.querySelector('.part') !== null")
    shown = page.run(
        "[...document.querySelectorAll('#routes summary')].map((one) => one.textContent.split(' ').slice(0, 2).join(' '))"
    )
    assert set(shown) == {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    chat = page.run(
        "[...document.querySelectorAll('.part')].find((one) => one.textContent.includes('/v1/chat/completions')).innerHTML"
    )
    assert "response_format" in chat
    assert "Answers with application/json or text/event-stream. Errors: 400, 401" in chat
    assert "What is the capital of France?" in chat
    assert "required" in chat
