"""From names to files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.registry.loader import REGISTER_HOOKS
from dovetail.registry.specs import API_VERSIONS, ComponentKind
from dovetail.scaffold.kinds import FACTS
from dovetail.scaffold.names import Names

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".jinja"
HOOKS = {kind: hook for hook, kind in REGISTER_HOOKS.items()}
INTERFACE_MODULES = {ComponentKind.TOOL_PARSER: "parsers", ComponentKind.REASONING_PARSER: "parsers"}


def render(names: Names, author: str | None = None) -> dict[str, str]:
    """The files of the package: text by path. Templates of ``common`` and of the kind; in their paths PACKAGE and NAME stand
    for the package's and the component's."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    values = _values(names, author)
    return {
        _path(template, names): environment.get_template(template).render(values)
        for template in sorted(environment.list_templates(extensions=[SUFFIX[1:]]))
        if template.split("/")[0] in ("common", names.kind.value)
    }


def write(files: Mapping[str, str], directory: Path) -> None:
    """Write ``files`` into ``directory``, which is made. Raises ``ConfigError`` if there is anything in it, or it cannot be
    written."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there and not empty; give another place with --directory")
    try:
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error}; give another place with --directory") from error


def _path(template: str, names: Names) -> str:
    path = template.partition("/")[2].removesuffix(SUFFIX)
    return path.replace("PACKAGE", names.package).replace("NAME", names.name)


def _values(names: Names, author: str | None) -> dict[str, Any]:
    """What templates may use."""
    from dovetail import __version__

    facts = FACTS[names.kind]
    return {
        "kind": names.kind.value,
        "kind_enum": names.kind.name,
        "name": names.name,
        "pascal": names.pascal,
        "cls": names.class_name,
        "package": names.package,
        "distribution": names.distribution,
        "replaces": names.replaces,
        "architecture": f"{names.pascal}ForCausalLM",
        "module": facts.module,
        "hook": HOOKS[names.kind],
        "api": API_VERSIONS[names.kind],
        "summary": facts.summary,
        "about": facts.about,
        "interface": facts.interface,
        "interface_module": f"dovetail.interfaces.{INTERFACE_MODULES.get(names.kind, names.kind.value)}",
        "offers": [feature.name for feature in facts.offers],
        "needs": [feature.name for feature in facts.needs],
        "chosen_by": _chosen_by(names),
        "used_by": _used_by(names),
        "in_yaml": _in_yaml(names),
        "rival": facts.rival,
        "author": _author(author),
        "dovetail": ".".join(__version__.split(".")[:2]),
    }


def _chosen_by(names: Names) -> str:
    return f"model: {{arch: {names.name}}}" if names.kind is ComponentKind.MODEL else f"{names.kind}: {names.name}"


def _used_by(names: Names) -> str:
    """A command."""
    if names.kind is ComponentKind.MODEL:
        return f'dovetail generate "The capital of France is" --set model.arch={names.name}'
    sets = {"kind": names.name, **FACTS[names.kind].setting}
    options = " ".join(f"--set {names.kind}.{key}={value}" for key, value in sets.items())
    if names.kind in (ComponentKind.TOOL_PARSER, ComponentKind.REASONING_PARSER, ComponentKind.API):
        return f"dovetail serve {options}"
    return f'dovetail generate "The capital of France is" {options}'


def _in_yaml(names: Names) -> str:
    if names.kind is ComponentKind.MODEL:
        return f"model:\n  path: tiny\n  arch: {names.name}"
    lines = [f"{key}: {json.dumps(value)}" for key, value in FACTS[names.kind].setting.items()]
    return "\n  ".join([f"{names.kind}:", f"kind: {names.name}", *lines])


def _author(given: str | None) -> str | None:
    """``Ada <ada@example.org>`` as a table of pyproject.toml."""
    if not given:
        return None
    name, _, address = given.partition("<")
    parts = {"name": name.strip(), "email": address.rstrip("> ")}
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in parts.items() if value) + " }"
