"""docs/structure.md and docs/request.md name only files, modules, classes, functions and settings that exist.

Run: pytest tests/core/test_docs_names.py
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import BaseModel

from dovetail.config import Config
from dovetail.interfaces.features import BUILT_IN_FEATURES
from dovetail.types import Req

ROOT = Path(__file__).parents[2]
CORE = "core/dovetail"
PAGES = ("docs/structure.md", "docs/request.md")

ALLOWED = {"TYPE_CHECKING": "a constant of Python's typing module"}
"""Spans in backticks that the check does not look up, each with what it is."""


@dataclass
class Names:
    """Hold what core/ and plugins/ define. ``members`` are by class, and ``bases`` are the names of the base classes."""

    defined: set[str] = field(default_factory=set)
    modules: dict[str, set[str]] = field(default_factory=dict)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)

    def has_member(self, cls: str, name: str) -> bool:
        """Return True if the class or one of its bases defines ``name``."""
        return name in self.members.get(cls, ()) or any(self.has_member(base, name) for base in self.bases.get(cls, ()))


@functools.cache
def names_of_code() -> Names:
    """Return the names in core/ and plugins/."""
    names = Names()
    for folder in ("core", "plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "templates" not in path.parts:
                _read(path, names)
    return names


def _read(path: Path, names: Names) -> None:
    tree = ast.parse(path.read_text())
    module = names.modules.setdefault(path.stem, set())
    module |= set(_assigned(tree.body))
    names.defined |= module
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.defined.add(node.name)
        elif isinstance(node, ast.ClassDef):
            members = names.members.setdefault(node.name, set())
            members |= {*_assigned(node.body), *_set_on_self(node)}
            names.bases.setdefault(node.name, []).extend(_base(base) for base in node.bases)
            names.defined |= {node.name, *members}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.texts.add(node.value)


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module or class defines at its top level."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def _set_on_self(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            yield node.attr


def _base(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def unknown_names(text: str) -> list[str]:
    """Return the spans of a page, in backticks or in its drawings, that name something that does not exist."""
    blocks = re.findall(r"^ {4}.*$", text, re.MULTILINE)
    spans = re.findall(r"`([^`\n]+)`", text)
    for block in blocks:
        spans += re.findall(r"\b[A-Z]\w+\.[a-z_]\w*\b|\b[\w/]+\.py\b", block)
    return [span for span in dict.fromkeys(spans) if not exists(span)]


def exists(span: str) -> bool:
    """Return True if ``span`` is a name that exists, or is not a name at all."""
    if span in ALLOWED:
        return True
    setting = re.fullmatch(r"(\w+(?:\.\w+)*)(?:\(\)|: \w+| [=>] \w+)", span)  # a call, or a name with its value
    name = setting[1] if setting else span
    if name.endswith(".py") or ("/" in name[1:] and not name.startswith("/")):
        return _is_path(name)
    if name.startswith("/"):
        return any(text == name or text.startswith(name + "/") for text in names_of_code().texts)
    if name.startswith("dovetail "):
        return _is_command(name.split()[1:])
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        return not re.search(r"[A-Za-z_]\w*\.\w", name)
    return _is_dotted(name.split(".")) if "." in name else _is_word(name)


def _is_path(name: str) -> bool:
    if any((ROOT / base / name).exists() for base in (".", CORE)):
        return True
    return "/" not in name and any((ROOT / "plugins").glob(f"*/dovetail_*/{name}"))


def _is_command(words: list[str]) -> bool:
    return (ROOT / CORE / "cli" / f"{words[0]}.py").exists()


def _is_dotted(parts: list[str]) -> bool:
    names = names_of_code()
    if ".".join(parts) in {feature.name for feature in BUILT_IN_FEATURES} or is_setting(parts):
        return True
    if parts[0] in names.members:
        return len(parts) == 2 and names.has_member(*parts)
    if parts[0] == "meta_info":  # of the answers of /generate
        return len(parts) == 2 and parts[1] in names.texts | names.defined
    if len(parts) == 2 and parts[0] in names.modules and parts[0] not in Config.model_fields:
        return parts[1] in names.modules[parts[0]]
    path = "/".join(parts[1:])
    return parts[0] == "dovetail" and ((ROOT / CORE / path).is_dir() or (ROOT / CORE / f"{path}.py").exists())


def is_setting(parts: list[str]) -> bool:
    """Return True if ``parts`` are the path of a config key, which the schema of the config has."""
    fields: Mapping[str, object] = Config.model_fields
    for i, part in enumerate(parts):
        if part not in fields:
            return False
        value = getattr(fields[part], "annotation", None)
        if i + 1 < len(parts):
            if not (inspect.isclass(value) and issubclass(value, BaseModel)):
                return False
            fields = value.model_fields
    return True


def _is_word(name: str) -> bool:
    """Return True for a name that the code defines, a complete string of the code (the name of a component, a value of a setting, a
    metric), a package, a folder of the tests, or a name of Python."""
    names = names_of_code()
    folders = [ROOT, ROOT / "tests", ROOT / CORE]
    return (
        name in names.defined | names.texts
        or any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for folder in folders)
        or (name.startswith("dovetail_") and _is_metric(name))
        or hasattr(builtins, name)
    )


def _is_metric(name: str) -> bool:
    known = {text.removeprefix("dovetail_") for text in names_of_code().texts}
    return name.removeprefix("dovetail_").removesuffix("_total") in known


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_a_page_exists(page: str):
    text = (ROOT / page).read_text()
    assert len(re.findall(r"`[^`\n]+`", text)) > 100, "the page names its files and functions in backticks"
    assert unknown_names(text) == []


@pytest.mark.parametrize(
    "gone",
    [
        "engine/gone.py",
        "core/dovetail/loop/gone.py",
        "gone.py",
        "plugins/gone",
        "NoSuchClass",
        "no_such_function",
        "no_such_function()",
        "Engine.commit",  # another class has that method
        "Req.no_such_field",
        "RequestTable.no_such_method",
        "scheduler.no_such_key",
        "no_such_section.max_running",
        "scheduler.no_such_key: 3",
        "attention.no_such_feature",
        "types.NoSuchType",
        "dovetail.no_such_package",
        "dovetail nosuchcommand",
        "/no_such_route",
        "dovetail_no_such_metric_total",
    ],
)
def test_a_name_that_is_gone_is_found(gone: str):
    assert unknown_names(f"Text with `Engine.launch` and `{gone}` in it.") == [gone]


def test_a_name_that_is_gone_is_found_in_a_drawing():
    assert unknown_names("    schedule -> Scheduler.attach (engine/graphs.py)\n") == []
    assert unknown_names("    schedule -> Scheduler.gone (engine/gone.py)\n") == ["Scheduler.gone", "engine/gone.py"]


def test_names_that_exist_are_accepted():
    good = [
        "engine/runners.py",
        "plugins/apis/dovetail_apis",
        "Engine.wait",
        "EagerRunner.can_run",
        "Req.cached_len",
        "scheduler.max_running",
        "grammar.timeout",
        "attention.verify_graph",
        "derive_seed",
        "fit.Negotiation",
        "/generate",
        "dovetail ab --write-tuning",
        "max_new_tokens = 0",
    ]
    assert [name for name in good if not exists(name)] == []


def test_the_drawing_of_the_cursors_is_that_of_the_class():
    drawing = re.search(r"^ {4}token_ids .*\n {4}.*$", (ROOT / "docs/request.md").read_text(), re.MULTILINE)
    assert drawing is not None
    assert textwrap.dedent(drawing[0]) in textwrap.dedent(inspect.getdoc(Req) or "").replace("\n    ", "\n")


def test_the_layers_of_imports_are_those_of_the_contract():
    text = (ROOT / "docs/structure.md").read_text()
    section = text.partition("## Who may import whom")[2].partition("\n## ")[0]
    listed = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert listed == layers


def test_every_package_and_module_of_the_core_is_on_the_map():
    text = (ROOT / "docs/structure.md").read_text()
    packages = [path for path in (ROOT / CORE).iterdir() if path.is_dir() or path.suffix == ".py"]
    names = [f"{path.name}/" if path.is_dir() else path.name for path in packages if not path.name.startswith("__")]
    assert [name for name in names if f"`{name}`" not in text] == []
    for package in ("loop", "scheduler", "engine", "constraints"):
        modules = [f"{package}/{path.name}" for path in sorted((ROOT / CORE / package).glob("*.py"))]
        assert [name for name in modules if f"`{name}`" not in text and "__init__" not in name] == []
