"""Run the ``dovetail`` command. Each command has its own file, which imports what it needs when it runs."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.errors import ConfigError, DovetailError, PluginError

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130

EXIT_STATUS = {
    0: "The command has done its work. For `dovetail serve`: it was stopped by a signal, and has answered what was running.",
    FAILED: "It failed for a reason that is no wrong setting: the engine cannot start, a check or a measurement failed.",
    USER_ERROR: "A wrong flag, config, plugin or file, also a setting that turns out not to fit the device, such as a `memory.kv_gib` larger than its memory. One message on standard error says what to change.",
    70: "`dovetail serve`: the engine was lost while serving.",
    INTERRUPTED: "Ctrl-C; for `dovetail serve` only before it was ready.",
}
"""Document the exit status of commands, for docs/cli.md. `dovetail ab` has its own (docs/ab.md)."""


def main(arguments: list[str] | None = None) -> None:
    """Run ``dovetail``. An error of the user, the config or a plugin prints one message to stderr, without a
    traceback, and exits with status 2. Any other error of Dovetail exits with 1, and Ctrl-C with 130, also during
    imports."""
    given = sys.argv[1:] if arguments is None else arguments
    show_traceback = "--traceback" in given
    given = [word for word in given if word != "--traceback"]
    try:
        with _sigterm_ends(given[:1] == ["serve"]):
            from dovetail.cli.app import build_app

            build_app(given)(given, prog_name="dovetail")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except DovetailError as error:
        if show_traceback:
            traceback.print_exc()
        _print_error(error)
        sys.exit(USER_ERROR if isinstance(error, ConfigError | PluginError) else FAILED)


@contextmanager
def _sigterm_ends(wanted: bool) -> Iterator[None]:
    """Let SIGTERM end the block with status 0, if ``wanted``: it may come while a server still imports. ``server.launch`` has
    handlers of its own for a server that starts or serves."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _print_error(error: DovetailError) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(("error: ", "bold red"), (str(error), "red"))
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)
