"""The config as JSON Schema, the sections of the installed plugins included. Editors complete from it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dovetail.config.longform import PHASES, PLUGIN_SECTIONS, reserved_words
from dovetail.config.plugin import GrammarSettings
from dovetail.config.sections import Config
from dovetail.config.tree import Choices

Schema = dict[str, Any]


def config_schema(choices: Choices) -> Schema:
    """JSON Schema (draft 2020-12) of every config that ``load_config`` takes with these components."""
    classes = {(s, name): choices.config_class(s, name) for s in PLUGIN_SECTIONS for name in choices.names(s)}
    models: list[type[BaseModel]] = [Config, GrammarSettings, *dict.fromkeys(classes.values())]
    refs, whole = models_json_schema([(model, "validation") for model in models])
    defs: Schema = whole["$defs"]
    named = {key: refs[cls, "validation"] for key, cls in classes.items()}
    for ref in named.values():
        defs[_name(ref)].setdefault("required", []).append("kind")
    root = defs.pop("Config")
    settings = defs.pop("GrammarSettings")["properties"]
    for section in PLUGIN_SECTIONS:
        components = {name: ref for (kind, name), ref in named.items() if kind == section}
        root["properties"][section] = _section(section, components, root["properties"][section])
    root["properties"]["grammar"]["anyOf"].append(_with_settings(root["properties"]["grammar"]["anyOf"], settings))
    root["properties"]["model"] = {"anyOf": [{"type": "string"}, root["properties"]["model"]]}
    _strings_for_lists(defs["PluginsSection"])
    for unused in ("Selection", "AttentionSelection", "GrammarSelection", "PluginConfig"):
        defs.pop(unused, None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dovetail config",
        **{key: value for key, value in root.items() if key != "title"},
        "$defs": dict(sorted(defs.items())),
    }


def _section(section: str, components: dict[str, Schema], default: Schema) -> Schema:
    name: Schema = {"enum": sorted(components)}
    one: list[Schema] = [name, _union(components)] if components else []
    forms: list[Schema] = [
        {"enum": list(reserved_words(section))},
        *one,
        {"type": "array", "minItems": 1, "items": {"anyOf": one}},
    ]
    if section == "attention":
        phases = {phase: {"anyOf": list(forms)} for phase in PHASES}
        forms.append({"type": "object", "properties": phases, "additionalProperties": False, "minProperties": 1})
    disabled = default.get("default", {}).get("disabled", False)
    return {"anyOf": forms, "default": "none" if disabled else "auto", "description": default["description"]}


def _with_settings(forms: list[Schema], settings: Schema) -> Schema:
    """The form in which settings of the section stand beside its ``backend``."""
    properties = {"backend": {"anyOf": list(forms)}, **settings}
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
