"""Provide the documentation that ships with Python, as prose and as a source of words (PSF licence)."""

import ast
import re
import sysconfig
from functools import cache
from pathlib import Path


def _docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return [text for text in found if text and len(text) > 60]


@cache
def python_docs() -> tuple[str, ...]:
    """Return the docstrings of the standard library of the running Python, in a fixed order (PSF licence)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "turtledemo",
        "__pycache__",
        "ensurepip",
    }
    files = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    return tuple(text for path in files for text in _docstrings(path))


@cache
def english_words() -> tuple[str, ...]:
    """Return lower-case words of 3 to 11 letters that are separate words in the documentation."""
    pattern = re.compile(r"(?<![\w.'])[a-z]{3,11}(?![\w.'(=])")
    return tuple(sorted({word for text in python_docs() for word in pattern.findall(text)}))
