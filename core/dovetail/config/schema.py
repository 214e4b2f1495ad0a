"""Describe the config as JSON Schema, including the sections of the installed plugins. Editors use it to complete
keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dovetail.config.kinds import BACKEND, KindSection
from dovetail.config.plugin import PluginConfig, Selection
from dovetail.config.sections import Config
from dovetail.config.tree import OPEN, Choices

Schema = dict[str, Any]


def config_schema(choices: Choices) -> Schema:
    """Return the JSON Schema (draft 2020-12) of the configs that ``load_config`` accepts with these components."""
    sections = choices.sections
    classes = {(s.key, name): choices.config_class(s.key, name) for s in sections for name in choices.names(s.key)}
    settings = {section.settings for section in sections if section.settings is not None}
    models: list[type[BaseModel]] = [Config, *settings, *dict.fromkeys(classes.values())]
    refs, whole = models_json_schema([(model, "validation") for model in models])
    defs: Schema = whole["$defs"]
    named = {key: refs[cls, "validation"] for key, cls in classes.items()}
    for ref in named.values():
        defs[_name(ref)].setdefault("required", []).append("kind")
    root = defs.pop("Config")
    del root["properties"][OPEN]
    for section in sections:
        components = {name: ref for (key, name), ref in named.items() if key == section.key}
        schema = _section(section, components)
        if section.settings is not None:
            schema["anyOf"].append(_with_settings(schema["anyOf"], defs[section.settings.__name__]["properties"]))
        root["properties"][section.key] = schema
    root["properties"]["model"] = {"anyOf": [{"type": "string"}, root["properties"]["model"]]}
    _strings_for_lists(defs["PluginsSection"])
    for cls in (Selection, PluginConfig, *(section.selection for section in sections), *settings):
        defs.pop(cls.__name__, None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dovetail config",
        **{key: value for key, value in root.items() if key != "title"},
        "$defs": dict(sorted(defs.items())),
    }


def _section(section: KindSection, components: dict[str, Schema]) -> Schema:
    name: Schema = {"enum": sorted(components)}
    one: list[Schema] = [name, _union(components)] if components else []
    forms: list[Schema] = [
        {"enum": list(section.reserved)},
        *one,
        {"type": "array", "minItems": 1, "items": {"anyOf": one}},
    ]
    if section.phases:
        phases = {phase: {"anyOf": list(forms)} for phase in section.phases}
        forms.append({"type": "object", "properties": phases, "additionalProperties": False, "minProperties": 1})
    return {"anyOf": forms, "default": section.default, "description": section.description}


def _with_settings(forms: list[Schema], settings: Schema) -> Schema:
    """Return the form of a section that has settings next to its ``backend``."""
    properties = {BACKEND: {"anyOf": list(forms)}, **settings}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _union(components: dict[str, Schema]) -> Schema:
    mapping = {name: ref["$ref"] for name, ref in components.items()}
    return {"oneOf": list(components.values()), "discriminator": {"propertyName": "kind", "mapping": mapping}}


def _name(ref: Schema) -> str:
    return ref["$ref"].removeprefix("#/$defs/")


def _strings_for_lists(plugins: Schema) -> None:
    for key in ("allow", "deny", "require"):
        given = plugins["properties"][key]
        kept = {word: given.pop(word) for word in ("default", "description", "title") if word in given}
        members = given.pop("anyOf", [given])
        plugins["properties"][key] = {"anyOf": [*members, {"type": "string"}], **kept}
