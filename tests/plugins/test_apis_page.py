"""Check docs/apis.md: its tables of routes and of fields are up to date, and its examples work.

    .venv/bin/python -m pytest -q tests/plugins/test_apis_page.py

Write the tables again: ``.venv/bin/python tests/plugins/test_apis_page.py``.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dovetail.interfaces.api import Api
from dovetail.registry import setup
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.testing.api import ApiSuite
from dovetail.testing.installed import installed
from dovetail_apis.fields import TABLES, Verdict

PAGE = Path(__file__).parents[2] / "docs" / "apis.md"
BEGIN, END = "<!-- routes: begin -->\n", "<!-- routes: end -->\n"
FIELDS, FIELDS_END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"
PEERS = {"O": "OpenAI", "V": "vLLM", "S": "SGLang", "C": "Cohere", "D": "Dovetail"}
NEWLINE = "\n"
ORDER = ("openai", "responses", "embeddings", "score", "tokenize", "anthropic", "ollama", "native")


def rows() -> Iterator[str]:
    yield "| API | route | | answers |"
    yield "|---|---|---|---|"
    registry = installed()
    components = {c.spec.name: c for c in registry.components(ComponentKind.API) if c.distribution == "dovetail"}
    assert set(components) == set(ORDER)
    for name in ORDER:
        component = components[name]
        api = load_attribute(component.spec.target, component.label)(registry.config_class(ComponentKind.API, name)())
        for what, group in itertools.groupby(api.routes(), lambda route: route.handler.__doc__ or ""):
            routes = list(group)
            paths = "`, `".join(re.sub(r":\w+}", "}", route.path) for route in routes)
            answers = "JSON" if len(routes[0].answers) == 1 else "JSON or a stream"
            yield f"| `{name}` | `{', '.join(routes[0].methods)} {paths}` | {what.partition(NEWLINE)[0]} | {answers} |"


def shown_default(default: object) -> str:
    values = default if isinstance(default, tuple) else (default,)
    shown = [json.dumps(value) for value in values if value is not None]
    return f" ({', '.join(shown)})" if shown else ""


def field_rows() -> Iterator[str]:
    done = {Verdict.HONOURED: "", Verdict.NO_EFFECT: "No effect. ", Verdict.REFUSED: "Refused: "}
    for table in TABLES:
        yield f"### {table.title}: `POST {table.path}`\n"
        yield "| field (default) | of | what the server does |"
        yield "|---|---|---|"
        for (verdict, note), found in itertools.groupby(
            sorted(table.groups, key=lambda group: list(Verdict).index(group.verdict)),
            lambda group: (group.verdict, group.note),
        ):
            groups = list(found)
            names = ", ".join(f"`{name}`{shown_default(d)}" for group in groups for name, d in group.defaults.items())
            of = ", ".join(PEERS[letter] for letter in PEERS if any(letter in group.peers for group in groups))
            yield f"| {names} | {of} | {done[verdict]}{note or 'The same as in the peers.'} |"
        yield ""


def with_tables(page: str) -> str:
    for begin, end, lines in ((BEGIN, END, rows()), (FIELDS, FIELDS_END, field_rows())):
        before, _, rest = page.partition(begin)
        table = "\n".join(lines).rstrip("\n")
        page = f"{before}{begin}{table}\n{end}{rest.partition(end)[2]}"
    return page


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text("utf-8")
    assert with_tables(page) == page, "write it: python tests/plugins/test_apis_page.py"


def test_the_page_s_config_is_valid() -> None:
    (text,) = re.findall(r"```yaml\n(api: .*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    chosen = setup([], [f"api={yaml.safe_load(text)['api']}"])[0].api.candidates
    assert [(one.kind, getattr(one, "max_age", None)) for one in chosen] == [("openai", None), ("responses", 600)]


def shown_api() -> type[Api]:
    (code,) = re.findall(r"```python plugin\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "shown"}
    exec(code, names)
    return names["Lines"]


class TestShown(ApiSuite):
    """Test the API that the page shows."""

    name = "lines"

    def make(self) -> Api:
        return shown_api()(None)  # type: ignore[arg-type]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")
