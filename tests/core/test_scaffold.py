"""Test what ``dovetail plugins new`` writes: a package of every kind lints, registers, can be configured and passes
its suite; and test what it refuses.

.venv/bin/python -m pytest -q tests/core/test_scaffold.py
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from dovetail.cli.plugins_new import new
from dovetail.config import PluginsSection, dump
from dovetail.errors import ConfigError
from dovetail.interfaces.features import Feature
from dovetail.registry import ComponentKind, Registry, builtin, load_plugins, setup
from dovetail.registry.reports import ComponentReport, Findings
from dovetail.scaffold import named, render, write
from dovetail.scaffold.names import LONGEST_NAME, LONGEST_PACKAGE
from fresh import run_python

KINDS = [descriptor.kind for descriptor in builtin.KINDS]
NAMES = {kind: f"scaffolded_{kind}"[:LONGEST_NAME] for kind in KINDS}
LEFT_OUT = (
    "test_outputs_are_those_of_decoding_without_drafts or test_a_drafter_that_raises_costs_drafts_only or (fp8 and not quantized) "
    "or test_chunk_after_a_large_prefix or (test_agrees_with_a_dictionary and not 1-1) or test_calls_are_found_in_any_pieces "
    "or test_pieces_do_not_matter or (test_batch_invariance_of_divided_rows and 1580) "
    "or (test_batch_invariance and (biases or clamped or scaled)) "
    "or test_grouped_heads or test_head_dims or test_softmax_in_float32 or test_shared_prefixes_of_grouped_heads"
)
"""Cases that take longest; tests/e2e/test_scaffold_venv.py has drafts, and the built-in parts' own tests have all."""

each_kind = pytest.mark.parametrize("kind", KINDS)


