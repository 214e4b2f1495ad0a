"""Report at the end of a test run which tests were skipped because a tool is missing, and how to get it."""

from __future__ import annotations

from collections import Counter

import pytest

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
