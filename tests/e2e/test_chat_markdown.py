"""Test what the chat page makes of texts, in headless Chromium against a scripted server: Markdown becomes elements, and
nothing that a model, a user or a server writes is markup or script.

.venv/bin/python -m pytest -q -p no:xdist tests/e2e/test_chat_markdown.py
"""

import hashlib
import json
import re
from pathlib import Path

from browser import Page, needs_browser
from chatting import MARKDOWN, last, rename, say, settled, texts, visit
from hatchling.builders.wheel import WheelBuilder
from scripted_server import ScriptedServer

from dovetail.server.pages.routes import FOLDER

ROOT = Path(__file__).parents[2]
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
def test_markdown_becomes_elements(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
    scripted.answer(*(MARKDOWN[i : i + 7] for i in range(0, len(MARKDOWN), 7)))
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
def test_what_is_drawn_piece_by_piece_is_what_is_drawn_at_once(page: Page, scripted: ScriptedServer) -> None:
    visit(page, scripted.url)
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
def test_texts_that_attack_the_page_are_inert(page: Page, scripted: ScriptedServer) -> None:
    everything = "\n\n".join(PAYLOADS)
    scripted.models = [{"id": f"m{PAYLOADS[1]}", "root": "r"}, {"id": PAYLOADS[0], "parent": f"m{PAYLOADS[1]}"}]
    visit(page, scripted.url)
    title = page.run("document.title")
    for payload in PAYLOADS:
        scripted.answer({"reasoning_content": payload}, payload)
        say(page, "go on")
    assert "<script>" in last(page, ".markdown") or "'-" in last(page, ".markdown")
    call = {"index": 0, "id": everything, "function": {"name": everything, "arguments": everything}}
    scripted.answer(*everything, {"reasoning_content": everything}, {"tool_calls": [call]})
    say(page, "all of it")
    assert PAYLOADS[0] in last(page, ".call")
    for status, body in ((400, {"error": {"message": everything, "param": PAYLOADS[0]}}), (500, everything)):
        scripted.answers.append((status, body))
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
    page.open(f"{scripted.url}/")  # the titles and turns are read again
    page.until("document.title !== 'Dovetail'")
    assert {re.sub(r"\s+", " ", payload.replace("\n", "")).strip() for payload in PAYLOADS} < set(
        texts(page, "nav .title")
    )
    assert page.run(INERT) == []
    assert page.run("document.title") == title
