"""Write the files of a new package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.registry.specs import ComponentKind, Selects
from dovetail.scaffold.kinds import FOLDER
from dovetail.scaffold.names import Names

SUFFIX = ".jinja"


def render(names: Names, author: str | None = None) -> dict[str, str]:
    """Return the files of the package: text by path. They are written from the templates of ``common`` and of the kind."""
    import jinja2

    own = jinja2.PrefixLoader({"own": jinja2.FileSystemLoader(names.template.folder)})
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.FileSystemLoader(FOLDER), own]),
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
        if template.split("/")[0] in ("common", "own")
    }


def write(files: Mapping[str, str], directory: Path) -> None:
    """Write ``files`` into ``directory``, and create it. Raises ``ConfigError`` if it is not empty or cannot be
    written."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} exists and is not empty; give another place with --directory")
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
    """Return the values that templates may use."""
    from dovetail import __version__

    descriptor, template = names.descriptor, names.template
    interface_module, _, interface = descriptor.interface.partition(":")
    return {
        "kind": str(names.kind),
        "kind_code": _code(ComponentKind, names.kind),
        "name": names.name,
        "pascal": names.pascal,
        "cls": names.class_name,
        "package": names.package,
        "distribution": names.distribution,
        "replaces": names.replaces,
        "architecture": f"{names.pascal}ForCausalLM",
        "module": template.module,
        "api": descriptor.api,
        "summary": template.summary,
        "about": template.about,
        "interface": interface,
        "interface_module": interface_module,
        "described": descriptor.described,
        "by_priority": descriptor.selects in (Selects.ONE, Selects.ONE_AND_OTHERS),
        "offers": [_code(Feature, feature) for feature in template.offers],
        "needs": [_code(Feature, feature) for feature in template.needs],
        "chosen_by": _chosen_by(names),
        "used_by": _used_by(names),
        "in_yaml": _in_yaml(names),
        "rival": template.rival,
        "author": _author(author),
        "dovetail": ".".join(__version__.split(".")[:2]),
    }


def _code(cls: type, name: str) -> str:
    """Return a kind or feature as code: its constant, if it has one."""
    constant = next((key for key, value in vars(cls).items() if isinstance(value, cls) and value == name), None)
    return f"{cls.__name__}.{constant}" if constant else f'{cls.__name__}("{name}")'


def _chosen_by(names: Names) -> str:
    section, _, key = names.descriptor.where.partition(".")
    return f"{section}: {{{key}: {names.name}}}" if key else f"{section}: {names.name}"


def _used_by(names: Names) -> str:
    """Return a command that uses the component."""
    descriptor, template = names.descriptor, names.template
    settings = {f"{names.kind}.kind": names.name} | {f"{names.kind}.{k}": v for k, v in template.setting.items()}
    sets = settings if descriptor.section is not None else {descriptor.named_at: names.name}
    options = " ".join(f"--set {key}={value}" for key, value in sets.items())
    command = "serve" if template.command == "serve" else 'generate "The capital of France is"'
    return f"dovetail {command}{template.options} {options}"


def _in_yaml(names: Names) -> str:
    section, _, key = names.descriptor.where.partition(".")
    lines = [f"{name}: {json.dumps(value)}" for name, value in names.template.setting.items()]
    if not key:
        return "\n  ".join([f"{section}:", f"kind: {names.name}", *lines])
    return "\n  ".join([f"{section}:", *(line.replace('"', "") for line in lines), f"{key}: {names.name}"])


def _author(given: str | None) -> str | None:
    """Return ``Ada <ada@example.org>`` as a table of pyproject.toml."""
    if not given:
        return None
    name, _, address = given.partition("<")
    parts = {"name": name.strip(), "email": address.rstrip("> ")}
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in parts.items() if value) + " }"
