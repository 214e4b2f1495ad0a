"""Let commands that run a model take the flags of ``dovetail serve`` that configure the model and the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from dovetail.cli.serve import as_declared
from dovetail.cli.serve_flags import FLAGS, SERVER, ServeFlag
from dovetail.cli.serve_refused import REFUSED
from dovetail.cli.serve_values import settings_of
from dovetail.cli.sources import shortcuts
from dovetail.errors import ConfigError

EPILOG = "The flags of `dovetail serve` about the model and the engine work here too, as in --quantization fp8."

_FLAGS = {name: flag for flag in FLAGS for name in flag.names}


def _config_of(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the values of ``--config`` and ``--set`` among ``words``."""
    found: dict[str, list[str]] = {"--config": [], "-c": [], "--set": [], "-s": []}
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name in found:
            found[name].append(value if equals else following)
    return [Path(file) for file in found["--config"] + found["-c"]], found["--set"] + found["-s"]


class EngineCommand(TyperCommand):
    """Parse the command line of a command with the option ``--set``: flags of ``dovetail serve`` become settings, unless the
    command has an option of this name. The names of a flag stand for one another, as with ``dovetail serve``."""

    starts_server = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click. Raises ``ConfigError``."""
        if ctx.resilient_parsing:  # as when a shell completes
            return super().parse_args(ctx, args)
        end = args.index("--") if "--" in args else len(args)
        own = {name for option in self.params for name in option.opts}
        left: list[str] = []
        given: dict[str, Any] = {}
        words = iter(args[:end])
        for word in words:
            declared = as_declared(word)
            name, equals, value = declared.partition("=")
            if name in own or word.partition("=")[0] in own:
                left.append(declared if name in own else word)
            elif name in REFUSED:
                raise ConfigError(f"{name}: {REFUSED[name]}")
            elif (flag := _FLAGS.get(name)) is None:
                left.append(word)
            elif flag.group == SERVER:
                raise ConfigError(self._about_server(ctx.command_path, name, flag))
            elif flag.type is bool:
                given[flag.parameter] = True
            else:
                _store(given, flag, value if equals else _next(words, name), name)
        sets = [word for setting in shortcuts(settings_of(given, *_config_of(left))) for word in ("--set", setting)]
        return super().parse_args(ctx, [*left, *sets, *args[end:]])

    def _about_server(self, command: str, name: str, flag: ServeFlag) -> str:
        if not self.starts_server:
            return f"{name} configures a server, and `{command}` starts none; leave it out"
        return f"{name} is a flag of `dovetail serve`; here, use --set {flag.key}=..."


class ServerCommand(EngineCommand):
    """Do as ``EngineCommand``, for a command that starts a server."""

    starts_server = True


def _next(words: Iterator[str], name: str) -> str:
    value = next(words, None)
    if value is None:
        raise ConfigError(f"{name} needs a value")
    return value


def _store(given: dict[str, Any], flag: ServeFlag, text: str, name: str) -> None:
    """Store the value of a flag. Mutates ``given``."""
    try:
        value = flag.type(text)
    except ValueError:
        kind = "an integer" if flag.type is int else "a number"
        raise ConfigError(f"{name} is {text!r}; allowed: {kind}") from None
    if flag.repeatable:
        given.setdefault(flag.parameter, []).append(value)
    else:
        given[flag.parameter] = value


def check_no_config(url_option: str, sets: Sequence[str] | None, *others: object) -> None:
    """Raise ``ConfigError`` if a config was given for a server that is running already."""
    if sets or any(others):
        raise ConfigError(
            f"{url_option} names a running server, which has its own config; leave out --config, --set, --model and "
            "the other flags of the model and the engine"
        )
