"""Test the cost of imports, and the public names.

Run: pytest tests/core/test_imports.py
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dovetail

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "triton",
    "xgrammar",
    "flashinfer",
    "flash_attn",
    "transformers",
    "llguidance",
    "outlines_core",
    "tokenizers",
)


def heavy_modules_after(code: str) -> list[str]:
    """Return the heavy packages that a fresh interpreter has imported after ``code``."""
    program = f"import sys\n{code}\nsys.stderr.write(repr([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ast.literal_eval(done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "code",
    [
        "import dovetail",
        "import dovetail; dovetail.SamplingParams(); dovetail.ConfigError; dovetail.hookimpl; dovetail.ComponentSpec",
        "import dovetail; dovetail.gen; dovetail.function; dovetail.OpenAI; dovetail.Runtime; dovetail.RuntimeEndpoint",
        "import dovetail.registry, dovetail.config, dovetail.messages, dovetail.types, dovetail.cli.app",
        "import dovetail.interfaces.attention, dovetail.interfaces.cache, dovetail.interfaces.model",
        "from dovetail.cli import main; main(['plugins', 'list', '--json'])",
        "from dovetail.cli import main; main(['config', 'show'])",
        "from dovetail.registry import setup; setup()",
    ],
)
def test_no_torch_and_no_kernel_library(code):
    body = f"try:\n    {code}\nexcept SystemExit:\n    pass"
    assert heavy_modules_after(body) == []


def test_the_check_itself_sees_torch():
    assert "torch" in heavy_modules_after("import torch")


UNUSED = (
    "dovetail.engine.adapters",
    "dovetail.engine.draft_graphs",
    "dovetail.engine.gguf_weights",
    "dovetail.engine.peft",
    "dovetail.gguf.mapping",
    "dovetail.layers.adapters",
    "dovetail.ops.collectives",
    "dovetail.ops.experts",
    "dovetail.ops.mixers",
    "dovetail.ops.peer",
    "yaml",
)
"""What neither a plain model on a CPU nor its defaults use."""


def test_an_engine_does_not_import_what_its_config_does_not_use():
    program = (
        f"import dovetail, sys; dovetail.LLM('tiny', device='cpu'); print([m for m in {UNUSED!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout.strip().splitlines()[-1]) == []
    for name in UNUSED:
        importlib.import_module(name)


def test_plugins_list_has_every_installed_plugin_loaded():
    code = "from dovetail.cli import main; main(['plugins', 'list', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plugins = json.loads(done.stdout)["plugins"]
    ours = {p["name"]: (p["status"], p["reason"]) for p in plugins if p["distribution"] == "dovetail"}
    assert set(ours.values()) == {("loaded", "")}, ours


def declared_names(path: Path) -> set[str]:
    """Return the names that a package's ``__init__`` imports for type checkers, with their modules."""
    blocks = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.If)]
    (block,) = (node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [statement for statement in block.body if isinstance(statement, ast.ImportFrom)]
    return {f"{statement.module}.{alias.name}" for statement in imports for alias in statement.names}


def test_all_equals_the_public_names():
    assert sorted(dovetail.__all__) == dir(dovetail)
    assert {*dovetail._MODULE_OF, "__version__"} == set(dovetail.__all__)
    declared = declared_names(Path(dovetail.__file__)) - {"dovetail.lang.*"}
    declared |= {f"dovetail.lang.{name}" for name in dovetail.lang.__all__}
    assert declared == {f"{module}.{name}" for name, module in dovetail._MODULE_OF.items()}


def test_the_names_of_the_language_are_defined_or_imported_in_its_api():
    assert sorted(dovetail.lang.__all__) == dir(dovetail.lang)
    assert declared_names(Path(dovetail.lang.__file__)) == {"dovetail.lang.api.*"}
    api = importlib.import_module("dovetail.lang.api")
    for name in dovetail.lang.__all__:
        assert getattr(dovetail, name) is getattr(dovetail.lang, name) is vars(api)[name]
    with pytest.raises(AttributeError, match=r"module 'dovetail\.lang' has no attribute 'nothing'"):
        _ = dovetail.lang.nothing
    defined = {name for name, value in vars(api).items() if getattr(value, "__module__", None) == api.__name__}
    assert {name for name in defined if not name.startswith("_")} - {"role"} <= set(dovetail.lang.__all__)


def test_every_public_name_resolves():
    for name in dovetail.__all__:
        assert getattr(dovetail, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dovetail.nothing


def test_every_error_is_public():
    from dovetail import errors

    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= set(dovetail.__all__)


def test_entry_points_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {
        entry.name: entry.value
        for entry in importlib.metadata.entry_points(group="dovetail.plugins")
        if entry.dist and entry.dist.name == "dovetail"
    }
    assert installed == project["entry-points"]["dovetail.plugins"], "reinstall: pip install -e ."
    scripts = {
        e.name: e.value for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "dovetail"
    }
    assert scripts == project["scripts"]
