"""Configure every test run."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # tests in every folder import fresh.py by its name

# A background job of a script ignores SIGINT, and so do its children. Tests of Ctrl-C need Python's handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in parallel, and small models gain nothing from more threads: libgomp's threads spin at every barrier,
# so two test processes with two threads each would wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from quick_engines import _engines_are_built_quickly, _what_is_there_is_set_apart  # noqa: F401
from usual_run import add_full

# The same examples in every run, so that a failure is repeatable; `make fuzz` searches for new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")

LONG = ("test_parsers_enforced.py",)
"""Files that take half a minute and would be the last of a run, with nothing left for the other workers."""


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the usual run leaves out, and move ``LONG`` to the front."""
    add_full(items)
    items.sort(key=lambda item: item.path.name not in LONG)


TOOLS = {
    "chromium": "Chromium, for the tests of pages: `apt-get install chromium`, or another package that puts it on the PATH",
    "GRAMMAR_CORPORA": "the JSON Schema Test Suite and a file of schemas: set GRAMMAR_CORPORA to their folder",
    "could not import": "an optional package: `make setup` installs those of the extra `dev`",
    "no kernels for packed weights": "a processor with AVX-512",
    "compiled kernels": "a C++ compiler: `apt-get install g++`",
}
"""What a test that is skipped may lack, by words of its reason, and how to get it."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many tests were skipped because a tool is missing, and how to get it."""
    missing: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        missing.update(advice for words, advice in TOOLS.items() if words in reason)
    if missing:
        terminalreporter.section("skipped because a tool is missing")
    for advice, count in missing.most_common():
        terminalreporter.line(f"{count} tests need {advice}")
