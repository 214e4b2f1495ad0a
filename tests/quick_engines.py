"""Engines and commands of tests are built quickly: a pytest plugin, for this suite and for those that its tests run (``-p quick_engines``).

Hundreds of engines are built, and most of their time went into things that are long only here. Each collects all garbage twice, which
looks at all that was imported and made before: it is set apart when a session begins, and again with each module, for good. An engine
also freezes what it is made of, until the next one comes; that would give these objects back to the collector. And each looks for
plugins, reading the metadata of everything installed, and registers and checks the same components: this is done once for the same
plugins. Hundreds of commands run in these processes, and each reads the parameters of all commands from their annotations, which is
done once for each function.
"""

import email
import functools
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer.main

from dovetail.config import PluginsSection
from dovetail.registry import loader
from dovetail.registry.installed import PluginStatus, Registry

MOST_KEPT = 8
_freeze, _unfreeze = gc.freeze, gc.unfreeze


@pytest.fixture(scope="session", autouse=True)
def _engines_are_built_quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", _nothing)
        patch.setattr(gc, "unfreeze", _nothing)
        patch.setattr(email, "message_from_string", functools.lru_cache(512)(email.message_from_string))
        patch.setattr(loader, "installed_plugins", _found_once(loader.installed_plugins))
        patch.setattr(loader._Loader, "registry", _registered_once(loader._Loader.registry))
        patch.setattr(
            typer.main, "get_params_from_function", functools.lru_cache(512)(typer.main.get_params_from_function)
        )
        yield
    _unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_set_apart(_engines_are_built_quickly: None) -> None:
    gc.collect()
    _freeze()


def _nothing() -> None:
    pass


def _found_once(usual: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """Return ``installed_plugins`` that looks again if the path or a folder of it has changed, and always if a test has added a
    temporary folder."""
    found: dict[tuple[tuple[str, int], ...], list[Any]] = {}
    temporary = os.path.realpath(tempfile.gettempdir())

    def installed_plugins() -> list[Any]:
        folders = [folder for folder in dict.fromkeys(sys.path) if Path(folder).exists()]
        if any(os.path.realpath(folder).startswith(temporary) for folder in folders):
            return usual()
        key = tuple((folder, os.stat(folder or ".").st_mtime_ns) for folder in folders)
        if key not in found:
            found.clear()
            found[key] = usual()
        return [*found[key]]

    return installed_plugins


def _registered_once(usual: Callable[..., Registry]) -> Callable[..., Registry]:
    """Return ``_Loader.registry`` that returns what it has returned for the same plugins, whose modules have the same values, under
    the same policy. Only registries of plugins that have all loaded are kept."""
    made: dict[tuple[Any, ...], tuple[Registry, Sequence[Any]]] = {}

    def registry(self: Any, entries: Sequence[Any]) -> Registry:
        policy: PluginsSection = self._policy
        modules = [sys.modules.get(getattr(entry, "module", "")) for entry in entries]
        if not all(isinstance(entry, EntryPoint) for entry in entries) or None in modules:
            return usual(self, entries)
        about = [(entry.name, entry.value, *loader._about(entry.dist)) for entry in entries if entry.dist]
        values = [value for module in modules for value in vars(module).values()]
        key = policy.model_dump_json(), tuple(about), tuple(map(id, modules)), tuple(map(id, values))
        if key in made:
            return made[key][0]
        result = usual(self, entries)
        if not result.duplicates and all(plugin.status is PluginStatus.LOADED for plugin in result.plugins):
            while len(made) >= MOST_KEPT:
                del made[next(iter(made))]
            made[key] = result, (modules, values)
        return result

    return registry
