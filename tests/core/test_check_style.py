"""Test that every check of tools/check_style.py finds what it is for, and nothing in a clean tree.

Run: .venv/bin/python -m pytest -q -p no:xdist tests/core/test_check_style.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "tools" / "check_style.py"
GLOSSARY = """# Glossary

| word | meaning |
|---|---|
| page | a unit of memory |

## Words that do not appear

| words | write instead |
|---|---|
| cellar, cellars | package |
| how quickly | the rate |

## After the list
"""


@pytest.fixture(scope="module")
def style():
    spec = importlib.util.spec_from_file_location("check_style", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_style"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_style"]


@pytest.fixture
def findings(style, tmp_path: Path):
    """Write files into an empty tree and return what the check finds."""

    def check(**files: str) -> list[str]:
        paths = {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
        paths.setdefault("docs/glossary.md", GLOSSARY)
        for name, text in paths.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return list(style.check(tmp_path, list(paths)))

    return check


def test_a_clean_tree_has_no_findings(findings):
    assert findings(core__dovetail__a_dot_py="class A:\n    '''Hold a page.'''\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "# the cellar\n",
        "def use_cellar(): ...\n",
        "class DraftCellars: ...\n",
        "message = f'no cellar for {1}'\n",
        "CELLAR_SIZE = 1\n",
        "# it says how\n# quickly it goes\n",
        "'''How\nquickly.'''\n",
    ],
)
def test_forbidden_words(findings, text: str):
    (finding,) = findings(core__dovetail__a_dot_py="\n" + text)
    assert finding.startswith("core/dovetail/a.py:2: the word ")
    assert findings(docs__a_dot_md=text)


@pytest.mark.parametrize("text", ["excellar = 1\n", "# how very quickly\n", "# package\n"])
def test_words_that_only_contain_a_forbidden_word(findings, text: str):
    assert findings(core__dovetail__a_dot_py=text) == []


def test_the_glossary_may_name_the_words_in_its_list_only(findings):
    assert findings(docs__glossary_dot_md=GLOSSARY) == []
    assert findings(docs__glossary_dot_md=GLOSSARY.replace("a unit", "a cellar"))


def test_a_glossary_without_a_list(findings):
    with pytest.raises(SystemExit, match="Words that do not appear"):
        findings(docs__glossary_dot_md="# Glossary\n")


def test_class_names_with_several_definitions(findings):
    (finding,) = findings(core__dovetail__a_dot_py="class A: ...\n", plugins__x__y__b_dot_py="class A: ...\n")
    assert "class A is defined in core/dovetail/a.py, plugins/x/y/b.py" in finding
    assert findings(core__dovetail__a_dot_py="class _A: ...\n", core__dovetail__b_dot_py="class _A: ...\n") == []
    assert findings(core__dovetail__a_dot_py="class A: ...\n", tests__b_dot_py="class A: ...\n") == []


@pytest.mark.parametrize("path", ["core__dovetail__a_dot_py", "tests__a_dot_py", "benchmarks__a_dot_py"])
def test_long_functions_and_files(findings, style, path: str):
    body = "    pass\n" * style.MOST_FUNCTION_LINES
    assert "f has 61 lines" in findings(**{path: "def f():\n" + body})[0]
    assert "f has 61 lines" in findings(**{path: "class A:\n  async def f():\n" + body})[0]
    assert findings(**{path: "def f():\n" + body[9:]}) == []
    assert findings(**{path: "@triton.jit\ndef f():\n" + body}) == []
    assert "501 lines" in findings(**{path: "\n" * (style.MOST_FILE_LINES + 1)})[0]
    assert findings(**{path: "\n" * style.MOST_FILE_LINES}) == []


def test_import_cycles(style):
    assert list(style.cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})) == []
    (finding,) = style.cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}})
    assert finding.startswith("import cycle: ")
    assert len(list(style.cycles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}))) == 2


def test_imports_inside_functions_and_for_types_alone_count(style, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "cyclic_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("def f():\n    from cyclic_package import b\n")
    (package / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cyclic_package.a import f\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(list(style.cycles(style.import_graph(["cyclic_package"])))) == 1


def test_the_packages_of_the_tree(style):
    packages = style.root_packages(style.tracked(style.ROOT))
    assert {"dovetail", "dovetail_attention", "dovetail_apis"} <= set(packages)
    assert all(package.startswith("dovetail") for package in packages)
