"""Run the HTTP server: ``dovetail serve``. Other commands take its arguments through ``with_flags``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from dovetail.cli.serve_flags import ALWAYS, FLAGS, ServeFlag
from dovetail.cli.serve_refused import REFUSED
from dovetail.cli.serve_values import KEYS_VARIABLE, key_file, settings_of
from dovetail.cli.sources import Sets, load, shortcuts
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.registry import Registry

_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_FIRST = {name: flag.names[0] for flag in FLAGS for name in flag.names if name.startswith("--")}

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|CONFIG",
        show_default=False,
        help="The model: a name or a directory. Config files: YAML, TOML or JSON, merged left to right.",
    ),
]


class ServeCommand(TyperCommand):
    """Parse the flags of a command made by ``with_flags``: refuse those of ``REFUSED`` with what to use instead, and read
    ``--context-length`` and ``--max_model_len`` as ``--max-model-len``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click. Raises ``ConfigError``."""
        end = args.index("--") if "--" in args else len(args)
        given = [as_declared(word) for word in args[:end]] + args[end:]
        if not ctx.resilient_parsing:  # as when a shell completes
            for word in given[:end]:
                name = word.partition("=")[0]
                if name in REFUSED:
                    raise ConfigError(f"{name}: {REFUSED[name]}")
        return super().parse_args(ctx, given)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """See click. Add the other names of the flags, of which typer knows only the first."""
        found = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return found
        flags = {item.value: item for item in super().shell_complete(ctx, "--")}
        others = [name for name, first in _FIRST.items() if name != first and name.startswith(incomplete)]
        items = ((name, flags[_FIRST[name]]) for name in others if _FIRST[name] in flags)
        return [*found, *(type(item)(name, help=item.help) for name, item in items)]


def as_declared(word: str) -> str:
    """Return a flag by its first name, which is the one that typer knows. It may have been written with underscores."""
    name, equals, value = word.partition("=")
    dashed = name.replace("_", "-")
    return _FIRST.get(dashed, dashed) + equals + value if dashed in _FIRST or dashed in REFUSED else word


def split_words(words: Sequence[str]) -> tuple[str | None, list[Path]]:
    """Return the model and the config files among the arguments. Raises ``ConfigError`` if two models are given."""
    files = [w for w in words if not Path(w).is_dir() and (Path(w).suffix.lower() in _SUFFIXES or _is_config(Path(w)))]
    models = [word for word in words if word not in files]
    if len(models) > 1:
        raise ConfigError(
            f"{' and '.join(map(repr, models))} are two models; give one (a flag for several values is repeated: "
            "--served-model-name a --served-model-name b), and config files that end in " + ", ".join(_SUFFIXES)
        )
    return (models[0] if models else None), [Path(file) for file in files]


def _is_config(file: Path) -> bool:
    """Return whether a file is read as a config file: every file that is not a GGUF file or a piece of one."""
    return file.is_file() and ".gguf" not in file.suffixes


def read_arguments(
    words: Sequence[str], sets: Sequence[str], given: Mapping[str, Any], env: dict[str, str]
) -> tuple[Config, Registry]:
    """Return what the command line gives. ``given`` has the values of flags by their ``parameter``; None stands for a
    flag that was not given. The keys of ``--api-key`` are added to ``env`` as a key file. Raises ``ConfigError`` and
    ``PluginError``."""
    model, files = split_words(words)
    settings = settings_of(given, files, sets)
    if model is not None:
        if "model.path" in settings:
            raise ConfigError(f"the model is given twice, as {model!r} and as {settings['model.path']!r}; keep one")
        settings["model.path"] = model
    if given.get("api_key"):
        env[KEYS_VARIABLE] = key_file(given["api_key"])
    return load(files, [*sets, *shortcuts(settings)])


def _serve(words: Words = None, sets: Sets = None, **given: Any) -> None:
    """Serve a model over HTTP: the APIs, and a chat page at /.

    Each flag sets a config key, which its help names in parentheses. Flags override config files and --set. The exit status
    is 0 after a signal, 2 for a wrong setting, 1 if the engine cannot start, and 70 if the engine has failed
    while serving and was not started again.
    """
    import logging
    import os

    config, registry = read_arguments(words or (), sets or (), given, os.environ)  # pyright: ignore[reportArgumentType]
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from dovetail.errors import EngineDeadError
    from dovetail.server.engine_process import EXIT_ENGINE_FAILED
    from dovetail.server.launch import serve as serve_http
    from dovetail.server.parts import single_engine

    prepare = single_engine
    if config.experiment.arms:
        from dovetail.experiment.online.serving import prepare_experiment as prepare
    try:
        serve_http(config, registry, prepare=prepare)
    except EngineDeadError as error:
        logging.getLogger("dovetail.server").error("%s", error)
        raise typer.Exit(EXIT_ENGINE_FAILED) from error


def _option(flag: ServeFlag) -> inspect.Parameter:
    others = [name for name in flag.names[1:] if name in _FIRST]
    also = f"; also {', '.join(others)}" if others else ""
    where = f" ({flag.key})" if flag.key else ""
    kind: Any = list[flag.type] if flag.repeatable else flag.type
    hint = Annotated[
        kind | None,
        typer.Option(
            *(name for name in flag.names if name not in others),
            help=flag.help.rstrip(".") + also + where,
            metavar=flag.metavar,
            rich_help_panel=flag.group,
            show_default=False,
        ),
    ]
    default = False if flag.type is bool else None
    return inspect.Parameter(flag.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with an option for each flag of ``FLAGS``, in the form that typer needs. ``command`` takes ``words``
    (``Words``), ``sets``, options of its own, and ``**given`` for the flags: what ``read_arguments`` needs. It is added to an
    app with ``cls=ServeCommand``."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [_option(flag) for flag in sorted(FLAGS, key=lambda flag: flag.group == ALWAYS)]

    def run(**given: Any) -> None:
        command(**given)

    run.__doc__ = command.__doc__
    parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *options]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


serve = with_flags(_serve)
