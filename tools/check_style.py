"""Check the tree against the rules of style that a program can check; docs/glossary.md holds the words.

Run: python tools/check_style.py

- One public class name of core/ and plugins/ has one definition.
- No import cycle between modules of core/ and plugins/, imports inside functions and under TYPE_CHECKING included.
- No word of the list "Words that do not appear" in code (identifiers, comments and strings), docs and messages.
- No function of more than 60 lines, compiled kernels excepted, and no file of more than 500 lines.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
GLOSSARY = "docs/glossary.md"
LIST = "## Words that do not appear"
PACKAGES = ("core", "plugins")
MOST_FUNCTION_LINES = 60
MOST_FILE_LINES = 500
PROSE = (".py", ".md", ".jinja", ".html", ".js", ".css", ".toml", ".svg", ".yaml")
NOT_PROSE = re.compile(r"docs/changes\.md|tools/tiny/corpus/.*|core/dovetail/assets/.*|tests/data/.*|.*/vendor/.*")
"""Files whose words are data: what the embedded model was trained on, old names, vendored libraries."""


def main() -> int:
    """Print every finding; return 1 if there is one."""
    files = tracked(ROOT)
    findings = [*check(ROOT, files), *cycles(import_graph(root_packages(files)))]
    for finding in findings:
        print(finding)
    print(f"style: {len(findings)} findings in {len(files)} files")
    return bool(findings)


def tracked(root: Path) -> list[str]:
    """Return the paths that git tracks below ``root`` and that exist."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [name for name in names if (root / name).is_file()]


def check(root: Path, files: Iterable[str]) -> Iterator[str]:
    """Yield the findings in ``files``, relative to ``root``, except import cycles."""
    pattern = forbidden((root / GLOSSARY).read_text())
    classes: dict[str, list[str]] = defaultdict(list)
    for name in files:
        path = Path(name)
        if path.suffix not in PROSE:
            continue
        text = (root / name).read_text()
        if not NOT_PROSE.fullmatch(name):
            yield from words(name, text, pattern)
        if path.suffix == ".py":
            tree = ast.parse(text)
            yield from sizes(name, text, tree)
            if path.parts[0] in PACKAGES:
                for each in public_classes(tree):
                    classes[each].append(name)
    yield from doubles(classes)


def forbidden(glossary: str) -> re.Pattern[str]:
    """Return the pattern of the words in the first column of the glossary's table "Words that do not appear"."""
    _, found, section = glossary.partition(LIST)
    if not found:
        raise SystemExit(f"{GLOSSARY} has no section {LIST!r}")
    rows = re.findall(r"^\| ([^|]+) \|", section.partition("\n## ")[0], re.MULTILINE)[1:]
    phrases = [phrase.strip() for row in rows for phrase in row.split(",")]
    return re.compile(
        r"\b(?:" + "|".join(re.escape(phrase).replace(r"\ ", r"[\s#]+") for phrase in phrases) + r")\b", re.I
    )


def words(name: str, text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the forbidden words in a file. Identifiers are split into words at underscores and capitals."""
    if name == GLOSSARY:
        text = text.partition(LIST)[0]
    text = text.replace("bootstrap_room", "bootstrap")  # a field of a peer's API, which must be named
    spaced = re.sub(r"_|(?<=[a-z0-9])(?=[A-Z])", " ", text)
    for found in pattern.finditer(spaced):
        number = spaced.count("\n", 0, found.start()) + 1
        word = re.sub(r"[\s#]+", " ", found[0])
        yield f"{name}:{number}: the word {word!r} does not appear here; {GLOSSARY} says what to write instead"


def sizes(name: str, text: str, tree: ast.Module) -> Iterator[str]:
    """Yield the functions and the file that are too long."""
    lines = text.count("\n")
    if lines > MOST_FILE_LINES:
        yield f"{name}: {lines} lines; a file has at most {MOST_FILE_LINES}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MOST_FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {lines} lines; a function has at most {MOST_FUNCTION_LINES}"


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether Triton compiles the function."""
    return any(re.search(r"\bjit\b", ast.unparse(each)) for each in node.decorator_list)


def public_classes(tree: ast.Module) -> list[str]:
    """Return the names of the public classes at the top of a module."""
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def doubles(classes: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the class names that stand for more than one thing; ``classes`` maps a name to the files that define it."""
    for name, places in sorted(classes.items()):
        if len(places) > 1:
            yield f"class {name} is defined in {', '.join(places)}; one name stands for one thing"


def root_packages(files: Iterable[str]) -> list[str]:
    """Return the import names of the packages in core/ and plugins/."""
    inits = [Path(name) for name in files if Path(name).name == "__init__.py"]
    return [
        path.parts[-2]
        for path in inits
        if path.parts[0] in PACKAGES and len(path.parts) == (3 if path.parts[0] == "core" else 4)
    ]


def import_graph(packages: Iterable[str]) -> dict[str, set[str]]:
    """Return which modules each module imports directly, inside functions and under TYPE_CHECKING too."""
    graph = grimp.build_graph(*packages, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def cycles(imports: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield an import cycle of every pair of modules that closes one, until none is left. Does not change ``imports``."""
    left = {module: set(targets) for module, targets in imports.items()}
    while True:
        try:
            graphlib.TopologicalSorter(left).prepare()
            return
        except graphlib.CycleError as error:
            cycle = error.args[1]
            yield f"import cycle: {' -> '.join(reversed(cycle))}"
            left[cycle[1]].discard(cycle[0])


if __name__ == "__main__":
    sys.exit(main())
