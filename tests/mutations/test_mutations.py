"""Test that each suite of ``dovetail.testing`` fails for plugins that are wrong in one way, by the case that is named,
and passes them without the fault.

Run: python -m pytest -q tests/mutations
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from mutant import Mutant, Suite
from mutants import DOCS, MUTANTS, UNPROVEN, cases, with_table

from dovetail.testing.model import ModelSuite

FOUND = (AssertionError, ExceptionGroup, pytest.fail.Exception)
"""How a case says that something is wrong. Anything else is an accident, unless a mutant names it in ``says``."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


def run(made: Suite, case: str, arguments: tuple[object, ...], folder: Path) -> None:
    suite = made()
    if isinstance(suite, ModelSuite):
        suite.write_checkpoint(suite.configs["plain"], folder)
        arguments = ("plain", folder, *arguments)
    method = getattr(suite, case)
    folders = {"tmp_path": folder} if "tmp_path" in inspect.signature(method).parameters else {}
    method(*arguments, **folders)


passed: set[tuple[Suite, str, str]] = set()


def check_sound(made: Suite, case: str, arguments: tuple[object, ...], folder: Path) -> None:
    """Check that the case passes without the fault, and is not skipped. It runs once for all mutants with the same
    case."""
    if (made, case, repr(arguments)) in passed:
        return
    try:
        run(made, case, arguments, folder)
    except pytest.skip.Exception as skipped:
        pytest.fail(f"the case does not run for the sound component: {skipped}")
    passed.add((made, case, repr(arguments)))


def found_in(mutant: Mutant, folder: Path) -> BaseException | None:
    """Return what the case reports about the broken component."""
    for arguments in mutant.runs:
        try:
            run(mutant.broken, mutant.case, arguments, folder)
        except FOUND as found:
            return found
        except Exception as found:
            if mutant.says and mutant.says in repr(found):
                return found
            raise
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.sound().kind}-{mutant.fault}")
def test_the_suite_catches_what(mutant: Mutant, folder: Path) -> None:
    for arguments in mutant.runs:
        check_sound(mutant.sound, mutant.case, arguments, folder)
    found = found_in(mutant, folder)
    assert found is not None, f"{mutant.case} does not see that the component {mutant.fault}"
    assert mutant.says in repr(found), f"{mutant.case} fails for another reason: {found}"


def test_every_case_can_fail() -> None:
    """Each case of each suite finds a fault here, except for those for which ``UNPROVEN`` gives a reason."""
    proven = {(str(mutant.sound().kind), mutant.case) for mutant in MUTANTS}
    common = {case for _, case in proven}
    missing = {(kind, case) for kind, case in cases() if (kind, case) not in proven and (kind or case not in common)}
    assert missing == set(UNPROVEN)


def test_the_documentation_has_the_table() -> None:
    page = DOCS.read_text("utf-8")
    assert with_table(page) == page, "write it: python tests/mutations/mutants.py"
