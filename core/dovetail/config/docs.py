"""Write docs/config.md from the schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from dovetail.config.kinds import BACKEND, KindSection, Sections
from dovetail.config.plugin import Section
from dovetail.config.sections import Config
from dovetail.config.tree import OPEN, Choices

INTRODUCTION = """\
# Config

<!-- Written by `dovetail config docs --set plugins.allow=dovetail --output docs/config.md`; a test holds it so. -->

One tree configures everything. A file holds the part of it that differs from the defaults, in YAML, TOML or JSON:

```yaml
model: tiny
cache: {{kind: radix}}
scheduler:
  max_running: 64
```

    dovetail serve server.yaml --set scheduler.max_running=8

## Where settings come from

Later sources win. Mappings merge key by key; anything else is replaced.

1. The defaults below.
2. Files, left to right; first the one that the environment variable `DOVETAIL_CONFIG` names.
3. Environment variables: `DOVETAIL_SCHEDULER__MAX_RUNNING=8` sets `scheduler.max_running`. Two underscores step into a
   section; the value is read as YAML. Every variable that begins with `DOVETAIL_` is a setting, and an unknown one is
   an error; `DOVETAIL_API_KEY`, the key that `dovetail chat` sends to a server, is not a setting.
4. `--set scheduler.max_running=8`, as often as needed; the value is read as YAML.

`dovetail config show` prints the tree that results, `dovetail config hash` a digest that is equal for equal trees,
`dovetail config schema` a JSON Schema for editors. An unknown key is an error, never ignored.

## How a section selects components

The sections {sections} select plugins. Each takes one of these forms:

| form | meaning |
|---|---|
| `auto` | the best installed component that fits the model, the device and the other components |
| `name` | this component, with its defaults |
| `{{kind: name, ...}}` | this component, with its own settings |
| a list of the last two | the first of them that fits, in this order; for {lists}, all of them |
| `none` | nothing ({optional} only) |

{phased} may also differ by phase: {phases}. {with_settings} may have settings next to its
backend: `grammar: {{backend: ..., timeout: 5}}`. A request that names no backend is served by the first backend of the
list that supports its constraint; with `auto`, the list has all installed backends. A component that the config names is
used, or startup stops with the reason; no other component takes its place. If a later source names another `kind`, its
section replaces the whole section of the earlier source. `dovetail explain` shows what is chosen and why.

A package may add a kind with its own section ([plugins.md](plugins.md)). The section takes the same forms,
`dovetail config schema` includes it, and this page lists it if it is written with the package installed.
"""


def config_docs(choices: Choices) -> str:
    """Return the whole page, as Markdown."""
    sections = choices.sections
    parts = [_introduction(sections), "## Settings\n", _top_level(sections)]
    by_key = {section.key: section for section in sections}
    for name, field in Config.model_fields.items():
        cls = field.annotation
        section = by_key.get(name)
        if section is None and isinstance(cls, type) and issubclass(cls, BaseModel):
            parts += _section_of(name, cls)
        elif section is not None and section.settings is not None:
            settings = section.settings
            parts.append(f"### `{name}`, next to `{BACKEND}`\n\n{_summary(settings)}\n\n{_table(settings)}")
    parts.append("## Components\n")
    parts += [_component(section.key, name, choices) for section in sections for name in choices.names(section.key)]
    return "\n".join(parts)


def _introduction(sections: Sections) -> str:
    def listed(chosen: Iterable[KindSection]) -> str:
        return ", ".join(f"`{section.key}`" for section in chosen)

    phased = [section for section in sections if section.phases]
    return INTRODUCTION.format(
        sections=listed(sections),
        optional=listed(section for section in sections if section.optional),
        lists=listed(section for section in sections if section.takes_all),
        phased=listed(phased),
        phases=", ".join(f"`{s.key}: {{{', '.join(f'{phase}: ...' for phase in s.phases)}}}`" for s in phased),
        with_settings=listed(section for section in sections if section.settings is not None),
    )


def _top_level(sections: Sections) -> str:
    by_key = {section.key: section for section in sections}
    rows = []
    for name, prop in Config.model_json_schema()["properties"].items():
        cls = Config.model_fields[name].annotation
        if name in by_key:
            rows.append(_section_row(by_key.pop(name)))
        elif isinstance(cls, type) and issubclass(cls, BaseModel):
            rows.append([f"`{name}`", "section", "below", _summary(cls).partition(". ")[0].removesuffix(".") + "."])
        elif name != OPEN:
            rows.append(_row(name, prop))
    rows += map(_section_row, by_key.values())
    return _markdown_table(("key", "type", "default", "meaning"), rows)


def _section_row(section: KindSection) -> list[str]:
    return [f"`{section.key}`", "component", f"`{section.default}`", section.description]


def _component(section: str, name: str, choices: Choices) -> str:
    cls = choices.config_class(section, name)
    head = f"### `{section}: {name}`\n\n{_summary(cls)}\n"
    if set(cls.model_fields) == {"kind"}:
        return f"{head}\nIt has no settings.\n"
    return f"{head}\n{_table(cls)}"


def _section_of(path: str, cls: type[BaseModel]) -> list[str]:
    """Return the section at ``path``, and then the sections in it."""
    parts = [f"### `{path}`\n\n{_summary(cls)}\n\n{_table(cls)}"]
    for name, inner in _sections_in(cls).items():
        parts += _section_of(f"{path}.{name}", inner)
    return parts


def _sections_in(cls: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return the sections of a core section of the config, by key. Other models, such as experiment arms, are values."""
    found = {name: field.annotation for name, field in cls.model_fields.items()}
    return {name: inner for name, inner in found.items() if isinstance(inner, type) and issubclass(inner, Section)}


def _summary(cls: type[BaseModel]) -> str:
    return (inspect.getdoc(cls) or "").replace("``", "`")


def _table(cls: type[BaseModel]) -> str:
    properties = cls.model_json_schema()["properties"]
    inner = _sections_in(cls)
    rows = [_row(name, prop) for name, prop in properties.items() if name != "kind" and name not in inner]
    rows += [
        [f"`{name}`", "section", "below", _summary(section).partition(".")[0] + "."] for name, section in inner.items()
    ]
    return _markdown_table(("key", "type", "default", "meaning"), rows)


def _row(name: str, prop: dict[str, Any]) -> list[str]:
    default = _literal(prop["default"]) if "default" in prop else "`{}`"
    return [f"`{name}`", _type(prop), default, prop.get("description", "")]


def _markdown_table(head: Iterable[str], rows: Iterable[list[str]]) -> str:
    lines = [list(head), ["---"] * 4, *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _literal(value: Any) -> str:
    words = {True: "true", False: "false", None: "not set"}
    if value is None or isinstance(value, bool):
        return words[value]
    return f"`{value}`"


def _type(prop: dict[str, Any]) -> str:
    """Return the type of one property in words, its bounds included."""
    if "anyOf" in prop:
        return " or ".join(_type(member) for member in prop["anyOf"] if member.get("type") != "null")
    if "enum" in prop or "const" in prop:
        return ", ".join(f"`{value}`" for value in prop.get("enum", [prop.get("const")]))
    if prop.get("type") == "array":
        return f"list of {_type(prop.get('items', {}))}"
    if "pattern" in prop:
        return f"text like `{prop['pattern']}`"
    words = {"string": "text", "object": "mapping", "number": "number", "integer": "integer", "boolean": "boolean"}
    return words.get(prop.get("type", ""), "any") + _bounds(prop)


def _bounds(prop: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f" {sign} {prop[key]}" for key, sign in signs.items() if key in prop]
    return ",".join(bounds)