def dist_info(source: Path, site: Path) -> None:
    """Let the package in ``source`` be installed in ``site``: what pip would write, as far as plugins are found by it."""
    project = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))["project"]
    folder = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    entries = [f"{name} = {target}" for name, target in project["entry-points"]["dovetail.plugins"].items()]
    (folder / "entry_points.txt").write_text("\n".join(["[dovetail.plugins]", *entries]) + "\n")
    (folder / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {}}))
    (package,) = (path.parent for path in source.glob("*/plugin.py"))
    shutil.copytree(package, site / package.name, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[ComponentKind, Path]:
    """Generate a package of each kind."""
    registry, folder = load_plugins(PluginsSection()), tmp_path_factory.mktemp("sources")
    for kind, name in NAMES.items():
        write(render(named(registry, kind, name), "Ada <ada@example.org>"), folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def site(sources: dict[ComponentKind, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install them in a folder."""
    folder = tmp_path_factory.mktemp("site")
    for source in sources.values():
        dist_info(source, folder)
    return folder


@pytest.fixture
def registry(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """Return everything that is installed, these packages included."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(site))
    yield load_plugins(PluginsSection())
    for name in set(sys.modules) - before:
        if name.startswith("dovetail_scaffolded"):
            del sys.modules[name]


def run(arguments: list[str], site: Path | None, directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh Python that finds what is installed in ``site``."""
    paths = [str(path) for path in (site, os.environ.get("PYTHONPATH")) if path]
    given = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "COLUMNS": "200",
        "PYTHONDONTWRITEBYTECODE": "1",
        **env,
    }
    return run_python(arguments, directory, given, seconds=1100)


def dovetail(*words: str) -> list[str]:
    return ["-c", "from dovetail.cli import main; main()", *words]


# -- what is written -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", ["short", "long"])
def test_it_is_formatted_and_lints_whatever_the_names(length: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    registry = load_plugins(PluginsSection())
    for index, kind in enumerate(KINDS):
        name = f"{'xyz'[index % 3]}{index}"
        package = None
        if length == "long":
            name, package = name.ljust(LONGEST_NAME, "w"), name.ljust(LONGEST_PACKAGE, "w")
        write(render(named(registry, kind, name, package)), tmp_path / kind)
    for command in (["check"], ["format", "--diff"]):
        done = run(["-m", "ruff", *command, "--quiet", "--no-cache", str(tmp_path)], None, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_its_types_are_right(sources: dict[ComponentKind, Path], tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    for kind, source in sources.items():
        shutil.copytree(source, tmp_path / kind)
    settings = {
        "include": [str(kind) for kind in KINDS],
        "extraPaths": [str(kind) for kind in KINDS],
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = run(["-m", "pyright", "--pythonpath", sys.executable], None, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@each_kind
def test_the_files_of_a_package(sources: dict[ComponentKind, Path], kind: ComponentKind) -> None:
    files = {path.relative_to(sources[kind]).as_posix() for path in sources[kind].rglob("*") if path.is_file()}
    package = f"dovetail_{NAMES[kind]}"
    expected = {"pyproject.toml", "README.md", ".gitignore", ".github/workflows/ci.yml", f"tests/test_{NAMES[kind]}.py"}
    assert files >= expected | {f"{package}/{file}.py" for file in ("__init__", "plugin", "config")}
    project = tomllib.loads((sources[kind] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["authors"] == [{"name": "Ada", "email": "ada@example.org"}]
    assert not [
        path
        for path in sources[kind].rglob("*")
        if path.is_file() and "{{" in path.read_text("utf-8").replace("${{", "")
    ]


def test_what_the_registry_imports_is_light(site: Path, tmp_path: Path) -> None:
    modules = [f"dovetail_{name}.{part}" for name in NAMES.values() for part in ("plugin", "config")]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'numpy', 'jinja2')])\n"
        "print(sorted(name for name in sys.modules if name.startswith('dovetail_')))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))}
    heavy, own = subprocess.check_output([sys.executable, "-c", code], env=env, text=True).splitlines()
    assert heavy == "[]"
    assert own == str(sorted([*modules, *{name.partition(".")[0] for name in modules}]))


# -- what is registered ----------------------------------------------------------------------------------------------------


@each_kind
def test_it_registers_beside_the_built_in_ones(registry: Registry, kind: ComponentKind) -> None:
    component = registry.get(kind, NAMES[kind])
    assert component.incompatible is None
    assert component.distribution == f"dovetail-{NAMES[kind].replace('_', '-')}"
    assert len(registry.components(kind)) > 1
    module, _, name = component.spec.target.partition(":")
    assert getattr(importlib.import_module(module), name)


@each_kind
def test_what_its_readme_sets_is_what_it_gets(
    registry: Registry, sources: dict[ComponentKind, Path], kind: ComponentKind, tmp_path: Path
) -> None:
    readme = (sources[kind] / "README.md").read_text("utf-8")
    (tmp_path / "config.yaml").write_text(*re.findall(r"^```yaml\n(.*?)^```", readme, re.MULTILINE | re.DOTALL))
    config, _ = setup([tmp_path / "config.yaml"])
    shown = dump(config)
    if kind == ComponentKind.MODEL:
        assert shown["model"]["arch"] == NAMES[kind]
        return
    section = shown[kind]["backend"] if kind == ComponentKind.GRAMMAR else shown[kind]
    section = section["decode"] if kind == ComponentKind.ATTENTION and "decode" in section else section
    defaults = registry.config_class(kind, NAMES[kind])().model_dump()
    assert section["kind"] == NAMES[kind]
    assert section != defaults, "the README sets something"
    (tmp_path / "again.json").write_text(json.dumps(shown))
    assert setup([tmp_path / "again.json"])[0] == config
    (line,) = re.findall(r"^    dovetail (?:generate|serve) .*$", readme, re.MULTILINE)
    sets = re.findall(r"--set (\S+)", line)
    assert dump(setup([], sets)[0])[kind] == shown[kind]


def test_a_replacement_takes_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = named(load_plugins(PluginsSection()), "cache", "radix", "scaffolded_radix", replace=True)
    assert names.replaces == "dovetail"
    write(render(names), tmp_path / "source")
    dist_info(tmp_path / "source", tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert load_plugins(PluginsSection()).get("cache", "radix").distribution == "scaffolded-radix"


def test_the_help_lists_every_kind() -> None:
    (kind, *_) = typing.get_type_hints(new, include_extras=True)["kind"].__metadata__
    listed = kind.help.removesuffix(", or the kind of an installed package.").split(", ")
    assert listed == [str(kind) for kind in KINDS]


# -- suites --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it needs less than a minute of a processor, which takes longer on a busy machine
def test_it_passes_its_suite_and_proves_what_it_claims(
    registry: Registry, sources: dict[ComponentKind, Path], site: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.json"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--import-mode=importlib", "--rootdir", str(tmp_path)]
    options += ["-p", "dovetail.testing.record", f"--dovetail-record={record}", "-k", f"not ({LEFT_OUT})"]
    tests = [str(source / "tests") for source in sources.values()]
    done = run(["-m", "pytest", *options, *tests], site, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = Findings.model_validate_json(record.read_text()).cases
    for kind, name in NAMES.items():
        label, spec = f"{kind}/{name}", registry.get(kind, name).spec
        of = tuple(case for case in cases if case.component == label)
        part = ComponentReport(component=label, claimed=tuple(spec.offers), cases=of)
        assert part.count("passed") > 3, label
        assert part.count("failed") == 0
        assert part.unproven == []
        of_info = {Feature.MODEL_TENSOR_PARALLEL} if kind == ComponentKind.MODEL else set()  # claimed by ModelInfo
        assert part.proven == sorted(spec.offers | of_info)


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("policie", "mine"),
            "no kind 'policie'; kinds: attention, cache, grammar, speculative, policy, model, tool_parser",
        ),
        (("policie", "mine"), "did you mean 'policy'?"),
        (
            ("cache", "radix"),
            "already installed, from dovetail .*; choose another name, or --replace .*Taken: none, radix",
        ),
        (("model", "LlamaForCausalLM"), "is not a name of a component"),
        (("cache", "mine", None, True), "--replace, but no cache is called 'mine'; installed: none, radix"),
        (("policy", "yes"), "a word of YAML"),
        (("policy", "null"), "a word of YAML"),
        (("cache", "auto"), "a reserved word of the section cache"),
        (("cache", "prefix"), "the class PrefixCache, which is the name of an interface"),
        (("cache", "two words"), "allowed: lower-case letters, digits and single underscores"),
        (("cache", "9lives"), "is not a name of a component"),
        (("cache", "mine_"), "is not a name of a component"),
        (("cache", "x" * (LONGEST_NAME + 1)), f"{LONGEST_NAME} characters at most"),
        (("cache", "mine", "torch"), "a package torch is already installed here; give another name with --package"),
        (("cache", "mine", "json"), "a package json is already installed here"),
        (("cache", "mine", "my-package"), "is not a name of a package"),
        (("cache", "mine", "class"), "is not a name of a package"),
        (("cache", "mine", "../up"), "is not a name of a package"),
    ],
)
def test_names_that_are_refused(words: tuple, said: str) -> None:
    kind, name, package, replace = (*words, None, False)[:4] if len(words) < 4 else words
    with pytest.raises(ConfigError, match=said):
        named(load_plugins(PluginsSection()), kind, name, package, replace=bool(replace))


def test_kinds_have_other_spellings() -> None:
    registry = load_plugins(PluginsSection())
    assert named(registry, "drafter", "mine").kind == ComponentKind.DRAFTER
    assert named(registry, "tool-parser", "mine").kind == ComponentKind.TOOL_PARSER


def test_nothing_is_written_over(tmp_path: Path) -> None:
    files = render(named(load_plugins(PluginsSection()), "policy", "mine"))
    (tmp_path / "empty").mkdir()
    write(files, tmp_path / "empty")
    before = {path: path.read_bytes() for path in (tmp_path / "empty").rglob("*") if path.is_file()}
    (tmp_path / "file").write_text("mine")
    for there in ("empty", "file"):
        with pytest.raises(ConfigError, match="exists and is not empty; give another place with --directory"):
            write({"pyproject.toml": "other"}, tmp_path / there)
    assert {path: path.read_bytes() for path in (tmp_path / "empty").rglob("*") if path.is_file()} == before


def test_the_command(tmp_path: Path) -> None:
    said = run(dovetail("plugins", "new", "policy", "my_turn", "--author", "Ada"), None, tmp_path)
    assert said.returncode == 0, said.stderr
    assert "pip install -e 'dovetail-my-turn[dev]'" in said.stdout
    assert 'name="my_turn"' in (tmp_path / "dovetail-my-turn" / "dovetail_my_turn" / "plugin.py").read_text()
    again = run(dovetail("plugins", "new", "policy", "my_turn"), None, tmp_path)
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: .*give another place with --directory"):
        write({"pyproject.toml": ""}, tmp_path / "file" / "in")
