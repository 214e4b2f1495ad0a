"""docs/config.md, written from the schema."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from dovetail.config.longform import OPTIONAL_SECTIONS, PLUGIN_SECTIONS
from dovetail.config.plugin import GrammarSettings
from dovetail.config.sections import Config
from dovetail.config.tree import Choices

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
   an error; `DOVETAIL_API_KEY`, the key that `dovetail chat` shows to a server, is none.
4. `--set scheduler.max_running=8`, as often as needed; the value is read as YAML.

`dovetail config show` prints the tree that results, `dovetail config hash` a digest that is equal for equal trees,
`dovetail config schema` a JSON Schema for editors. An unknown key is an error, never ignored.

## How a section selects components

The sections {sections} select plugins. Each takes one of these forms:

| form | meaning |
|---|---|
| `auto` | the best installed component that fits the model, the device and the other parts |
| `name` | this component, with its defaults |
| `{{kind: name, ...}}` | this component, with its own settings |
| a list of the last two | the first of them that fits, in this order; of `api` all of them |
| `none` | nothing ({optional} only) |

`attention` may also differ by phase: `attention: {{prefill: ..., decode: ...}}`. `grammar` may have settings beside its
backend: `grammar: {{backend: ..., timeout: 5}}`; requests that name no backend are served by the first of its list that
honours their constraint, of all that are installed with `auto`. A component that is named is used or
startup stops with the reason; nothing else is taken in its place. Where a later source names another `kind`, its
section replaces the earlier one whole. `dovetail explain` shows what is chosen and why.
"""


def config_docs(choices: Choices) -> str:
    """The whole page, as Markdown."""
    sections = ", ".join(f"`{name}`" for name in PLUGIN_SECTIONS)
    optional = ", ".join(f"`{name}`" for name in OPTIONAL_SECTIONS)
    parts = [INTRODUCTION.format(sections=sections, optional=optional), "## Settings\n", _top_level()]
    for name, field in Config.model_fields.items():
        cls = field.annotation
        if name not in PLUGIN_SECTIONS and isinstance(cls, type) and issubclass(cls, BaseModel):
            parts.append(f"### `{name}`\n\n{_summary(cls)}\n\n{_table(cls)}")
        elif name == "grammar":
            parts.append(f"### `grammar`, beside `backend`\n\n{_summary(GrammarSettings)}\n\n{_table(GrammarSettings)}")
    parts.append("## Components\n")
    parts += [_component(section, name, choices) for section in PLUGIN_SECTIONS for name in choices.names(section)]
    return "\n".join(parts)


def _top_level() -> str:
    rows = []
    for name, prop in Config.model_json_schema()["properties"].items():
        cls = Config.model_fields[name].annotation
        if name in PLUGIN_SECTIONS:
            rows.append([f"`{name}`", "component", _default_of_section(name), prop["description"]])
        elif isinstance(cls, type) and issubclass(cls, BaseModel):
            rows.append([f"`{name}`", "section", "below", _summary(cls).partition(". ")[0].removesuffix(".") + "."])
        else:
            rows.append(_row(name, prop))
    return _markdown_table(("key", "type", "default", "meaning"), rows)


def _default_of_section(name: str) -> str:
    default = Config.model_fields[name].default
    return "`none`" if getattr(default, "disabled", False) else "`auto`"


def _component(section: str, name: str, choices: Choices) -> str:
    cls = choices.config_class(section, name)
    head = f"### `{section}: {name}`\n\n{_summary(cls)}\n"
    if set(cls.model_fields) == {"kind"}:
        return f"{head}\nIt has no settings.\n"
    return f"{head}\n{_table(cls)}"


def _summary(cls: type[BaseModel]) -> str:
    return (inspect.getdoc(cls) or "").replace("``", "`")


def _table(cls: type[BaseModel]) -> str:
    properties = cls.model_json_schema()["properties"]
    rows = [_row(name, prop) for name, prop in properties.items() if name != "kind"]
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
    """One property's type in words, its bounds included."""
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
