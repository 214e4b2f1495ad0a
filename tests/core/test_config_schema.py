"""Test the exported JSON Schema and docs/config.md.

Run: pytest tests/core/test_config_schema.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import Field

from dovetail.config import Config, load_config
from dovetail.config.docs import config_docs
from dovetail.config.kinds import BUILT_IN
from dovetail.config.schema import config_schema
from dovetail.config.sources import read
from dovetail.config.tree import OPEN, dump, validate
from dovetail.errors import ConfigError
from dovetail.registry import ComponentKind, setup

ROOT = Path(__file__).parents[2]

TYPES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def accepts(schema, value, root):
    """Validate with a small JSON Schema validator, which supports only the keywords that the schema uses."""
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    known = {
        "$schema",
        "$defs",
        "title",
        "description",
        "default",
        "discriminator",
        "anyOf",
        "oneOf",
        "enum",
        "const",
        "type",
    }
    known |= {"properties", "additionalProperties", "required", "items", "minItems", "minProperties", "pattern"}
    known |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    assert set(schema) <= known, set(schema) - known
    if "anyOf" in schema and not any(accepts(member, value, root) for member in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(accepts(member, value, root) for member in schema["oneOf"]) != 1:
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if "type" in schema and not _is_of(value, schema["type"]):
        return False
    if isinstance(value, dict):
        return _mapping(schema, value, root)
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(accepts(schema.get("items", {}), v, root) for v in value)
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    return value is None or isinstance(value, bool) or _in_bounds(schema, value)


def _is_of(value, name):
    return isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _in_bounds(schema, value):
    return schema.get("minimum", value) <= value <= schema.get("maximum", value) and schema.get(
        "exclusiveMinimum", value - 1
    ) < value < schema.get("exclusiveMaximum", value + 1)


def _mapping(schema, value, root):
    fields = schema.get("properties", {})
    extra = schema.get("additionalProperties", True)
    return (
        len(value) >= schema.get("minProperties", 0)
        and all(name in value for name in schema.get("required", []))
        and all(accepts(fields[name], v, root) for name, v in value.items() if name in fields)
        and (extra is not False or set(value) <= set(fields))
    )


@pytest.fixture
def registry(fakes):
    fast = {"workspace_mib": (int, Field(default=64, ge=1, description="Scratch memory."))}
    return fakes.registry(fakes.spec(ComponentKind.ATTENTION, "fast", fast), fakes.spec(ComponentKind.GRAMMAR, "gram"))


TREES = [
    {},
    {"model": "tiny"},
    {"model": {"path": "x", "overrides": {"a": [1]}}},
    {"model": 3},
    {"model": {"pth": "x"}},
    {"attention": "fast"},
    {"attention": "slow"},
    {"attention": {"kind": "fast", "workspace_mib": 3}},
    {"attention": {"kind": "fast", "workspace_mib": 0}},
    {"attention": {"kind": "plain", "workspace_mib": 3}},
    {"attention": {"workspace_mib": 3}},
    {"attention": ["fast", {"kind": "plain"}]},
    {"attention": []},
    {"attention": ["auto"]},
    {"attention": {"prefill": "fast"}},
    {"attention": {"prefill": "fast", "decode": ["plain", "fast"]}},
    {"attention": {"prefil": "fast"}},
    {"attention": "none"},
    {"grammar": "none"},
    {"grammar": "auto"},
    {"grammar": {}},
    {"grammar": {"backend": "none", "timeout": 2, "isolation": "thread"}},
    {"grammar": {"timeout": 0}},
    {"grammar": {"backend": "auto", "patience": 1}},
    {"grammar": {"backend": {"backend": "auto"}}},
    {"cache": {"kind": "tree", "eviction": "lfu"}},
    {"cache": {"kind": "tree", "eviction": "fifo"}},
    {"cache": "none"},
    {"speculative": "none"},
    {"scheduler": {"overlap": "auto", "max_running": 1}},
    {"scheduler": {"overlap": True}},
    {"scheduler": {"overlap": "maybe"}},
    {"scheduler": {"max_running": 0}},
    {"memory": {"fraction": 1.0}},
    {"memory": {"kv_gib": 0.5, "num_pages": None}},
    {"device": "cuda:1"},
    {"device": "gpu"},
    {"plugins": {"allow": "fakes", "deny": ["a"]}},
    {"plugins": {"alow": []}},
    {"nonsense": 1},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_schema_accepts_exactly_what_loading_accepts(registry, tree):
    schema = config_schema(registry)
    try:
        validate(read([], [], {}, tree), registry)
        loads = True
    except ConfigError:
        loads = False
    assert accepts(schema, tree, schema) is loads


def test_the_schema_accepts_every_dump(registry):
    schema = config_schema(registry)
    for sets in ([], ["attention=fast", "grammar=none"], ["attention={prefill: fast, decode: [plain, fast]}"]):
        assert accepts(schema, dump(load_config([], sets, {}, registry)), schema)


def test_docs_name_every_key_and_every_component(registry):
    page = config_docs(registry)
    for name, field in Config.model_fields.items():
        assert (f"`{name}`" in page) == (name != OPEN)
        for key in getattr(field.annotation, "model_fields", {}) if hasattr(field.default, "model_fields_set") else {}:
            if name not in [section.key for section in BUILT_IN]:
                assert f"| `{key}` |" in page
    assert "### `attention: fast`" in page
    assert "| `workspace_mib` | integer ≥ 1 | `64` | Scratch memory. |" in page


def test_every_setting_of_the_core_has_a_meaning():
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| ([^|]*) \|$", config_docs(setup([], ["plugins.allow=[]"], {})[1]), re.MULTILINE
    )
    assert rows
    assert [key for key, meaning in rows if not meaning.strip()] == []


def test_docs_config_md_is_up_to_date():
    _, registry = setup([], ["plugins.allow=dovetail"], {})
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == config_docs(registry), "run: dovetail config docs --set plugins.allow=dovetail -o docs/config.md"
