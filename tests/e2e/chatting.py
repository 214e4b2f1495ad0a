"""Use the chat page as a person would: fields, messages, buttons, and what is visible of an answer."""

import json

from browser import Page

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


def visit(page: Page, url: str) -> None:
    """Open the chat with nothing stored, and wait until it knows the model."""
    page.open(f"{url}/docs")
    page.run("sessionStorage.clear(); localStorage.clear()")
    page.open(f"{url}/")
    page.until("document.title !== 'Dovetail'")


def fill(page: Page, **fields: object) -> None:
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value)
        page.run(f"field = document.getElementById('{name}'); field.value = {json.dumps(text)}")
        page.run("field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change'))")


def say(page: Page, text: str, wait: bool = True) -> None:
    page.run("document.getElementById('message').focus()")
    page.type(text)
    page.press("Enter")
    if wait:
        settled(page)


def settled(page: Page) -> None:
    page.until("document.getElementById('stop').hidden && document.querySelector('#log article') !== null")


def last(page: Page, what: str = ".text") -> str:
    """Return the text of a part of the last answer."""
    return page.run(f"[...document.querySelectorAll('article')].at(-1).querySelector('{what}')?.textContent")


def figures(page: Page) -> dict[str, str]:
    """Return the line below the last answer."""
    rows = "[...[...document.querySelectorAll('dl')].at(-1).children].map((row) => [...row.children].map((one) => one.textContent))"
    return dict(page.run(rows))


def click(page: Page, text: str) -> None:
    """Press the last button of that name."""
    page.run(f"[...document.querySelectorAll('button')].findLast((one) => one.textContent === '{text}').click()")


def texts(page: Page, what: str) -> list[str]:
    """Return the texts of all elements of a selector."""
    return page.run(f"[...document.querySelectorAll('{what}')].map((one) => one.textContent)")


def rename(page: Page, title: str) -> None:
    """Give the open conversation a title."""
    click(page, "Rename")
    page.run(f"document.querySelector('nav input').value = {json.dumps(title)}")
    page.press("Enter")
